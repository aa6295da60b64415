# SPDX-License-Identifier: Apache-2.0
"""Two models of one vocabulary, compared on columns that all rows share: a same-tokenizer teacher beside others.

X-Token compares another tokenizer's teacher on its most important columns (`projection.py`), so a teacher that needs
no projection is compared in the same way: both sides renormalised on the columns, whose normaliser over the whole
vocabulary then cancels. On all columns it is the ordinary divergence.

Not for one teacher over the whole vocabulary: `fused_linear.py` does that without logits. n rows, V vocabulary, I
columns.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.divergences import check_beta
from cohobate.functional.kernels import kernels_for
from cohobate.functional.largest import largest_entries
from cohobate.functional.logprobs import check_temperature, upcast, wide_dtype


def same_support_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    columns: Tensor | None = None,
    temperature: float = 1.0,
    beta: float = 0.0,
) -> Tensor:
    """What `beta` names, in nats of each row, 0 forward KL, 1 reverse KL, between them JSD: `-> [n]`.

    Args:
        student_logits: `[n, V]` raw; differentiable.
        teacher_logits: `[n, I]` raw, of the columns alone; a constant.
        columns: `[I]` the ids to compare on, where both sides are renormalised; None for all V.
    """
    check_beta(beta)
    check_temperature(temperature)
    if columns is not None:
        student_logits = student_logits[:, columns]
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student and teacher must have the same rows and columns, got {list(student_logits.shape)} and "
            f"{list(teacher_logits.shape)}."
        )
    value: Any = _SameSupport.apply(student_logits, teacher_logits.detach(), beta, 1 / temperature)
    return value


class _SameSupport(torch.autograd.Function):
    """D_n of one tile, and its gradient while both sides are at hand: no [n, I] of either is kept but that gradient.

    Twin: `divergences.divergence` of both sides' `logprobs.log_softmax`.   Saved: dD/dz [n, I], if it is asked for
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, beta: float, scale: float) -> Tensor:
        scales, kernels = (scale, scale), kernels_for(student)
        if not ctx.needs_input_grad[0]:
            return kernels.divergence_rows(student, teacher, beta, None, None, scales)[0]
        slopes = torch.empty(student.shape, dtype=wide_dtype(student, teacher), device=student.device)
        each = torch.full(student.shape[:1], scale, dtype=slopes.dtype, device=student.device)
        value = kernels.divergence_rows(student, teacher, beta, each, slopes, scales)[0]
        ctx.save_for_backward(slopes)
        ctx.dtype = student.dtype
        return value

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(ctx: Any, grad_value: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes,) = ctx.saved_tensors
        grad = slopes * grad_value[:, None].to(slopes.dtype)  # [n, I]
        grad.masked_fill_((grad_value == 0)[:, None], 0.0)  # whatever such a row holds
        return grad.to(ctx.dtype), None, None, None  # the teacher is a constant, the others are numbers


def important_columns(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` ids with the largest logit in any row of `logits [n, V]`, and that logit: `([k], [k])`, best first.

    Of equal ones the lower id; none if there are no rows. So the k of many rows are among those of each part of them.
    """
    if logits.shape[0] == 0:
        return logits.new_zeros(0, dtype=torch.int64), upcast(logits.new_zeros(0))
    values, ids = largest_entries(logits.amax(0)[None], min(k, logits.shape[1]))
    return ids[0], values[0]
