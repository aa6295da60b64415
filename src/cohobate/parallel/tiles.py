# SPDX-License-Identifier: Apache-2.0
"""Logits `[..., V]` as two-dimensional tiles of whole rows, without copying them.

`logits[:, :-1]`, the commonest slice of all, is no longer one matrix, and `reshape` would copy it: the very tensor
that nobody has room for twice. So leading axes are split until what is left can be viewed as `[rows, V]`. Kernels
that keep their temporaries small get whatever is left in one piece; the plain ones get bounded chunks of rows.
"""

from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType

from torch import Tensor

from cohobate.functional.chunked_head import row_chunks
from cohobate.functional.kernels import plain
from cohobate.functional.logprobs import wide_dtype

CHUNK_BYTES = 64 * 2**20  # of all temporaries of one chunk together
_TEMPORARIES = 10  # wide [rows, V] tensors alive at once in the widest of the plain kernels


def check_logits(name: str, logits: Tensor) -> None:
    """Raise TypeError unless `logits`, an argument called `name`, are floating `[..., V_local]`."""
    if not logits.is_floating_point() or logits.dim() < 1:
        raise TypeError(f"{name} must be floating [..., V_local], got {logits.dtype} of shape {list(logits.shape)}.")


def num_rows(logits: Tensor) -> int:
    """How many rows `logits [..., V]` has; also right for a shard without columns."""
    return logits.shape[:-1].numel()


def row_tiles(kernels: ModuleType, *tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Pairs of a slice of the flattened rows and the views `[n, V]` of each of `tensors [..., V]` that it covers.

    All tensors have the same leading axes; each may have its own strides and width.
    """
    return _tiles(0, kernels, tensors)


def _tiles(first: int, kernels: ModuleType, tensors: tuple[Tensor, ...]) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    rows = num_rows(tensors[0])
    if rows == 0:
        return
    if not all(_is_matrix(x) for x in tensors):
        inner = rows // tensors[0].shape[0]
        for i in range(tensors[0].shape[0]):
            yield from _tiles(first + i * inner, kernels, tuple(x[i] for x in tensors))
        return
    matrices = [x.view(rows, x.shape[-1]) for x in tensors]
    for chunk in row_chunks(rows, _rows_at_once(kernels, tensors, rows)):
        yield slice(first + chunk.start, first + chunk.stop), tuple(x[chunk] for x in matrices)


def _is_matrix(x: Tensor) -> bool:
    """Whether `x [..., V]` can be viewed as `[rows, V]`: each axis steps as far as the next one is long."""
    steps = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(steps))


def _rows_at_once(kernels: ModuleType, tensors: tuple[Tensor, ...], rows: int) -> int:
    if kernels is not plain:
        return rows
    width = max(x.shape[-1] for x in tensors)
    return max(1, CHUNK_BYTES // (_TEMPORARIES * max(width, 1) * wide_dtype(*tensors).itemsize))
