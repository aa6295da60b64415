# SPDX-License-Identifier: Apache-2.0
"""Ranks that agree before they exchange, seen from one; grids of several: `test_cross_tokenizer_ranks.py`."""

import pytest
import torch

from cohobate.parallel.agreement import Grid

ALONE = Grid(vocabulary=None, sequence=None)
CPU = torch.device("cpu")


def test_one_rank_is_a_grid_of_one_and_sees_its_own_facts():
    assert (ALONE.shape, ALONE.place) == ((1, 1), (0, 0))
    made, table = ALONE.made_by_all(lambda: ("made", [3.0, -1.0, float(2**52 + 1)]), 3, CPU)
    assert made == "made"
    assert table == [[[3.0, -1.0, float(2**52 + 1)]]]


def test_a_rank_without_others_raises_what_it_found():
    def fail() -> tuple[str, list[float]]:
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        ALONE.made_by_all(fail, 3, CPU)
