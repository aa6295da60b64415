# SPDX-License-Identifier: Apache-2.0
"""The chunks of two token rows as far as they spell the same bytes, for text that a model wrote.

`align_tokens` calls unequal bytes an error, since somebody gave it two different texts. Here one side's tokens were
made from the other's bytes, and what is not the same is a fact about that text: a vocabulary lacks a character, a row
was cut to a length. So the chunks simply end before it. Nothing after the first difference is searched for a place
where both sides may agree again: it would be a guess.

Only a difference that is known is passed over: a tokenizer that composes accents (NFC), or takes `▁` for a space,
changes some characters, and one can tell which. What covers them stands in no chunk, the text after them does.

S student tokens, N teacher tokens.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cohobate.align.spans import Chunks
from cohobate.vocab.pieces import TokenPieces

Ids = NDArray[np.int64]
Ranges = NDArray[np.int64]  # [C, 4] student_start, student_end, teacher_start, teacher_end
# Before ASCII and letters, which compose with nothing in front of them; Hangul's later jamo do.
_STARTS = re.compile(r"(?=[\x00-\x7f▁]|[^\W\u1160-\u11ff])")


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of tokens without specials."""

    ends: Ids  # where each token ends in the range's bytes
    text: bytes
    plain: bool  # the range had no special, at which it was else cut

    def without_first_byte(self) -> "_Part":
        return _Part(self.ends - 1, self.text[1:], self.plain)


def align_agreeing(
    student: TokenPieces,
    student_ids: Ids,
    teacher: TokenPieces,
    teacher_ids: Ids,
    *,
    pairs: Sequence[tuple[int, int]] = (),
    may_lead: tuple[bool, bool] = (False, False),
    rewrite: Callable[[str], str] | None = None,
) -> Chunks:
    """The finest chunks of `student_ids [S]` and `teacher_ids [N]` from the first token on, until the bytes differ.

    Args:
        pairs: ascending positions (student's, teacher's) of control tokens that are one thing on both sides. Each is a
            chunk, and what lies between two is aligned on its own. Any other special ends the chunks.
        may_lead: for each side, whether its first token may have a space in front that the other side lacks; a
            tokenizer that adds spaces may anyway.
        rewrite: what the teacher's tokenizer makes of a text, if it changes some characters: it may look at those
            around a character, but not across the beginning of a letter.
    """
    fences = [(-1, -1), *pairs, (len(student_ids), len(teacher_ids))]
    parts: list[Ranges] = []
    for number, ((s, t), (next_s, next_t)) in enumerate(pairwise(fences)):
        first = number == 0
        ours, theirs = _without_lead(
            _part(student, student_ids[s + 1 : next_s]),
            _part(teacher, teacher_ids[t + 1 : next_t]),
            student.prefix_space or (first and may_lead[0]),
            teacher.prefix_space or (first and may_lead[1]),
        )
        found, same_to_the_end = _agreeing(ours, theirs, rewrite)
        parts.append(found + np.array([s + 1, s + 1, t + 1, t + 1]))
        if not (same_to_the_end and ours.plain and theirs.plain):
            break
        if number < len(pairs):
            parts.append(np.array([[next_s, next_s + 1, next_t, next_t + 1]]))
    return chunks_of(np.concatenate(parts))


def _part(vocabulary: TokenPieces, ids: Ids) -> _Part:
    """The tokens up to the first special among `ids`."""
    special = np.flatnonzero(vocabulary.special[ids])
    if len(special):
        ids = ids[: special[0]]
    text = b"".join(map(vocabulary.pieces.__getitem__, ids.tolist()))
    return _Part(np.cumsum(vocabulary.lengths[ids]), text, not len(special))


def _without_lead(student: _Part, teacher: _Part, student_may: bool, teacher_may: bool) -> tuple[_Part, _Part]:
    spaces_s, spaces_t = (len(part.text) - len(part.text.lstrip(b" ")) for part in (student, teacher))
    if student_may and spaces_s == spaces_t + 1:
        return student.without_first_byte(), teacher
    if teacher_may and spaces_t == spaces_s + 1:
        return student, teacher.without_first_byte()
    return student, teacher


