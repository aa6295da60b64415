# SPDX-License-Identifier: Apache-2.0
"""The divergence loss on logits that somebody already has: mask, mean and count in one call, for other people's loops.

Inside Cohobate the logits are never made (`fused_linear.py`). Where they exist they are the largest tensors of the
step, so nothing of their size is made here but the gradient, and that once: it is written while the rows are read.

N slots, of which `valid_token_count` are valid, V vocabulary, n rows of one tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.chunked_head import row_chunks, scaled_for_backward
from cohobate.functional.divergences import check_beta, divergence_terms
from cohobate.functional.kernels import kernels_for
from cohobate.functional.largest import largest_entries
from cohobate.functional.logprobs import check_temperature, log_softmax, put_last, upcast_pair, wide_dtype
from cohobate.functional.reduce import as_mask, divide_by_count, select_valid
from cohobate.functional.workspace import fresh

_TILE_BYTES = 64 * 2**20  # of one side's rows in float32: bounds what a kernel without row blocks of its own makes
_LOOSE_BYTES = 2 * 2**20  # shorter runs of valid rows are copied together: a call for each would cost more


class JSDLossOutput(NamedTuple):
    """What `generalized_jsd_loss` returns."""

    loss: Tensor  # scalar: loss_sum / max(valid_token_count, 1)
    loss_sum: Tensor  # scalar: the sum over valid positions, in nats
    valid_token_count: Tensor  # int64 scalar


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    response_mask: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_top_k: int | None = None,
    pointwise_clip: float | None = None,
) -> JSDLossOutput:
    """Mean divergence in nats over the valid positions; `beta` weights the teacher, 0 is forward KL, 1 is reverse KL.

    Args:
        student_logits, teacher_logits: `[..., V]`, any float dtypes; the teacher is a constant.
        response_mask: `[...]` bool or 0/1. A masked slot is taken out before the maths: whatever stands there (NaN,
            -inf) reaches neither value nor gradient.
        temperature: divides both sides' logits. The loss is not multiplied by its square.
        teacher_top_k: restrict both sides to the teacher's k largest and normalise there. It is blind to the tail and
            kept to compare with others; `topk_divergence` keeps the tail.
        pointwise_clip: `min(term, c)` for each vocabulary entry before the sum: a pseudo-loss, see `clip_divergence`.

    The gradient, in the logits' dtype, is made in the forward pass; nothing else of the logits' size is, unless
    `pointwise_clip` is given. It cannot be differentiated again.

    Raises:
        ValueError: a number outside its range, or unequal shapes.
        TypeError: logits that are not floating.
    """
    _check_loss_arguments(student_logits, teacher_logits, response_mask)
    check_beta(beta)
    check_temperature(temperature)
    vocab_size = student_logits.shape[-1]
    if teacher_top_k is not None and not 1 <= teacher_top_k <= vocab_size:
        raise ValueError(f"teacher_top_k must be in [1, {vocab_size}], got {teacher_top_k}.")
    if pointwise_clip is not None and not pointwise_clip >= 0:
        raise ValueError(f"pointwise_clip must be >= 0 or None, got {pointwise_clip}.")
    mask, student, teacher = as_mask(response_mask), student_logits, teacher_logits.detach()
    count = mask.sum()
    if teacher_top_k is None and pointwise_clip is None:
        plan = _Plan(
            beta=beta,
            temperature=temperature,
            count=int(count),
            # float16 has no room for a gradient that a loss scale has yet to lift.
            is_early=torch.is_grad_enabled() and student.requires_grad and student.dtype != torch.float16,
        )
        loss, loss_sum = _MeanDivergence.apply(student, teacher, mask, plan)  # pyright: ignore[reportGeneralTypeIssues]
        return JSDLossOutput(loss=loss, loss_sum=loss_sum, valid_token_count=count)
    if teacher_top_k is not None:
        rows = _folded(teacher)[0]  # [B, T, V]
        kept = torch.stack([largest_entries(row, teacher_top_k)[1] for row in rows]).view(*mask.shape, teacher_top_k)
        student, teacher = _Gather.apply(student, kept), teacher.gather(-1, kept)  # [..., K]
    student, teacher = upcast_pair(select_valid(student, mask), select_valid(teacher, mask))  # [n, V or K]
    terms = divergence_terms(
        log_softmax(student, temperature=temperature), log_softmax(teacher, temperature=temperature), beta=beta
    )
    loss_sum = (terms if pointwise_clip is None else terms.clamp(max=pointwise_clip)).sum()
    return JSDLossOutput(loss=divide_by_count(loss_sum, count), loss_sum=loss_sum, valid_token_count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    beta: float
    temperature: float
    count: int  # of valid slots
    is_early: bool  # whether the forward pass makes the gradient


class _MeanDivergence(torch.autograd.Function):
    """(sum_n D_n / count, sum_n D_n) over the valid slots.   Twin: `divergences.divergence` of `log_softmax`

    The forward pass makes the gradient of the mean, and the backward pass scales it where it lies.
    Saved: that gradient, of the student's shape and dtype; for float16 the inputs instead.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, mask: Tensor, plan: _Plan) -> Any:
        share = torch.full((), 1 / max(plan.count, 1), dtype=wide_dtype(student, teacher), device=student.device)
        gradient = fresh(tuple(student.shape), student.dtype, student.device) if plan.is_early else None
        total = _read(student, teacher, mask, plan, share, gradient)
        ctx.save_for_backward(*((student, teacher, mask) if gradient is None else (gradient,)))
        ctx.plan = plan
        return total * share, total

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradients is clearer.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_mean: Tensor, grad_sum: Tensor
    ) -> Any:
        plan: _Plan = ctx.plan
        factor = grad_mean + grad_sum * max(plan.count, 1)
        if plan.is_early:
            (gradient,) = ctx.saved_tensors
            gradient = scaled_for_backward(gradient, factor, gradient.dtype)
        else:
            student, teacher, mask = ctx.saved_tensors
            gradient = fresh(tuple(student.shape), student.dtype, student.device)
            _read(student, teacher, mask, plan, factor / max(plan.count, 1), gradient)
        return gradient, None, None, None  # teacher: a constant; mask and plan: no numbers


