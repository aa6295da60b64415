# SPDX-License-Identifier: Apache-2.0
"""What takes part of a batch: the runs of student pairs that one teacher is compared on, and that teacher's rows.

A chunk is a run of the student's predictions and one of the teacher's. It counts by geometry and ids alone. It takes
part unless one of its pairs has weight 0: that pair may hold anything, so such a chunk is left out before anything is
read, and what it holds reaches no sum, no gradient, no choice of columns. A same-tokenizer teacher is compared pair by
pair: runs of one.

N student pairs, M predictions of one teacher, C chunks, U of them that take part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cohobate.align.rollout import AlignedBatch
from cohobate.align.spans import Chunks
from cohobate.errors import ConfigError, VocabularyMismatch
from cohobate.functional.runs import Ints, joined_runs
from cohobate.functional.scores import DenseScores, HiddenScores, SeveralScores, TeacherScores, TopKScores
from cohobate.objectives.protocol import StudentScores, num_pairs_of

RowScores = HiddenScores | DenseScores | TopKScores


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherText:
    """One teacher's own tokens of a batch and how they fall together with the student's."""

    teacher: int
    target_ids: Tensor  # [M]
    row: Tensor  # [M] in [0, B)
    chunks: Chunks | None  # [C]; None: pair by pair
    pairs: Tensor  # [M] (without chunks) the student's pair that each prediction is of, ascending; else those it reads
    rows: tuple[int, ...] | None = None  # of the batch, that were routed to it; None: it reads all


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One teacher in one call."""

    text: TeacherText
    start: Ints  # [U] first student pair of each run
    end: Ints  # [U] one past its last
    weights: Tensor  # [U] of `batch.weights`: the least of the run's pairs
    mismatched: NDArray[np.bool_]  # [U] not one token on both sides
    chunks: Chunks | None  # [U] with the teacher's runs; None: the teacher's are its `rows`, one for each pair
    rows: Tensor  # [R] rows of the teacher that are compared
    spoken: Tensor  # [P] rows of the teacher in texts that take part, compared or not

    def without_runs(self) -> "Compared":
        """The same teacher, not compared."""
        nothing = slice(0, 0)
        return replace(
            self,
            start=self.start[nothing],
            end=self.end[nothing],
            weights=self.weights[nothing],
            mismatched=self.mismatched[nothing],
            chunks=None if self.chunks is None else picked(self.chunks, nothing),
            rows=self.rows[nothing],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """What relates two vocabularies for a method: so that a message names the right thing to repair."""

    kind: type
    name: str
    command: str


def teacher_text(batch: AlignedBatch, teacher: int, *, own_tokenizer: bool, routed: bool = False) -> TeacherText:
    """What `batch` holds for one teacher.

    Raises:
        ValueError: nothing, or something for a teacher of the other kind; rows that are routed and should not be, or
            the reverse.
    """
    if not batch.teachers and not own_tokenizer and not routed:
        every = torch.arange(batch.num_pairs, device=batch.row.device)
        return TeacherText(teacher=teacher, target_ids=batch.target_ids, row=batch.row, chunks=None, pairs=every)
    if teacher >= len(batch.teachers):
        raise ValueError(
            f"the objective compares with teachers[{teacher}], but the batch was aligned for {len(batch.teachers)} "
            "teachers. Give the objective one part for each teacher, in their order."
        )
    side = batch.teachers[teacher]
    if own_tokenizer != (side.chunks is not None):
        kinds = ("the student's tokenizer (no part)", "a tokenizer of its own (a part)")
        raise ValueError(
            f"the objective takes teachers[{teacher}] for one with {kinds[own_tokenizer]}, the batch for one with "
            f"{kinds[not own_tokenizer]}: align again, or change the objective's part."
        )
    if routed != (side.rows is not None):
        raise ValueError(
            f"the batch was aligned {'without' if routed else 'with'} routes of its rows to single teachers, but the "
            f"objective was made with routed={routed}: make it with routed={not routed}."
        )
    return TeacherText(
        teacher=teacher,
        target_ids=side.target_ids,
        row=side.row,
        chunks=side.chunks,
        pairs=batch.pairs_read_by(side),
        rows=side.rows,
    )


def whole_chunks(chunks: Chunks) -> NDArray[np.bool_]:
    """`[C]` those that have a prediction on both sides."""
    return (chunks.student_end > chunks.student_start) & (chunks.teacher_end > chunks.teacher_start)


def compared(batch: AlignedBatch, text: TeacherText, counted: NDArray[np.bool_] | None) -> Compared:
    """What takes part of the chunks that are `counted [C]` (None: of the pairs)."""
    alive = torch.zeros(batch.num_rows, dtype=torch.bool, device=batch.row.device)
    alive[batch.row[batch.weights != 0]] = True
    spoken = alive[text.row].nonzero().squeeze(-1)
    if text.chunks is None:
        rows = (batch.weights[text.pairs] != 0).nonzero().squeeze(-1)
        pairs = text.pairs[rows]
        start = pairs.cpu().numpy()
        return Compared(
            text=text,
            start=start,
            end=start + 1,
            weights=batch.weights[pairs],
            mismatched=np.zeros(len(start), dtype=np.bool_),
            chunks=None,
            rows=rows,
            spoken=rows,
        )
    assert counted is not None
    _check_ascending(text.chunks, batch.num_pairs, text.target_ids.shape[0])
    first, last = (x.astype(np.int64) for x in (text.chunks.student_start, text.chunks.student_end))
    pair, chunk = (torch.from_numpy(x).to(batch.row.device) for x in joined_runs(first, np.maximum(last - first, 0)))
    least = torch.full((len(first),), float("inf"), dtype=batch.weights.dtype, device=batch.row.device)
    least.scatter_reduce_(0, chunk, batch.weights[pair], "amin")
    dead = torch.zeros(len(first), dtype=torch.bool, device=batch.row.device)
    dead[chunk[batch.weights[pair] == 0]] = True
    taken = np.flatnonzero(counted & ~dead.cpu().numpy())
    some = picked(text.chunks, taken)
    t_first, t_last = (x.astype(np.int64) for x in (some.teacher_start, some.teacher_end))
    rows, _ = joined_runs(t_first, t_last - t_first)
    return Compared(
        text=text,
        start=first[taken],
        end=last[taken],
        weights=least[torch.from_numpy(taken).to(least.device)],
        mismatched=(last - first)[taken] + t_last - t_first != 2,
        chunks=some,
        rows=torch.from_numpy(rows).to(batch.row.device),
        spoken=spoken,
    )


def _check_ascending(chunks: Chunks, num_student: int, num_teacher: int) -> None:
    for side, start, end, number in (
        ("student", chunks.student_start, chunks.student_end, num_student),
        ("teacher", chunks.teacher_start, chunks.teacher_end, num_teacher),
    ):
        if len(start) and (start[0] < 0 or end[-1] > number or (start[1:] < end[:-1]).any()):
            raise ValueError(
                f"chunks must be ascending ranges of the {side}'s {number} predictions that do not overlap. They must "
                "be those of this batch."
            )


def picked(chunks: Chunks, which: Ints | slice) -> Chunks:
    """Some of the chunks."""
    names = ("student_start", "student_end", "teacher_start", "teacher_end")
    return replace(chunks, **{name: getattr(chunks, name)[which] for name in names})


def moved(chunks: Chunks, student: int, teacher: int) -> Chunks:
    """The chunks of predictions that are counted from `student` and `teacher` on."""
    return Chunks(
        student_start=chunks.student_start - np.int32(student),
        student_end=chunks.student_end - np.int32(student),
        teacher_start=chunks.teacher_start - np.int32(teacher),
        teacher_end=chunks.teacher_end - np.int32(teacher),
    )


def check_sides(
    student: StudentScores,
    teacher: TeacherScores | None,
    batch: AlignedBatch,
    texts: Sequence[TeacherText],
    *,
    name: str,
    artefact: Artefact,
    sizes: Sequence[tuple[int, int] | None],
    kinds: Sequence[tuple[type, ...]],
    temperature: float,
) -> tuple[RowScores, ...]:
    """The scores of each teacher, once they are known to belong to this objective and batch.

    Args:
        sizes: the student's and the teacher's ids that each teacher's artefact was built for; None: one tokenizer.
        kinds: what the objective can use of each teacher.

    Raises:
        ConfigError: scores of a kind or temperature that cannot be used.
        VocabularyMismatch: a width that is not the artefact's.
        ValueError: another number of rows than of predictions.
    """
    if not isinstance(student, HiddenScores | DenseScores):
        raise ConfigError(f"{name} needs the student as HiddenScores or DenseScores, got {type(student).__name__}.")
    if num_pairs_of(student) != batch.num_pairs:
        raise ValueError(
            f"the student scored {num_pairs_of(student)} pairs but the batch has {batch.num_pairs}: select the rows "
            "of `batch.student.pair_index` before scoring."
        )
    said = teacher.scores if isinstance(teacher, SeveralScores) else (teacher,)
    if len(said) != len(texts):
        raise ConfigError(
            f"{name} was made for {len(texts)} teachers and got the scores of {len(said)}: give it one part (or None) "
            "for each."
        )
    found: list[RowScores] = []
    for i, (scores, text, size, accepted) in enumerate(zip(said, texts, sizes, kinds, strict=True)):
        where = f"teachers[{i}]"
        if not isinstance(scores, accepted) or not isinstance(scores, HiddenScores | DenseScores | TopKScores):
            raise ConfigError(_wrong_kind(name, where, scores, accepted, own_tokenizer=size is not None))
        if num_pairs_of(scores) != text.target_ids.shape[0]:
            raise ValueError(
                f"{where} scored {num_pairs_of(scores)} predictions, but its side of the batch has "
                f"{text.target_ids.shape[0]}: select the rows of `batch.teachers[{i}].pair_index`."
            )
        _check_width(where, artefact, size, student.vocab_size, scores.vocab_size)
        if isinstance(scores, TopKScores) and scores.temperature != temperature:
            raise ConfigError(
                f"the top-k scores of {where} were normalised at temperature {scores.temperature}, but {name} has "
                f"temperature={temperature}. Set both to the same number."
            )
        found.append(scores)
    return tuple(found)


def _wrong_kind(name: str, where: str, scores: object, accepted: tuple[type, ...], *, own_tokenizer: bool) -> str:
    wanted = " or ".join(kind.__name__ for kind in accepted)
    message = f"{name} accepts {wanted} of {where}, got {'no scores' if scores is None else type(scores).__name__}."
    if not isinstance(scores, TopKScores):
        return message
    if own_tokenizer:
        return f"{message} It compares whole rows: leave top_k out for this teacher, or use csd."
    return (
        f"{message} A teacher with the student's tokenizer is compared on columns that all rows share: leave top_k "
        "out for it."
    )


def _check_width(where: str, artefact: Artefact, size: tuple[int, int] | None, student: int, teacher: int) -> None:
    if size is None:
        if student != teacher:
            raise VocabularyMismatch(
                f"the student predicts {student} ids, {where} {teacher}. Without {artefact.name} it is taken for one "
                "with the student's tokenizer: cut both heads to its real ids (`OutputHead.cut`), or build what "
                f"relates two tokenizers ({artefact.command} build)."
            )
        return
    for side, width, wanted in (("student", student, size[0]), (where, teacher, size[1])):
        if width != wanted:
            raise VocabularyMismatch(
                f"the scores of {side} have {width} columns, the {artefact.name} of {where} {wanted} ids on that side."
                " Cut padded heads to the real ids, and check that they are those of these two tokenizers, not swapped"
                f" ({artefact.command} validate)."
            )