def _agreeing(student: _Part, teacher: _Part, rewrite: Callable[[str], str] | None) -> tuple[Ranges, bool]:
    """Chunks of two ranges, and whether they reach the ends of both."""
    if rewrite is not None and student.text != teacher.text:
        text = valid_text(student.text)
        changes = _changes(text, teacher.text, rewrite)
        if changes is not None:
            size = len(text.encode())
            ends_s, ends_t, unequal = _on_one_line(student.ends[student.ends <= size], teacher.ends, changes)
            return _between_common_ends(ends_s, ends_t, unequal), size == len(student.text)
    same = common_prefix(student.text, teacher.text)
    found = _between_common_ends(student.ends[student.ends <= same], teacher.ends[teacher.ends <= same], [])
    return found, len(student.text) == len(teacher.text) == same


def _between_common_ends(ends_s: Ids, ends_t: Ids, unequal: Sequence[tuple[int, int]]) -> Ranges:
    """Token ranges between neighbouring positions where tokens of both sides end, without those over `unequal`."""
    cuts = np.intersect1d(ends_s, ends_t)
    cuts = cuts[cuts > 0]
    stop_s, stop_t = np.searchsorted(ends_s, cuts) + 1, np.searchsorted(ends_t, cuts) + 1
    begins = np.append(0, cuts)[:-1]
    kept = np.ones(len(cuts), dtype=np.bool_)
    for begin, end in unequal:
        kept &= (cuts <= begin) | (begins >= end)
    columns = (np.append(0, stop_s)[:-1], stop_s, np.append(0, stop_t)[:-1], stop_t)
    return np.stack(columns, axis=1)[kept]


def _changes(text: str, teacher: bytes, rewrite: Callable[[str], str]) -> list[tuple[int, int, int, int]] | None:
    """Byte ranges (of `text`, of `teacher`) that `rewrite` changes, if `teacher` is what it makes of `text`."""
    changes, a, b = [], 0, 0
    for segment in _STARTS.split(text):
        ours, theirs = segment.encode(), rewrite(segment).encode()
        if teacher[b : b + len(theirs)] != theirs:
            return None
        if ours != theirs:
            changes.append((a, a + len(ours), b, b + len(theirs)))
        a, b = a + len(ours), b + len(theirs)
    return changes if b == len(teacher) else None


def _on_one_line(
    ends_s: Ids, ends_t: Ids, changes: Sequence[tuple[int, int, int, int]]
) -> tuple[Ids, Ids, list[tuple[int, int]]]:
    """Both sides' ends as positions of one text, in which both spellings of a changed range follow each other.

    So no token can end at one place on both sides inside such a range. Also gives where these ranges are.
    """
    line_s, line_t, unequal, shift = ends_s.copy(), ends_t.copy(), [], 0
    for a, stop_a, b, stop_b in changes:
        size_a, size_b = stop_a - a, stop_b - b
        line_s[ends_s >= stop_a] += size_b
        line_t[ends_t > b] += size_a
        unequal.append((a + shift, a + shift + size_a + size_b))
        shift += size_b
    return line_s, line_t, unequal


def valid_text(piece: bytes) -> str:
    """The text at the beginning of `piece`, up to what is none."""
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        return piece[: error.start].decode()


def common_prefix(a: bytes, b: bytes) -> int:
    """How many bytes `a` and `b` begin alike."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return int(np.flatnonzero(np.frombuffer(a[:size], np.uint8) != np.frombuffer(b[:size], np.uint8))[0])


def chunks_of(ranges: Ranges) -> Chunks:
    """`Chunks` from the rows `student_start, student_end, teacher_start, teacher_end`."""
    columns = np.ascontiguousarray(ranges.T, dtype=np.int32)
    return Chunks(**{field.name: column for field, column in zip(fields(Chunks), columns, strict=True)})


def ranges_of(chunks: Chunks) -> Ranges:
    """`[C, 4]` of `chunks`, a copy."""
    return np.stack([getattr(chunks, field.name) for field in fields(Chunks)], axis=1).astype(np.int64)


def no_chunks() -> Chunks:
    return chunks_of(np.zeros((0, 4), np.int64))
