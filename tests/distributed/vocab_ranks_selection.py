# SPDX-License-Identifier: Apache-2.0
"""The part of `vocab_ranks.py` about shards that meet, top-k, argmax and sampling."""

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
import vocab_oracle as oracle
from torch import Tensor

from cohobate.parallel.shards import GroupShards, shards_of
from cohobate.parallel.vocab import vocab_parallel_logprobs
from cohobate.parallel.vocab_sample import vocab_parallel_sample
from cohobate.parallel.vocab_topk import vocab_parallel_argmax, vocab_parallel_topk

V = oracle.V
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def shard_of(whole: Tensor, widths: list[int], *, backwards: bool = False) -> tuple[Tensor, dict[str, Any]]:
    """This rank's columns, and the arguments that say where they lie; `backwards` gives rank 0 the last ids."""
    start = sum(widths[dist.get_rank() + 1 :] if backwards else widths[: dist.get_rank()])
    stop = start + widths[dist.get_rank()]
    place = {"tp_group": dist.group.WORLD, "vocab_start_index": start, "vocab_end_index": stop}
    return whole[..., start:stop], place


def rows_with_ties(dtype: torch.dtype) -> Tensor:
    """`[6, V]`: ordinary, many ties, all equal, both zeros, mostly forbidden, all forbidden."""
    rows = oracle.draw(6, V, seed=3, dtype=torch.float64, scale=3.0)
    rows[1] = rows[1].round()
    rows[2] = 1.5
    rows[3] = torch.where(torch.arange(V) % 2 == 0, 0.0, -0.0)
    rows[4, torch.arange(V) % 9 != 4] = -math.inf
    rows[5] = -math.inf
    return rows.to(dtype)


def top_k_is_what_sorting_gives(world: int) -> list[str]:
    failures = []
    for name, widths in oracle.SPLITS[world].items():
        for dtype, backwards in itertools.product(DTYPES, (False, True)):
            whole = rows_with_ties(dtype)
            shard, place = shard_of(whole, widths, backwards=backwards)
            if not torch.equal(
                vocab_parallel_argmax(shard, **place), torch.tensor(oracle.largest(whole, 1)[1]).flatten()
            ):
                failures.append(f"argmax, {name}, {dtype}")
            for k in (1, 4, 20, V):
                leaf = shard.clone().requires_grad_()
                values, ids = vocab_parallel_topk(leaf, k, **(place if backwards else {"tp_group": place["tp_group"]}))
                want_values, want_ids = oracle.largest(whole, k)
                weights = oracle.draw(6, k, seed=k, dtype=torch.float64)
                (grad,) = torch.autograd.grad(values, leaf, weights.to(values.dtype))
                want = torch.zeros(6, V, dtype=torch.float64).scatter_(-1, torch.tensor(want_ids), weights)
                want_grad = want.to(values.dtype).to(dtype)[..., place["vocab_start_index"] : place["vocab_end_index"]]
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                if (
                    ids.tolist() != want_ids
                    or values.tolist() != want_values
                    or values.dtype != wide
                    or not torch.equal(grad, want_grad)
                ):
                    failures.append(f"top {k}, {name}, {dtype}, backwards {backwards}")
    return failures


