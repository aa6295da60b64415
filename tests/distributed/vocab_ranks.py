# SPDX-License-Identifier: Apache-2.0
"""What each rank of the vocabulary tests does: every case in one launch; one JSON line to standard output.

A rank compares its own columns with the whole-vocabulary oracle and reports the cases that differ.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import vocab_oracle as oracle
import vocab_ranks_selection as selection
from torch import Tensor

from cohobate.parallel.vocab import (
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_jsd,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
)
from cohobate.parallel.vocab_sample import vocab_parallel_sample
from cohobate.parallel.vocab_topk import vocab_parallel_topk

V, BETAS = oracle.V, (0.1, 0.5, 0.9)
IGNORE = -100


class Split:
    """One way to cut a vocabulary over all ranks, seen from this rank."""

    def __init__(self, widths: list[int]):
        self.widths, self.rank = widths, dist.get_rank()
        self.start = sum(widths[: self.rank])
        self.stop = self.start + widths[self.rank]
        self.group = dist.group.WORLD

    def mine(self, whole: Tensor) -> Tensor:
        return whole[..., self.start : self.stop]


def pair_operations(split: Split) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]:
    """By name: the operation on two shards, and the oracle on two wholes."""
    group = split.group
    operations: dict[str, Any] = {
        "forward": (lambda s, t: vocab_parallel_kl_div(s, t, group), oracle.forward_kl),
        "reverse": (lambda s, t: vocab_parallel_kl_div(s, t, group, True), oracle.reverse_kl),
    }
    for beta in BETAS:
        operations[f"jsd {beta}"] = (
            lambda s, t, beta=beta: vocab_parallel_jsd(s, t, group, beta=beta),
            lambda s, t, beta=beta: oracle.jsd(s, t, beta),
        )
    return operations


def single_operations(split: Split) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]:
    tokens = torch.tensor([[0, V - 1, IGNORE], [18, 19, 33]])
    several = torch.stack([tokens, tokens, torch.tensor([[5, IGNORE, IGNORE], [18, 1, 36]])], dim=-1)  # with repeats
    place = (split.group, split.start, split.stop)
    return {
        "entropy": (lambda x: vocab_parallel_entropy(x, split.group), oracle.entropy),
        "token": (
            lambda x: vocab_parallel_logprobs(x, tokens, *place, ignore_index=IGNORE),
            lambda x: oracle.logprobs(x, tokens[..., None])[..., 0],
        ),
        "tokens": (
            lambda x: vocab_parallel_logprobs(x, several, split.group),
            lambda x: oracle.logprobs(x, several),
        ),
        "cross entropy": (
            lambda x: vocab_parallel_cross_entropy(x, tokens, *place),
            lambda x: -oracle.logprobs(x, tokens[..., None])[..., 0],
        ),
    }


def compare_with_the_oracle(
    splits: dict[str, list[int]], dtypes: tuple[torch.dtype, ...], scales: tuple[float, ...]
) -> tuple[list[str], int]:
    """Every operation on shards against the oracle on wholes: the cases that differ, and how many there were."""
    failures, count = [], 0
    weights = oracle.draw(2, 3, seed=9, dtype=torch.float64)
    for (split_name, widths), dtype, scale in itertools.product(splits.items(), dtypes, scales):
        split = Split(widths)
        pairs = pair_operations(split)
        wholes = [oracle.draw(2, 3, sum(widths), seed=seed, dtype=dtype, scale=scale) for seed in (1, 2)]
        for name, (operation, truth) in (pairs | single_operations(split)).items():
            inputs = wholes if name in pairs else wholes[:1]
            wide = weights[..., None] if name == "tokens" else weights
            want = oracle.value_and_gradients(truth, *[x.double() for x in inputs], weights=wide)
            got = oracle.value_and_gradients(operation, *[split.mine(x) for x in inputs], weights=wide)
            want[1:] = [split.mine(x) for x in want[1:]]
            for part, (x, y) in enumerate(zip(got, want, strict=True)):
                count += 1
                wrong = oracle.differs(x, y, dtype, gradient=part > 0, scale=scale)
                if wrong:
                    failures.append(f"{name}, {split_name}, {dtype}, x{scale}, output {part}: {wrong}")
    return failures, count


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts collectives by name while it lasts, and the numbers that they carry."""
    calls: dict[str, int] = {}
    originals = {}

    def wrap(name: str) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            key = f"{name} {kwargs['op']}" if "op" in kwargs else name
            calls[key] = calls.get(key, 0) + 1
            tensor = args[-1]
            calls["numbers"] = calls.get("numbers", 0) + (tensor.numel() if isinstance(tensor, Tensor) else 0)
            return originals[name](*args, **kwargs)

        return counting

    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor"):
        originals[name] = getattr(dist, name)
        setattr(dist, name, wrap(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def count_collectives(split: Split) -> dict[str, dict[str, int]]:
    """Collectives of one call, forwards and backwards, and the numbers they carry, for 50 rows."""
    student, teacher = (
        split.mine(oracle.draw(50, V, seed=s, dtype=torch.float32)).clone().requires_grad_() for s in (1, 2)
    )
    index = torch.arange(50) % V
    calls: dict[str, Callable[[], Tensor]] = {
        "kl": lambda: vocab_parallel_kl_div(student, teacher, split.group),
        "jsd": lambda: vocab_parallel_jsd(student, teacher, split.group, beta=0.5),
        "entropy": lambda: vocab_parallel_entropy(student, split.group),
        "logprobs": lambda: vocab_parallel_logprobs(student, index, split.group),
        "top k": lambda: vocab_parallel_topk(student, 4, tp_group=split.group)[0],
        "logprobs of 4": lambda: vocab_parallel_logprobs(student, index[:, None].expand(50, 4), split.group),
    }
    result = {}
    for name, call in calls.items():
        with counted() as forward:
            value = call()
        with counted() as backward:
            value.sum().backward()
        result[name] = forward | {"backward": sum(backward.values())}
    return result


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def refuse_on_all_ranks(split: Split) -> dict[str, str]:
    """Errors that one rank, or none, could find alone; then a call that must still work."""
    last = split.rank == dist.get_world_size() - 1
    x = split.mine(oracle.draw(4, V, seed=1, dtype=torch.float32))
    fine = torch.tensor([0, 1, 2, IGNORE])
    odd = torch.tensor([0, 1, 99, IGNORE]) if last else fine
    negative = torch.tensor([0, -7, 2, IGNORE]) if last else fine
    wide = x if not last else torch.cat([x, x[:, :1]], dim=-1)
    return {
        "index too high": error_of(lambda: vocab_parallel_logprobs(x, odd, split.group)),
        "index too low": error_of(lambda: vocab_parallel_cross_entropy(x, negative, split.group)),
        "index in the padding": error_of(
            lambda: vocab_parallel_logprobs(x, fine.clamp(min=0) + 30, split.group, split.start, split.stop, 32)
        ),
        "index of another shape": error_of(
            lambda: vocab_parallel_logprobs(x, fine[:2] if last else fine, split.group)
        ),
        "overlap": error_of(lambda: vocab_parallel_logprobs(x, fine, split.group, 0)),
        "gap": error_of(lambda: vocab_parallel_logprobs(x, fine, split.group, split.start + 3 * last)),
        "start on one rank": error_of(
            lambda: vocab_parallel_logprobs(x, fine, split.group, split.start if last else None)
        ),
        "range of another width": error_of(
            lambda: vocab_parallel_logprobs(x, fine, split.group, split.start, split.stop + last)
        ),
        "size of another rank": error_of(
            lambda: vocab_parallel_logprobs(x, fine, split.group, split.start, split.stop, V - last)
        ),
        "size beyond the shards": error_of(
            lambda: vocab_parallel_logprobs(x, fine, split.group, split.start, split.stop, V + 1)
        ),
        "padding at an unknown place": error_of(
            lambda: vocab_parallel_logprobs(x, fine, split.group, global_vocab_size=V - 1)
        ),
        "teacher of another width": error_of(lambda: vocab_parallel_kl_div(x, wide, split.group)),
        "teacher of other rows": error_of(lambda: vocab_parallel_jsd(x, x[:2] if last else x, split.group, beta=0.5)),
        "k beyond the vocabulary": error_of(lambda: vocab_parallel_topk(x, V + 1, tp_group=split.group)),
        "top k of shards with a gap": error_of(
            lambda: vocab_parallel_topk(x, 2, tp_group=split.group, vocab_start_index=split.start + 3 * last)
        ),
        "a row without an allowed token": error_of(
            lambda: vocab_parallel_sample(x.clone().index_fill(0, torch.tensor(2), -torch.inf), tp_group=split.group)
        ),
        "after all this": error_of(lambda: vocab_parallel_kl_div(x, x, split.group)),
    }


def odd_rows(split: Split) -> dict[str, list[float]]:
    """Rows with forbidden tokens, as numbers; NaN and infinity by name."""
    inf = float("inf")
    student = torch.zeros(5, V)
    teacher = torch.zeros(5, V)
    student[0, :20] = teacher[0, :20] = -inf  # both forbid: no part of it
    student[1, 3] = -inf  # the student alone forbids
    teacher[2, 30] = -inf  # the teacher alone
    student[3] = teacher[3] = -inf  # nothing allowed
    student[4, :20], teacher[4, 20:] = -inf, -inf  # nothing in common
    s, t = (split.mine(x).clone().requires_grad_() for x in (student, teacher))
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
    index = torch.tensor([25, 3, 30, IGNORE, 21])
    calls = {
        "forward": lambda: vocab_parallel_kl_div(s, t, split.group),
        "reverse": lambda: vocab_parallel_kl_div(s, t, split.group, True),
        "jsd": lambda: vocab_parallel_jsd(s, t, split.group, beta=0.5),
        "entropy": lambda: vocab_parallel_entropy(s, split.group),
        "logprobs": lambda: vocab_parallel_logprobs(s, index, split.group),
    }
    result = {}
    for name, call in calls.items():
        value = call()
        result[name] = value.tolist()
        finite = mask * value.detach().isfinite()
        s.grad = None
        torch.where(finite == 1, value, 0.0).sum().backward()
        assert s.grad is not None
        result[f"{name} gradient"] = [float(s.grad[3].abs().sum()), float(s.grad.isfinite().all())]
        s.grad = None
        (call() * torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0])).sum().backward()
        result[f"{name} gradient unmasked"] = [float(s.grad[3].abs().sum())]
    return result


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = dist.get_world_size()
    split = Split(oracle.SPLITS[world]["even"])
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    failures, count = compare_with_the_oracle(oracle.SPLITS[world], dtypes, (1.0, 60.0))
    # Wide enough for the CPU's own kernels on one rank at least, and not on all.
    wide = {"wide": [4500] * (world - 1) + [300]}
    wide_failures, wide_count = compare_with_the_oracle(wide, dtypes[:2], (1.0, 60.0))
    result = {
        "failures": failures + wide_failures,
        "cases": [count, wide_count],
        "collectives": count_collectives(split),
        "errors": refuse_on_all_ranks(split),
        "odd rows": odd_rows(split),
        "top k": selection.top_k_is_what_sorting_gives(world),
        "cache": selection.a_top_k_cache_crosses_degrees(),
        "samples": selection.samples(world),
        "groups": selection.groups_meet(),
    }
    print("RESULT", json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
