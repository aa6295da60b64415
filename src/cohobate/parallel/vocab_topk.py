# SPDX-License-Identifier: Apache-2.0
"""The k largest logits of a sharded vocabulary with their global ids, differentiable.

Each rank finds the k largest of its own columns, and those candidates, `[N, k]` from each rank, are gathered once: the
k largest of all are among them. Every rank then sorts the same numbers in the same way. A row's logits are never
gathered, and the gradient of a value goes to the one column that it came from.

Such a selection fits any degree of tensor parallelism: made on the teacher's ranks, used on the student's.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.kernels import kernels_for
from cohobate.functional.largest import largest_entries
from cohobate.functional.logprobs import upcast, wide_dtype
from cohobate.functional.ordered import from_ordered_bits, ordered_bits, packed_keys, unpacked_keys
from cohobate.functional.workspace import fresh
from cohobate.parallel.layout import NUM_SPAN_FACTS, ShardSpan, agreed_layout
from cohobate.parallel.shards import Group, rank_and_size
from cohobate.parallel.tiles import check_logits, num_rows, row_tiles

_LEAST = torch.iinfo(torch.int64).min  # sorts behind every key: where a shard has fewer than k columns


def vocab_parallel_topk(
    logits: Tensor,
    k: int,
    *,
    tp_group: Group = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The `k` largest logits of each row over all shards, and their global ids: `[..., V_local] -> [..., k]` twice.

    Values are the raw logits, descending, float32 (float64 for float64 logits), ids int64; of equal logits the lower
    id comes first. Both are equal on every rank. Values are differentiable. `k` may exceed a shard's width.

    Raises:
        ValueError: on every rank alike: k < 1 or beyond the vocabulary, shards that leave a gap or overlap.
    """
    check_logits("logits", logits)
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k}.")
    span = ShardSpan(start=vocab_start_index, stop=vocab_end_index)
    return _TopK.apply(logits, k, tp_group, span)  # pyright: ignore[reportReturnType]


def vocab_parallel_argmax(
    logits: Tensor,
    *,
    tp_group: Group = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
) -> Tensor:
    """Global id of the largest logit of each row over all shards, of several the lowest: `[..., V_local] -> [...]`.

    int64, equal on every rank. Errors as `vocab_parallel_topk`, whose k = 1 it is.
    """
    place = {"vocab_start_index": vocab_start_index, "vocab_end_index": vocab_end_index}
    _, ids = vocab_parallel_topk(logits.detach(), 1, tp_group=tp_group, **place)
    return ids[..., 0]


class _TopK(torch.autograd.Function):
    """values_j = x at id j: the gradient is put back there.   Twin: torch.sort.   Saved: the ids as local columns."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, group: Group, span: ShardSpan) -> tuple[Tensor, Tensor]:
        values, columns = _own_candidates(logits, k)  # [N, k or fewer]
        facts = torch.tensor(span.facts(logits.shape[-1]), dtype=torch.int64)
        tables, candidates = _exchange(_encoded(values, columns, k), facts, group)
        layout = agreed_layout(tables)
        if k > layout.vocab_size:
            raise ValueError(f"k must be in [1, {layout.vocab_size}], the ids of all shards, got {k}.")
        values, ids = _merged(candidates, layout.starts, values.dtype, k)  # [N, k]
        start = layout.starts[rank_and_size(group)[0]]
        here = (ids >= start) & (ids < start + logits.shape[-1])
        ctx.save_for_backward(torch.where(here, ids - start, -1))
        ctx.like = logits.new_empty(0), logits.shape
        ids = ids.view(*logits.shape[:-1], k)
        ctx.mark_non_differentiable(ids)
        return values.view(ids.shape), ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor, _grad_ids: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (columns,) = ctx.saved_tensors
        like, shape = ctx.like
        grad_logits = fresh(tuple(shape), like.dtype, like.device).zero_()
        row, j = (columns >= 0).nonzero(as_tuple=True)  # `scatter_` would make a float32 copy of a bfloat16 gradient
        mine = grad_values.reshape(columns.shape)[row, j].to(like.dtype)
        grad_logits.view(columns.shape[0], shape[-1]).index_put_((row, columns[row, j]), mine)
        return grad_logits, None, None, None  # k, group, span


def _own_candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `min(k, W)` largest of each row of this rank's `logits [..., W]`, and their columns."""
    kernels, kept = kernels_for(logits), min(k, logits.shape[-1])
    values = torch.empty(num_rows(logits), kept, dtype=wide_dtype(logits), device=logits.device)
    columns = torch.empty(values.shape, dtype=torch.int64, device=logits.device)
    if kept:
        for rows, (x,) in row_tiles(kernels, logits):
            if kept == 1:
                columns[rows] = kernels.argmax(x)[:, None]
                values[rows] = upcast(x.gather(-1, columns[rows]))
            else:
                values[rows], columns[rows] = largest_entries(x, kept)
    return values, columns


def _encoded(values: Tensor, columns: Tensor, k: int) -> Tensor:
    """int64 `[words, N, k]` that the ranks can exchange: one word for value and column, two words for float64."""
    if values.dtype == torch.float64:
        words = torch.stack([ordered_bits(values), columns])
    else:
        words = packed_keys(values, columns)[None]
    return torch.nn.functional.pad(words, (0, k - values.shape[-1]), value=_LEAST)


def _exchange(words: Tensor, facts: Tensor, group: Group) -> tuple[list[list[float]], list[Tensor]]:
    """Each rank's facts, and each rank's words `[words, N, k]`: one collective."""
    _, size = rank_and_size(group)
    if size == 1:
        return [facts.tolist()], [words]
    mine = torch.cat([facts.to(words.device), words.reshape(-1)])
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine, group=group)
    tables = torch.stack([x[:NUM_SPAN_FACTS] for x in everyone]).tolist()
    return tables, [x[NUM_SPAN_FACTS:].view(words.shape) for x in everyone]


def _merged(candidates: list[Tensor], starts: tuple[int, ...], dtype: torch.dtype, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of all ranks' candidates and their global ids, `[N, k]`, of equal values the lower id first."""
    if dtype != torch.float64:
        # A key's lower word falls as the id rises; `_LEAST` must not wrap around to the largest.
        keys = [torch.where(x[0] == _LEAST, _LEAST, x[0] - start) for x, start in zip(candidates, starts, strict=True)]
        return unpacked_keys(torch.cat(keys, dim=-1).topk(k).values)
    bits = torch.cat([x[0] for x in candidates], dim=-1)  # [N, ranks * k]
    ids = torch.cat([x[1] + start for x, start in zip(candidates, starts, strict=True)], dim=-1)
    by_id = ids.argsort(-1)
    bits, ids = bits.gather(-1, by_id), ids.gather(-1, by_id)
    order = bits.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return from_ordered_bits(bits.gather(-1, order), dtype), ids.gather(-1, order)
