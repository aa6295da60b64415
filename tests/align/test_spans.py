# SPDX-License-Identifier: Apache-2.0
"""Chunks are the gaps between common byte boundaries: checked against that definition, spelled out byte by byte."""

import random
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohobate.align import align_bytes, align_regions, common_truncation
from cohobate.errors import AlignmentError

Chunk = tuple[int, int, int, int]


def boundaries(pieces: list[bytes]) -> dict[int, int]:
    """Byte position -> number of tokens that end at or before it, for the tokens that move it."""
    found, at = {0: 0}, 0
    for count, piece in enumerate(pieces, start=1):
        at += len(piece)
        found.setdefault(at, count)
    return found


def by_definition(student: list[bytes], teacher: list[bytes]) -> list[Chunk]:
    ours, theirs = boundaries(student), boundaries(teacher)
    cuts = [at for at in range(1 + sum(map(len, student))) if at in ours and at in theirs]
    return [(ours[a], ours[b], theirs[a], theirs[b]) for a, b in pairwise(cuts)]


def split(text: bytes, seed: int, longest: int = 5) -> list[bytes]:
    rng, pieces = random.Random(seed), []
    while text:
        n = rng.randint(1, longest)
        pieces.append(text[:n])
        text = text[n:]
    return pieces


@settings(max_examples=400, deadline=None)
@given(text=st.text(max_size=60), seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)), longest=st.integers(1, 9))
def test_chunks_are_the_definition(text: str, seeds: tuple[int, int], longest: int):
    student, teacher = split(text.encode(), seeds[0], longest), split(text.encode(), seeds[1])
    assert list(align_bytes(student, teacher)) == by_definition(student, teacher)


