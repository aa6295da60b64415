# SPDX-License-Identifier: Apache-2.0
"""Parts of a student's logits: where rows and columns are, and sums over parts with their gradients."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from cohobate.functional.moments import WHOLE
from cohobate.functional.student_shards import StudentShards, added, row_places, rows_here

from .thread_shards import Meeting, ThreadShards, on_shards


def shard(width: int, first_id: int) -> StudentShards:
    meeting = Meeting(1)
    return StudentShards(width=width, first_id=first_id, vocabulary=ThreadShards(meeting, 0, first_id))


def test_rows_are_found_where_they_lie_and_padding_nowhere():
    positions = np.array([4, -1, 0, 9, 2])
    places = row_places(positions, 6)
    assert places.tolist() == [2, -1, 4, -1, 0, -1]
    assert rows_here(np.array([4, 5, 0]), places).tolist() == [0, -1, 2]
    assert rows_here(np.array([4, 5]), None).tolist() == [4, 5]
    with pytest.raises(ValueError, match="positions name row 2 twice"):
        row_places(np.array([2, 1, 2]), 6)
    assert row_places(np.array([], dtype=np.int64), 2).tolist() == [-1, -1]


def test_logits_are_picked_and_gradients_added_in_their_own_shard_alone():
    whole = torch.arange(24.0).view(3, 8)
    rows, columns = torch.tensor([0, 1, 2, 2, 2]), torch.tensor([7, 0, 3, 3, 5])
    bounds, gradient = [0, 3, 3, 8], torch.zeros(3, 8)
    picked = torch.zeros(5)
    for start, stop in pairwise(bounds):
        part = shard(stop - start, start)
        padded = torch.nn.functional.pad(whole[:, start:stop], (0, 2), value=torch.nan)
        picked += part.pick(padded, rows, columns)
        part.add_at(gradient[:, start:stop], rows, columns, torch.ones(5))
    assert picked.tolist() == whole[rows, columns].tolist()
    want = torch.zeros(3, 8)
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        want[row, column] += 1
    assert gradient.equal(want)
    alone = StudentShards(width=8)
    assert alone.pick(whole, rows, columns).equal(whole[rows, columns])
    again = torch.zeros(3, 8)
    alone.add_at(again, rows, columns, torch.ones(5))
    assert again.equal(want)


@pytest.mark.parametrize("both_ways", [False, True])
def test_a_sum_hands_its_gradient_through_or_adds_it_up(both_ways: bool):
    weights = (torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))

    def gradient(part: slice, shards: ThreadShards) -> tuple[Tensor, Tensor, list[str]]:
        mine = torch.tensor([1.0 + part.start, 3.0], requires_grad=True)
        total = added(mine, shards, both_ways=both_ways)
        (grad,) = torch.autograd.grad((total * weights[part.start]).sum(), mine)
        return total.detach(), grad, shards.exchanged

    for rank, (total, grad, exchanged) in enumerate(on_shards([0, 1, 2], gradient)):
        assert total.tolist() == [3.0, 6.0]
        assert grad.tolist() == ([11.0, 22.0] if both_ways else weights[rank].tolist())
        assert exchanged == ["sum"] * (1 + both_ways)


def test_without_shards_a_sum_is_what_it_was():
    values = torch.ones(3)
    assert added(values, WHOLE, both_ways=True) is values
