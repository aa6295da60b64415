# SPDX-License-Identifier: Apache-2.0
"""The same completion under two prefixes: the student's own prompt, and the teacher's, which may hold more.

The teacher's row is its prefix followed by the very ids the student drew; no text is made in between, so both sides
speak of the same tokens. The builder only places tokens: it never truncates, never inserts a BOS, never writes into
what it was given, and never repeats a row. B rows, T/P/W columns, R the longest attended completion, N aligned pairs,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cohobate.align.response import check_logits, check_same_sides
from cohobate.align.rollout import AlignedBatch, AlignedSide, RolloutBatch, check_shapes
from cohobate.align.runs import (
    Run,
    Split,
    attended_runs,
    check_ids,
    check_pad_id,
    position_ids,
    select_positions,
    split_rollout,
)
from cohobate.errors import AlignmentError


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherContext:
    """The complete prefix that the teacher reads before a completion: one row per rollout row, padded on either side.

    Complete means: everything up to and including the tokens that open the answer (BOS, template, generation prompt).
    """

    input_ids: Tensor  # [B, P] int64 or int32, of the rollout's dtype
    attention_mask: Tensor  # [B, P] 0/1 or bool, one contiguous attended run per row

    def __post_init__(self) -> None:
        check_shapes("TeacherContext", input_ids=(self.input_ids, "B P"), attention_mask=(self.attention_mask, "B P"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OPSDTrainingBatch:
    """Inputs for both forward passes, and where each side predicts each completion token."""

    student_model_inputs: dict[str, Tensor]  # input_ids, attention_mask of the rollout, and position_ids; each [B, T]
    teacher_model_inputs: dict[str, Tensor]  # the same three names, right-padded; each [B, W]
    completion_ids: Tensor  # [B, R] int64, padded with pad_token_id
    response_mask: Tensor  # [B, R] bool: True where completion_ids holds a token of the completion
    student_logit_positions: (
        Tensor  # [B, R] int64: column of the logits that predict completion_ids[b, r]; 0 if masked
    )
    teacher_logit_positions: Tensor  # [B, R] int64: likewise in the teacher's row

    def align_logits(self, student_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
        """`(student [B, R, V], teacher [B, R, V])`: both at `[b, r]` predict `completion_ids[b, r]`; 0 where masked.

        Args:
            student_logits: `[B, T, V]`, every position of a forward over `student_model_inputs`.
            teacher_logits: `[B, W, V]`, every position of a forward over `teacher_model_inputs`; detached here. Each
                side keeps its dtype.

        Raises:
            TypeError: logits that are not floating-point.
            ValueError: not 3-D, not that side's `[B, T]` (swapped outputs), another device, or unequal V.
        """
        for side, logits, inputs in (
            ("student", student_logits, self.student_model_inputs),
            ("teacher", teacher_logits, self.teacher_model_inputs),
        ):
            _check_side_logits(side, logits, inputs["input_ids"])
        check_same_sides(student_logits, teacher_logits)
        return (
            select_positions(student_logits, self.student_logit_positions, self.response_mask),
            select_positions(teacher_logits.detach(), self.teacher_logit_positions, self.response_mask),
        )

    def pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """`(student_index [N], teacher_index [N], target_ids [N])` into each side's flattened `[B * columns]`.

        Ordered by row, then by place in the completion; all int64.
        """
        width = self.response_mask.shape[1]
        slot = torch.nonzero(self.response_mask.reshape(-1))[:, 0]  # the one transfer: N becomes known
        row = slot // max(1, width)

        def index(positions: Tensor, inputs: dict[str, Tensor]) -> Tensor:
            return row * inputs["input_ids"].shape[1] + positions.reshape(-1)[slot]

        return (
            index(self.student_logit_positions, self.student_model_inputs),
            index(self.teacher_logit_positions, self.teacher_model_inputs),
            self.completion_ids.reshape(-1)[slot],
        )


def build_opsd_training_batch(
    *, rollout: RolloutBatch, teacher_context: TeacherContext, pad_token_id: int
) -> OPSDTrainingBatch:
    """Place the completions of `rollout` behind the teacher's prefixes and say where both sides predict each token.

    Args:
        rollout: rows `[padding | prompt | completion | padding]`, padding on either side or both. Ids are int64 or
        int32,
            masks bool or 0/1, one contiguous attended run per row. A completion may be empty; a row may then even have
            no attended token at all.
        teacher_context: one complete prefix per rollout row (never broadcast), padded on either side, of the rollout's
            dtype and device. A prefix may be empty only where the completion is.
        pad_token_id: fills the teacher's rows and `completion_ids`. It may equal EOS: only masks decide.

    Returns:
        R is the longest attended completion, whatever the width of the buffer; the teacher's width W is its longest
        row (at least 1, so that a forward pass is possible). The student's ids and mask are the rollout's own tensors.

    Raises:
        TypeError: floating ids or masks, different id dtypes, `pad_token_id` that is not an integer.
        ValueError: anything else that cannot be aligned; the message names the row, what was found and what to do.
    """
    pad = check_pad_id(pad_token_id)
    splits = split_rollout(rollout)
    runs = _context_runs(rollout, teacher_context, splits)
    ids, device = rollout.input_ids, rollout.input_ids.device

    numbers = [[s.start, s.completion, r.begin, r.length] for s, r in zip(splits, runs, strict=True)]
    geometry = torch.tensor(numbers, dtype=torch.int64, device=device).reshape(-1, 4, 1)
    start, completion, prefix_begin, prefix = geometry.unbind(1)  # each [B, 1]
    slot = torch.arange(max((s.completion for s in splits), default=0), device=device)
    response_mask = slot < completion  # [B, R]

    teacher_width = max((r.length + s.completion for r, s in zip(runs, splits, strict=True)), default=0)
    place = torch.arange(max(1, teacher_width), device=device)
    in_prefix, attended = place < prefix, place < prefix + completion  # [B, W]
    teacher_ids = torch.where(
        in_prefix,
        _take(teacher_context.input_ids, prefix_begin + place, in_prefix),
        torch.where(attended, _take(ids, start + place - prefix, attended & ~in_prefix), pad),
    )
    teacher_mask = attended.to(rollout.attention_mask.dtype)
    return OPSDTrainingBatch(
        student_model_inputs={
            "input_ids": ids,
            "attention_mask": rollout.attention_mask,
            "position_ids": position_ids(rollout.attention_mask),
        },
        teacher_model_inputs={
            "input_ids": teacher_ids,
            "attention_mask": teacher_mask,
            "position_ids": position_ids(teacher_mask),
        },
        completion_ids=torch.where(response_mask, _take(ids, start + slot, response_mask), pad).long(),
        response_mask=response_mask,
        student_logit_positions=torch.where(response_mask, start - 1 + slot, 0),
        teacher_logit_positions=torch.where(response_mask, prefix - 1 + slot, 0),
    )


def aligned_batch(
    training_batch: OPSDTrainingBatch,
    *,
    sample_ids: Sequence[str],
    is_sampled: Tensor,
    weights: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
) -> AlignedBatch:
    """The N pairs of `training_batch`, as teachers and objectives read them.

    Args:
        training_batch: from `build_opsd_training_batch`.
        sample_ids: the B durable names of the rows.
        is_sampled: `[B]` bool, True where the student drew the completion.
        weights: `[N]` or `[B, R]` floating factors of each pair's loss; None is 1 everywhere.
        sampler_logprobs: `[B, T]` in the rollout's columns: column t describes the token in column t.
    """
    student_index, teacher_index, target_ids = training_batch.pairs()
    mask, student_ids = training_batch.response_mask, training_batch.student_model_inputs["input_ids"]
    if weights is None:
        weights = torch.ones(target_ids.shape, dtype=torch.float32, device=mask.device)
    elif weights.dim() == 2:
        check_shapes("aligned_batch", response_mask=(mask, "B R"), weights=(weights, "B R"))
        weights = weights[mask].float()
    else:
        weights = weights.float()
    drawn = None
    if sampler_logprobs is not None:
        check_shapes("aligned_batch", input_ids=(student_ids, "B T"), sampler_logprobs=(sampler_logprobs, "B T"))
        # A prediction stands one column before its token; log-probs are kept in the token's own column.
        drawn = sampler_logprobs.reshape(-1)[student_index + 1].float()
    return AlignedBatch(
        student=AlignedSide(model_inputs=training_batch.student_model_inputs, pair_index=student_index),
        teacher=AlignedSide(model_inputs=training_batch.teacher_model_inputs, pair_index=teacher_index),
        target_ids=target_ids,
        weights=weights,
        row=student_index // max(1, student_ids.shape[1]),
        is_sampled=is_sampled,
        sample_ids=tuple(sample_ids),
        sampler_logprobs=drawn,
    )


def _check_side_logits(side: str, logits: Tensor, input_ids: Tensor) -> None:
    check_logits(logits, f"{side}_logits")
    if logits.shape[:2] != input_ids.shape:
        raise AlignmentError(
            f"{side}_logits has [B, T] = {list(logits.shape[:2])}, but {side}_model_inputs['input_ids'] has "
            f"{list(input_ids.shape)}. Pass every position of the {side}'s own forward, neither shifted nor cut, and "
            "check that the outputs of student and teacher are not swapped."
        )
    if logits.device != input_ids.device:
        raise ValueError(
            f"{side}_logits is on {logits.device}, but {side}_model_inputs is on {input_ids.device}. Move the logits "
            f"to {input_ids.device}, or build the batch there."
        )


def _context_runs(rollout: RolloutBatch, context: TeacherContext, splits: list[Split]) -> list[Run]:
    ids, found = rollout.input_ids, context.input_ids
    if found.shape[0] != ids.shape[0]:
        raise AlignmentError(
            f"teacher_context has {found.shape[0]} rows, but the rollout has {ids.shape[0]}. Give one complete prefix "
            "per rollout row; it is never broadcast. With n samples per prompt, sample j of prompt i is row i * n + "
            "j: repeat each prefix with repeat_interleave(n, dim=0)."
        )
    check_ids(found, "teacher_context.input_ids")
    if found.dtype != ids.dtype:
        raise TypeError(
            f"rollout.input_ids is {ids.dtype}, but teacher_context.input_ids is {found.dtype}. Convert one of them."
        )
    runs = attended_runs(context.attention_mask, "teacher_context.attention_mask")
    if found.device != ids.device or context.attention_mask.device != ids.device:
        raise ValueError(
            f"rollout is on {ids.device}, but teacher_context.input_ids is on {found.device} and its attention_mask "
            f"on {context.attention_mask.device}. Move them to one device."
        )
    for row, (run, split) in enumerate(zip(runs, splits, strict=True)):
        if split.completion and not run.length:
            raise AlignmentError(
                f"teacher_context, row {row}: the prefix has no attended token, but the completion has "
                f"{split.completion}, so nothing predicts the first of them. Give the teacher at least one prefix "
                "token (for example BOS)."
            )
    return runs


def _take(values: Tensor, columns: Tensor, keep: Tensor) -> Tensor:
    """`values [B, T]` at `columns [B, K]` where `keep`; what stands elsewhere is not to be read."""
    if values.shape[1] == 0:  # a context without columns, legal if every completion is empty
        return values.new_zeros(columns.shape)
    return values.gather(1, torch.where(keep, columns, 0))
