# SPDX-License-Identifier: Apache-2.0
"""Two small ByteLevel BPE tokenizers over the characters of `tiny`: other merges, other ids, other specials."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny import CHARACTERS

_PIECES = [character.replace(" ", "Ġ") for character in CHARACTERS]  # as ByteLevel writes a space


def _bpe(merges: list[tuple[str, str]], first: list[str], *, order: int) -> PreTrainedTokenizerFast:
    pieces = [*_PIECES[::order], *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate([*first, *pieces])}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(first)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=first[0], eos_token=first[1])


@cache
def student_tokenizer() -> PreTrainedTokenizerFast:
    """27 ids: pad 0, eos 1, the characters, and four pairs of them."""
    return _bpe([("1", "2"), ("3", "4"), ("a", "b"), ("=", "5")], ["<pad>", "<eos>"], order=1)


@cache
def teacher_tokenizer() -> PreTrainedTokenizerFast:
    """29 ids: three specials, the characters the other way round, and others of their pairs and triples."""
    merges = [("2", "3"), ("1", "2"), ("12", "0"), ("b", "c"), ("+", "1")]
    return _bpe(merges, ["<none>", "<end>", "<other>"], order=-1)
