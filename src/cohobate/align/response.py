# SPDX-License-Identifier: Apache-2.0
"""Which logit predicts which completion token, row by row, for right-padded logits and for one model's own rollout.

The token in column t is predicted by the logits of column t - 1. The classic mistake cuts every row at one column (the
longest prompt of the batch): rows with a shorter prompt then lose their first tokens, and nothing fails. Here every
row has its own start. B rows, L/T positions, R completion length, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cohobate.align.rollout import RolloutBatch
from cohobate.align.rollout_ops import completion_mask
from cohobate.align.runs import as_int, select_positions, split_rollout
from cohobate.errors import AlignmentError

Lengths = Tensor | Sequence[int]


def align_rollout_logits(
    student_logits: Tensor,
    teacher_logits: Tensor,
    student_prompt_lengths: Lengths,
    teacher_prompt_lengths: Lengths,
    response_lengths: Lengths,
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits that predict each response token on both sides, and the mask of the real ones.

    Rows are right-padded, `[prompt | response | padding]`. Response token j of a row is predicted at position
    `prompt_length - 1 + j` of that row, on each side with that side's own prompt.

    Args:
        student_logits: `[B, Ls, V]`, any floating dtype.
        teacher_logits: `[B, Lt, V]`, any floating dtype; detached here.
        student_prompt_lengths: `[B]` integers >= 1.
        teacher_prompt_lengths: `[B]` integers >= 1.
        response_lengths: `[B]` integers >= 0, one number for both sides: it is the same response.

    Returns:
        `(student [B, R, V], teacher [B, R, V], mask [B, R] bool)` with `R = max(response_lengths)`. Outside the mask
        both are exact zeros. If every response is empty, R is 0 and the student keeps a gradient path.

    Raises:
        TypeError: lengths that are not integers, logits that are not floating-point.
        ValueError: unequal B, V or device, not 3-D, a length out of range, a row longer than its logits.
    """
    for name, logits in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        check_logits(logits, name)
    check_same_sides(student_logits, teacher_logits)
    batch, device = student_logits.shape[0], student_logits.device
    responses = _host_lengths(response_lengths, "response_lengths", batch, least=0)
    student_prompts = _host_lengths(student_prompt_lengths, "student_prompt_lengths", batch, least=1)
    teacher_prompts = _host_lengths(teacher_prompt_lengths, "teacher_prompt_lengths", batch, least=1)
    _check_room("student", student_logits.shape[1], student_prompts, responses)
    _check_room("teacher", teacher_logits.shape[1], teacher_prompts, responses)

    numbers = torch.tensor([responses, student_prompts, teacher_prompts], dtype=torch.int64, device=device)
    length, student_prompt, teacher_prompt = numbers[..., None].unbind(0)  # each [B, 1]
    slot = torch.arange(max(responses, default=0), device=device)
    mask = slot < length
    return (
        select_positions(student_logits, torch.where(mask, student_prompt - 1 + slot, 0), mask),
        select_positions(teacher_logits.detach(), torch.where(mask, teacher_prompt - 1 + slot, 0), mask),
        mask,
    )


def check_logits(logits: Tensor, name: str) -> None:
    """`logits` must be a floating-point `[B, T, V]`."""
    if logits.dim() != 3:
        raise ValueError(f"{name} must be 3-D [B, T, V], got shape {list(logits.shape)}.")
    if not logits.is_floating_point():
        raise TypeError(f"{name} must be floating-point logits, got {logits.dtype}.")


def check_same_sides(student: Tensor, teacher: Tensor) -> None:
    """Both logits must have the same rows, ids and device. Heads of unequal width are cut by the caller, not here."""
    if student.shape[0] != teacher.shape[0]:
        raise AlignmentError(
            f"student_logits has {student.shape[0]} rows and teacher_logits {teacher.shape[0]}. Row i of both must "
            "speak of the same response; with several samples per prompt, give the teacher one row per sample."
        )
    if student.shape[2] != teacher.shape[2]:
        raise AlignmentError(
            f"student_logits holds {student.shape[2]} ids and teacher_logits {teacher.shape[2]}. If both models share "
            "one tokenizer and only their heads are padded differently, cut both to the tokenizer's real ids first: "
            "logits[..., :num_real_ids]. That cut is never applied silently. If the tokenizers differ, a "
            "same-vocabulary alignment cannot compare them."
        )
    if student.device != teacher.device:
        raise ValueError(
            f"student_logits is on {student.device} and teacher_logits on {teacher.device}. Move them to one device."
        )


def _check_room(side: str, width: int, prompts: list[int], responses: list[int]) -> None:
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if prompt + response > width:
            raise AlignmentError(
                f"row {row}: the {side}'s prompt of {prompt} and response of {response} tokens need "
                f"{prompt + response} positions, but {side}_logits has {width}. Check that the lengths count this "
                "side's own tokens, and that its input was not truncated."
            )


def _host_lengths(lengths: Lengths, name: str, batch: int, *, least: int) -> list[int]:
    if isinstance(lengths, Tensor):
        if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
            raise TypeError(f"{name} must hold integers, got {lengths.dtype}. Convert it with .long().")
        if lengths.dim() != 1:
            raise ValueError(f"{name} must be 1-D [B], got shape {list(lengths.shape)}.")
        if lengths.device.type == "meta":
            raise ValueError(f"{name} is on the meta device, which holds no values. Pass the real lengths.")
        values = lengths.tolist()
    else:
        values = [as_int(value, f"{name}, row {row},") for row, value in enumerate(lengths)]
    if len(values) != batch:
        raise AlignmentError(f"{name} has {len(values)} entries, but the logits have {batch} rows. Give one per row.")
    for row, value in enumerate(values):
        if value < least:
            why = (
                "The first response token is predicted by the last prompt token, so a prompt (for example BOS) is "
                "needed."
                if least
                else "An empty response has length 0."
            )
            raise AlignmentError(f"{name}, row {row}: got {value}, must be >= {least}. {why}")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTokenBatch:
    """One model's view of a rollout: what goes in and what its logits should predict, the shift by one being done."""

    input_ids: Tensor  # [B, T] as in the rollout
    attention_mask: Tensor  # [B, T] as in the rollout
    target_ids: Tensor  # [B, T - 1] int64: logits at i predict target_ids[:, i] = input_ids[:, i + 1]
    response_mask: Tensor  # [B, T - 1] bool: True where that target is a completion token

    @classmethod
    def from_rollout(cls, rollout: RolloutBatch) -> "ResponseTokenBatch":
        """Targets and mask of `rollout`, for any padding of the rows.

        Raises:
            TypeError: ids, mask or boundary of a floating dtype.
            ValueError: holes or other values than 0/1 in the mask, a boundary outside `[1, T]`, a completion without a
                prompt token; the message names the row.
        """
        split_rollout(rollout)
        return cls(
            input_ids=rollout.input_ids,
            attention_mask=rollout.attention_mask,
            target_ids=rollout.input_ids[:, 1:].long(),
            response_mask=completion_mask(rollout)[:, 1:],
        )

    def select_causal_logits(self, logits: Tensor) -> Tensor:
        """`[B, T - 1, V]` of `logits [B, T, V]`: position i predicts `target_ids[:, i]`; the last predicts nothing."""
        check_logits(logits, "logits")
        if logits.shape[:2] != self.input_ids.shape:
            raise AlignmentError(
                f"logits has [B, T] = {list(logits.shape[:2])}, but input_ids has {list(self.input_ids.shape)}. Pass "
                "the logits of every position of a forward over this batch's input_ids, neither shifted nor cut."
            )
        return logits[:, :-1]
