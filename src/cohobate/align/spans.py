# SPDX-License-Identifier: Apache-2.0
"""Two tokenizations of one text: the finest chunks in which both sides spell the same bytes.

Let A be the set of byte positions at which a student token ends, B the same for the teacher. The gaps between
neighbours of `A & B` are the chunks: unique, equal in bytes by construction, and found by counting, where a search
over token *strings* needs minutes on a page of digits and still calls `_foo` and ` foo` the same. Bytes, not
characters, so a character that a tokenizer splits needs nothing special.

A token without bytes (a special) takes part by its role. Specials of equal role are paired in order and stand as 1:1
chunks; what lies between two paired ones is aligned on its own, so nothing slips across a turn of a chat. Where the
bytes differ there is nothing to align, and that is an error, not a guess; only a text that one side cut short is used
up to the last common boundary.

Not here: which vocabulary entries correspond (`vocab`), and which chunks a loss may score (`functional`).
S student tokens, N teacher tokens, C chunks.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cohobate.errors import AlignmentError

Pieces = Sequence[bytes | None]
Roles = Mapping[int, str | Collection[str]]
Ints = NDArray[np.int32]
_Special = tuple[frozenset[str], int]  # the roles of a special, and its place in the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Token ranges, half open and sorted, that spell the same bytes (or are a special and its counterpart)."""

    student_start: Ints  # [C]
    student_end: Ints  # [C]
    teacher_start: Ints  # [C]
    teacher_end: Ints  # [C]

    def __len__(self) -> int:
        return len(self.student_start)

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """`(student_start, student_end, teacher_start, teacher_end)` of each chunk."""
        return zip(*(getattr(self, field.name).tolist() for field in fields(self)), strict=True)

    def orphans(self, num_student: int, num_teacher: int) -> tuple[int, int]:
        """How many of `num_student` and `num_teacher` tokens stand in no chunk."""
        in_student = int((self.student_end - self.student_start).sum())
        in_teacher = int((self.teacher_end - self.teacher_start).sum())
        return num_student - in_student, num_teacher - in_teacher


def align_bytes(
    student_pieces: Pieces,
    teacher_pieces: Pieces,
    *,
    student_roles: Roles | None = None,
    teacher_roles: Roles | None = None,
) -> Chunks:
    """The chunks of two token sequences, each token given as its bytes, or None for a special.

    Args:
        student_pieces, teacher_pieces: the bytes of token 0, 1, ... of each side.
        student_roles, teacher_roles: position of a special -> its role, or several roles it may play. Specials that
            share one are paired: the longest common sequence, of several such the one with most pairs after equally
            many bytes (spaces aside), of those the one that pairs earliest. A special without a counterpart stands in
            no chunk, and neither do the tokens around it if it cuts a chunk in two.

    Raises:
        AlignmentError: (a ValueError) the bytes between two paired specials differ; the message says where. If, after
            the last paired special, one side's bytes are the beginning of the other's, the chunks end at the last
            common boundary.
    """
    student, teacher = _side("student", student_pieces, student_roles), _side("teacher", teacher_pieces, teacher_roles)
    return align_sides(student, teacher)


def align_regions(
    student_pieces: Pieces,
    teacher_pieces: Pieces,
    student_regions: Sequence[tuple[int, int]],
    teacher_regions: Sequence[tuple[int, int]],
    *,
    student_roles: Roles | None = None,
    teacher_roles: Roles | None = None,
) -> Chunks:
    """`align_bytes` inside each region only: the turns of a chat, which each side's template frames in its own way.

    `student_regions[i]` and `teacher_regions[i]` are the token ranges `[start, end)` of the same text, in order and
    without overlap. Tokens outside every region stand in no chunk. Only the last region may be cut short.
    """
    if len(student_regions) != len(teacher_regions):
        raise AlignmentError(
            f"the student has {len(student_regions)} regions and the teacher {len(teacher_regions)}; each region "
            "needs its counterpart."
        )
    student, teacher = _side("student", student_pieces, student_roles), _side("teacher", teacher_pieces, teacher_roles)
    _check_regions("student", student_regions, len(student_pieces))
    _check_regions("teacher", teacher_regions, len(teacher_pieces))
    parts = []
    for number, (ours, theirs) in enumerate(zip(student_regions, teacher_regions, strict=True)):
        last, where = number == len(student_regions) - 1, f"region {number}: "
        parts.append(
            align_sides(student, teacher, student_range=ours, teacher_range=theirs, may_be_cut=last, where=where)
        )
    return _joined(parts)


