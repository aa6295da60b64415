# SPDX-License-Identifier: Apache-2.0
"""Chunks of what a model wrote: up to the first difference, over composed accents, and never an error."""

import unicodedata
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cohobate.align.agreement import align_agreeing, common_prefix
from cohobate.vocab.pieces import TokenPieces

NFC = partial(unicodedata.normalize, "NFC")


def vocabulary(*pieces: bytes | None, prefix_space: bool = False) -> TokenPieces:
    """Ids 0, 1, … of these bytes; None is a special."""
    return TokenPieces(
        pieces=[piece or b"" for piece in pieces],
        lengths=np.array([len(piece or b"") for piece in pieces], dtype=np.int64),
        special=np.array([piece is None for piece in pieces]),
        roles={},
        prefix_space=prefix_space,
        num_tokens=len(pieces),
    )


def aligned(student: list[bytes | None], teacher: list[bytes | None], **options: Any) -> list[tuple[int, ...]]:
    prefix = [options.pop(name, False) for name in ("student_prefix", "teacher_prefix")]
    sides = [vocabulary(*side, prefix_space=p) for side, p in zip((student, teacher), prefix, strict=True)]
    ids = [np.arange(len(side)) for side in (student, teacher)]
    return list(align_agreeing(sides[0], ids[0], sides[1], ids[1], **options))


def by_definition(student: list[bytes], teacher: list[bytes]) -> list[tuple[int, int, int, int]]:
    """Every pair of token counts after which both sides spell the same bytes, and the gaps between neighbours."""
    meets = [
        (i, j)
        for i in range(len(student) + 1)
        for j in range(len(teacher) + 1)
        if b"".join(student[:i]) == b"".join(teacher[:j])
    ]
    return [(a, b, c, d) for (a, c), (b, d) in pairwise(meets)]


PIECE = st.binary(min_size=1, max_size=3).map(lambda piece: bytes(b"ab"[x % 2] for x in piece))


@given(student=st.lists(PIECE, max_size=12), teacher=st.lists(PIECE, max_size=12))
def test_chunks_are_the_gaps_between_all_places_where_both_spell_the_same(
    student: list[bytes], teacher: list[bytes]
) -> None:
    assert aligned([*student], [*teacher]) == by_definition(student, teacher)


def test_a_difference_ends_the_chunks_even_if_both_sides_agree_again() -> None:
    assert aligned([b"ab", b"X", b"cd"], [b"a", b"b", b"Y", b"cd"]) == [(0, 1, 0, 2)]


def test_a_special_without_counterpart_ends_the_chunks_on_either_side() -> None:
    assert aligned([b"a", None, b"b"], [b"a", b"b"]) == [(0, 1, 0, 1)]
    assert aligned([b"a", b"b"], [b"a", None, b"b"]) == [(0, 1, 0, 1)]
    assert aligned([b"a", None, None], [b"a", None], pairs=[(2, 1)]) == [(0, 1, 0, 1)]


def test_pairs_are_chunks_and_fence_what_lies_between_them() -> None:
    student, teacher = [b"ab", None, b"c", b"d", None], [b"a", b"b", None, b"cd", None]
    found = aligned(student, teacher, pairs=[(1, 2), (4, 4)])
    assert found == [(0, 1, 0, 2), (1, 2, 2, 3), (2, 4, 3, 4), (4, 5, 4, 5)]
    # The same bytes in all, but not before the pair.
    assert aligned([b"a", None, b"bc"], [b"ab", None, b"c"], pairs=[(1, 1)]) == []


def test_a_space_in_front_is_passed_over_only_where_that_side_may_have_one() -> None:
    assert aligned([b" a", b"b"], [b"a", b"b"]) == []
    assert aligned([b" a", b"b"], [b"a", b"b"], may_lead=(True, False)) == [(0, 1, 0, 1), (1, 2, 1, 2)]
    assert aligned([b"a"], [b" a"], may_lead=(True, False)) == []
    assert aligned([b"a"], [b" ", b"a"], teacher_prefix=True) == [(0, 1, 0, 2)]
    assert aligned([b"  a"], [b"a"], may_lead=(True, False)) == []  # two are text


def test_only_a_tokenizers_own_space_may_stand_after_a_pair() -> None:
    student, teacher = [b"a", None, b"b"], [b"a", None, b" b"]
    assert aligned(student, teacher, pairs=[(1, 1)], may_lead=(False, True)) == [(0, 1, 0, 1), (1, 2, 1, 2)]
    assert aligned(student, teacher, pairs=[(1, 1)], teacher_prefix=True)[-1] == (2, 3, 2, 3)


