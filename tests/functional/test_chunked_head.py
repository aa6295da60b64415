# SPDX-License-Identifier: Apache-2.0
"""The chunk loop: every row once, in even chunks, of a size that a budget allows."""

from itertools import product

import torch

from cohobate.functional.chunked_head import row_chunks, rows_per_chunk


def test_chunks_cover_every_row_once_and_are_even():
    for num_rows, rows in product(range(12), range(1, 8)):
        slices = list(row_chunks(num_rows, rows))
        assert [i for c in slices for i in range(num_rows)[c]] == list(range(num_rows))
        sizes = [c.stop - c.start for c in slices]
        assert all(1 <= size <= rows for size in sizes)
        assert len(sizes) == -(-num_rows // rows)


def test_a_budget_becomes_a_number_of_rows():
    def rows(**given: int | None) -> int:
        return rows_per_chunk(torch.zeros(1), 100, torch.float32, given.get("size"), given.get("bytes"))

    assert rows(size=5) == 5
    assert rows(bytes=1) == 1
    assert rows(bytes=7 * 2 * 100 * 4) == 7
    assert rows() == 512  # with more the products are no faster
