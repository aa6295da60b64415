# SPDX-License-Identifier: Apache-2.0
"""Any loss over the logits of a head, a block of rows at a time, without ever holding `[N, V]`.

The fused functions know their loss and take its gradient while the logits are there. A loss over chunks of two
tokenizations is too varied for that: several teachers and cross-entropy read one row, and what a value is worth (a
scale that compares all of them, a count of the whole step) is known only after every block has been read. So here the
forward pass gives values, block by block, and keeps nothing but the inputs; the backward pass makes each block's
logits once more, asks autograd for the gradient by them, and adds it up in the head's own way (`chunked_head.py`):
four matrix products over the vocabulary.

Not here: which rows must stay in one block (the caller's blocks), and what the values mean. N rows, V vocabulary, H
hidden, n rows of one block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.chunked_head import (
    CHUNK_BYTES_CPU,
    CHUNK_BYTES_DEVICE,
    ChunkHead,
    HeadGradients,
    check_side,
    rows_per_chunk,
)
from cohobate.functional.logprobs import product_dtype, wide_dtype
from cohobate.functional.workspace import set_aside, tile

BlockLoss = Callable[[Tensor, int], Tensor]
"""From raw logits `[n, V]` of a block, and its number, to values `[m]` (m is the block's own), differentiable."""

_TILES = 5  # [n, V] alive at once: logits, their gradient, and what a loss makes on the way


def blocked_head_loss(
    hidden: Tensor,
    weight: Tensor,
    blocks: Sequence[slice],
    block_loss: BlockLoss,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, ...]:
    """`block_loss` of the logits of each block of rows: one `[m]` tensor for each, in order.

    Args:
        hidden, weight: `[N, H]`, `[V, H]`; with `bias [V]`, all that gets gradients. Logits are
            `softcap((h W^T + bias) * scale)`, in float32 (float64 for float64 inputs) whatever the inputs' dtype.
        blocks: disjoint slices of rows, ascending, at least one; it may have no rows. Rows in no block are not read.
        block_loss: called once for each block in the forward pass, and if there is a gradient once more in the
            backward pass, where it must say the same. It owns the logits until it returns: a value may be a view of
            them, but nothing else may keep them. Other tensors that it reads are constants.

    A row whose logits get no gradient adds nothing to any gradient, whatever it holds. dW adds up in float32 (float64)
    and is rounded once. Autocast is off inside.

    Raises:
        ValueError: shapes or blocks that do not fit.
    """
    check_side("", hidden, weight, bias)
    rows = [_bounds(block, hidden.shape[0]) for block in blocks]
    if not rows or any(after.start < before.stop for before, after in pairwise(rows)):
        raise ValueError(
            f"blocks must be at least one slice of rows, ascending and disjoint, got {list(blocks)[:4]}. Without rows "
            "give slice(0, 0)."
        )
    plan = _Plan(
        head=ChunkHead(scale=scale, softcap=softcap, temperature=1.0),
        products=product_dtype(hidden, weight),
        wide=wide_dtype(hidden, weight),
        blocks=tuple(rows),
        loss=block_loss,
    )
    out: Any = _BlockedHead.apply(hidden, weight, bias, plan)
    return out


def rows_per_block(hidden: Tensor, vocab_size: int) -> int:
    """About how many rows one block of such hidden states should have, so that it keeps to the device's budget."""
    budget = CHUNK_BYTES_CPU if hidden.device.type == "cpu" else CHUNK_BYTES_DEVICE
    return rows_per_chunk(hidden, vocab_size, wide_dtype(hidden), None, 2 * budget // _TILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything that gets no gradient."""

    head: ChunkHead
    products: torch.dtype  # of the matrix products
    wide: torch.dtype  # of the logits, and of dW and db while they add up
    blocks: tuple[slice, ...]
    loss: BlockLoss


class _BlockedHead(torch.autograd.Function):
    """v_b = f_b(z_b), z_b the logits of block b.   Twin: `block_loss` of slices of `logprobs.head_logits(...)`

    With g_b from upstream, dz_b = (dv_b/dz_b)^T g_b from autograd over the block; to the raw products it is scale dz_b
    or, under a soft-cap c, scale (1 - (z_b / c)^2) dz_b.   Saved: the inputs.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> tuple[Tensor, ...]:
        cast = _Head(hidden, weight, bias, plan)
        values = []
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            for number, rows in enumerate(plan.blocks):
                logits = cast.logits(rows)
                values.append(_values(plan, logits, number).clone())  # a view would be overwritten by the next block
        ctx.save_for_backward(hidden, weight, bias)
        ctx.plan = plan
        return tuple(values)

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *upstream: Tensor
    ) -> Any:
        hidden, weight, bias = ctx.saved_tensors
        plan: _Plan = ctx.plan
        cast = _Head(hidden, weight, bias, plan)
        grads = HeadGradients(hidden, weight, ctx.needs_input_grad[:3], plan.wide)
        if grads.hidden is not None:
            grads.hidden.zero_()  # rows in no block
        with torch.autocast(hidden.device.type, enabled=False):
            for number, (rows, grad_values) in enumerate(zip(plan.blocks, upstream, strict=True)):
                grad = _logit_gradient(plan, cast.logits(rows), number, grad_values)
                live = (grad != 0).any(-1).to(plan.wide)  # [n] 0 where NaN may stand in the row; 0 x NaN is NaN
                grads.add(rows, grad, cast.hidden(rows), cast.weight, live)
        grad_weight = None if grads.weight is None else grads.weight.to(weight.dtype)
        grad_bias = None if grads.bias is None or bias is None else grads.bias.to(bias.dtype)
        return grads.hidden, grad_weight, grad_bias, None  # plan: no tensors


class _Head:
    """The head of one pass, in the dtypes of its products and of its logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> None:
        self.weight = weight.to(plan.products)
        self._hidden, self._plan = hidden, plan
        self._bias = None if bias is None else bias.to(plan.wide)

    def hidden(self, rows: slice) -> Tensor:
        return self._hidden[rows].to(self._plan.products)

    def logits(self, rows: slice) -> Tensor:
        """`[n, V]`; the next call overwrites it."""
        size = (rows.stop - rows.start, self.weight.shape[0])
        out = tile("student", size, self._plan.wide, self.weight.device)
        self._plan.head.project(self.hidden(rows), self.weight, self._bias, out)
        return out if self._plan.head.softcap is None else out.mul_(self._plan.head.softcap)


def _logit_gradient(plan: _Plan, logits: Tensor, number: int, grad_values: Tensor) -> Tensor:
    """The gradient `[n, V]` by the raw products of a block whose values get `grad_values [m]`."""
    if logits.shape[0] == 0 or grad_values.numel() == 0:
        return torch.zeros_like(logits)
    leaf = logits.requires_grad_()
    with torch.enable_grad():
        values = _values(plan, leaf, number)
        if not values.requires_grad:
            return torch.zeros_like(logits)
        (grad,) = torch.autograd.grad(values, leaf, grad_values.to(values.dtype), materialize_grads=True)
    slope = plan.head.slope
    if plan.head.softcap is not None:
        slope = slope * (1 - (logits.detach() / plan.head.softcap).square())  # [n, V]
        return torch.where(grad == 0, 0.0, grad * slope)  # NaN in the logits of a row without gradient
    return grad if slope == 1.0 else grad * slope


def _values(plan: _Plan, logits: Tensor, number: int) -> Tensor:
    with set_aside():  # the logits lie in the workspace, and the loss may call what uses it too
        values = plan.loss(logits, number)
    if values.dim() != 1:
        raise ValueError(f"block_loss must give values [m], got {list(values.shape)} for block {number}.")
    return values


def _bounds(block: slice, num_rows: int) -> slice:
    start, stop, step = block.indices(num_rows)
    if step != 1:
        raise ValueError(f"a block must be neighbouring rows, got {block}.")
    return slice(start, max(start, stop))
