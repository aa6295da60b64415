# SPDX-License-Identifier: Apache-2.0
"""The k largest entries of rows, by whichever way is taken, are what a stable sort in plain Python gives."""

import math

import pytest
import torch
from torch import Tensor

from cohobate.functional import largest
from cohobate.functional.largest import largest_entries


def sorted_by_hand(rows: Tensor, k: int) -> list[list[int]]:
    return [sorted(range(len(row)), key=lambda v, row=row: (-row[v], v))[:k] for row in rows.tolist()]


def rows_of(kind: str, width: int, dtype: torch.dtype) -> Tensor:
    rows = torch.randn(9, width, generator=torch.Generator().manual_seed(width)) * 3
    if kind == "ties":
        rows = rows.round()
    elif kind == "all equal":
        rows.fill_(0.5)
    elif kind == "mostly forbidden":
        rows[:, width // 8 :] = -math.inf
    elif kind == "both zeros":
        rows = torch.where(rows > 0, 0.0, -0.0)
    return rows.to(dtype)


@pytest.mark.parametrize("kind", ["ordinary", "ties", "all equal", "mostly forbidden", "both zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("width", "k"), [(700, 1), (700, 20), (701, 87), (50, 20), (50, 50), (3, 0)])
def test_entries_descend_and_the_lower_of_equals_comes_first(kind: str, dtype: torch.dtype, width: int, k: int):
    rows = rows_of(kind, width, dtype)
    values, ids = largest_entries(rows, k)
    assert ids.tolist() == sorted_by_hand(rows, k)
    assert torch.equal(values, rows.gather(-1, ids).to(values.dtype))
    assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch):
    rows = rows_of("ties", 700, torch.float32)
    want = largest_entries(rows, 20)
    monkeypatch.setattr(largest, "_BLOCK_BYTES", 700 * 4 * 2)  # two rows at a time
    assert all(torch.equal(a, b) for a, b in zip(largest_entries(rows, 20), want, strict=True))


@pytest.mark.parametrize("place", [3, 699])
@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_nan_counts_as_largest(place: int, nan: float):
    rows = rows_of("ordinary", 700, torch.float32)
    rows[4, place] = nan
    ids = largest_entries(rows, 20)[1]
    assert ids[4, 0] == place
    rows[4, place] = math.inf
    assert torch.equal(ids, largest_entries(rows, 20)[1])


def test_rows_of_any_strides_are_read():
    whole = rows_of("ordinary", 1400, torch.bfloat16)
    assert torch.equal(largest_entries(whole[::2, :700], 20)[1], largest_entries(whole[::2, :700].clone(), 20)[1])
    assert torch.equal(largest_entries(whole.T[:9, :9], 5)[1], largest_entries(whole.T[:9, :9].clone(), 5)[1])
