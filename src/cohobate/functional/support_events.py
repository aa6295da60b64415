# SPDX-License-Identifier: Apache-2.0
"""Which events of two vocabularies a chunk compares: pairs of tokens that end the same bytes after the same prefix.

A chunk's student tokens a_1..a_m and teacher tokens b_1..b_n spell the same bytes. All but the last of each side are a
prefix that both took; only the last token varies, so every probability stands in a row that the ordinary forward pass
made, and no further forward pass is needed. The pairs (final student token, final teacher token) are

    1:1         all tokens that both vocabularies have
    1:n, n:1    all tokens of the short side whose chain is the long side's prefix and one more token
    m:n         the pair that was realized

They depend on ids and tables alone. This is the bookkeeping; the divergence over the pairs is `common_support.py`.
Rows count in one of two ways (`Rows`): a row of a text predicts the token after it, a row of aligned pairs the token
of its own place. S student tokens, N teacher tokens, C chunks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cohobate.functional.runs import Ints, joined_runs
from cohobate.functional.scores import Rows, predictor_offset
from cohobate.functional.student_shards import rows_here

ForcedMode = Literal["union", "evict"]
ONE_TO_ONE, ONE_TO_MANY, MANY_TO_ONE, MANY_TO_MANY = 0, 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportOptions:
    """What a chunk's support holds; see `common_support_divergence`."""

    realized_only_mismatch: bool = False
    keep_realized: bool = True
    min_support: int = 1
    forced_mode: ForcedMode = "union"

    def __post_init__(self) -> None:
        if self.min_support < 1:
            raise ValueError(f"min_support must be >= 1, got {self.min_support}.")
        if self.forced_mode not in ("union", "evict"):
            raise ValueError(f"forced_mode must be 'union' or 'evict', got {self.forced_mode!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRows:
    """The geometry of C chunks, and what of it concerns the student's rows that are here."""

    kind: Ints  # [C] 0 = 1:1, 1 = 1:n, 2 = n:1, 3 = m:n
    scorable: NDArray[np.bool_]  # [C] both sides have a predictor for their first token
    mine: NDArray[np.bool_]  # [C] scorable, and the row that predicts the last student token is here
    student_row: Ints  # [C] where that row lies here; 0 where it is not mine
    teacher_row: Ints  # [C] the row that predicts the last teacher token
    student_token: Ints  # [C] the last student token's place in the text
    teacher_token: Ints  # [C]
    student_prefix: tuple[Ints, Ints, Ints]  # rows here that predict an earlier token of their chunk; token; chunk
    teacher_prefix: tuple[Ints, Ints]  # rows that predict an earlier token of a chunk that is mine; chunk
    student_rows: Ints  # every row that a scorable chunk reads, wherever it is, once for each reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Explicit events, chunk after chunk: `[E]` each."""

    chunk: Ints
    student_id: Ints
    teacher_id: Ints


def chunk_rows(
    chunks: Any, num_student: int, num_teacher: int, rows: Rows = "text", row_of: Ints | None = None
) -> ChunkRows:
    """Kinds, predictor rows and what can be scored. A chunk whose first token nothing predicts is never scored.

    Args:
        row_of: `[S]` where each student row lies here, -1 where it is elsewhere; None: all are here.

    Raises:
        ValueError: chunks that reach beyond the tokens.
    """
    offset = predictor_offset(rows)
    s0, s1, t0, t1 = check_chunks(chunks, num_student, num_teacher)
    m, n = s1 - s0, t1 - t0
    scorable = (m > 0) & (n > 0) & (s0 >= offset) & (t0 >= offset)
    last = np.full(len(m), -1)
    last[scorable] = rows_here((s1 - 1 - offset)[scorable], row_of)
    mine = scorable & (last >= 0)
    prefix, of_chunk = joined_runs(s0 - offset, np.where(scorable, m - 1, 0))
    here = rows_here(prefix, row_of)
    found = here >= 0
    return ChunkRows(
        kind=np.where(m > 1, np.where(n > 1, MANY_TO_MANY, MANY_TO_ONE), np.where(n > 1, ONE_TO_MANY, ONE_TO_ONE)),
        scorable=scorable,
        mine=mine,
        student_row=np.where(mine, last, 0),
        teacher_row=t1 - 1 - offset,
        student_token=s1 - 1,
        teacher_token=t1 - 1,
        student_prefix=(here[found], prefix[found] + offset, of_chunk[found]),
        teacher_prefix=joined_runs(t0 - offset, np.where(mine, n - 1, 0)),
        student_rows=np.concatenate([(s1 - 1 - offset)[scorable], prefix]),
    )


def check_chunks(chunks: Any, num_student: int, num_teacher: int) -> tuple[Ints, Ints, Ints, Ints]:
    """The four columns of `chunks`, `[C]` each, once they are known to lie inside the tokens of both sides."""
    names = ("student_start", "student_end", "teacher_start", "teacher_end")
    s0, s1, t0, t1 = (np.asarray(getattr(chunks, name), dtype=np.int64) for name in names)
    for side, start, end, tokens in (("student", s0, s1, num_student), ("teacher", t0, t1, num_teacher)):
        if len(end) and (end.max() > tokens or start.min() < 0):
            raise ValueError(
                f"the chunks span {side} tokens {start.min()} to {end.max()}, but there are {tokens}. They must be "
                "those of these two rows of ids."
            )
    return s0, s1, t0, t1


def check_ids(side: str, ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless `ids` are integers in `[0, vocab_size)`: a negative one would count from the end."""
    if ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"the {side}'s ids must be integers, got {ids.dtype}.")
    array = ids.cpu().numpy()
    wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(wrong):
        raise ValueError(
            f"the {side}'s id {array[wrong[0]]} at position {wrong[0]} is outside 0 to {vocab_size - 1}. Cut padding "
            "and ignored labels off first."
        )


def mismatch_pairs(
    rows: ChunkRows, chunks: Any, student_ids: Ints, teacher_ids: Ints, tables: Any, options: SupportOptions
) -> Pairs:
    """The events of every chunk that is mine and not 1:1; a chunk with too few alternatives has none."""
    chunk, student, teacher = [], [], []
    ranges = np.stack([chunks.student_start, chunks.student_end, chunks.teacher_start, chunks.teacher_end], axis=1)
    for c in np.flatnonzero(rows.mine & (rows.kind != ONE_TO_ONE)).tolist():
        s0, s1, t0, t1 = ranges[c].tolist()
        ours, theirs = student_ids[s0:s1].tolist(), teacher_ids[t0:t1].tolist()
        for of_student, of_teacher in _support(int(rows.kind[c]), ours, theirs, tables, options):
            chunk.append(c)
            student.append(of_student)
            teacher.append(of_teacher)
    return Pairs(
        **{
            name: np.asarray(values, dtype=np.int64)
            for name, values in (("chunk", chunk), ("student_id", student), ("teacher_id", teacher))
        }
    )


def disjoint(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """`pairs` without those that use a student id or a teacher id again: one event must not be counted twice."""
    kept, ours, theirs = [], set(), set()
    for of_student, of_teacher in pairs:
        if of_student not in ours and of_teacher not in theirs:
            kept.append((of_student, of_teacher))
            ours.add(of_student)
            theirs.add(of_teacher)
    return kept


def _support(
    kind: int, ours: Sequence[int], theirs: Sequence[int], tables: Any, options: SupportOptions
) -> list[tuple[int, int]]:
    realized = (ours[-1], theirs[-1])
    if kind == MANY_TO_MANY or options.realized_only_mismatch:
        return [realized]
    if kind == ONE_TO_MANY:
        pairs = tables.student_to_teacher.alternatives(tuple(theirs[:-1]))
    else:
        pairs = [(s, t) for t, s in tables.teacher_to_student.alternatives(tuple(ours[:-1]))]
    if options.keep_realized and realized not in pairs:
        pairs = [realized, *pairs]
    found = disjoint(pairs)
    return found if len(found) >= options.min_support else []
