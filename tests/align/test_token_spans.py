# SPDX-License-Identifier: Apache-2.0
"""Ids of two kinds of tokenizer become chunks of equal bytes; specials, prefix spaces, bad ids."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from cohobate.align import align_tokens
from cohobate.errors import AlignmentError, VocabularyMismatch
from cohobate.vocab.pieces import token_pieces
from small_tokenizers import bpe, chat_tokenizer, sentencepiece_tokenizer


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def other_chat_tokenizer() -> PreTrainedTokenizerFast:
    """Another ByteLevel vocabulary, with a turn end of its own name and no `<think>`."""
    made = PreTrainedTokenizerFast(tokenizer_object=bpe(size=320), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": [AddedToken("<|eot|>", special=True)]})
    return made


shared_other = cache(other_chat_tokenizer)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40).filter(lambda t: "<" not in t and "|" not in t))
def test_any_text_is_covered_by_chunks_of_equal_bytes(text: str):
    ours, theirs = chat_tokenizer(), shared_other()
    student, teacher = ids_of(ours, text), ids_of(theirs, text)
    chunks = align_tokens(ours, student, theirs, teacher)
    assert chunks.orphans(len(student), len(teacher)) == (0, 0)
    a, b = token_pieces(ours).pieces, token_pieces(theirs).pieces
    for s0, s1, t0, t1 in chunks:
        assert b"".join(a[i] for i in student[s0:s1]) == b"".join(b[i] for i in teacher[t0:t1])


def test_a_special_meets_its_own_text_its_role_or_the_one_the_user_names():
    ours, theirs = chat_tokenizer(), shared_other()
    end, eot = ours.convert_tokens_to_ids("<|im_end|>"), theirs.convert_tokens_to_ids("<|eot|>")
    same = theirs.convert_tokens_to_ids("<|im_end|>")
    assert list(align_tokens(ours, [end], theirs, [same])) == [(0, 1, 0, 1)]
    assert list(align_tokens(ours, [end], theirs, [eot])) == []
    assert list(align_tokens(ours, [end], theirs, [eot], special_roles={"<|im_end|>": "<|eot|>"})) == [(0, 1, 0, 1)]
    assert list(align_tokens(ours, [end], sentencepiece_tokenizer(), [2])) == [(0, 1, 0, 1)]  # both end a text


def test_an_added_token_that_is_not_special_is_its_text_and_may_meet_ordinary_tokens():
    ours, theirs = chat_tokenizer(), shared_other()
    student, teacher = ids_of(ours, "<think>"), ids_of(theirs, "<think>")
    assert len(student) == 1 < len(teacher)
    assert list(align_tokens(ours, student, theirs, teacher)) == [(0, 1, 0, len(teacher))]


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("text", ["a cab", " a b", "ab", "", "zß a"])
def test_the_space_that_sentencepiece_invents_is_left_out(legacy: bool, text: str):
    ours, theirs = chat_tokenizer(), sentencepiece_tokenizer(legacy=legacy)
    student, teacher = ids_of(ours, text), ids_of(theirs, text)
    chunks = align_tokens(ours, student, theirs, teacher)
    assert chunks.orphans(len(student), len(teacher)) == (0, 0)
    mirrored = align_tokens(theirs, teacher, ours, student)
    assert [(t0, t1, s0, s1) for s0, s1, t0, t1 in chunks] == list(mirrored)


def test_two_sides_that_both_invent_a_space_agree_about_it():
    ours = sentencepiece_tokenizer()
    ids = ids_of(ours, "a b")
    assert align_tokens(ours, ids, sentencepiece_tokenizer(legacy=True), ids).orphans(len(ids), len(ids)) == (0, 0)


def test_ids_may_be_a_list_an_array_or_a_tensor():
    ours, theirs = chat_tokenizer(), shared_other()
    student, teacher = ids_of(ours, "the dog"), ids_of(theirs, "the dog")
    want = list(align_tokens(ours, student, theirs, teacher))
    assert list(align_tokens(ours, torch.tensor(student), theirs, np.array(teacher, dtype=np.int32))) == want
    assert list(align_tokens(ours, [], theirs, torch.tensor([], dtype=torch.long))) == []


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, -100], r"student_ids\[1\] is -100"),
        ([10**6], r"student_ids\[0\] is 1000000, but the student's tokenizer has the ids 0 to"),
        ([[1]], r"one row of integers, got shape \(1, 1\)"),
        ([0.5], "one row of integers"),
    ],
)
def test_ids_that_are_none_are_refused(ids: list[int], message: str):
    with pytest.raises(AlignmentError, match=message):
        align_tokens(chat_tokenizer(), ids, chat_tokenizer(), [3])


def test_a_special_that_a_side_does_not_have_is_named():
    with pytest.raises(AlignmentError, match="'<eot>', which is no special of the teacher; it has: "):
        align_tokens(chat_tokenizer(), [], chat_tokenizer(), [], special_roles={"<|im_end|>": "<eot>"})


def test_a_tokenizer_that_changes_the_text_is_refused():
    with pytest.raises(VocabularyMismatch, match="NFKC, Lowercase"):
        align_tokens(chat_tokenizer(nfkc=True), [], chat_tokenizer(), [])


def test_the_vocabulary_is_read_once_and_again_when_tokens_were_added():
    made = other_chat_tokenizer()
    first = token_pieces(made)
    assert token_pieces(made) is first
    made.add_tokens(["<tool>"])
    assert token_pieces(made).pieces[-1] == b"<tool>"
