# SPDX-License-Identifier: Apache-2.0
"""From hidden states and an output head to the divergence from a teacher's top K, without ever holding `[N, V]`.

A server or a store tells K log-probabilities of each position, so only the student is projected: three matrix products
over the vocabulary with the gradient (logits, dX, dW), which is taken while a chunk's logits are there, one without.

The formulas' meaning is in `topk.py` (the plain twin), the chunk loop in `chunked_head.py`. N rows, V vocabulary, H
hidden, K kept ids, n rows of one chunk.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.chunked_head import scaled_for_backward
from cohobate.functional.divergences import check_beta, divergence
from cohobate.functional.fused_linear import FusedDivergence
from cohobate.functional.kernels import kernels_for
from cohobate.functional.logprobs import entropy, gather_last, put_last
from cohobate.functional.moments import side_moments
from cohobate.functional.reduce import weigh
from cohobate.functional.student_head import HeadOptions, HeadPlan, Precision, StudentHead
from cohobate.functional.topk import Tail, bucketed, check_support, support_divergence

_AWAY = -1e30  # a logit that is out of every sum; arithmetic with -inf would need masks


def fused_linear_topk(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    beta: float,
    tail: Tail = "bucket",
    temperature: float = 1.0,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    chunk_bytes: int | None = None,
    logits: Precision = "accurate",
) -> FusedDivergence:
    """Weighted sum over rows of `topk_divergence`, in nats: 0 forward KL, 1 reverse KL, between them JSD.

    Args:
        hidden, weight: the student's `[N, H]`, `[V, H]`; with `bias [V]`, all that gets gradients.
        teacher_ids, teacher_logprobs: `[N, K]`, distinct ids and their true log-probabilities, already at
            `temperature`, which divides the student's logits only; constants.
        tail: as in `topk_divergence`.
        weights, scale, softcap, chunk_size, chunk_bytes, logits: as in `fused_linear_divergence`.

    The result's `divergence` follows `tail`; `teacher_entropy`, `forward_kl` and `reverse_kl` are always those of K
    ids and one bucket, hence lower bounds; `student_entropy` and `top1_agreement` are exact.

    Raises:
        ValueError: shapes or numbers that do not fit, or a support whose loss is identically zero.
    """
    check_beta(beta)
    options = HeadOptions(
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        chunk_size=chunk_size,
        chunk_bytes=chunk_bytes,
        logits=logits,
    )
    head = options.plan(hidden, weight, bias, teacher_logprobs)
    check_support(hidden.shape[0], weight.shape[0], teacher_ids, teacher_logprobs, tail)
    if weights is not None and weights.shape != hidden.shape[:1]:
        raise ValueError(f"weights must be [N] = [{hidden.shape[0]}], got {list(weights.shape)}.")
    plan = _TopKPlan(
        beta=beta,
        tail=tail,
        ids=teacher_ids,
        teacher=teacher_logprobs.detach().to(head.wide),
        weights=hidden.new_ones(hidden.shape[0], dtype=head.wide)
        if weights is None
        else weights.detach().to(head.wide),
        head=head,
    )
    out: Any = _FusedTopK.apply(hidden, weight, bias, plan)
    return FusedDivergence(**dict(zip((field.name for field in fields(FusedDivergence)), out, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TopKPlan:
    """Everything `_FusedTopK` needs and gives no gradient to."""

    beta: float
    tail: Tail
    ids: Tensor  # [N, K]
    teacher: Tensor  # [N, K] log-probabilities, wide
    weights: Tensor  # [N] wide
    head: HeadPlan


class _FusedTopK(torch.autograd.Function):
    """sum_n w_n D_n.   Twin: `topk.topk_divergence` of `logprobs.head_logits(...)`

    D reads the tempered logits z only through z_k of the K ids and R = logsumexp of all others, so with the slopes
    of D by those K + 1 numbers (from autograd, which costs [n, K] here)
        dD/dz_v = dD/dz_k  for the ids        dD/dz_v = dD/dR exp(z_v - R)  for all others
    Saved: dX [N, H], dW [V, H], db [V], whichever are asked for.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _TopKPlan) -> Any:
        # Rows as in FusedDivergence.
        stats = torch.empty(6, hidden.shape[0], dtype=plan.head.wide, device=hidden.device)
        student = StudentHead(hidden, weight, bias, plan.head)
        for rows, z in student.chunks():
            stats[:, rows] = _topk_tile(z, rows, student, plan)
        grads = student.gradients
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        details = stats.unbind(0)
        ctx.mark_non_differentiable(*details)
        return weigh(stats[0], plan.weights).sum(), *details

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_loss: Tensor, *_: Tensor
    ) -> Any:
        grad_hidden, grad_weight, grad_bias = (
            scaled_for_backward(grad, grad_loss, dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return grad_hidden, grad_weight, grad_bias, None  # plan: the teacher and the weights are constants


def _topk_tile(z: Tensor, rows: slice, student: StudentHead, plan: _TopKPlan) -> Tensor:
    """Statistics `[6, n]`, ordered as in `FusedDivergence`, of a tile `z [n, V]`, which is used up.

    The gradients are added to the student's.
    """
    kernels, ids, teacher = kernels_for(z), plan.ids[rows], plan.teacher[rows]
    best = gather_last(ids, teacher.argmax(-1))
    agreement = (kernels.argmax(z) == best).to(teacher.dtype)
    own = z.gather(-1, ids)  # [n, K]
    # The rest is summed over itself, not as 1 - kept: a sure student has a tail.
    put_last(z, ids, max(_AWAY, torch.finfo(z.dtype).min))
    rest, rest_entropy = side_moments(*kernels.side_sums(z, student.scale))  # [n]
    kept = own.to(teacher.dtype) * student.scale
    others = None if ids.shape[1] == z.shape[1] else rest
    value, slopes = _value_and_slopes(kept, others, teacher, plan)
    if slopes is not None:
        _add_gradient(z, rows, own, rest, slopes, student, plan)
    student_view, teacher_view = bucketed(kept, others, teacher)  # [n, K + 1]
    forward, reverse = (divergence(student_view, teacher_view, beta=beta) for beta in (0.0, 1.0))
    parts = torch.stack([kept.logsumexp(-1), rest], dim=-1)  # [n, 2]
    inside = torch.stack([entropy(kept.log_softmax(-1)), rest_entropy], dim=-1)
    return torch.stack([value, _joined_entropy(parts, inside), entropy(teacher_view), agreement, forward, reverse])


def _add_gradient(
    z: Tensor,
    rows: slice,
    own: Tensor,
    rest: Tensor,
    slopes: tuple[Tensor, Tensor],
    student: StudentHead,
    plan: _TopKPlan,
) -> None:
    """`z [n, V]` was `own [n, K]` at the ids before they were put away; `slopes [n, K]`, `[n]` are by kept and R."""
    ids, factor = plan.ids[rows], plan.weights[rows] * plan.head.head.slope  # [n]
    idle = factor == 0
    by_kept = torch.where(idle[:, None], 0.0, slopes[0] * factor[:, None])
    by_rest = torch.where(idle, 0.0, slopes[1] * factor)
    out = kernels_for(z).softmax_gradient(z, rest, by_rest, None, student.gradient_tile(z), student.scale)
    put_last(out, ids, by_kept)
    if plan.head.head.softcap is not None:
        put_last(z, ids, own)  # the tanh is needed whole
    student.add(rows, z, out, factor)


def _value_and_slopes(
    kept: Tensor, rest: Tensor | None, teacher: Tensor, plan: _TopKPlan
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The divergence `[n]` and, if a gradient is wanted, its slopes by `kept [n, K]` and by `rest [n]`."""
    if not plan.head.with_grad:
        return support_divergence(kept, rest, teacher, beta=plan.beta, tail=plan.tail), None
    with torch.enable_grad():
        kept = kept.detach().requires_grad_()
        rest = None if rest is None else rest.detach().requires_grad_()
        value = support_divergence(kept, rest, teacher, beta=plan.beta, tail=plan.tail)
        leaves = [kept] if rest is None else [kept, rest]
        by_kept, *others = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
    by_rest = others[0] if others else torch.zeros_like(value)
    return value.detach(), (by_kept, by_rest)


def _joined_entropy(logsumexps: Tensor, entropies: Tensor) -> Tensor:
    """Entropy `[n]` of a distribution in parts, from each part's, `[n, parts]`: H(masses) + sum of mass * H(part)."""
    masses = logsumexps.log_softmax(-1)
    return entropy(masses) + (masses.exp() * entropies).sum(-1)