def samples(world: int) -> dict[str, list]:
    """Ids drawn from shards, which must be those of one process whose generator is rank 0's."""
    rank = dist.get_rank()
    result: dict[str, list] = {"differs": [], "support": []}
    for name, widths in oracle.SPLITS[world].items():
        for dtype, backwards in itertools.product(DTYPES, (False, True)):
            whole = oracle.draw(300, V, seed=5, dtype=dtype, scale=2.0)
            whole[:, 7] = -math.inf
            whole[:, ::5] = 1.0  # ties across shards
            shard, place = shard_of(whole, widths, backwards=backwards)
            for options in (
                {},
                {"top_k": 5},
                {"top_p": 0.6},
                {"top_k": 2},
                {"temperature": 0.5, "top_k": 9, "top_p": 0.8},
            ):
                own = torch.Generator().manual_seed(11 if rank == 0 else 400 + rank)
                ids = vocab_parallel_sample(shard, generator=own, **place, **options)
                alone = vocab_parallel_sample(whole, generator=torch.Generator().manual_seed(11), **options)
                if not torch.equal(ids, alone):
                    result["differs"].append(
                        f"{name}, {dtype}, backwards {backwards}, {options}: {int((ids != alone).sum())} rows"
                    )
    torch.manual_seed(rank)
    shard, place = shard_of(torch.zeros(40, V), oracle.SPLITS[world]["even"])
    result["no generator"] = vocab_parallel_sample(shard, **place).tolist()
    return result


def a_top_k_cache_crosses_degrees() -> dict[str, list[float]]:
    """Loss and gradient of a student at degree 1 and at that of all ranks, from a cache made by two ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    student, teacher = (oracle.draw(5, V, seed=seed, dtype=torch.float32, scale=2.0) for seed in (1, 2))
    pair = dist.new_group([0, 1])
    ids, logprobs = torch.empty(5, 6, dtype=torch.int64), torch.empty(5, 6)
    if rank < 2:
        shard = teacher[:, : V // 2] if rank == 0 else teacher[:, V // 2 :]
        ids = vocab_parallel_topk(shard, 6, tp_group=pair)[1]
        logprobs = vocab_parallel_logprobs(shard, ids, pair)
    dist.broadcast(ids, 0)
    dist.broadcast(logprobs, 0)
    result = {}
    whole, sharded = [V], oracle.SPLITS[size]["lopsided"]
    for degree, widths, group in ((1, whole, None), (size, sharded, dist.group.WORLD)):
        start = sum(widths[:rank]) if group else 0
        stop = start + widths[rank if group else 0]
        leaf = student[:, start:stop].clone().requires_grad_()
        kept = vocab_parallel_logprobs(leaf, ids, group)
        loss = (logprobs.exp() * (logprobs - kept)).sum()
        (grad,) = torch.autograd.grad(loss, leaf)
        total = torch.zeros(5, V)
        total[:, start:stop] = grad
        if group:
            dist.all_reduce(total)
        result[f"degree {degree}"] = [float(loss), *total.flatten().tolist()]
    return {"one": result["degree 1"], "many": result[f"degree {size}"]}


def groups_meet() -> dict[str, Any]:
    """What `GroupShards` makes of one number per rank and row."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    result: dict[str, Any] = {"whole": type(shards_of(None)).__name__, "sharded": type(shards_of(group)).__name__}
    single = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    result["alone"] = type(shards_of(single)).__name__
    shards = GroupShards(group, vocab_start_index=10 * rank)
    for dtype in (torch.float32, torch.float64):
        values = torch.tensor([[1.0, -2.0 + rank, 0.25], [0.0, -math.inf, 3.0 - rank]], dtype=dtype)
        before = values.clone()
        result[f"max {dtype}"] = shards.max(values.T).tolist()  # not contiguous
        result[f"sum {dtype}"] = shards.sum(values.T).tolist()
        assert torch.equal(values, before)
        # rows: a tie, both zeros, the highest on the last rank, nothing anywhere, a difference in the last bit
        step = torch.finfo(dtype).eps
        values = torch.tensor([2.0, -0.0 if rank else 0.0, float(rank), -math.inf, 1.0 + rank * step], dtype=dtype)
        values = torch.cat([values, torch.tensor([-math.nan if rank == 1 else 5.0], dtype=dtype)])
        ids = torch.tensor([3, 0, 9, 0, 1, 2])
        largest, winner = shards.largest(values, ids)
        result[f"largest {dtype}"] = [largest.double().nan_to_num(nan=1e9).tolist(), winner.tolist()]
        result[f"last bit {dtype}"] = float((largest[4].double() - 1) / step)
    return result
