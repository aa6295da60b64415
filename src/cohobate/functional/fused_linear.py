# SPDX-License-Identifier: Apache-2.0
"""From hidden states and output heads to a divergence, without ever holding `[N, V]`.

A vocabulary of 150,000 makes logits the largest tensor of a training step: two models, gradients, float32. So rows go
in chunks, and a chunk's logits are used up before the next is made. `fused_linear_divergence` takes the *gradient* too
while the logits are there, so that nothing is projected twice: four matrix products over the vocabulary in all
(student, teacher, dX, dW), which is the floor; without a gradient only the first two. Its backward pass only scales.

Not here: the formulas' meaning (`divergences.py`, the plain twins), the mask and the mean (`reduce.py`), sharded heads
(`parallel`). N rows, V vocabulary, H hidden, n rows of one chunk.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.chunked_head import (
    ChunkHead,
    HeadGradients,
    check_side,
    needed_gradients,
    row_chunks,
    rows_per_chunk,
    wide_dtype,
)
from cohobate.functional.divergences import check_beta
from cohobate.functional.logprobs import check_temperature, product_dtype

_FORBIDDEN = -1e30  # stands for -inf where a bias may hold one: far below any log-probability, yet 0 x it is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedDivergence:
    """What `fused_linear_divergence` returns, in nats. All but `loss_sum` is detached `[N]`, float32 or float64."""

    loss_sum: Tensor  # scalar: sum of weights * divergence; differentiable in the student's tensors
    divergence: Tensor  # the divergence that beta names, unweighted
    student_entropy: Tensor
    teacher_entropy: Tensor
    top1_agreement: Tensor  # 1.0 where both sides have the same most likely token, else 0.0
    forward_kl: Tensor  # KL(teacher || student)
    reverse_kl: Tensor  # KL(student || teacher)


def fused_linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    weights: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_scale: float = 1.0,
    teacher_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    chunk_size: int | None = None,
    chunk_bytes: int | None = None,
) -> FusedDivergence:
    """Weighted sum over rows of what `beta` names, in nats: 0 forward KL, 1 reverse KL, between them JSD.

    Args:
        student_hidden, student_weight: `[N, Hs]`, `[V, Hs]`; with `student_bias [V]`, all that gets gradients.
        teacher_hidden, teacher_weight: `[N, Ht]`, `[V, Ht]`; constants, as is `teacher_bias [V]`.
        weights: `[N]`, any float dtype, a constant. A row of weight 0 adds 0 to value and gradient, whatever it holds.
        student_scale, student_softcap, ...: logits are `softcap((h W^T + bias) * scale)`, then `/ temperature`.
        chunk_size: rows of a chunk; by default as many as `chunk_bytes` (a default by device) allows for its tiles.

    Products run in the inputs' dtype (autocast's where it rules), all else in float32, or float64 if an input is
    float64. dW is accumulated in that wide dtype. N = 0 gives zeros with a gradient path.

    Raises:
        ValueError: shapes or numbers that do not fit; heads of different width must be cut to the shared real ids.
    """
    check_beta(beta)
    check_temperature(temperature)
    student = ChunkHead(scale=student_scale, softcap=student_softcap, temperature=temperature)
    teacher = ChunkHead(scale=teacher_scale, softcap=teacher_softcap, temperature=temperature)
    check_side("student", student_hidden, student_weight, student_bias)
    check_side("teacher", teacher_hidden, teacher_weight, teacher_bias)
    num_rows, vocab_size = student_hidden.shape[0], student_weight.shape[0]
    if teacher_hidden.shape[0] != num_rows:
        raise ValueError(
            f"student has {num_rows} rows and teacher {teacher_hidden.shape[0]}; they must be the same pairs."
        )
    if teacher_weight.shape[0] != vocab_size:
        raise ValueError(
            f"student's head has {vocab_size} ids and teacher's {teacher_weight.shape[0]}. Padded heads over one "
            "tokenizer are cut to the real ids first (OutputHead.cut); two vocabularies need another loss."
        )
    if weights is not None and weights.shape != (num_rows,):
        raise ValueError(f"weights must be [N] = [{num_rows}], got {list(weights.shape)}.")
    wide = wide_dtype(student_hidden, student_weight, teacher_hidden, teacher_weight)
    plan = _DivergencePlan(
        beta=beta,
        student=student,
        teacher=teacher,
        student_dtype=product_dtype(student_hidden, student_weight),
        teacher_dtype=product_dtype(teacher_hidden, teacher_weight),
        teacher_hidden=teacher_hidden.detach(),
        teacher_weight=teacher_weight.detach(),
        teacher_bias=None if teacher_bias is None else teacher_bias.detach().to(wide),
        weights=None if weights is None else weights.detach().to(wide),
        needs=needed_gradients(student_hidden, student_weight, student_bias),
        wide=wide,
        rows=rows_per_chunk(student_hidden, vocab_size, wide, chunk_size, chunk_bytes),
    )
    out: Any = _FusedDivergence.apply(student_hidden, student_weight, student_bias, plan)
    return FusedDivergence(**dict(zip((field.name for field in fields(FusedDivergence)), out, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _DivergencePlan:
    """Everything `_FusedDivergence` needs and gives no gradient to."""

    beta: float
    student: ChunkHead
    teacher: ChunkHead
    student_dtype: torch.dtype
    teacher_dtype: torch.dtype
    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    weights: Tensor | None
    needs: tuple[bool, bool, bool]
    wide: torch.dtype
    rows: int


class _FusedDivergence(torch.autograd.Function):
    """sum_n w_n D_n.   Twin: `divergences.divergence` of `logprobs.log_softmax(logprobs.head_logits(...))`

    With log-probs s, t (of p_s, p_t), gap = t - s and the mixture m, the gradient of a row by its tempered logits is
        beta 0:  p_s - p_t          beta 1:  p_s (-gap - KL(s||t))
        between: u - p_s sum(u),    u = (1 - beta) p_s (s - log m)
    Saved: dX [N, H], dW [V, H], db [V], whichever are asked for.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _DivergencePlan) -> Any:
        num_rows, wide = hidden.shape[0], plan.wide
        stats = torch.empty(6, num_rows, dtype=wide, device=hidden.device)  # rows as in FusedDivergence
        grads = HeadGradients(hidden, weight, plan.needs, wide)
        weight_s = weight.to(plan.student_dtype)  # [V, Hs]
        weight_t = plan.teacher_weight.to(plan.teacher_dtype)  # [V, Ht]
        bias_s = None if bias is None else bias.to(wide)
        may_forbid = bias is not None or plan.teacher_bias is not None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in row_chunks(num_rows, plan.rows):
                hidden_s = hidden[rows].to(plan.student_dtype)  # [n, Hs]
                hidden_t = plan.teacher_hidden[rows].to(plan.teacher_dtype)  # [n, Ht]
                s, tanh = plan.student.logprobs((hidden_s @ weight_s.T).to(wide), bias_s)  # [n, V]
                t, _ = plan.teacher.logprobs((hidden_t @ weight_t.T).to(wide), plan.teacher_bias)  # [n, V]
                stats[:, rows], grad = _divergence_tile(s, t, plan.beta, may_forbid, any(plan.needs))
                if grad is not None:
                    factor = None if plan.weights is None else plan.weights[rows]  # [n]
                    grads.add(rows, plan.student.back(grad, tanh, factor), hidden_s, weight_s, factor)
        loss_sum = _weighted_sum(stats[0], plan.weights)
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        details = stats.unbind(0)
        ctx.mark_non_differentiable(*details)
        return loss_sum, *details

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_loss: Tensor, *_: Tensor
    ) -> Any:
        grad_hidden, grad_weight, grad_bias = (
            None if grad is None else (grad * grad_loss).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return grad_hidden, grad_weight, grad_bias, None  # plan: the teacher and the weights are constants


def _divergence_tile(
    s: Tensor, t: Tensor, beta: float, may_forbid: bool, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Statistics `[6, n]`, ordered as in `FusedDivergence`, and the gradient `[n, V]` by the student's logits.

    Log-probabilities `s, t [n, V]` are used up.
    """
    agree = (s.argmax(-1) == t.argmax(-1)).to(s.dtype)
    only_t = only_s = None
    if may_forbid:
        # -inf - -inf and 0 x inf are NaN. A finite stand-in keeps the arithmetic; rows costing +inf are marked later.
        no_s, no_t = s == -torch.inf, t == -torch.inf
        only_t, only_s = (no_s & ~no_t).any(-1), (no_t & ~no_s).any(-1)
        s.masked_fill_(no_s, _FORBIDDEN)
        t.masked_fill_(no_t, _FORBIDDEN)
    gap = t - s
    p_t = t.exp()
    scratch = t.mul_(p_t)
    entropy_t = -scratch.sum(-1)
    forward = torch.mul(p_t, gap, out=scratch).sum(-1)
    p_s = s.exp()
    entropy_s = -s.mul_(p_s).sum(-1)
    reverse = -torch.mul(p_s, gap, out=scratch).sum(-1)
    grad = None
    if beta == 0.0:
        value = forward
        grad = p_s.sub_(p_t) if with_grad else None
    elif beta == 1.0:
        value = reverse
        grad = gap.add_(reverse[:, None]).neg_().mul_(p_s) if with_grad else None
    else:
        mixture = _log_mixture(gap, beta)
        student_term = gap.clamp(min=0).add_(mixture).mul_(p_s).mul_(beta - 1)  # (1 - beta) p_s (s - log m)
        teacher_term = gap.clamp_(max=0).sub_(mixture).mul_(p_t)  # p_t (t - log m)
        student_sum = student_term.sum(-1)
        value = student_sum + beta * teacher_term.sum(-1)
        grad = student_term.sub_(p_s.mul_(student_sum[:, None])) if with_grad else None
    if only_t is not None and only_s is not None:
        forward, reverse = forward.masked_fill(only_t, torch.inf), reverse.masked_fill(only_s, torch.inf)
        value = forward if beta == 0.0 else reverse if beta == 1.0 else value
    return torch.stack([value, entropy_s, entropy_t, agree, forward, reverse]), grad


def _log_mixture(gap: Tensor, beta: float) -> Tensor:
    """`log m` relative to the larger side, from `gap = t - s`; exactly 0 where both are equal: `[n, V] -> [n, V]`."""
    below = gap.abs().neg_().expm1_()  # (smaller - larger) / larger
    if beta == 0.5:
        below.mul_(0.5)
    else:
        below.mul_(torch.where(gap > 0, gap.new_full((), 1 - beta), gap.new_full((), beta)))
    return below.log1p_()


def _weighted_sum(values: Tensor, weights: Tensor | None) -> Tensor:
    return values.sum() if weights is None else torch.where(weights == 0, 0.0, values * weights).sum()
