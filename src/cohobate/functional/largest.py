# SPDX-License-Identifier: Apache-2.0
"""The k largest entries of each row of logits, in order, ties to the lower id.

`torch.topk` leaves open which of several equal logits it keeps, and bf16 logits are full of equals; shards of a
vocabulary, or two runs, would disagree. On a CPU it also takes ten passes where two are enough: the k-th largest of
the maxima of some blocks of columns is a bound below which nothing can be among the k largest, and few entries stay
above it. Only those are sorted. Other devices sort integers that carry value and id (`ordered.py`).

NaN counts as largest. n rows, V columns.
"""

import numpy as np
import torch
from torch import Tensor

from cohobate.functional.logprobs import wide_dtype
from cohobate.functional.ordered import packed_keys, unpacked_keys

_BLOCK_BYTES = 2**20  # float32 rows at a time: they and what is made of them stay in a core's cache
_SORT_BYTES = 64 * 2**20  # of keys at a time where whole rows are sorted


def largest_entries(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`(values, ids int64)` of the `k <= V` largest of each row, descending: `[n, V] -> [n, k]` twice; detached.

    Values are float32, or float64 where the logits are.
    """
    logits = logits.detach()
    num_rows, width = logits.shape
    assert k <= width
    values = torch.empty(num_rows, k, dtype=wide_dtype(logits), device=logits.device)
    ids = torch.empty(num_rows, k, dtype=torch.int64, device=logits.device)
    bounded = logits.device.type == "cpu" and logits.dtype != torch.float64 and 0 < 8 * k <= width
    row_bytes = width * (4 if bounded else 8)
    step = max(1, (_BLOCK_BYTES if bounded else _SORT_BYTES) // max(row_bytes, 1))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        values[rows], ids[rows] = (_above_a_bound if bounded else _sorted)(logits[rows], k)
    return values, ids


def _sorted(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if logits.dtype == torch.float64:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    keys = packed_keys(logits, torch.arange(logits.shape[-1], device=logits.device))
    return unpacked_keys(keys.topk(k).values)


def _above_a_bound(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same where V is many times k, from the entries that reach the bound: those of each row fill `[n, C]`."""
    x = _float32(logits)  # [n, V]
    num_rows, width = x.shape
    depth = width // (4 * k)  # columns of a block: more blocks bind tighter, and cost more to sort
    blocks = width // depth
    maxima = x[:, : blocks * depth].reshape(num_rows, depth, blocks).max(1)  # column c is in block c modulo `blocks`
    maxima = np.concatenate([maxima, x[:, blocks * depth :]], axis=1)  # and the columns left over
    if np.isnan(maxima).any():
        return _sorted(logits, k)
    bound = np.partition(maxima, -k, axis=1)[:, -k]  # [n]
    flat = np.flatnonzero(x >= bound[:, None])
    row = flat // width
    counts = np.bincount(row, minlength=num_rows)
    place = np.arange(flat.size) - (np.cumsum(counts) - counts)[row]  # of the candidate within its row
    candidates = torch.full((num_rows, int(counts.max(initial=k))), torch.iinfo(torch.int64).min)
    keys = packed_keys(torch.from_numpy(x.reshape(-1)[flat]), torch.from_numpy(flat - row * width))
    candidates[torch.from_numpy(row), torch.from_numpy(place)] = keys
    return unpacked_keys(candidates.topk(k).values)


def _float32(logits: Tensor) -> np.ndarray:
    """`logits` as numpy's float32, which has no bfloat16: its bits are the upper half of a float32's."""
    if logits.dtype == torch.bfloat16:
        bits = logits.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        np.left_shift(bits, 16, out=bits)
        return bits.view(np.float32)
    return logits.numpy().astype(np.float32, copy=False)
