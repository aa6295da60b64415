# SPDX-License-Identifier: Apache-2.0
"""What counts as a control token is decided by the tokenizer itself; what is read as one, by the caller."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cohobate.data.control import _MARKERS, ControlTokens, Span
from cohobate.errors import ConfigError, DataError
from cohobate.vocab import token_bytes
from small_tokenizers import ADDED, SPECIAL, chat_tokenizer, sentencepiece_tokenizer, word_tokenizer

PIECES = [
    *SPECIAL,
    *ADDED,
    *(
        "<|im_",
        "end|>",
        "|>",
        "<|",
        "<",
        "|",
        ">",
        "think",
        "</",
        "<s>",
        "</s>",
        "<unk>",
        "<0x41>",
        "\ufdd0",
        "\ufdd1",
    ),
    *(
        " ",
        "  ",
        "\n",
        "\t",
        "a",
        "ab",
        "42",
        "é",
        "e\u0301",
        "日本",
        "👍",
        "\U000f0000",
        "\U0010fffd",
        "▁",
        "Ġ",
        "\0",
    ),
]
hostile = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)
guard = cache(ControlTokens)


def control_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    return set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}


def default_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@settings(max_examples=800)
@given(text=hostile, ignore_merges=st.booleans())
def test_typed_text_gives_no_control_token_and_decodes_to_itself(text: str, ignore_merges: bool):
    tokenizer = chat_tokenizer(ignore_merges=ignore_merges)
    ids = guard(tokenizer).encode(text, ())
    assert not control_ids(tokenizer) & set(ids)
    assert tokenizer.decode(ids) == text


@settings(max_examples=300)
@given(text=hostile)
def test_the_control_tokens_found_are_those_that_the_tokenizer_reads(text: str):
    for tokenizer in (chat_tokenizer(), chat_tokenizer(nfkc=True), sentencepiece_tokenizer()):
        read = [i for i in default_ids(tokenizer, text) if i in control_ids(tokenizer)]
        assert [
            span.token_id for span in guard(tokenizer).find(text) if span.token_id in control_ids(tokenizer)
        ] == read


@settings(max_examples=300)
@given(text=hostile, legacy=st.booleans())
def test_a_sentencepiece_tokenizer_gives_no_control_token_and_the_bytes_of_the_text(text: str, legacy: bool):
    tokenizer = sentencepiece_tokenizer(legacy=legacy)
    ids = guard(tokenizer).encode(text, ())
    assert not control_ids(tokenizer) & set(ids)
    said = b"".join(piece or b"?" for piece in map(token_bytes(tokenizer).__getitem__, ids)).decode()
    written = text.replace("▁", " ")  # the one character that these vocabularies use up
    assert said in (written, f" {written}")


@pytest.mark.parametrize("text", ["<THINK>", "＜ｔｈｉｎｋ＞", "a <Think> b"])
def test_text_that_the_normaliser_turns_into_a_control_token_is_caught(text: str):
    tokenizer = chat_tokenizer(nfkc=True)
    assert set(default_ids(tokenizer, text)) & control_ids(tokenizer)
    assert not set(guard(tokenizer).encode(text, ())) & control_ids(tokenizer)


@pytest.mark.parametrize("token", [*SPECIAL, *ADDED])
def test_an_allowed_place_is_read_as_the_token_and_the_same_words_elsewhere_are_not(token: str):
    tokenizer = chat_tokenizer()
    token_id = tokenizer.convert_tokens_to_ids(token)
    text = f"a {token}b{token}"
    ids = guard(tokenizer).encode(text, [Span(2, 2 + len(token), token_id)])
    assert [i for i in ids if i in control_ids(tokenizer)] == [token_id]
    before = default_ids(tokenizer, "a ")
    assert ids[: len(before) + 1] == (*before, token_id)
    assert tokenizer.decode(ids) == text


@settings(max_examples=300)
@given(text=hostile)
def test_with_every_found_place_allowed_the_ids_are_the_default_ones_also_through_the_twin(text: str):
    for tokenizer in (chat_tokenizer(), sentencepiece_tokenizer(), sentencepiece_tokenizer(legacy=True)):
        control = guard(tokenizer)
        spans = control.find(text)
        assert control.encode(text, spans) == control.encode(text, None) == default_ids(tokenizer, text)
        marker = next(m for m in _MARKERS if m not in text)
        written, position = "", 0
        for start, end, token_id in spans:
            written += text[position:start] + f"{marker}{token_id}{marker}"
            position = end
        assert tuple(control._twin(marker).encode(written + text[position:]).ids) == default_ids(tokenizer, text)


def test_a_word_of_the_vocabulary_that_is_a_control_token_is_spelled_in_smaller_pieces():
    tokenizer = word_tokenizer({"<unk>": 0, "<eos>": 1, "a": 2, "b": 3, "$": 4})
    tokenizer.add_special_tokens({"bos_token": "$"})
    assert default_ids(tokenizer, "a$b<eos>") == (2, 4, 3, 1)
    assert ControlTokens(tokenizer).encode("a$b<eos>", ()) == (2, 0, 3, 0, 0, 0, 0, 0)  # "$" and "<" … are no letters


def test_white_space_that_is_an_added_token_is_text():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chat_tokenizer().backend_tokenizer)
    tokenizer.add_tokens(["    "])
    spaces = tokenizer.convert_tokens_to_ids("    ")
    control = ControlTokens(tokenizer)
    assert not control.find("a    b")
    assert spaces in control.encode("a    b", ())
    assert spaces in control.encode("a    b<think>", ())


def test_text_after_other_text_gets_no_prefix_space():
    for legacy in (False, True):
        tokenizer = sentencepiece_tokenizer(legacy=legacy)
        control = guard(tokenizer)
        assert tokenizer.convert_ids_to_tokens(control.encode("ab", ())) == ["▁ab"]
        assert tokenizer.convert_ids_to_tokens(control.encode_after("ab", ())) == ["ab"]
        assert tokenizer.convert_ids_to_tokens(control.encode_after("ab</s>", None)) == ["ab", "</s>"]
        assert "</s>" not in tokenizer.convert_ids_to_tokens(control.encode_after("ab</s>", ()))


@settings(max_examples=300)
@given(text=hostile)
def test_text_after_other_text_is_whole(text: str):
    tokenizer = chat_tokenizer()
    for continuation in (text, f"\n{text}", f"a{text}"):
        assert tokenizer.decode(guard(tokenizer).encode_after(continuation, ())) == continuation


def test_text_that_would_grow_together_with_what_stands_before_it_is_whole_too():
    lines = Tokenizer(models.BPE({"\n": 0, "\n\n": 1, "a": 2, "b": 3}, [("\n", "\n")]))
    assert ControlTokens(PreTrainedTokenizerFast(tokenizer_object=lines)).encode_after("\nb", None) == (0, 3)


def test_a_text_of_every_noncharacter_is_refused_and_of_all_but_one_is_not():
    control = guard(chat_tokenizer())
    with pytest.raises(DataError, match="noncharacter"):
        control.encode("<think>" + "".join(_MARKERS), ())
    ids = control.encode("<think>" + "".join(_MARKERS[:-1]), ())
    assert not control_ids(chat_tokenizer()) & set(ids)


def test_a_text_that_the_vocabulary_cannot_write_names_the_reason():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(DataError, match="cannot encode the text"):
        ControlTokens(PreTrainedTokenizerFast(tokenizer_object=tokenizer)).encode("c", None)


def test_a_tokenizer_without_a_fast_backend_is_refused():
    with pytest.raises(ConfigError, match="no fast tokenizer"):
        ControlTokens(object())
