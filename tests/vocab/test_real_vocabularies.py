# SPDX-License-Identifier: Apache-2.0
"""Tables and projections between published vocabularies of three kinds: every chain complete, and the destination's
own, as a byte pair encoder written here from its definition finds it."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cohobate.errors import VocabularyMismatch
from cohobate.vocab import Projection, SubtokenTables, token_bytes
from cohobate.vocab.chains import SubtokenTable
from real_tokenizers import BY_NAME, PAIRS, mistral, mistral_model, tekken, tekken_ranks

pytestmark = pytest.mark.real

SIZES = {"deepseek": 129_280, "mistral": 32_768, "tekken": 131_072}
Rank = Callable[[bytes, bytes], float | None]  # of joining two neighbours; the lowest is joined first


@cache
def tables(pair: tuple[str, str]) -> SubtokenTables:
    return SubtokenTables.build(*(BY_NAME[name]() for name in pair))


@cache
def pieces_of(name: str) -> list[bytes | None]:
    return token_bytes(BY_NAME[name]())


def directions(pair: tuple[str, str]) -> list[tuple[str, str, SubtokenTable]]:
    made = tables(pair)
    return [(*pair, made.student_to_teacher), (*pair[::-1], made.teacher_to_student)]


@pytest.mark.parametrize("name", SIZES)
def test_a_vocabulary_has_the_ids_it_is_known_for_and_each_ordinary_one_has_bytes(name: str):
    pieces = pieces_of(name)
    assert len(pieces) == SIZES[name]
    assert {bytes([byte]) for byte in range(256)} <= set(pieces)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("text", ["x = [1, 2]\r\n\ty", "naïve café 日本語", "👩‍👩‍👧 ﬁ", "e\u0301\u200d\u202e"])
def test_the_bytes_of_the_ids_are_the_text(name: str, text: str):
    pieces = pieces_of(name)
    spelled = b"".join(pieces[i] or b"" for i in BY_NAME[name]()(text, add_special_tokens=False)["input_ids"])
    assert spelled.removeprefix(b" ") == text.encode()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_chain_spells_its_token_and_the_pair_validates(pair: tuple[str, str]):
    for source, destination, table in directions(pair):
        pieces, wanted = (pieces_of(name) for name in (source, destination))
        assert table.header["unwritable"] == 0
        seen: set[bytes] = set()
        for piece, chain in zip(pieces, table, strict=True):
            if piece and piece not in seen:  # of several with the same bytes the lowest id has the chain
                assert b"".join(wanted[i] or b"" for i in chain) == piece
                seen.add(piece)
    tables(pair).validate(*(BY_NAME[name]() for name in pair))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_bos_and_eos_meet_and_nothing_else_of_the_specials(pair: tuple[str, str]):
    student, teacher = (BY_NAME[name]() for name in pair)
    made, ours, theirs = tables(pair), *(pieces_of(name) for name in pair)
    found = {(int(s), int(t)) for s, t in zip(*made.common, strict=True) if ours[s] is None or theirs[t] is None}
    roles = [role for role in ("bos_token_id", "eos_token_id", "unk_token_id") if getattr(student, role) is not None]
    assert found == {
        (getattr(student, role), getattr(teacher, role)) for role in roles if getattr(teacher, role) is not None
    }


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_swapped_tokenizers_are_refused(pair: tuple[str, str]):
    student, teacher = (BY_NAME[name]() for name in pair)
    with pytest.raises(VocabularyMismatch, match="swapped"):
        tables(pair).validate(teacher, student)


def join_by_rank(piece: bytes, parts: Sequence[bytes], rank: Rank) -> list[bytes]:
    """Byte pair encoding from its definition: join the neighbours of lowest rank until none can be joined."""
    parts = list(parts)
    while True:
        ranked = [(found, i) for i, pair in enumerate(pairwise(parts)) if (found := rank(*pair)) is not None]
        if not ranked:
            assert b"".join(parts) == piece
            return parts
        _, i = min(ranked)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def tekken_parts(piece: bytes) -> list[bytes]:
    ranks, _ = tekken_ranks()
    return join_by_rank(piece, [bytes([byte]) for byte in piece], lambda a, b: ranks.get(a + b))


def mistral_parts(piece: bytes) -> list[bytes]:
    """SentencePiece joins characters by the scores of its model; one it does not know is left as its bytes."""
    scores = mistral_scores()
    text = piece.decode()
    parts = join_by_rank(piece, [c.encode() for c in text], lambda a, b: _negative(scores.get(a + b)))
    return [x for part in parts for x in ([part] if part in scores else [bytes([byte]) for byte in part])]


def _negative(score: float | None) -> float | None:
    return None if score is None else -score


@cache
def mistral_scores() -> dict[bytes, float]:
    import sentencepiece

    model: Any = sentencepiece.SentencePieceProcessor(model_file=str(mistral_model()))
    ordinary = [i for i in range(len(model)) if not (model.is_control(i) or model.is_byte(i) or model.is_unknown(i))]
    return {model.id_to_piece(i).replace("▁", " ").encode(): model.get_score(i) for i in ordinary}


@pytest.mark.parametrize("by_hand", [tekken_parts, mistral_parts], ids=["tekken", "mistral"])
def test_a_chain_is_the_destinations_own_spelling(by_hand: Callable[[bytes], list[bytes]]):
    destination = "tekken" if by_hand is tekken_parts else "mistral"
    pieces, wanted = pieces_of("deepseek"), pieces_of(destination)
    table = next(table for pair in PAIRS for s, d, table in directions(pair) if (s, d) == ("deepseek", destination))
    known = set(wanted)
    rng, checked = random.Random(0), 0
    for token_id in rng.sample(range(len(pieces)), 4000):
        piece = pieces[token_id]
        if not piece or piece in known or (destination == "mistral" and not is_text(piece)):
            continue
        assert [wanted[i] for i in table[token_id]] == by_hand(piece), piece
        checked += 1
    assert checked > 1000


def is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_tokens_that_are_no_text_alone_have_chains_too():
    made = tables(("deepseek", "mistral")).student_to_teacher
    broken = [i for i, piece in enumerate(pieces_of("deepseek")) if piece and not is_text(piece)]
    assert len(broken) > 500
    assert all(made[i] for i in broken)


def test_a_projection_between_them_validates_and_is_exact_where_the_tables_are():
    projection = Projection.build(mistral(), tekken())
    projection.validate(mistral(), tekken())
    counterpart = tables(("mistral", "tekken")).student_to_teacher.counterpart
    assert np.array_equal(projection.exact, counterpart >= 0)
    assert np.array_equal(projection.indices[projection.exact, 0], counterpart[counterpart >= 0])


def unigram() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -2.0)], unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def lossy() -> PreTrainedTokenizerFast:
    made = Tokenizer.from_str(tekken().backend_tokenizer.to_str())
    made.normalizer = normalizers.NFKC()
    return PreTrainedTokenizerFast(tokenizer_object=made, name_or_path="claude-like")


def without_bytes() -> PreTrainedTokenizerFast:
    """SentencePiece BPE without byte fallback: what is no letter of it cannot be written."""
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "ab": 4}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", name_or_path="letters")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (unigram, "is a Unigram vocabulary.*decoder is Metaspace.*need BPE"),
        (lossy, r"claude-like changes or drops characters of the text \(NFKC\).*decoder is ByteLevel"),
        (without_bytes, r"letters cannot write \d+ of the .* tokens.*decoder is Metaspace"),
    ],
)
@pytest.mark.parametrize("real_side", [0, 1])
def test_everything_else_is_refused_with_its_name_and_decoder_on_either_side(
    other: Callable[[], PreTrainedTokenizerFast], message: str, real_side: int
):
    pair = [mistral(), other()] if real_side == 0 else [other(), mistral()]
    with pytest.raises(VocabularyMismatch, match=message):
        SubtokenTables.build(*pair)
