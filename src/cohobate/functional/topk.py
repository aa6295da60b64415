# SPDX-License-Identifier: Apache-2.0
"""Divergences when only the teacher's K most likely tokens are known.

A truncated sum is not a divergence: it can be negative, and clamping that at 0 switches the gradient off. So a call
says what became of the tail. The default puts the other tokens of each side into one bucket: a coarser view of the
same two distributions, therefore never more than the full divergence, and equal to it at K = V.
"""

from typing import Literal

import torch
from torch import Tensor

from cohobate.functional.divergences import check_beta, divergence
from cohobate.functional.kernels import kernels_for
from cohobate.functional.logprobs import check_temperature, upcast, upcast_pair
from cohobate.functional.moments import side_moments

Tail = Literal["bucket", "renormalize", "drop"]
TopKOf = Literal["teacher", "student"]
"""Whose k likeliest ids a divergence over k ids is taken over."""


def topk_divergence(
    student_logits: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    beta: float,
    tail: Tail = "bucket",
    temperature: float = 1.0,
) -> Tensor:
    """Divergence in nats over the teacher's top K, 0 forward KL, 1 reverse KL, between them JSD: `-> [N]`.

    Args:
        student_logits: `[N, V]` raw; divided by `temperature`.
        teacher_ids: `[N, K]` int64, distinct within a row.
        teacher_logprobs: `[N, K]` true (not renormalised) log-probabilities, already at `temperature`; a constant.
        tail: what becomes of the other V - K tokens. `"bucket"`: one extra entry on each side, a lower bound of the
            full divergence. `"renormalize"`: both sides normalised over the K; blind to the tail. `"drop"`: the K
            terms alone; not a divergence, may be negative.

    Raises:
        ValueError: shapes, ranges, or a support whose loss is identically zero (K = 1, renormalised).
    """
    check_beta(beta)
    check_temperature(temperature)
    if student_logits.dim() != 2:
        raise ValueError(f"student_logits must be [N, V], got {tuple(student_logits.shape)}.")
    check_support(student_logits.shape[0], student_logits.shape[1], teacher_ids, teacher_logprobs, tail)
    student, teacher = upcast_pair(student_logits, teacher_logprobs.detach())
    scaled = student / temperature  # [N, V]
    kept = scaled.gather(-1, teacher_ids)  # [N, K]
    covers_all = teacher_ids.shape[-1] == student_logits.shape[-1]
    rest = None if covers_all or tail == "renormalize" else _logsumexp_of_rest(scaled, teacher_ids)  # [N]
    return support_divergence(kept, rest, teacher, beta=beta, tail=tail)


def support_divergence(
    kept: Tensor, rest: Tensor | None, teacher_logprobs: Tensor, *, beta: float, tail: Tail
) -> Tensor:
    """`topk_divergence` once the vocabulary has been read, in nats: `-> [N]`, differentiable in `kept` and `rest`.

    `kept [N, K]` are the student's tempered logits of the teacher's ids, `rest [N]` the logsumexp of all others; None
    if there are none, unread by `"renormalize"`. `teacher_logprobs [N, K]` are true and at the same temperature.
    """
    if tail == "renormalize":
        return divergence(kept.log_softmax(-1), teacher_logprobs.log_softmax(-1), beta=beta)
    student, teacher = bucketed(kept, rest, teacher_logprobs)
    if tail == "drop":
        num_kept = kept.shape[-1]
        student, teacher = student[:, :num_kept], teacher[:, :num_kept]
    return divergence(student, teacher, beta=beta)


def bucketed(kept: Tensor, rest: Tensor | None, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of both sides over the K ids and one entry for all others: `[N, K + 1]`, or `[N, K]` if
    nothing is left over (`rest=None`). Arguments as in `support_divergence`."""
    if rest is None:
        return kept.log_softmax(-1), teacher_logprobs
    teacher = torch.cat([teacher_logprobs, log_tail_mass(teacher_logprobs)[:, None]], dim=-1)
    return torch.cat([kept, rest[:, None]], dim=-1).log_softmax(-1), teacher


def bucketed_view(scaled: Tensor, ids: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """`bucketed` of the student's tempered logits (or log-probabilities) `scaled [N, V]`."""
    covers_all = ids.shape[-1] == scaled.shape[-1]
    return bucketed(scaled.gather(-1, ids), None if covers_all else _logsumexp_of_rest(scaled, ids), teacher_logprobs)


def logprobs_at(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """True log-probabilities in nats of `ids [N, K]` under `logits [N, V]` at `temperature`: `-> [N, K]`, detached.

    The normaliser is that of the whole vocabulary. Whoever knows all logits can answer for ids that another side
    chose; a teacher that tells its own K likeliest cannot.
    """
    check_temperature(temperature)
    logits = logits.detach()
    normalizer = side_moments(*kernels_for(logits).side_sums(logits, 1 / temperature))[0]  # [N]
    return upcast(logits.gather(-1, ids)) / temperature - normalizer[:, None]


def log_tail_mass(logprobs: Tensor) -> Tensor:
    """Log of the mass that `logprobs [..., K]` leave over, in nats: `-> [...]`, floored at one machine epsilon.

    `log(1 - e^x) = log(-expm1(x))`. Kept mass that rounds to 1 (or, summed, to a little more) would give -inf or NaN.
    """
    eps = torch.finfo(logprobs.dtype).eps
    kept = torch.logsumexp(logprobs, dim=-1).clamp(max=-eps)
    return torch.log(-torch.expm1(kept))


def _logsumexp_of_rest(scaled: Tensor, ids: Tensor) -> Tensor:
    """logsumexp of `scaled [N, V]` without the `ids [N, K]`: `-> [N]`.

    Summed over the complement itself, not 1 - kept: exact for a student that is sure, whose tail must still get its
    gradient. The fill is finite so that a row whose rest is -inf throughout has a gradient of 0 and not NaN.
    """
    fill = torch.finfo(scaled.dtype).min / 4
    return torch.logsumexp(scaled.scatter(-1, ids, fill), dim=-1)


def check_support(num_rows: int, vocab_size: int, ids: Tensor, logprobs: Tensor, tail: str) -> None:
    """Raise ValueError unless `ids`, `logprobs [N, K]` are a support of `num_rows` rows that `tail` can use."""
    if ids.dim() != 2 or ids.shape[0] != num_rows:
        raise ValueError(f"teacher_ids must be [N, K] with N = {num_rows}, got {tuple(ids.shape)}.")
    if ids.shape != logprobs.shape:
        raise ValueError(
            "teacher_ids and teacher_logprobs must have one shape, got "
            f"{tuple(ids.shape)} and {tuple(logprobs.shape)}."
        )
    num_kept = ids.shape[1]
    if not 1 <= num_kept <= vocab_size:
        raise ValueError(f"K must be in [1, {vocab_size}], got {num_kept}.")
    if tail not in ("bucket", "renormalize", "drop"):
        raise ValueError(f"tail must be 'bucket', 'renormalize' or 'drop', got {tail!r}.")
    if tail == "renormalize" and num_kept == 1:
        raise ValueError(
            "tail='renormalize' with K = 1 puts probability 1 on one id on both sides: the loss is identically zero. "
            "Use tail='bucket', or K >= 2."
        )
