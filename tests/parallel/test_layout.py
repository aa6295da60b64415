# SPDX-License-Identifier: Apache-2.0
"""Where each rank's ids begin, told or derived; what is refused is in `test_vocab_ranks.py`, on ranks."""

import pytest
import torch

from cohobate.parallel.layout import ShardSpan, agreed_layout, exact


def agreed(*shards: tuple[ShardSpan, int]):
    return agreed_layout([span.facts(width) for span, width in shards])


def test_without_a_word_shards_follow_each_other_in_rank_order():
    layout = agreed((ShardSpan(), 5), (ShardSpan(), 0), (ShardSpan(), 2))
    assert (layout.starts, layout.widths, layout.vocab_size) == ((0, 5, 5), (5, 0, 2), 7)


def test_told_shards_may_lie_in_any_order():
    layout = agreed((ShardSpan(start=4), 3), (ShardSpan(stop=4), 4), (ShardSpan(start=7, stop=7), 0))
    assert (layout.starts, layout.vocab_size) == ((4, 0, 7), 7)
    assert layout.order == [1, 0, 2]


def test_an_empty_shard_comes_before_the_shard_that_begins_where_it_does():
    layout = agreed((ShardSpan(start=0), 3), (ShardSpan(start=3), 2), (ShardSpan(start=0), 0))
    assert layout.order == [2, 0, 1]


def test_padding_is_what_lies_beyond_the_vocabulary():
    span = ShardSpan(vocab_size=9)
    x = torch.arange(5.0)[None]
    assert [span.real_columns(x, rank).shape[-1] for rank in (0, 1, 2)] == [5, 4, 0]
    assert agreed((span, 5), (span, 5), (span, 5)).vocab_size == 9
    told = ShardSpan(start=7, vocab_size=9)
    assert told.real_columns(x, 0).tolist() == [[0.0, 1.0]]
    told_by_its_end = ShardSpan(stop=12, vocab_size=10)
    assert told_by_its_end.real_columns(x, 0).tolist() == [[0.0, 1.0, 2.0]]


def test_facts_stay_apart_from_all_ids_where_float32_cannot_hold_them():
    assert exact(-(2**40)) < 0
    assert exact(2**40) == 2**24
    assert exact(151_936) == 151_936


def test_no_columns_at_all_are_no_vocabulary_to_cut():
    with pytest.raises(ValueError, match=r"global_vocab_size must be in \[1, 0\]"):
        agreed((ShardSpan(start=0, vocab_size=1), 0))
