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
    return OwnTokenizersAligner(same=same, readers=tuple(readers), routing=getattr(teacher, "routing", None))


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

    def read(self, rolled: RolledOut, *, needed: Sequence[bool] | None = None) -> "SameTokenizerReading":
        """`needed`: of each row whether a teacher reads it in these tokens; None: of all."""
        if self.privileged is None:
            prefixes = [row.prompt_ids for row in rolled.rows]
        else:
            prefixes = [
                self.privileged(row, view) if needed is None or needed[i] else row.prompt_ids
                for i, (row, view) in enumerate(zip(rolled.rows, _views(rolled, self.decode), strict=True))
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
    routing: Any = None  # `(row, sample_id) -> number of the teacher that reads it`, with `check`; None: all do

    def read(self, rolled: RolledOut) -> "OwnTokenizersReading":
        completions = _views(rolled, self.same.decode)
        routed = None if self.routing is None else tuple(self.routing(row.row, row.sample_id) for row in rolled.rows)
        read = tuple(
            None if reader is None else self._read(reader, rolled.rows, completions, _chosen(routed, i))
            for i, reader in enumerate(self.readers)
        )
        needed = None if routed is None else [self.readers[i] is None for i in routed]
        same = self.same.read(rolled, needed=needed)
        return OwnTokenizersReading(same=same, read=read, pad_token_ids=self._pads(), routed=routed)

    def _read(
        self,
        reader: TeacherReader,
        rows: Sequence[PromptRow],
        completions: Sequence[CompletionView],
        chosen: Sequence[bool] | None,
    ) -> list[TeacherTokens | None]:
        """What one teacher reads of each row; None for one that is not `chosen`."""
        prompts: dict[str, tuple[int, ...]] = {}  # of rows with several completions written once
        found: list[TeacherTokens | None] = []
        for i, (row, completion) in enumerate(zip(rows, completions, strict=True)):
            if chosen is not None and not chosen[i]:
                found.append(None)
                continue
            if reader.reads_completion:
                prompt = reader.prompt_ids(row, completion)
            elif row.sample_id in prompts:
                prompt = prompts[row.sample_id]
            else:
                prompt = prompts[row.sample_id] = reader.prompt_ids(row)
            found.append(reader(row, completion.ids, prompt))
        return found

    def without_pairs(self, token_id: int) -> AlignedBatch:
        rows = None if self.routing is None else ()
        sides = tuple(
            empty_side(token_id, same_tokenizer=True, rows=rows)
            if reader is None
            else empty_side(reader.pad_token_id, same_tokenizer=False, rows=rows)
            for reader in self.readers
        )
        return replace(without_pairs(token_id), teacher=sides[0], teachers=sides)

    def check(self, rows: Sequence[PromptRow]) -> None:
        """Finds each row's teacher, and writes each teacher's prompt of the first row of every kind that it reads."""
        if self.routing is not None:
            self.routing.check([(row.sample_id, row.row) for row in rows])
        for i, reader in enumerate(self.readers):
            if reader is not None and not reader.reads_completion:
                first: dict[type, PromptRow] = {}
                for row in rows:
                    if self.routing is None or self.routing(row.row, row.sample_id) == i:
                        first.setdefault(type(None if row.source is None else row.source.prompt), row)
                for row in first.values():
                    reader.prompt_ids(row)

    def _pads(self) -> tuple[int, ...]:
        return tuple(self.same.pad_token_id if reader is None else reader.pad_token_id for reader in self.readers)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTokenizersReading:
    """A step with what each teacher reads of each row."""

    same: SameTokenizerReading
    read: tuple[list[TeacherTokens | None] | None, ...]  # of each teacher; None: the student's tokens
    pad_token_ids: tuple[int, ...]
    routed: tuple[int, ...] | None = None  # the one teacher that reads each row; None: all do

    @property
    def lengths(self) -> list[tuple[int, ...]]:
        """A row has no tokens for a teacher that does not read it."""
        same = self.same.lengths
        return [
            (student, *(self._length(i, r, shared) for i in range(len(self.read))))
            for r, (student, shared) in enumerate(same)
        ]

    def _length(self, teacher: int, row: int, shared: int) -> int:
        if self.routed is not None and self.routed[row] != teacher:
            return 0
        read = self.read[teacher]
        tokens = None if read is None else read[row]
        return shared if tokens is None else len(tokens.ids)

    def batch(self, rows: Sequence[int]) -> AlignedBatch:
        read = [None if side is None else [t for r in rows if (t := side[r]) is not None] for side in self.read]
        rows_of = None
        if self.routed is not None:
            rows_of = [[b for b, r in enumerate(rows) if self.routed[r] == i] for i in range(len(self.read))]
        return with_teachers(self.same.batch(rows), read, pad_token_ids=self.pad_token_ids, rows_of=rows_of)


def _chosen(routed: Sequence[int] | None, teacher: int) -> list[bool] | None:
    return None if routed is None else [i == teacher for i in routed]


def _views(rolled: RolledOut, decode: Any) -> list[CompletionView]:
    """What a privileged context may react to, of each row."""
    completions = completion_ids(rolled.rollout)
    return [
        CompletionView(ids=ids, text=decode(ids, skip_special_tokens=True), lesson=lesson)
        for ids, lesson in zip(completions, rolled.lessons or [None] * len(completions), strict=True)
    ]