def common_truncation(sides: Sequence[Pieces], max_lengths: Sequence[int]) -> list[int]:
    """How many tokens of each side to keep so that all keep the same bytes and side i at most `max_lengths[i]` tokens.

    All sides must spell the same bytes. Nothing is tokenized again, so the kept ids equal those of the whole text.
    Specials right after the cut are kept while they fit.
    """
    if len(sides) != len(max_lengths) or not sides:
        raise AlignmentError(f"got {len(sides)} token sequences and {len(max_lengths)} lengths; wanted one for each.")
    texts = [b"".join(piece or b"" for piece in pieces) for pieces in sides]
    for text in texts[1:]:
        if text != texts[0]:
            raise AlignmentError(_difference("", "side 0", texts[0], "another side", text))
    ends = [np.cumsum(_lengths(pieces)) for pieces in sides]
    common = np.append(0, ends[0])  # byte positions where every side may stop; 0: with nothing
    for end, most in zip(ends, max_lengths, strict=True):
        common = np.intersect1d(common, np.append(0, end[: max(most, 0)]))
    cut = common[-1]
    return [
        min(int(np.searchsorted(end, cut, side="right")), most) for end, most in zip(ends, max_lengths, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One token sequence in the form that alignment counts with."""

    name: str  # student or teacher, for messages
    lengths: NDArray[np.int64]  # [n] bytes of each token, 0 for a special
    special: NDArray[np.bool_]  # [n]
    text: bytes  # of all tokens
    roles: Mapping[int, frozenset[str]]  # position of a special, ascending -> its roles
    strip_space: bool = False  # the tokenizer may have put a space in front of the text

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """`[n + 1]` byte position at which each token ends, after a leading 0."""
        return np.append(0, np.cumsum(self.lengths))


def align_sides(
    student: Side,
    teacher: Side,
    *,
    student_range: tuple[int, int] | None = None,
    teacher_range: tuple[int, int] | None = None,
    may_be_cut: bool = True,
    where: str = "",
) -> Chunks:
    """Chunks inside one token range of each side (default: everything); see `align_bytes`."""
    begin_s, stop_s = student_range or (0, len(student.lengths))
    begin_t, stop_t = teacher_range or (0, len(teacher.lengths))
    ours = [i for i in student.roles if begin_s <= i < stop_s]
    theirs = [i for i in teacher.roles if begin_t <= i < stop_t]
    pairs = _pair_specials(_specials(student, ours, begin_s), _specials(teacher, theirs, begin_t))
    fences = [(begin_s - 1, begin_t - 1), *((ours[i], theirs[j]) for i, j in pairs), (stop_s, stop_t)]
    parts: list[Chunks] = []
    for number, ((s0, t0), (s1, t1)) in enumerate(pairwise(fences)):
        if number:
            parts.append(_chunks([s0], [s0 + 1], [t0], [t0 + 1]))
        last = number == len(pairs)
        content = _align_content(student, teacher, (s0 + 1, s1), (t0 + 1, t1), last and may_be_cut, where)
        parts.append(content)
    return _joined(parts)


def _specials(side: Side, positions: Sequence[int], begin: int) -> list[_Special]:
    """Roles of the specials at `positions`, and how many bytes that are no spaces stand between `begin` and each."""
    if not positions:
        return []
    solid = np.append(0, np.cumsum(np.frombuffer(side.text, np.uint8) != ord(" ")))  # a tokenizer may add a space
    places = solid[side.ends[list(positions)]] - solid[side.ends[begin]]
    return [(side.roles[i], place) for i, place in zip(positions, places.tolist(), strict=True)]


def _pair_specials(ours: Sequence[_Special], theirs: Sequence[_Special]) -> list[tuple[int, int]]:
    """The longest common sequence of specials that share a role.

    Of several the one with most pairs in one place, since only between those the bytes can be equal: a `bos` that is
    the `eos` too, and that one side lacks, is else taken for the other end of the text. Of those the earliest.
    """
    num_s, num_t = len(ours), len(theirs)
    pair = 1 + min(num_s, num_t)  # is worth more than all places

    def worth(i: int, j: int) -> int:
        (roles_s, place_s), (roles_t, place_t) = ours[i], theirs[j]
        return pair + (place_s == place_t) if roles_s & roles_t else 0

    same = 0  # how many pair one to one from the front on: nothing is worth more, and all the rest costs their product
    while same < min(num_s, num_t) and worth(same, same) > pair:
        same += 1
    best = [[0] * (num_t + 1) for _ in range(num_s + 1 - same)]  # worth of what is left from (same + i, j) on
    for i in reversed(range(same, num_s)):
        row, below = best[i - same], best[i - same + 1]
        for j in reversed(range(same, num_t)):
            row[j] = max(below[j], row[j + 1], below[j + 1] + w if (w := worth(i, j)) else 0)
    pairs = [(i, i) for i in range(same)]
    i = j = same
    while i < num_s and j < num_t and best[i - same][j]:
        if (w := worth(i, j)) and best[i - same][j] == best[i - same + 1][j + 1] + w:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i - same][j] == best[i - same + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _align_content(
    student: Side, teacher: Side, ours: tuple[int, int], theirs: tuple[int, int], may_be_cut: bool, where: str
) -> Chunks:
    """Chunks of the tokens with bytes in two ranges that no paired special divides."""
    at_s, ends_s, text_s = _content(student, ours)
    at_t, ends_t, text_t = _content(teacher, theirs)
    spaces_s, spaces_t = (len(text) - len(text.lstrip(b" ")) for text in (text_s, text_t))
    if student.strip_space and spaces_s == spaces_t + 1:
        ends_s, text_s = ends_s - 1, text_s[1:]
    elif teacher.strip_space and spaces_t == spaces_s + 1:
        ends_t, text_t = ends_t - 1, text_t[1:]
    if text_s != text_t and not (may_be_cut and (text_s.startswith(text_t) or text_t.startswith(text_s))):
        raise AlignmentError(_difference(where, student.name, text_s, teacher.name, text_t))
    moves_s, moves_t = _that_move(ends_s), _that_move(ends_t)  # the tokens that have bytes: their ends ascend strictly
    ends_here = np.full(max(len(text_s), len(text_t)) + 1, -1)  # by byte: the teacher's token that ends there
    ends_here[ends_t[moves_t]] = moves_t
    found = ends_here[ends_s[moves_s]]
    common = found >= 0
    last_s, last_t = moves_s[common], found[common]  # [C] the token that ends each chunk
    if len(last_s) == 0:
        return _chunks([], [], [], [])
    first_s, first_t = _after_each(last_s), _after_each(last_t)
    if len(at_s) == ours[1] - ours[0] and len(at_t) == theirs[1] - theirs[0]:  # no special between the tokens
        return _chunks(first_s + ours[0], last_s + (ours[0] + 1), first_t + theirs[0], last_t + (theirs[0] + 1))
    start_s, end_s, start_t, end_t = at_s[first_s], at_s[last_s] + 1, at_t[first_t], at_t[last_t] + 1
    # A special without counterpart inside a chunk would be counted among its tokens.
    unbroken = (end_s - start_s == last_s + 1 - first_s) & (end_t - start_t == last_t + 1 - first_t)
    return _chunks(start_s[unbroken], end_s[unbroken], start_t[unbroken], end_t[unbroken])


def _that_move(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    moved = np.empty(len(ends), dtype=np.bool_)
    moved[:1] = ends[:1] != 0
    np.not_equal(ends[1:], ends[:-1], out=moved[1:])
    return np.flatnonzero(moved)


def _after_each(last: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first token of each chunk: the one behind the last of the chunk before."""
    first = np.empty_like(last)
    first[0] = 0
    np.add(last[:-1], 1, out=first[1:])
    return first


def _content(side: Side, tokens: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64], bytes]:
    """Positions of the tokens in a range that are no specials, where each ends in the range's bytes, those bytes."""
    start, end = tokens
    first, special = side.ends[start], side.special[start:end]
    text = side.text[first : side.ends[end]]
    if not special.any():
        return np.arange(start, end), side.ends[start + 1 : end + 1] - first, text
    at = np.flatnonzero(special == 0) + start
    return at, side.ends[at + 1] - first, text


def _side(name: str, pieces: Pieces, roles: Roles | None) -> Side:
    named: dict[int, frozenset[str]] = {}
    for position in sorted(roles or {}):
        if not 0 <= position < len(pieces):
            raise AlignmentError(f"{name}_roles speaks of position {position}, but there are {len(pieces)} tokens.")
        if pieces[position] is not None:
            raise AlignmentError(
                f"{name}_roles gives position {position} a role, but the token there has the bytes "
                f"{pieces[position]!r}. A special has None."
            )
        role = (roles or {})[position]
        named[position] = frozenset([role] if isinstance(role, str) else role)
    return Side(
        name=name,
        lengths=_lengths(pieces),
        special=np.fromiter((piece is None for piece in pieces), dtype=np.bool_, count=len(pieces)),
        text=b"".join(piece or b"" for piece in pieces),
        roles=named,
    )


def _lengths(pieces: Pieces) -> NDArray[np.int64]:
    return np.fromiter((len(piece or b"") for piece in pieces), dtype=np.int64, count=len(pieces))


def _check_regions(name: str, regions: Sequence[tuple[int, int]], num_tokens: int) -> None:
    before = 0
    for number, (start, end) in enumerate(regions):
        if not before <= start <= end <= num_tokens:
            raise AlignmentError(
                f"{name}_regions[{number}] is [{start}, {end}): regions must follow each other without overlap inside "
                f"the {num_tokens} tokens."
            )
        before = end


def _difference(where: str, name_a: str, text_a: bytes, name_b: str, text_b: bytes) -> str:
    """Where two byte strings part, and what stands there."""
    same = next((i for i, (a, b) in enumerate(zip(text_a, text_b, strict=False)) if a != b), None)
    at = min(len(text_a), len(text_b)) if same is None else same
    near = slice(max(0, at - 16), at + 16)
    return (
        f"{where}the two sides spell different bytes from byte {at} on: {name_a} {text_a[near]!r}, {name_b} "
        f"{text_b[near]!r} ({len(text_a)} and {len(text_b)} bytes). Tokenize the same text on both sides; a tokenizer "
        "that normalises needs its text normalised first; turns that two templates frame differently are aligned "
        "region by region (align_regions)."
    )


def _chunks(student_start: Any, student_end: Any, teacher_start: Any, teacher_end: Any) -> Chunks:
    arrays = (np.asarray(x, dtype=np.int32) for x in (student_start, student_end, teacher_start, teacher_end))
    return Chunks(**dict(zip((field.name for field in fields(Chunks)), arrays, strict=True)))


def _joined(parts: Sequence[Chunks]) -> Chunks:
    return Chunks(
        **{
            field.name: np.concatenate([np.empty(0, np.int32), *(getattr(part, field.name) for part in parts)])
            for field in fields(Chunks)
        }
    )
