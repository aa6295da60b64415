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
from cohobate.functional.logprobs import check_temperature, upcast_pair

Tail = Literal["bucket", "renormalize", "drop"]


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
    _check_support(student_logits, teacher_ids, teacher_logprobs, tail)
    student, teacher = upcast_pair(student_logits, teacher_logprobs.detach())
    scaled = student / temperature  # [N, V]
    kept = scaled.gather(-1, teacher_ids)  # [N, K]
    if tail == "renormalize":
        return divergence(kept.log_softmax(-1), teacher.log_softmax(-1), beta=beta)
    covers_all = teacher_ids.shape[-1] == student_logits.shape[-1]
    if covers_all:
        return divergence(kept.log_softmax(-1), teacher, beta=beta)
    rest = _logsumexp_of_rest(scaled, teacher_ids)  # [N]
    normalizer = torch.logaddexp(torch.logsumexp(kept, dim=-1), rest)  # [N]
    student_kept = kept - normalizer[:, None]
    if tail == "drop":
        return divergence(student_kept, teacher, beta=beta)
    student_all = torch.cat([student_kept, (rest - normalizer)[:, None]], dim=-1)  # [N, K + 1]
    teacher_all = torch.cat([teacher, log_tail_mass(teacher)[:, None]], dim=-1)
    return divergence(student_all, teacher_all, beta=beta)


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


def _check_support(student_logits: Tensor, ids: Tensor, logprobs: Tensor, tail: str) -> None:
    if student_logits.dim() != 2 or ids.dim() != 2 or ids.shape[0] != student_logits.shape[0]:
        raise ValueError(
            "wanted student_logits [N, V] and teacher_ids [N, K], got "
            f"{tuple(student_logits.shape)} and {tuple(ids.shape)}."
        )
    if ids.shape != logprobs.shape:
        raise ValueError(
            "teacher_ids and teacher_logprobs must have one shape, got "
            f"{tuple(ids.shape)} and {tuple(logprobs.shape)}."
        )
    num_kept, vocab_size = ids.shape[1], student_logits.shape[1]
    if not 1 <= num_kept <= vocab_size:
        raise ValueError(f"K must be in [1, {vocab_size}], got {num_kept}.")
    if tail not in ("bucket", "renormalize", "drop"):
        raise ValueError(f"tail must be 'bucket', 'renormalize' or 'drop', got {tail!r}.")
    if tail == "renormalize" and num_kept == 1:
        raise ValueError(
            "tail='renormalize' with K = 1 puts probability 1 on one id on both sides: the loss is identically zero. "
            "Use tail='bucket', or K >= 2."
        )
