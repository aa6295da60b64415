# SPDX-License-Identifier: Apache-2.0
"""Rows of any strides as matrices: every row once, in order, never a copy."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cohobate.functional.kernels import cpu, plain
from cohobate.parallel import tiles
from cohobate.parallel.tiles import num_rows, row_tiles

MAKERS: dict[str, Callable[[], Tensor]] = {
    "one row": lambda: torch.arange(7.0),
    "a matrix": lambda: torch.arange(21.0).view(3, 7),
    "four axes": lambda: torch.arange(168.0).view(2, 3, 4, 7),
    "a slice of positions": lambda: torch.arange(140.0).view(4, 5, 7)[:, :-1],
    "a slice of batches": lambda: torch.arange(140.0).view(4, 5, 7)[::2],
    "swapped": lambda: torch.arange(140.0).view(4, 5, 7).transpose(0, 1),
    "vocabulary first": lambda: torch.arange(140.0).view(7, 4, 5).movedim(0, -1),
    "repeated": lambda: torch.arange(7.0).expand(4, 5, 7),
    "axes of one": lambda: torch.arange(28.0).view(1, 4, 1, 7)[:, ::2],
    "no rows": lambda: torch.zeros(0, 3, 7),
    "no columns": lambda: torch.zeros(4, 3, 0),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kernels", [plain, cpu], ids=["plain", "cpu"])
def test_tiles_are_the_rows_in_order_and_no_copies(name: str, kernels: object, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "CHUNK_BYTES", 4 * 10 * 7 * 3)  # three rows at a time
    x = MAKERS[name]()
    flat = x.reshape(num_rows(x), x.shape[-1])
    seen = []
    for rows, (tile,) in row_tiles(kernels, x):  # pyright: ignore[reportArgumentType]
        assert torch.equal(tile, flat[rows])
        assert tile.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert kernels is cpu or len(tile) <= 3 or tile.numel() == 0
        seen += range(rows.start, rows.stop)
    assert seen == list(range(num_rows(x)))


def test_tensors_of_unlike_strides_and_widths_go_together():
    x, y = torch.arange(60.0).view(4, 5, 3)[:, :-1], torch.arange(32.0).view(4, 4, 2)
    got = list(row_tiles(cpu, x, y))
    assert [rows for rows, _ in got] == [slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 16)]
    assert all(torch.equal(a, x[i]) and torch.equal(b, y[i]) for i, (_, (a, b)) in enumerate(got))


def test_a_matrix_is_one_tile_where_the_kernels_keep_to_small_blocks():
    assert len(list(row_tiles(cpu, torch.zeros(8, 500, 9)))) == 1
