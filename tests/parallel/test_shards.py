# SPDX-License-Identifier: Apache-2.0
"""Shards that check each other, seen from one process; what groups exchange is in `test_vocab_ranks.py`."""

import pytest
import torch

from cohobate.functional.moments import WHOLE, Shards
from cohobate.parallel.shards import CheckedShards, GroupShards, rank_and_size, shards_of


def test_no_group_is_the_whole_vocabulary():
    assert shards_of(None) is WHOLE
    assert shards_of(None, 5) is WHOLE
    assert rank_and_size(None) == (0, 1)


def test_all_kinds_are_shards():
    checked = CheckedShards(None, [], lambda table: None)
    assert isinstance(checked, Shards)
    assert isinstance(GroupShards.__new__(GroupShards), Shards)


def test_facts_ride_in_the_maximum_and_passengers_in_the_sum():
    values = torch.tensor([[1.0, -torch.inf], [2.0, 3.0]])
    shards = CheckedShards(None, [3.0, -1.0], lambda table: ("agreed", table), lambda: torch.ones(2, 3))
    assert torch.equal(shards.max(values), values)
    assert shards.agreed == ("agreed", [[3.0, -1.0]])
    assert torch.equal(shards.sum(values), values)
    assert shards.carried is not None
    assert torch.equal(shards.carried, torch.ones(2, 3))
    assert torch.equal(shards.sum(values[:1]), values[:1])  # a second sum carries nothing


def test_what_the_check_raises_comes_out_of_the_maximum():
    def refuse(table: list[list[float]]) -> None:
        raise ValueError(f"not {table}")

    with pytest.raises(ValueError, match=r"not \[\[7.0\]\]"):
        CheckedShards(None, [7.0], refuse).max(torch.zeros(0))