class _Gather(torch.autograd.Function):
    """`values [..., V]` at distinct `ids [..., K]`.   Twin: `torch.gather`, whose backward pass takes dear memory
    (`workspace.py`), and for bfloat16 twice as much more."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ids: Tensor) -> Any:
        ctx.save_for_backward(ids)
        ctx.shape = tuple(values.shape)
        return values.gather(-1, ids)

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids,) = ctx.saved_tensors
        out = fresh(ctx.shape, grad.dtype, grad.device).zero_()
        put_last(out.view(-1, out.shape[-1]), ids.reshape(-1, ids.shape[-1]), grad.reshape(-1, grad.shape[-1]))
        return out, None  # ids: integers


def _read(
    student: Tensor, teacher: Tensor, mask: Tensor, plan: _Plan, coefficient: Tensor, gradient: Tensor | None
) -> Tensor:
    """The sum of the divergences, and into `gradient [..., V]`, if given, its slope times the scalar `coefficient`."""
    scale = 1 / plan.temperature
    kernels, slope = kernels_for(student), coefficient * scale  # the kernel's gradient is by the scaled logits
    total = torch.zeros_like(coefficient)
    for s, t, where, out in _tiles(student, teacher, mask, gradient):
        if coefficient.dtype == torch.float64:  # of mixed sides both are widened, so that equal numbers stay equal
            s, t = s.double(), t.double()
        target = out if where is None or gradient is None else torch.empty_like(s, dtype=gradient.dtype)
        rows = kernels.divergence_rows(s, t, plan.beta, slope.expand(s.shape[0]), target, (scale, scale))
        total += rows[0].sum()
        if where is not None and out is not None and target is not None:
            out[where] = target
    return total


def _tiles(
    student: Tensor, teacher: Tensor, mask: Tensor, gradient: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    """`(student [n, V], teacher [n, V], where, gradient)` over the valid slots; masked slots' gradients are zeroed.

    Slots that stand side by side are views, and `gradient` the same view of the gradient. The slots of short runs are
    copied together, a few at a time, and `where [n]` says to which rows of `gradient` they belong.
    """
    student, teacher = _folded(student, teacher)  # [B, T, V]
    out = None if gradient is None else gradient.view(student.shape)
    row_bytes = 4 * max(student.shape[-1], 1)
    for b, slots in enumerate(mask.reshape(student.shape[:2]).cpu()):
        if out is not None and not slots.all():
            out[b].index_fill_(0, slots.logical_not().nonzero().squeeze(-1).to(out.device), 0.0)
        loose: list[int] = []
        for start, stop in _runs(slots):
            if (stop - start) * row_bytes < _LOOSE_BYTES:
                loose.extend(range(start, stop))
                continue
            for rows in row_chunks(stop - start, max(1, _TILE_BYTES // row_bytes)):
                side_by_side = slice(start + rows.start, start + rows.stop)
                grad = None if out is None else out[b, side_by_side]
                yield student[b, side_by_side], teacher[b, side_by_side], None, grad
        for rows in row_chunks(len(loose), max(1, _LOOSE_BYTES // row_bytes)):
            where = torch.tensor(loose[rows], device=student.device)
            yield student[b, where], teacher[b, where], where, None if out is None else out[b]


def _runs(slots: Tensor) -> list[tuple[int, int]]:
    """First and one past the last of every run of True in `slots [T]`."""
    edges = torch.nn.functional.pad(slots.to(torch.int8), (1, 1)).diff().nonzero().squeeze(-1).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _folded(*logits: Tensor) -> list[Tensor]:
    """All `[..., V]` as `[B, T, V]`, with B = 1 if they can be; no copy of `[B, T, V]` that were cut along T."""
    flat = logits[0].dim() < 3 or all(x.is_contiguous() for x in logits)
    shape = (1, -1, logits[0].shape[-1]) if flat else (-1, *logits[0].shape[-2:])
    return [x.reshape(shape) for x in logits]


def _check_loss_arguments(student: Tensor, teacher: Tensor, mask: Tensor) -> None:
    for name, logits in (("student_logits", student), ("teacher_logits", teacher)):
        if not logits.is_floating_point():
            raise TypeError(f"{name} must be floating, got {logits.dtype}.")
    if student.shape != teacher.shape or student.dim() < 1:
        raise ValueError(
            f"student_logits and teacher_logits must have one shape [..., V], got {tuple(student.shape)} and "
            f"{tuple(teacher.shape)}. Align them first; cut heads of different width to the real ids."
        )
    if mask.shape != student.shape[:-1]:
        raise ValueError(
            f"response_mask must have the logits' shape without V: wanted {tuple(student.shape[:-1])}, "
            f"got {tuple(mask.shape)}."
        )
