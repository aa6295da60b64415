# SPDX-License-Identifier: Apache-2.0
"""Losses and weights when only the log-probability of the sampled token is known.

Three estimators of the reverse KL share a name and differ in what their *gradient* estimates, which is what trains.
With `d = log p_student - log p_teacher` on tokens the student drew:

    k1 = d              unbiased value; expected gradient 0       -> a reward (advantage -d), never a loss
    k2 = d^2 / 2        biased value;  expected gradient exactly that of KL(student || teacher)   -> a loss
    k3 = e^-d - 1 + d   unbiased value, low variance, >= 0; expected gradient that of the *forward* KL -> a metric

So back-propagating k1 or k3 raises with that reason.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from cohobate.functional.logprobs import upcast, upcast_pair
from cohobate.functional.reduce import as_mask

_K1_REASON = (
    "k1 (log p_student - log p_teacher) cannot be back-propagated: over the student's samples its expected gradient "
    "is zero, whatever the teacher says. Use it as a reward (estimator='policy_gradient'), or take estimator='k2'."
)
_K3_REASON = (
    "k3 cannot be back-propagated: over the student's samples its expected gradient is that of the forward KL, not "
    "of the reverse KL whose value it estimates. It is a metric; as a loss take estimator='k2' or 'policy_gradient'."
)


class _RefuseBackward(torch.autograd.Function):
    """The identity in the forward pass; the backward pass raises ValueError with a reason."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, reason: str) -> Tensor:
        ctx.reason = reason
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        raise ValueError(ctx.reason)


