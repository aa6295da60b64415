# SPDX-License-Identifier: Apache-2.0
"""From completions to micro-batches: for a teacher that reads the student's tokens, and for teachers that do not.

Which of the two a run needs is said by the teacher: one with an attribute `texts` reads text of its own (a
`TeacherText`) or, where that is None, the student's tokens. A step is read once, before it is known which rows go
together, since how wide a row is on every side decides that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from cohobate.align import aligned_batch, build_opsd_training_batch
from cohobate.align.cross_tokenizer import TeacherText, TeacherTokens, empty_side, with_teachers
from cohobate.align.rollout import AlignedBatch, AlignedSide
from cohobate.align.rollout_ops import select_rows
from cohobate.data import CompletionView, PrivilegedConfig, PrivilegedContext, PromptRow, teacher_context
from cohobate.data.retokenize import TeacherReader
from cohobate.trainer.rolled_out import RolledOut, completion_ids


class Reading(Protocol):
    """The completions of a step as every side reads them, to be cut into micro-batches."""

    @property
    def lengths(self) -> list[tuple[int, ...]]:
        """Tokens of each row on every side: the student's, and each teacher's in order."""
        ...

    def batch(self, rows: Sequence[int]) -> AlignedBatch:
        """One micro-batch of the given rows."""
        ...


class Aligner(Protocol):
    """How a run's sides come to predictions that can be compared."""

    def read(self, rolled: RolledOut) -> Reading: ...

    def without_pairs(self, token_id: int) -> AlignedBatch:
        """A micro-batch of one token and no pair: what a rank runs to stay in step when it has no rows left."""
        ...

    def check(self, rows: Sequence[PromptRow]) -> None:
        """Refuse now, with a `DataError`, rows that a teacher could not read later."""
        ...


def aligner_of(
    teacher: Any,
    tokenizer: Any,
    *,
    privileged: PrivilegedConfig | None,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
) -> Aligner:
    """The aligner that `teacher` needs beside a student with `tokenizer`."""
    texts: Sequence[TeacherText | None] | None = getattr(teacher, "texts", None)
    shares_tokens = texts is None or None in texts
    same = SameTokenizerAligner(
        privileged=None if privileged is None or not shares_tokens else PrivilegedContext(tokenizer, privileged),
        decode=tokenizer.decode,
        pad_token_id=pad_token_id,
    )
    if texts is None:
        return same
    readers = [
        None if text is None else TeacherReader(text, tokenizer, eos_token_ids=eos_token_ids, privileged=privileged)
        for text in texts
    ]
    return OwnTokenizersAligner(same=same, readers=tuple(readers))


