# SPDX-License-Identifier: Apache-2.0
"""Identity of vocabularies is proven id by id over bytes: sizes, names and head widths prove and disprove nothing."""

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from cohobate.errors import VocabularyMismatch
from cohobate.teachers.load import load_tokenizer
from cohobate.vocab import (
    SharedVocabulary,
    SubtokenTables,
    check_config_vocab_size,
    check_same_vocabulary,
    fingerprint,
    real_vocab_size,
    special_roles,
    template_fingerprint,
    token_bytes,
)
from cohobate.vocab.tokens import describe
from small_tokenizers import ADDED, SPECIAL, bpe, chat_tokenizer, sentencepiece_tokenizer, word_tokenizer
from tiny import char_tokenizer

WORDS = {"<unk>": 0, "<eos>": 1, "a": 2, "b": 3, "é": 4}


def wrap(backend: Tokenizer, **roles: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def chat(**changes: Any) -> PreTrainedTokenizerFast:
    """A fresh copy of the chat tokenizer, for tests that change it."""
    shared = chat_tokenizer()
    roles = {"eos_token": shared.eos_token, "pad_token": shared.pad_token, "chat_template": shared.chat_template}
    return wrap(shared.backend_tokenizer, **{**roles, **changes})


# ------------------------------------------------------------------ id -> bytes


@settings(max_examples=300)
@given(text=st.text(max_size=40))
def test_the_bytes_of_the_ids_are_the_bytes_of_the_text(text: str):
    tokenizer = wrap(bpe())  # three special tokens, which random text does not spell
    table = token_bytes(tokenizer)
    pieces = [table[i] for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert b"".join(piece for piece in pieces if piece is not None) == text.encode()


def test_byte_fallback_and_the_space_mark_are_read_as_bytes():
    tokenizer = sentencepiece_tokenizer()
    table = token_bytes(tokenizer)
    assert [table[tokenizer.convert_tokens_to_ids(piece)] for piece in ("<0x41>", "<0xF0>", "▁", "▁ab")] == [
        b"A",
        b"\xf0",
        b" ",
        b" ab",
    ]
    ids = tokenizer("b 👍", add_special_tokens=False)["input_ids"]
    assert b"".join(table[i] or b"?" for i in ids) == " b 👍".encode()


def test_a_character_vocabulary_is_its_characters():
    assert token_bytes(word_tokenizer(WORDS)) == [None, None, b"a", b"b", "é".encode()]
    assert token_bytes(char_tokenizer("01"))[2:] == [b"0", b"1"]


def test_added_tokens_and_holes_are_none_and_the_length_is_the_highest_id_plus_one():
    table = token_bytes(chat_tokenizer())
    assert len(table) == real_vocab_size(chat_tokenizer()) == len(chat_tokenizer())
    assert {i for i, piece in enumerate(table) if piece is None} == set(chat_tokenizer().added_tokens_decoder)
    assert len(set(chat_tokenizer().added_tokens_decoder)) == len(SPECIAL) + len(ADDED)
    assert token_bytes(word_tokenizer({**WORDS, "z": 9}))[5:] == [None] * 4 + [b"z"]


@pytest.mark.parametrize(
    "step",
    [
        normalizers.NFKC(),
        normalizers.Lowercase(),
        normalizers.Strip(),
        normalizers.Sequence([normalizers.StripAccents()]),
    ],
)
def test_a_normaliser_that_loses_text_is_refused_and_nfc_is_not(step: Any):
    token_bytes(wrap(bpe(normalizer=normalizers.Sequence([normalizers.NFC()]))))
    with pytest.raises(VocabularyMismatch, match="changes or drops characters of the text"):
        token_bytes(wrap(bpe(normalizer=step)))


def test_a_tokenizer_that_cannot_be_read_is_refused_with_its_reason():
    spaces = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    spaces.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(VocabularyMismatch, match=r"drops characters of the text \(Whitespace\)"):
        token_bytes(wrap(spaces))
    pieces = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    pieces.decoder = decoders.WordPiece()
    with pytest.raises(VocabularyMismatch, match=r"its decoder \(WordPiece\) is not known"):
        check_same_vocabulary(wrap(pieces), wrap(pieces))
    with pytest.raises(VocabularyMismatch, match="no fast tokenizer"):
        fingerprint(object())


# ------------------------------------------------------------------ fingerprints


def test_the_fingerprint_changes_with_every_id_and_role_and_with_nothing_else():
    reference = fingerprint(chat())
    same = [chat(pad_token="<|im_end|>"), chat(chat_template="{{ messages }}"), chat(name_or_path="elsewhere")]
    assert {fingerprint(tokenizer) for tokenizer in same} == {reference}
    more = chat()
    more.add_tokens(["<new>"])
    changed = [more, chat(eos_token="<|endoftext|>"), chat(bos_token="<|im_start|>"), word_tokenizer(WORDS)]
    swapped = word_tokenizer({**WORDS, "a": 3, "b": 2})
    joined = word_tokenizer({"<unk>": 0, "<eos>": 1, "ab": 2, "é": 4})
    assert len({reference, *map(fingerprint, [*changed, swapped, joined])}) == 7


def test_the_fingerprint_does_not_depend_on_saving_and_loading(tmp_path: Any):
    chat().save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert fingerprint(loaded) == fingerprint(chat())
    assert template_fingerprint(loaded) == template_fingerprint(chat())
    assert template_fingerprint(chat(chat_template="{{ messages }}")) != template_fingerprint(chat())
    assert template_fingerprint(wrap(bpe())) is None


def test_roles_are_named_without_the_pad_token():
    assert special_roles(chat()) == {"eos": 2}
    assert special_roles(sentencepiece_tokenizer()) == {"bos": 1, "eos": 2, "unk": 0}


# ------------------------------------------------------------------ the same vocabulary


def test_one_tokenizer_is_the_same_however_it_is_wrapped():
    assert check_same_vocabulary(chat(), chat()) == SharedVocabulary(size=len(chat()))
    assert check_same_vocabulary(chat(), chat(), recorded_text=True) == SharedVocabulary(size=len(chat()))
    one = chat()
    assert check_same_vocabulary(one, one, recorded_text=True) == SharedVocabulary(size=len(one))


def test_heads_of_different_width_over_one_tokenizer_are_cut_to_the_real_ids():
    size = len(chat())
    shared = check_same_vocabulary(chat(), chat(), student_width=size + 271, teacher_width=size + 399)
    assert (shared.size, shared.differences) == (size, ())


def test_a_permuted_vocabulary_of_the_same_size_is_refused_with_the_first_differing_id():
    ours, theirs = word_tokenizer(WORDS), word_tokenizer({**WORDS, "b": 4, "é": 3})
    assert len(ours) == len(theirs)
    with pytest.raises(VocabularyMismatch) as caught:
        check_same_vocabulary(ours, theirs)
    assert "id 3 is b'b' for the student and b'\\xc3\\xa9' for the teacher" in str(caught.value)
    assert "`csd`" in str(caught.value)
    assert "`xtoken`" in str(caught.value)
    with pytest.raises(VocabularyMismatch, match=r"id 2 is b'a' for the student and no token for the teacher"):
        check_same_vocabulary(ours, word_tokenizer({"<unk>": 0, "<eos>": 1, "b": 3, "é": 4}))


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_every_transposition_is_found_at_its_lower_id(seed: int):
    rng = random.Random(seed)
    letters = [chr(0x61 + i) for i in range(20)]
    i, j = sorted(rng.sample(range(20), 2))
    swapped = letters.copy()
    swapped[i], swapped[j] = swapped[j], swapped[i]

    def make(order: list[str]) -> PreTrainedTokenizerFast:
        return word_tokenizer({"<unk>": 0, "<eos>": 1} | {letter: n + 2 for n, letter in enumerate(order)})

    with pytest.raises(VocabularyMismatch, match=rf"id {i + 2} is b'{letters[i]}' .* and b'{letters[j]}' "):
        check_same_vocabulary(make(letters), make(swapped))


def test_more_added_tokens_on_one_side_are_cut_and_told():
    newer = chat()
    newer.add_tokens(["<tool_response>", "</tool_response>"])
    shared = check_same_vocabulary(chat(), newer)
    assert shared.size == len(chat())
    assert f"the teacher has 2 more ids, which are cut: {len(chat())} b'<tool_response>'" in shared.differences[0]
    assert check_same_vocabulary(newer, chat()).size == len(chat())


def test_more_ordinary_tokens_on_one_side_are_refused():
    with pytest.raises(
        VocabularyMismatch, match=r"teacher has 1 ordinary tokens from id 5 \(b'z'\) on, which the student"
    ):
        check_same_vocabulary(word_tokenizer(WORDS), word_tokenizer({**WORDS, "z": 5}))


def test_a_head_narrower_than_its_tokenizer_loses_added_tokens_only():
    size = len(chat())
    shared = check_same_vocabulary(chat(), chat(), student_width=size - 1, teacher_width=size)
    assert shared.size == size - 1
    assert "head has no row for" in shared.differences[0]
    with pytest.raises(VocabularyMismatch, match=r"for which its head of 400 rows has no row"):
        check_same_vocabulary(chat(), chat(), student_width=400)


def test_another_stop_token_is_told_and_refused_only_for_recorded_text():
    base = chat(eos_token="<|endoftext|>")
    shared = check_same_vocabulary(base, chat())
    assert shared.differences == ("eos is 0 ('<|endoftext|>') for the student and 2 ('<|im_end|>') for the teacher",)
    with pytest.raises(VocabularyMismatch, match=r"recorded text would not be the same tokens.*eos is 0"):
        check_same_vocabulary(base, chat(), recorded_text=True)


def normalised() -> PreTrainedTokenizerFast:
    tokenizer = chat()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def digits() -> PreTrainedTokenizerFast:
    tokenizer = chat()
    steps = [pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def without_merges() -> PreTrainedTokenizerFast:
    tokenizer = chat()
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    tokenizer.backend_tokenizer.model = models.BPE(vocabulary, [])
    return tokenizer


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (normalised, "the normalisers differ"),
        (digits, "the pre-tokenizers differ"),
        (without_merges, "the merges differ"),
        (lambda: chat(chat_template="{{ messages }}"), "the chat templates differ"),
        (lambda: chat(bos_token="<|im_start|>"), "bos is none for the student and 1"),
    ],
)
def test_recorded_text_needs_every_rule_of_encoding_to_be_equal(other: Any, reason: str):
    assert check_same_vocabulary(chat(), other()).size == len(chat())
    with pytest.raises(VocabularyMismatch, match=reason):
        check_same_vocabulary(chat(), other(), recorded_text=True)


# ------------------------------------------------------------------ configurations


class Nested:
    def __init__(self, size: int) -> None:
        self.text_config = LlamaConfig(vocab_size=size)


def test_a_teacher_without_a_tokenizer_needs_an_equal_vocab_size():
    shared = check_config_vocab_size(Qwen2Config(vocab_size=32), LlamaConfig(vocab_size=32))
    assert shared == SharedVocabulary(size=32, proven=False)
    assert check_config_vocab_size(Nested(32), LlamaConfig(vocab_size=32)).size == 32
    assert check_config_vocab_size({"text_config": {"vocab_size": 8}}, {"vocab_size": 8}).size == 8
    tokenizer = word_tokenizer(WORDS)
    assert check_config_vocab_size(Nested(32), Nested(32), tokenizer=tokenizer).size == len(tokenizer)


def test_configurations_of_two_sizes_are_refused_with_both_and_with_the_recipes_that_can():
    for student in (Qwen2Config(), Nested(151936)):
        with pytest.raises(VocabularyMismatch) as caught:
            check_config_vocab_size(student, LlamaConfig())
        for word in ("151936", "32000", "`csd`", "`xtoken`", "teacher_processing_class"):
            assert word in str(caught.value)
    with pytest.raises(VocabularyMismatch, match="the teacher's config states no vocab_size"):
        check_config_vocab_size(Qwen2Config(), object())


# ------------------------------------------------------------------ size


def large(words: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([f"<|special_{i}|>" for i in range(22)])
    return wrap(backend)


def test_a_vocabulary_of_realistic_size_is_compared_in_seconds():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    triples = ("".join(triple) for triple in itertools.product(alphabet, repeat=3))
    words = [*alphabet, *itertools.islice(triples, 151_643 - len(alphabet))]  # as many as Qwen2.5 has, and 22 added
    ours = large(words)
    theirs = wrap(ours.backend_tokenizer)
    start = time.process_time()
    shared = check_same_vocabulary(ours, theirs, student_width=151_936, teacher_width=152_064)
    spent = time.process_time() - start
    assert shared == SharedVocabulary(size=151_665)
    assert spent < 2.0
    with pytest.raises(VocabularyMismatch, match="id 151641 is"):
        check_same_vocabulary(ours, large([*words[:-2], words[-1], words[-2]]))


def test_a_message_names_a_tokenizer_and_not_its_class(tmp_path: Path):
    """The class is transformers' own matter (`TokenizersBackend`), and the same for nearly all of them."""
    tokenizer = char_tokenizer()
    assert describe(tokenizer) == "the tokenizer (without a name)"
    tokenizer.save_pretrained(tmp_path / "mine")
    loaded = load_tokenizer(tmp_path / "mine")
    assert describe(loaded) == f"the tokenizer {tmp_path / 'mine'}"
    with pytest.raises(VocabularyMismatch) as caught:
        SubtokenTables.build(loaded, char_tokenizer("01"))
    assert "the tokenizer" in str(caught.value)
    assert type(loaded).__name__ not in str(caught.value)
