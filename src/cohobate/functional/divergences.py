# SPDX-License-Identifier: Apache-2.0
"""Divergences between a student's and a teacher's next-token distributions, from log-probabilities, in nats.

`forward_kl`, `reverse_kl` and `jsd` are three functions because beta is not a smooth dial between them: the interior
vanishes at both ends (`jsd` at .001 is a thousandth of the forward KL), so `jsd` refuses 0 and 1. The functions return
one number per position; masks are applied *before* the maths by whoever holds them, and one function reduces.

Every difference of logarithms is taken relative to the larger side (log1p, expm1): equal numbers give exactly 0, which
a `logaddexp` followed by a subtraction does not. A token at -inf on both sides adds 0 to value and gradient; one that
only the weighting side forbids adds 0; one that only the other side forbids costs +inf for a KL, a finite amount for
`jsd`.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from cohobate.functional.logprobs import upcast_pair

Clip = Literal["none", "token", "pointwise"]


def forward_kl(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(teacher || student) in nats: `[..., V] x 2 -> [...]`, float32 or float64.

    +inf where the teacher allows a token that the student forbids. Differentiable in both arguments.
    """
    return divergence_terms(student_logprobs, teacher_logprobs, beta=0.0).sum(-1)


def reverse_kl(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(student || teacher) in nats: `[..., V] x 2 -> [...]`, float32 or float64.

    +inf where the student allows a token that the teacher forbids. Differentiable in both arguments.
    """
    return divergence_terms(student_logprobs, teacher_logprobs, beta=1.0).sum(-1)


def jsd(student_logprobs: Tensor, teacher_logprobs: Tensor, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence in nats, beta weighting the teacher: `[..., V] x 2 -> [...]`.

    `beta KL(teacher || m) + (1 - beta) KL(student || m)` with `m = beta p_teacher + (1 - beta) p_student`
    (GKD, 2306.13649). At beta .5 symmetric and at most ln 2. Differentiable in both arguments.
    """
    if not 0 < beta < 1:
        raise ValueError(
            f"jsd needs 0 < beta < 1, got {beta}. At 0 and 1 it vanishes; for a KL use forward_kl or reverse_kl."
        )
    return divergence_terms(student_logprobs, teacher_logprobs, beta=beta).sum(-1)


def divergence(student_logprobs: Tensor, teacher_logprobs: Tensor, *, beta: float) -> Tensor:
    """What `beta` names, in nats: 0 forward KL, 1 reverse KL, between them `jsd`: `[..., V] x 2 -> [...]`."""
    return divergence_terms(student_logprobs, teacher_logprobs, beta=beta).sum(-1)


def divergence_terms(student_logprobs: Tensor, teacher_logprobs: Tensor, *, beta: float) -> Tensor:
    """What each vocabulary entry adds to the divergence that `beta` names, in nats: `[..., V] x 2 -> [..., V]`.

    Terms of a KL may be negative; terms of `jsd` are not, but for rounding.
    """
    check_beta(beta)
    if student_logprobs.shape != teacher_logprobs.shape:
        raise ValueError(
            f"student and teacher must have one shape, got {tuple(student_logprobs.shape)} and "
            f"{tuple(teacher_logprobs.shape)}. Heads of different width are cut to the real ids first."
        )
    s, t = upcast_pair(student_logprobs, teacher_logprobs)
    return _DivergenceTerms.apply(s, t, beta)  # pyright: ignore[reportReturnType]


def clip_divergence(terms: Tensor, *, clip: Clip, limit: float | None = None) -> tuple[Tensor, Tensor]:
    """Sum `terms [..., V]` with a cap, in nats: `(value [...], clipped [...])`, the latter a detached share in [0, 1].

    `"token"` caps the position's sum: still the divergence, but a position above the limit has no gradient; `clipped`
    is 0 or 1. `"pointwise"` caps each entry from above: a pseudo-loss that can be negative and whose gradient can
    point away from the teacher (it pushes down exactly the tokens that the teacher likes most); `clipped` is the share
    of entries.
    """
    if clip == "none":
        total = terms.sum(-1)
        return total, torch.zeros_like(total.detach())
    if limit is None or not limit >= 0:
        raise ValueError(f"clip={clip!r} needs a limit >= 0 in nats, got {limit}.")
    if clip == "token":
        total = terms.sum(-1)
        return total.clamp(max=limit), (total.detach() > limit).to(total.dtype)
    if clip == "pointwise":
        return terms.clamp(max=limit).sum(-1), (terms.detach() > limit).to(terms.dtype).mean(-1)
    raise ValueError(f"clip must be 'none', 'token' or 'pointwise', got {clip!r}.")


def check_beta(beta: float) -> None:
    """Raise ValueError unless `0 <= beta <= 1`."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1] (0 forward KL, 1 reverse KL), got {beta}.")


class _DivergenceTerms(torch.autograd.Function):
    """term_v of the divergence, with log-probs s, t, the mixture m and gap = t - s:

        beta 0:   p_t gap                                        d/ds = -p_t             d/dt = p_t (gap + 1)
        beta 1:  -p_s gap                                        d/ds = p_s (1 - gap)    d/dt = -p_s
        between:  beta p_t (t - log m) + (1 - beta) p_s (s - log m)
                  d/ds = (1 - beta) p_s (s - log m)              d/dt = beta p_t (t - log m)

    Between, what the derivative of log m adds cancels in every entry. Step-by-step autograd cancels it in floats: with
    float32 logits 1e-3 apart its gradient is 4 % off at beta .001, this one .01 %; and it keeps 8.5 [..., V], not 2.
    The gradient by t is that by s with the sides swapped and beta mirrored, as D_beta(s, t) = D_(1 - beta)(t, s).
    Saved: s, t.   Twin: the oracle of the tests, in probability space.
    """

    @staticmethod
    def forward(ctx: Any, s: Tensor, t: Tensor, beta: float) -> Tensor:
        ctx.save_for_backward(s, t)
        ctx.beta = beta
        return _terms(s, t, beta)

    @staticmethod
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(ctx: Any, grad_terms: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        s, t = ctx.saved_tensors
        grad_s = grad_terms * _student_slopes(s, t, ctx.beta) if ctx.needs_input_grad[0] else None
        grad_t = grad_terms * _student_slopes(t, s, 1 - ctx.beta) if ctx.needs_input_grad[1] else None
        return grad_s, grad_t, None  # beta: a number


def _terms(s: Tensor, t: Tensor, beta: float) -> Tensor:
    gap = t - s  # [..., V]; NaN where both sides forbid, which no term reads
    if beta == 0.0:
        return _expect(t, gap, infinite=math.inf)
    if beta == 1.0:
        return _expect(s, -gap, infinite=math.inf)
    student_over_m, teacher_over_m = over_mixture(gap, beta)
    return beta * _expect(t, teacher_over_m) + (1 - beta) * _expect(s, student_over_m)


def _student_slopes(s: Tensor, t: Tensor, beta: float) -> Tensor:
    if beta == 0.0:
        return -t.exp()
    if beta == 1.0:
        return _expect(s, 1 - (t - s))
    return (1 - beta) * _expect(s, over_mixture(t - s, beta)[0])


def over_mixture(gap: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """`(s - log m, t - log m)` from `gap = t - s`, relative to the larger side: exactly 0 where both are equal."""
    teacher_leads = gap > 0
    below = torch.where(teacher_leads, -gap, gap)  # <= 0: the smaller side relative to the larger
    smaller_share = torch.where(teacher_leads, gap.new_full((), 1 - beta), gap.new_full((), beta))
    mixture = torch.log1p(smaller_share * torch.expm1(below))  # log m / larger side, <= 0
    return torch.where(teacher_leads, -gap - mixture, -mixture), torch.where(teacher_leads, -mixture, gap - mixture)


def _expect(logprobs: Tensor, values: Tensor, *, infinite: float = 0.0) -> Tensor:
    """`p * values`: 0 where log p is -inf whatever `values` is; `infinite` where `values` is +inf, even if p is 0."""
    forbidden = logprobs == -math.inf
    unbounded = (values == math.inf) & ~forbidden
    product = logprobs.exp() * torch.where(forbidden | unbounded, 0.0, values)
    return torch.where(unbounded, infinite, product)
