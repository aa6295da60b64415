# SPDX-License-Identifier: Apache-2.0
"""Teachers with tokenizers of their own: from what each of them reads of a row to their sides of a batch.

A teacher with the student's tokenizer makes one prediction for each of the student's. One with another makes more or
fewer, and chunks say which belong together. Here rows are only put behind each other: predictions are numbered through
the batch on both sides, and so are the ranges of a chunk, which is why no later part needs to know where rows begin.
Which tokens a teacher reads is found in `data/retokenize.py`.

B rows, W columns of a teacher, M its predictions, C chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohobate.align.agreement import no_chunks
from cohobate.align.rollout import AlignedBatch, TeacherSide
from cohobate.align.spans import Chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherText:
    """How a teacher with its own tokenizer comes to its tokens; what is None is as on the student's side."""

    tokenizer: Any
    prompts: Any = None  # a `data.PromptConfig`: its system prompt, template arguments and allow_control_tokens
    special_roles: Mapping[str, str] | None = None  # student's control token -> teacher's, by their texts
    max_length: int | None = None  # tokens of a row, prompt included


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTokens:
    """What one teacher reads of one row: a prompt, and after it the tokens that it is to predict."""

    ids: tuple[int, ...]
    num_prompt: int  # at least 1, since nothing predicts a row's first token
    chunks: Chunks  # over the student's completion and over `ids[num_prompt:]`

    def __post_init__(self) -> None:
        if not 1 <= self.num_prompt <= len(self.ids):
            raise ValueError(
                f"TeacherTokens has {len(self.ids)} ids and num_prompt={self.num_prompt}: a row needs at least one "
                "token that is only read."
            )


def with_teachers(
    batch: AlignedBatch, read: Sequence[Sequence[TeacherTokens] | None], *, pad_token_ids: Sequence[int]
) -> AlignedBatch:
    """`batch` with one `TeacherSide` for each teacher, in order.

    Args:
        batch: the rows as a teacher with the student's tokenizer would read them.
        read: for each teacher what it reads of the B rows, or None if it has the student's tokenizer.
        pad_token_ids: of each teacher; what stands there is masked.
    """
    counts = torch.bincount(batch.row, minlength=batch.num_rows).tolist()
    sides = tuple(
        _same_tokenizer_side(batch) if rows is None else teacher_side(rows, counts, pad, batch.target_ids.device)
        for rows, pad in zip(read, pad_token_ids, strict=True)
    )
    return replace(batch, teacher=sides[0], teachers=sides)


def teacher_side(
    rows: Sequence[TeacherTokens], num_student_pairs: Sequence[int], pad_token_id: int, device: torch.device
) -> TeacherSide:
    """The rows right-padded, all of their M predictions, and the chunks over these and the student's pairs.

    `num_student_pairs [B]` are the tokens of each row's completion on the student's side.
    """
    width = max((len(row.ids) for row in rows), default=1)
    ids = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    for r, row in enumerate(rows):
        ids[r, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.int64)
    length, prompt = (
        torch.tensor(values, dtype=torch.int64)[:, None]
        for values in ([len(row.ids) for row in rows], [row.num_prompt for row in rows])
    )
    column = torch.arange(width)
    mask = (column < length).long()
    target = torch.nonzero(((column >= prompt) & (column < length)).flatten())[:, 0]  # [M] in order of rows
    num_pairs = [len(row.ids) - row.num_prompt for row in rows]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.where(mask != 0, column, 0)}
    return TeacherSide(
        model_inputs={name: value.to(device) for name, value in inputs.items()},
        pair_index=(target - 1).to(device),
        target_ids=ids.flatten()[target].to(device),
        row=(target // width).to(device),
        chunks=_joined([row.chunks for row in rows], num_student_pairs, num_pairs),
    )


def empty_side(token_id: int, *, same_tokenizer: bool) -> TeacherSide:
    """One row of one token, and nothing to predict: what a rank without rows runs."""
    one, none = torch.ones((1, 1), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return TeacherSide(
        model_inputs={"input_ids": one * token_id, "attention_mask": one, "position_ids": one * 0},
        pair_index=none,
        target_ids=none,
        row=none,
        chunks=None if same_tokenizer else no_chunks(),
    )


def unaligned(batch: AlignedBatch) -> list[tuple[Tensor, Tensor]]:
    """For each teacher with its own tokenizer `[B]` student pairs that are in none of its chunks, and `[B]` chunks."""
    pairs = torch.bincount(batch.row, minlength=batch.num_rows)
    found = []
    for side in batch.teachers:
        if side.chunks is not None:
            start = torch.from_numpy(side.chunks.student_start).to(batch.row.device, torch.int64)
            length = torch.from_numpy(side.chunks.student_end).to(start) - start
            row = batch.row[start]
            inside = torch.zeros_like(pairs).index_add_(0, row, length)
            found.append((pairs - inside, torch.bincount(row, minlength=batch.num_rows)))
    return found


def _same_tokenizer_side(batch: AlignedBatch) -> TeacherSide:
    return TeacherSide(
        model_inputs=batch.teacher.model_inputs,
        pair_index=batch.teacher.pair_index,
        target_ids=batch.target_ids,
        row=batch.row,
    )


def _joined(parts: Sequence[Chunks], num_student: Sequence[int], num_teacher: Sequence[int]) -> Chunks:
    """All chunks over predictions that are numbered through the rows."""
    joined = {}
    for field in fields(Chunks):
        counts = num_student if field.name.startswith("student") else num_teacher
        before = np.concatenate([[0], np.cumsum(counts[:-1], dtype=np.int64)]) if counts else []
        shifted = [getattr(part, field.name) + start for part, start in zip(parts, before, strict=True)]
        joined[field.name] = np.concatenate([np.empty(0, np.int32), *shifted]).astype(np.int32)
    return Chunks(**joined)
