# SPDX-License-Identifier: Apache-2.0
"""A vocabulary read once: the bytes of ids, and added tokens noticed whether or not ids are left free."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cohobate.vocab.pieces import token_pieces
from small_tokenizers import bpe, chat_tokenizer, sentencepiece_tokenizer, word_tokenizer


@pytest.mark.parametrize("kind", [chat_tokenizer, sentencepiece_tokenizer])
@given(data=st.data())
def test_ids_are_spelled_as_their_pieces_joined(kind: type, data: st.DataObject):
    pieces = token_pieces(kind())
    ids = data.draw(st.lists(st.integers(0, len(pieces.pieces) - 1), max_size=30))
    assert pieces.spell(np.array(ids, dtype=np.int64)) == b"".join(pieces.pieces[i] for i in ids)


@pytest.mark.parametrize("with_holes", [False, True])
def test_tokens_added_later_are_noticed(with_holes: bool):
    if with_holes:
        made = word_tokenizer({"<unk>": 0, "<eos>": 1, "a": 2, "b": 5})
    else:
        made = PreTrainedTokenizerFast(tokenizer_object=bpe(size=300), eos_token="<|im_end|>")
    first = token_pieces(made)
    assert token_pieces(made) is first
    assert (b"" in [p for i, p in enumerate(first.pieces) if not first.roles.get(i)]) == with_holes
    made.add_tokens(["<tool>", "<other>"])
    after = token_pieces(made)
    for name in ("<tool>", "<other>"):
        assert after.pieces[made.convert_tokens_to_ids(name)] == name.encode()
    made.add_special_tokens({"pad_token": "<nothing>"})
    assert token_pieces(made).special[made.convert_tokens_to_ids("<nothing>")]
