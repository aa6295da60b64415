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
    batch: AlignedBatch,
    read: Sequence[Sequence[TeacherTokens] | None],
    *,
    pad_token_ids: Sequence[int],
    rows_of: Sequence[Sequence[int]] | None = None,
) -> AlignedBatch:
    """`batch` with one `TeacherSide` for each teacher, in order.

    Args:
        batch: the rows as a teacher with the student's tokenizer would read them.
        read: for each teacher what it reads of its rows, or None if it has the student's tokenizer.
        pad_token_ids: of each teacher; what stands there is masked.
        rows_of: for each teacher its rows in [0, B), ascending; None: all rows are every teacher's.
    """
    counts = torch.bincount(batch.row, minlength=batch.num_rows).tolist()
    sides = []
    for i, (rows, pad) in enumerate(zip(read, pad_token_ids, strict=True)):
        places = None if rows_of is None else tuple(rows_of[i])
        if places == ():
            side = empty_side(pad, same_tokenizer=rows is None, device=batch.target_ids.device, rows=())
        elif rows is None:
            side = _same_tokenizer_side(batch, places)
        else:
            side = teacher_side(rows, counts, pad, batch.target_ids.device, places)
        sides.append(side)
    return replace(batch, teacher=sides[0], teachers=tuple(sides))


def teacher_side(
    rows: Sequence[TeacherTokens],
    num_student_pairs: Sequence[int],
    pad_token_id: int,
    device: torch.device,
    places: tuple[int, ...] | None = None,
) -> TeacherSide:
    """The rows right-padded, all of their M predictions, and the chunks over these and the student's pairs.

    `num_student_pairs [B]` are the tokens of each row's completion on the student's side. `places`: which of the B
    rows these are, ascending; None: all.
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
    row_of = torch.arange(len(rows)) if places is None else torch.tensor(places, dtype=torch.int64)
    before = _starts(num_student_pairs)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.where(mask != 0, column, 0)}
    return TeacherSide(
        model_inputs={name: value.to(device) for name, value in inputs.items()},
        pair_index=(target - 1).to(device),
        target_ids=ids.flatten()[target].to(device),
        row=row_of[target // width].to(device),
        chunks=_joined([row.chunks for row in rows], [before[r] for r in row_of.tolist()], _starts(num_pairs)),
        rows=places,
    )


def empty_side(
    token_id: int,
    *,
    same_tokenizer: bool,
    device: torch.device | None = None,
    rows: tuple[int, ...] | None = None,
) -> TeacherSide:
    """One row of one token, and nothing to predict: what a rank without rows runs, and a teacher without any.

    `rows`: `()` beside teachers that rows are routed to.
    """
    one = torch.ones((1, 1), dtype=torch.int64, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return TeacherSide(
        model_inputs={"input_ids": one * token_id, "attention_mask": one, "position_ids": one * 0},
        pair_index=none,
        target_ids=none,
        row=none,
        chunks=None if same_tokenizer else no_chunks(),
        rows=rows,
    )


def unaligned(batch: AlignedBatch) -> list[tuple[Tensor, ...]]:
    """Of each teacher with its own tokenizer: the rows that it reads; and of each its student pairs, how many of them
    are in no chunk, and its chunks. Four tensors of one length.
    """
    pairs = torch.bincount(batch.row, minlength=batch.num_rows)
    found = []
    for side in batch.teachers:
        if side.chunks is not None:
            start = torch.from_numpy(side.chunks.student_start).to(batch.row.device, torch.int64)
            length = torch.from_numpy(side.chunks.student_end).to(start) - start
            row = batch.row[start]
            inside = torch.zeros_like(pairs).index_add_(0, row, length)
            rows = torch.arange(batch.num_rows) if side.rows is None else torch.tensor(side.rows, dtype=torch.int64)
            of_rows = (pairs, pairs - inside, torch.bincount(row, minlength=batch.num_rows))
            found.append((rows, *(values[rows.to(values.device)] for values in of_rows)))
    return found


def _same_tokenizer_side(batch: AlignedBatch, places: tuple[int, ...] | None) -> TeacherSide:
    whole = TeacherSide(
        model_inputs=batch.teacher.model_inputs,
        pair_index=batch.teacher.pair_index,
        target_ids=batch.target_ids,
        row=batch.row,
    )
    if places is None:
        return whole
    pairs = batch.pairs_read_by(replace(whole, rows=places))
    columns = whole.model_inputs["attention_mask"].shape[1]
    used = (whole.model_inputs["attention_mask"][list(places)] != 0).any(0).nonzero()[:, 0].tolist()
    width = used[-1] + 1 if used else 1  # rows are padded on the right
    new_row = torch.zeros(batch.num_rows, dtype=torch.int64)
    new_row[list(places)] = torch.arange(len(places))
    row = whole.row[pairs]
    return TeacherSide(
        model_inputs={name: value[list(places), :width] for name, value in whole.model_inputs.items()},
        pair_index=new_row.to(row.device)[row] * width + whole.pair_index[pairs] % columns,
        target_ids=whole.target_ids[pairs],
        row=row,
        rows=places,
    )


def _starts(counts: Sequence[int]) -> list[int]:
    """How many stand before each."""
    return [0, *np.cumsum(counts[:-1], dtype=np.int64).tolist()] if counts else []


def _joined(parts: Sequence[Chunks], before_student: Sequence[int], before_teacher: Sequence[int]) -> Chunks:
    """All chunks over predictions that are numbered through the rows, each row's from its first number on."""
    joined = {}
    for field in fields(Chunks):
        before = before_student if field.name.startswith("student") else before_teacher
        shifted = [getattr(part, field.name) + start for part, start in zip(parts, before, strict=True)]
        joined[field.name] = np.concatenate([np.empty(0, np.int32), *shifted]).astype(np.int32)
    return Chunks(**joined)
