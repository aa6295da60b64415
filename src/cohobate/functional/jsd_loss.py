# SPDX-License-Identifier: Apache-2.0
"""The divergence loss on logits that somebody already has: mask, mean and count in one call, for other people's loops.

Inside Cohobate the logits are never made (`fused_linear.py`). N valid positions, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cohobate.functional.divergences import check_beta, divergence_terms
from cohobate.functional.logprobs import check_temperature, log_softmax, upcast_pair
from cohobate.functional.reduce import divide_by_count, select_valid


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
    student = select_valid(student_logits, response_mask)  # [N, V]
    teacher = select_valid(teacher_logits.detach(), response_mask)
    student, teacher = upcast_pair(student, teacher)
    if teacher_top_k is not None:
        kept = teacher.topk(teacher_top_k, dim=-1).indices  # [N, K]
        student, teacher = student.gather(-1, kept), teacher.gather(-1, kept)
    terms = divergence_terms(
        log_softmax(student, temperature=temperature), log_softmax(teacher, temperature=temperature), beta=beta
    )
    if pointwise_clip is not None:
        terms = terms.clamp(max=pointwise_clip)
    count = torch.tensor(terms.shape[0], dtype=torch.int64, device=terms.device)
    loss_sum = terms.sum()
    return JSDLossOutput(loss=divide_by_count(loss_sum, count), loss_sum=loss_sum, valid_token_count=count)


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
