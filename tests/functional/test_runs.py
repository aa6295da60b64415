# SPDX-License-Identifier: Apache-2.0
"""Runs laid end to end."""

import numpy as np

from cohobate.functional.runs import joined_runs


def test_each_chunk_gives_its_rows_in_order_and_an_empty_one_gives_none():
    rows, chunk = joined_runs(np.array([4, 0, 9]), np.array([3, 0, 2]))
    assert rows.tolist() == [4, 5, 6, 9, 10]
    assert chunk.tolist() == [0, 0, 0, 2, 2]


def test_no_chunks_give_no_rows():
    rows, chunk = joined_runs(np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    assert len(rows) == len(chunk) == 0