@settings(max_examples=200, deadline=None)
@given(text=st.binary(max_size=80), seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_chunks_cover_both_sides_spell_the_same_bytes_and_cannot_be_split(text: bytes, seeds: tuple[int, int]):
    student, teacher = split(text, seeds[0]), split(text, seeds[1])
    chunks = align_bytes(student, teacher)
    assert chunks.orphans(len(student), len(teacher)) == (0, 0)
    for s0, s1, t0, t1 in chunks:
        assert s1 > s0
        assert t1 > t0
        assert b"".join(student[s0:s1]) == b"".join(teacher[t0:t1])
        inner = {len(b"".join(student[s0:i])) for i in range(s0 + 1, s1)}
        assert not inner & {len(b"".join(teacher[t0:i])) for i in range(t0 + 1, t1)}


def test_the_worked_example_with_its_paired_special():
    student = [None, b"d", b"ab", b"c", b"d", b"ab", b"c"]
    teacher = [None, b"d", b"a", b"b", b"cd", b"a", b"bc"]
    chunks = align_bytes(student, teacher, student_roles={0: "bos"}, teacher_roles={0: "bos"})
    assert list(chunks) == [(0, 1, 0, 1), (1, 2, 1, 2), (2, 3, 2, 4), (3, 5, 4, 5), (5, 7, 5, 7)]
    assert {x.dtype for x in (chunks.student_start, chunks.teacher_end)} == {np.dtype(np.int32)}


def test_without_a_role_a_special_stands_in_no_chunk():
    chunks = align_bytes([None, b"ab"], [b"a", b"b", None])
    assert list(chunks) == [(1, 2, 0, 2)]
    assert chunks.orphans(2, 3) == (1, 1)


def test_a_chunk_that_an_unpaired_special_cuts_in_two_is_no_chunk():
    assert list(align_bytes([b"a", None, b"b", b"c"], [b"ab", b"c"])) == [(3, 4, 1, 2)]
    assert list(align_bytes([b"a", None, b"b"], [b"a", b"b"])) == [(0, 1, 0, 1), (2, 3, 1, 2)]


def test_nothing_slips_across_a_paired_special():
    roles = {1: "eos"}
    with pytest.raises(AlignmentError, match="from byte 1 on: student b'ab', teacher b'a'"):
        align_bytes([b"ab", None, b"c"], [b"a", None, b"bc"], student_roles=roles, teacher_roles=roles)


def test_the_most_specials_are_paired_and_of_several_ways_the_earliest():
    def pairs(ours: str, theirs: str) -> list[tuple[int, int]]:
        chunks = align_bytes(
            [None] * len(ours),
            [None] * len(theirs),
            student_roles=dict(enumerate(ours)),
            teacher_roles=dict(enumerate(theirs)),
        )
        return [(s0, t0) for s0, _, t0, _ in chunks]

    assert pairs("ab", "b") == [(1, 0)]
    assert pairs("a", "aa") == [(0, 0)]
    assert pairs("abc", "cab") == [(0, 1), (1, 2)]
    assert pairs("xay", "bac") == [(1, 1)]
    assert pairs("", "a") == []


@settings(max_examples=200, deadline=None)
@given(ours=st.text("abc", max_size=6), theirs=st.text("abc", max_size=6))
def test_as_many_specials_are_paired_as_any_choice_could(ours: str, theirs: str):
    def longest(a: str, b: str) -> int:
        if not a or not b:
            return 0
        return max(longest(a[1:], b), longest(a, b[1:]), longest(a[1:], b[1:]) + 1 if a[0] == b[0] else 0)

    chunks = align_bytes(
        [None] * len(ours),
        [None] * len(theirs),
        student_roles=dict(enumerate(ours)),
        teacher_roles=dict(enumerate(theirs)),
    )
    assert len(chunks) == longest(ours, theirs)
    assert all(ours[s] == theirs[t] for s, _, t, _ in chunks)


def test_a_special_that_plays_two_roles_meets_either():
    chunks = align_bytes(
        [None, b"a", None],
        [None, b"a", None],
        student_roles={0: ("bos", "eos"), 2: ("bos", "eos")},
        teacher_roles={0: "bos", 2: "eos"},
    )
    assert list(chunks) == [(0, 1, 0, 1), (1, 2, 1, 2), (2, 3, 2, 3)]


def test_a_side_cut_short_is_used_up_to_the_last_common_boundary():
    assert list(align_bytes([b"ab", b"c"], [b"a", b"b", b"cde"])) == [(0, 1, 0, 2)]
    assert list(align_bytes([], [b"a"])) == []


def test_only_the_end_of_a_text_may_be_cut_short():
    roles = {1: "eos"}
    with pytest.raises(AlignmentError, match=r"from byte 1 on.*\(1 and 2 bytes\)"):
        align_bytes([b"a", None], [b"ab", None], student_roles=roles, teacher_roles=roles)


def test_different_bytes_are_named_where_they_part():
    with pytest.raises(ValueError, match="from byte 3 on: student b'abcd', teacher b'abce'"):
        align_bytes([b"ab", b"cd"], [b"abce"])


def test_tokens_without_bytes_that_are_no_specials_join_the_chunk_that_follows():
    assert list(align_bytes([b"", b"ab", b"", b"c"], [b"ab", b"c"])) == [(0, 2, 0, 1), (2, 4, 1, 2)]


def test_regions_are_aligned_each_on_its_own():
    student = [b"<u>", b"hi", b"</u>", b"ok", b"!"]
    teacher = [b"[", b"h", b"i", b"]", b"ok!"]
    chunks = align_regions(student, teacher, [(1, 2), (3, 5)], [(1, 3), (4, 5)])
    assert list(chunks) == [(1, 2, 1, 3), (3, 5, 4, 5)]
    with pytest.raises(AlignmentError, match="region 0: the two sides spell different bytes from byte 1"):
        align_regions(student, teacher, [(1, 2), (3, 5)], [(1, 2), (4, 5)])
    with pytest.raises(AlignmentError, match="the student has 1 regions and the teacher 2"):
        align_regions(student, teacher, [(1, 2)], [(1, 3), (4, 5)])
    with pytest.raises(AlignmentError, match=r"teacher_regions\[1\] is \[2, 5\)"):
        align_regions(student, teacher, [(1, 2), (3, 5)], [(1, 3), (2, 5)])


def test_truncation_keeps_the_most_bytes_that_end_a_token_on_every_side_and_fit():
    student, teacher = [b"ab", b"c", b"de", None], [b"a", b"b", b"cd", b"e"]
    assert common_truncation([student, teacher], [4, 4]) == [4, 4]
    assert common_truncation([student, teacher], [3, 4]) == [3, 4]
    assert common_truncation([student, teacher], [4, 3]) == [1, 2]
    assert common_truncation([student, teacher], [0, 9]) == [0, 0]
    with pytest.raises(AlignmentError, match="from byte 1 on"):
        common_truncation([[b"ab"], [b"ac"]], [1, 1])


@settings(max_examples=200, deadline=None)
@given(text=st.binary(max_size=40), lengths=st.tuples(*[st.integers(0, 20)] * 3))
def test_truncation_is_the_best_of_all_choices(text: bytes, lengths: tuple[int, int, int]):
    sides = [split(text, seed) for seed in range(3)]
    kept = common_truncation(sides, lengths)
    texts = {b"".join(side[:n]) for side, n in zip(sides, kept, strict=True)}
    possible = set.intersection(
        *(
            {sum(map(len, side[:n])) for n in range(min(most, len(side)) + 1)}
            for side, most in zip(sides, lengths, strict=True)
        )
    )
    assert {len(kept_text) for kept_text in texts} == {max(possible)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("roles", "message"),
    [({5: "bos"}, "position 5, but there are 1 tokens"), ({0: "bos"}, "bytes b'a'. A special has None")],
)
def test_roles_that_do_not_fit_are_refused(roles: dict[int, str], message: str):
    with pytest.raises(AlignmentError, match=message):
        align_bytes([b"a"], [b"a"], student_roles=roles)


def test_of_equally_many_pairs_those_in_one_place_are_taken():
    """A text that begins and ends with one special, on a side that adds it in front, and on one that does not."""
    both = ("bos", "eos")
    chunks = align_bytes(
        [None, b"a b", None], [b"a", b" b", None], student_roles={0: both, 2: both}, teacher_roles={2: both}
    )
    assert list(chunks) == [(1, 2, 0, 2), (2, 3, 2, 3)]


def test_specials_that_pair_one_to_one_cost_no_table_of_all_pairs():
    pieces = [None, b"a"] * 3000
    roles = dict.fromkeys(range(0, 6000, 2), "eos")
    tracemalloc.start()
    chunks = align_bytes(pieces, pieces, student_roles=roles, teacher_roles=roles)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(chunks) == 6000
    assert peak < 30e6
