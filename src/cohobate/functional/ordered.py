# SPDX-License-Identifier: Apache-2.0
"""Integers that sort like floating-point numbers: a maximum, a tie and the id that wins it in one comparison.

Shards of a vocabulary must agree on the largest entries of a row to the last bit, ties included, and a reduction over
ranks compares plain numbers. So value and id become one integer, larger for a larger value and, among equal values,
for a lower id. Finding the k largest of a row is in `largest.py`.
"""

import torch
from torch import Tensor

_LOW_WORD = (1 << 32) - 1


def ordered_bits(values: Tensor) -> Tensor:
    """Integers, as wide as `values`, that sort as they do: -0.0 and 0.0 are equal, NaN is above everything."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    plain = torch.where(values.isnan(), torch.nan, values)  # a NaN's own sign would sort it below -inf
    bits = plain.view(width)
    magnitude = bits & torch.iinfo(width).max
    return torch.where(bits < 0, -magnitude, magnitude)


def from_ordered_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of `dtype` whose `ordered_bits` these are."""
    sign = torch.iinfo(bits.dtype).min
    return torch.where(bits < 0, -bits | sign, bits).view(dtype)


def packed_keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 that sort by value (float32 or narrower), and among equal values the lowest of `ids` in front."""
    return (ordered_bits(values.float()).long() << 32) + (_LOW_WORD - ids)


def unpacked_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """`(values float32, ids int64)` of `packed_keys`."""
    return from_ordered_bits((keys >> 32).int(), torch.float32), _LOW_WORD - (keys & _LOW_WORD)