def without_pairs(token_id: int) -> AlignedBatch:
    """One token and no pair, for a teacher that reads the student's tokens."""
    none = torch.zeros(0, dtype=torch.int64)
    side = AlignedSide(model_inputs=empty_side(token_id, same_tokenizer=True).model_inputs, pair_index=none)
    return AlignedBatch(
        student=side,
        teacher=side,
        target_ids=none,
        weights=torch.zeros(0),
        row=none,
        is_sampled=torch.zeros(1, dtype=torch.bool),
        sample_ids=("",),
        sampler_logprobs=torch.zeros(0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SameTokenizerAligner:
    """For teachers that predict the student's tokens: the same completion behind a prefix of the teacher's own."""

    privileged: PrivilegedContext | None  # None: the teacher reads the student's prompt
    decode: Any  # the student's, for privileged contexts that read the completion
    pad_token_id: int

    def read(self, rolled: RolledOut) -> "SameTokenizerReading":
        if self.privileged is None:
            prefixes = [row.prompt_ids for row in rolled.rows]
        else:
            prefixes = [
                self.privileged(row, _view(ids, self.decode))
                for row, ids in zip(rolled.rows, completion_ids(rolled.rollout), strict=True)
            ]
        return SameTokenizerReading(rolled=rolled, prefixes=prefixes, pad_token_id=self.pad_token_id)

    def without_pairs(self, token_id: int) -> AlignedBatch:
        return without_pairs(token_id)

    def check(self, rows: Sequence[PromptRow]) -> None:
        """Nothing: the rows were encoded for the student, and the teacher reads these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameTokenizerReading:
    """A step with the teacher's complete prefix of each row."""

    rolled: RolledOut
    prefixes: list[tuple[int, ...]]
    pad_token_id: int

    @property
    def lengths(self) -> list[tuple[int, ...]]:
        student = self.rolled.rollout.attention_mask.sum(1).tolist()
        completions = completion_ids(self.rolled.rollout)
        return [(s, len(p) + len(c)) for s, p, c in zip(student, self.prefixes, completions, strict=True)]

    def batch(self, rows: Sequence[int]) -> AlignedBatch:
        rollout = select_rows(self.rolled.rollout, rows)
        context = teacher_context([self.prefixes[r] for r in rows], self.pad_token_id)
        batch = build_opsd_training_batch(rollout=rollout, teacher_context=context, pad_token_id=self.pad_token_id)
        return aligned_batch(
            batch,
            sample_ids=tuple(self.rolled.rows[r].sample_id for r in rows),
            is_sampled=self.rolled.is_sampled[list(rows)],
            sampler_logprobs=rollout.sampler_logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTokenizersAligner:
    """For teachers of which some read text of their own: the same bytes on every side, and chunks between them."""

    same: SameTokenizerAligner  # makes the student's side, and that of a teacher that reads the student's tokens
    readers: tuple[TeacherReader | None, ...]  # None: a teacher that does

    def read(self, rolled: RolledOut) -> "OwnTokenizersReading":
        completions = completion_ids(rolled.rollout)
        read = tuple(
            None if reader is None else self._read(reader, rolled.rows, completions) for reader in self.readers
        )
        return OwnTokenizersReading(same=self.same.read(rolled), read=read, pad_token_ids=self._pads())

    def _read(
        self, reader: TeacherReader, rows: Sequence[PromptRow], completions: Sequence[tuple[int, ...]]
    ) -> list[TeacherTokens]:
        prompts: dict[str, tuple[int, ...]] = {}  # of rows with several completions written once
        found = []
        for row, ids in zip(rows, completions, strict=True):
            if reader.reads_completion:
                prompt = reader.prompt_ids(row, _view(ids, self.same.decode))
            elif row.sample_id in prompts:
                prompt = prompts[row.sample_id]
            else:
                prompt = prompts[row.sample_id] = reader.prompt_ids(row)
            found.append(reader(row, ids, prompt))
        return found

    def without_pairs(self, token_id: int) -> AlignedBatch:
        sides = tuple(
            empty_side(token_id, same_tokenizer=True)
            if reader is None
            else empty_side(reader.pad_token_id, same_tokenizer=False)
            for reader in self.readers
        )
        return replace(without_pairs(token_id), teacher=sides[0], teachers=sides)

    def check(self, rows: Sequence[PromptRow]) -> None:
        """Writes each teacher's prompt of the first row of every kind."""
        first: dict[type, PromptRow] = {}
        for row in rows:
            first.setdefault(type(None if row.source is None else row.source.prompt), row)
        for reader in self.readers:
            if reader is not None and not reader.reads_completion:
                for row in first.values():
                    reader.prompt_ids(row)

    def _pads(self) -> tuple[int, ...]:
        return tuple(self.same.pad_token_id if reader is None else reader.pad_token_id for reader in self.readers)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTokenizersReading:
    """A step with what each teacher reads of each row."""

    same: SameTokenizerReading
    read: tuple[list[TeacherTokens] | None, ...]
    pad_token_ids: tuple[int, ...]

    @property
    def lengths(self) -> list[tuple[int, ...]]:
        same = self.same.lengths
        return [
            (student, *(shared if rows is None else len(rows[r].ids) for rows in self.read))
            for r, (student, shared) in enumerate(same)
        ]

    def batch(self, rows: Sequence[int]) -> AlignedBatch:
        read = [None if side is None else [side[r] for r in rows] for side in self.read]
        return with_teachers(self.same.batch(rows), read, pad_token_ids=self.pad_token_ids)


def _view(ids: tuple[int, ...], decode: Any) -> CompletionView:
    """What a privileged context may react to."""
    return CompletionView(ids=ids, text=decode(ids, skip_special_tokens=True))