def test_a_cut_character_ends_the_chunks_at_the_last_common_end() -> None:
    whole = "aé".encode()
    assert aligned([b"a", whole[1:2]], [b"a"]) == [(0, 1, 0, 1)]
    assert aligned([b"a" + whole[1:2]], [b"a"]) == []


def pieces(text: str, sizes: list[int]) -> list[bytes]:
    """`text` cut into tokens of these many bytes, the last one as long as what is left."""
    rest, found = text.encode(), []
    for size in sizes:
        if rest:
            found.append(rest[:size])
            rest = rest[size:]
    return [*found, rest] if rest else found


def test_composed_characters_stand_in_no_chunk_and_what_follows_does() -> None:
    text = "a e\u0301b c"  # e and an accent, which NFC joins
    student = pieces(text, [1, 1, 1, 2, 1, 1, 1])
    teacher = pieces(unicodedata.normalize("NFC", text), [1, 1, 2, 1, 1, 1])
    found = aligned([*student], [*teacher], rewrite=NFC)
    # `a`, ` `; the accented character is passed over; `b`, ` `, `c`
    assert found == [(0, 1, 0, 1), (1, 2, 1, 2), (4, 5, 3, 4), (5, 6, 4, 5), (6, 7, 5, 6)]
    assert aligned([*student], [*teacher]) == [(0, 1, 0, 1), (1, 2, 1, 2)]


def test_a_composed_character_costs_no_more_than_itself_in_a_text_without_spaces() -> None:
    text = "日本\u0958ख\u1100\u1161語"
    ours, theirs = list(text), [*"日本", "\u0915", "\u093c", "ख", "\uac00", "語"]
    found = aligned([c.encode() for c in ours], [c.encode() for c in theirs], rewrite=NFC)
    assert ["".join(ours[a:b]) for a, b, _, _ in found] == ["日", "本", "ख", "語"]


def test_a_mark_that_is_a_space_to_the_teacher_is_passed_over_alone() -> None:
    ours, theirs = ["a", "▁", "b▁", "c"], ["a", " ", "b", " ", "c"]
    found = aligned(
        [c.encode() for c in ours], [c.encode() for c in theirs], rewrite=lambda text: text.replace("▁", " ")
    )
    assert found == [(0, 1, 0, 1), (3, 4, 4, 5)]


SIZES = st.lists(st.integers(1, 4), max_size=40)
COMPOSING = st.text(alphabet="ae nA\u0301\u0327\u0308\u1100\u1161\u11a8\u0958\u093cक日👍\u05d0", max_size=16)


@given(text=COMPOSING, student=SIZES, teacher=SIZES, tail=st.sampled_from([b"", b"\xe2\x82"]))
def test_across_composed_characters_every_chunk_spells_the_same_on_both_sides(
    text: str, student: list[int], teacher: list[int], tail: bytes
) -> None:
    ours = pieces(text, student) + ([tail] if tail else [])
    theirs = pieces(unicodedata.normalize("NFC", text), teacher)
    found = aligned([*ours], [*theirs], rewrite=NFC)
    for (a, b, c, d), before in zip(found, [(0, 0, 0, 0), *found], strict=False):
        assert a >= before[1]
        assert c >= before[3]
        assert b"".join(ours[a:b]) == b"".join(theirs[c:d])
    if unicodedata.is_normalized("NFC", text) and not tail:
        assert found == by_definition(ours, theirs)


def test_equal_text_needs_no_normaliser_and_another_change_is_not_passed_over() -> None:
    assert aligned([b"a", b"X", b"b"], [b"a", b"Y", b"b"], rewrite=NFC) == [(0, 1, 0, 1)]


@pytest.mark.parametrize(("a", "b", "size"), [(b"", b"x", 0), (b"abc", b"abd", 2), (b"ab", b"abc", 2)])
def test_the_common_prefix_is_counted_in_bytes(a: bytes, b: bytes, size: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == size


def test_python_and_the_tokenizer_compose_alike() -> None:
    """Python tells what the tokenizer's NFC does; characters newer than either's tables would only cost chunks."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="x")
    for text in ("e\u0301 \u0958", "\u1100\u1161\u11a8", "q\u0323\u0307"):
        wanted = fast.backend_tokenizer.normalizer.normalize_str(text)
        assert unicodedata.normalize("NFC", text) == wanted
