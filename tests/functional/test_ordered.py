# SPDX-License-Identifier: Apache-2.0
"""Integers that sort like floats."""

import math

import pytest
import torch

from cohobate.functional.ordered import from_ordered_bits, ordered_bits, packed_keys, unpacked_keys

ASCENDING = [-math.inf, -3.4e4, -1.0, -1e-4, 0.0, 1e-4, 0.5, 1.0, 1.5, 3.4e4, math.inf]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bits_ascend_as_the_numbers_do_and_come_back(dtype: torch.dtype):
    values = torch.tensor(ASCENDING, dtype=dtype)
    bits = ordered_bits(values)
    assert bool((bits.diff() > 0).all())
    assert bits.element_size() == values.element_size()
    assert torch.equal(from_ordered_bits(bits, dtype), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_zeros_are_equal_and_nan_of_either_sign_is_above_infinity(dtype: torch.dtype):
    zero, minus_zero, nan, minus_nan, infinity = ordered_bits(
        torch.tensor([0.0, -0.0, math.nan, -math.nan, math.inf], dtype=dtype)
    ).tolist()
    assert zero == minus_zero
    assert nan == minus_nan > infinity


def test_neighbours_are_told_apart():
    one = torch.tensor(1.0)
    neighbours = torch.stack([one.nextafter(torch.tensor(0.0)), one, one.nextafter(torch.tensor(2.0))])
    assert ordered_bits(neighbours).diff().tolist() == [1, 1]


def test_keys_sort_by_value_then_lower_id_and_come_back():
    values = torch.tensor([1.0, 1.0, 2.0, -1.0, -math.inf, -1.0])
    ids = torch.tensor([7, 3, 900_000, 0, 1, 2**31])
    order = packed_keys(values, ids).argsort(descending=True)
    assert order.tolist() == [2, 1, 0, 3, 5, 4]
    back, back_ids = unpacked_keys(packed_keys(values, ids))
    assert torch.equal(back, values)
    assert torch.equal(back_ids, ids)