def k1(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Estimate of KL(student || teacher) in nats on the student's samples, for rewards only: `[...] x 2 -> [...]`."""
    student, teacher = upcast_pair(student_logprobs, teacher_logprobs)
    return _RefuseBackward.apply(student - teacher, _K1_REASON)  # pyright: ignore[reportReturnType]


def k2(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio, whose expected gradient is that of KL(student || teacher): `[...] x 2 -> [...]`."""
    student, teacher = upcast_pair(student_logprobs, teacher_logprobs.detach())
    return 0.5 * (student - teacher).square()


def k3(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Estimate of KL(student || teacher) in nats, unbiased and >= 0, for metrics only: `[...] x 2 -> [...]`."""
    student, teacher = upcast_pair(student_logprobs, teacher_logprobs)
    log_ratio = teacher - student
    return _RefuseBackward.apply(torch.expm1(log_ratio) - log_ratio, _K3_REASON)  # pyright: ignore[reportReturnType]


def sampled_kl_loss(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    *,
    estimator: Literal["k2", "policy_gradient"] = "k2",
    sampler_logprobs: Tensor | None = None,
) -> Tensor:
    """Loss per sampled token whose expected gradient is that of KL(student || teacher): `[N] x 2 -> [N]`, in nats.

    `"policy_gradient"` is `-advantage * ratio` with the constant advantage `log p_teacher - log p_student`; the ratio
    is 1 in value, or `p_student / p_sampler` if `sampler_logprobs [N]` (under the policy that drew the tokens) are
    given. At a ratio of 1 its value is k1, so the logged loss is an estimate of the KL. The teacher is a constant.

    Raises:
        ValueError: `estimator="k1"` or `"k3"`, which have other gradients; unequal shapes.
    """
    if student_logprobs.shape != teacher_logprobs.shape:
        raise ValueError(
            "student_logprobs and teacher_logprobs must have one shape, got "
            f"{tuple(student_logprobs.shape)} and {tuple(teacher_logprobs.shape)}."
        )
    if estimator == "k2":
        if sampler_logprobs is not None:
            raise ValueError("sampler_logprobs belong to estimator='policy_gradient'; k2 takes none.")
        return k2(student_logprobs, teacher_logprobs)
    if estimator == "policy_gradient":
        student, teacher = upcast_pair(student_logprobs, teacher_logprobs.detach())
        drawn_by = student.detach() if sampler_logprobs is None else sampler_logprobs.detach().to(student.dtype)
        advantage = teacher - student.detach()
        return -advantage * torch.exp(student - drawn_by)
    reason = {"k1": _K1_REASON, "k3": _K3_REASON}.get(estimator)
    raise ValueError(reason or f"estimator must be 'k2' or 'policy_gradient', got {estimator!r}.")


def iw_opd_weights(advantages: Tensor, mask: Tensor, *, gamma: float = 0.5) -> Tensor:
    """Weights in [1, 1 + gamma], larger for early tokens, 0 where masked: `[B, R], [B, R] -> [B, R]`.

    `w_t = 1 + gamma (1 - sum_{i<t} |a_i| / Q)` with `Q = max(sum_i |a_i|, 1e-8)`, over the valid tokens of the row
    (IW-OPD, 2606.22600). Constants: no gradient reaches the advantages.
    """
    if advantages.shape != mask.shape or advantages.dim() != 2:
        raise ValueError(
            f"advantages and mask must both be [B, R], got {tuple(advantages.shape)} and {tuple(mask.shape)}."
        )
    if not gamma >= 0:
        raise ValueError(f"gamma must be >= 0, got {gamma}.")
    valid = as_mask(mask)
    size = torch.where(valid, upcast(advantages.detach()).abs(), 0.0)  # [B, R]
    before = size.cumsum(-1) - size
    total = size.sum(-1, keepdim=True).clamp(min=1e-8)  # [B, 1]
    return torch.where(valid, 1 + gamma * (1 - before / total), 0.0)


def clipped_surrogate(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, *, clip_epsilon: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate as a loss to minimise, and which tokens the clip holds: `[N] x 3 -> ([N], [N] bool)`.

    `-min(r a, clip(r, 1 - eps, 1 + eps) a)` with `r = exp(logprobs - sampler_logprobs)`. A held token has no gradient.
    """
    if not 0 < clip_epsilon < 1:
        raise ValueError(f"clip_epsilon must be in (0, 1), got {clip_epsilon}.")
    log_ratio = upcast(logprobs) - upcast(sampler_logprobs.detach())
    advantage = advantages.detach().to(log_ratio.dtype)
    ratio = log_ratio.detach().exp()
    too_high = (advantage > 0) & (ratio > 1 + clip_epsilon)
    too_low = (advantage < 0) & (ratio < 1 - clip_epsilon)
    clipped = too_high | too_low
    settled = clipped | (advantage == 0)  # taken out before exp: an overflowing ratio times 0 is NaN
    free = torch.where(settled, 0.0, log_ratio).exp()
    bound = torch.where(too_high, ratio.new_full((), 1 + clip_epsilon), ratio.new_full((), 1 - clip_epsilon))
    return -advantage * torch.where(clipped, bound, free), clipped


def min_max(values: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest of `values [N]`: detached scalars, `(inf, -inf)` of nothing, neutral in a reduction."""
    wide = upcast(values.detach()).flatten()
    edge = torch.tensor([float("inf")], dtype=wide.dtype, device=wide.device)
    return torch.cat([wide, edge]).amin(), torch.cat([wide, -edge]).amax()


def tip_scores(
    student_entropy: Tensor,
    divergence: Tensor,
    *,
    entropy_range: tuple[Tensor, Tensor] | None = None,
    divergence_range: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Importance in [0, 1] of a token: high where the student is unsure *or* far from the teacher: `[N] x 2 -> [N]`.

    `1 - (1 - h)(1 - d)` with both scaled to [0, 1] by `(min, max)`: of the tensors given, or of the whole step if the
    ranges (as from `min_max`) are passed in. A constant quantity tells no token from another and scales to 0.

    A reconstruction of the selection rule of TIP (2604.14084) from its description, not its authors' code.
    """
    if student_entropy.shape != divergence.shape:
        raise ValueError(
            f"student_entropy and divergence must have one shape, got {tuple(student_entropy.shape)} and "
            f"{tuple(divergence.shape)}."
        )
    unsure = _scale_to_unit(student_entropy, entropy_range)
    far = _scale_to_unit(divergence, divergence_range)
    return 1 - (1 - unsure) * (1 - far)


def select_top_share(scores: Tensor, share: float) -> Tensor:
    """True for the `ceil(share * N)` highest of `scores [N]`, ties to the lower index: `-> [N]` bool."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}.")
    num_selected = math.ceil(share * scores.shape[0])
    ranked = torch.sort(scores.detach(), descending=True, stable=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(0, ranked[:num_selected], True)


def _scale_to_unit(values: Tensor, value_range: tuple[Tensor, Tensor] | None) -> Tensor:
    low, high = min_max(values) if value_range is None else value_range
    wide = upcast(values.detach())
    span = high - low
    return torch.where(span > 0, (wide - low) / torch.where(span > 0, span, 1.0), 0.0).clamp(0.0, 1.0)
