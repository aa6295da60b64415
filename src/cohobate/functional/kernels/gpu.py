# SPDX-License-Identifier: Apache-2.0
"""The passes of `plain.py` on a GPU: tensors in, launches of the Triton programs in `gpu_rows.py`, tensors out.

These passes move memory and do little else, so what counts is how often a row is read: once for all sums, once more to
write the gradient, and for a JSD once between, since log m needs both normalisers first. Nothing but the gradient is
written, nothing is widened in memory, and nothing waits for the GPU.

Imported by `kernels_for` alone, where there are a GPU and Triton. Under `TRITON_INTERPRET=1` the same code runs on CPU
tensors, slowly; that is how it is tested where no GPU is. `out` may be either side, or the first part of its rows in a
narrower dtype. n rows, V ids of the tile.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from cohobate.functional.kernels import gpu_rows as rows
from cohobate.functional.kernels import plain
from cohobate.functional.kernels.compose import Scales
from cohobate.functional.logprobs import wide_dtype

# Ids that a program reads at a time, by 8 warps of 32 threads: 8 ids a thread. So a thread loads 16 bytes or more at
# once, and its partial sums (six an id) leave room in the registers of an H100 for two programs a multiprocessor: one
# reads while the other adds up. Twice the ids or half the warps is one program; half the ids is more time in barriers.
BLOCK = 2048
# With products and sums fused, `x_t c - x_s c` would be the rounding error of a product where it must be 0.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}

P = ParamSpec("P")
R = TypeVar("R")


def _or_plain(kernel: Callable[P, R]) -> Callable[P, R]:
    """Leave a tile whose rows are not dense (a transposed one) to the twin."""
    twin: Callable[P, R] = getattr(plain, kernel.__name__)

    @wraps(kernel)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        shape = tensors[0].shape  # the tiles have it, numbers per row do not
        dense = shape[1] <= 1 or all(x.stride(1) == 1 for x in tensors if x.shape == shape)
        return kernel(*args, **kwargs) if dense else twin(*args, **kwargs)

    return call


@_or_plain
def pair_sums(student: Tensor, teacher: Tensor, scales: Scales = (1.0, 1.0)) -> tuple[Tensor, Tensor]:
    """Twin: `plain.pair_sums`. One sweep."""
    num_rows = student.shape[0]
    maxima, sums = _numbers(2, num_rows, student, teacher), _numbers(6, num_rows, student, teacher)
    _launch(rows.pair_sums, num_rows, student, teacher, maxima, sums, *_sizes(student, teacher), *scales)
    return maxima, sums


@_or_plain
def mixture_sums(student: Tensor, teacher: Tensor, log_z: Tensor, beta: float, scales: Scales = (1.0, 1.0)) -> Tensor:
    """Twin: `plain.mixture_sums`. One sweep."""
    num_rows = student.shape[0]
    sums = _numbers(2, num_rows, student, teacher)
    sizes = _sizes(student, teacher)
    _launch(rows.mixture_sums, num_rows, student, teacher, log_z.contiguous(), sums, *sizes, *scales, beta)
    return sums


@_or_plain
def pair_gradient(
    student: Tensor,
    teacher: Tensor,
    log_z: Tensor,
    center: Tensor,
    coefficient: Tensor,
    beta: float,
    out: Tensor,
    scales: Scales = (1.0, 1.0),
) -> Tensor:
    """Twin: `plain.pair_gradient`. One sweep; a row of coefficient 0 is not read."""
    num_rows = student.shape[0]
    per_row = (log_z.contiguous(), center.contiguous(), coefficient.contiguous())
    sizes = (*_sizes(student, teacher), out.stride(0))
    options = {"KIND": _kind(beta), "NARROWS": _narrows(out, student, teacher)}
    _launch(rows.pair_gradient, num_rows, student, teacher, *per_row, out, *sizes, *scales, beta, **options)
    return out


@_or_plain
def side_sums(logits: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Twin: `plain.side_sums`. One sweep."""
    num_rows = logits.shape[0]
    maximum, sums = _numbers(1, num_rows, logits)[0], _numbers(2, num_rows, logits)
    _launch(rows.side_sums, num_rows, logits, maximum, sums, *_sizes(logits), scale)
    return maximum, sums


@_or_plain
def softmax_gradient(
    logits: Tensor, log_z: Tensor, constant: Tensor, slope: Tensor | None, out: Tensor, scale: float = 1.0
) -> Tensor:
    """Twin: `plain.softmax_gradient`. One sweep; a row of constant and slope 0 is not read."""
    num_rows = logits.shape[0]
    constant = constant.contiguous()
    per_row = (log_z.contiguous(), constant, constant if slope is None else slope.contiguous())
    sizes = (*_sizes(logits), out.stride(0))
    options = {"SLOPED": slope is not None, "NARROWS": _narrows(out, logits)}
    _launch(rows.softmax_gradient, num_rows, logits, *per_row, out, *sizes, scale, **options)
    return out


@_or_plain
def argmax(logits: Tensor) -> Tensor:
    """Twin: `plain.argmax`. One sweep."""
    num_rows = logits.shape[0]
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _launch(rows.argmax, num_rows, logits, ids, *_sizes(logits))
    return ids


@_or_plain
def divergence_rows(
    student: Tensor,
    teacher: Tensor,
    beta: float,
    coefficient: Tensor | None = None,
    out: Tensor | None = None,
    scales: Scales = (1.0, 1.0),
) -> Tensor:
    """Twin: `plain.divergence_rows`. One kernel: two sweeps for a KL and its gradient, three for a JSD."""
    writes = out is not None
    assert not writes or coefficient is not None
    out = out if out is not None else student
    num_rows = student.shape[0]
    numbers = _numbers(6, num_rows, student, teacher)
    weights = numbers if coefficient is None else coefficient.contiguous()  # unread without `out`
    sizes = (*_sizes(student, teacher), out.stride(0))
    arguments = (student, teacher, weights, numbers, out, *sizes, *scales, beta)
    options = {"KIND": _kind(beta), "WRITES": writes, "NARROWS": _narrows(out, student, teacher)}
    _launch(rows.divergence_rows, num_rows, *arguments, **options)
    return numbers


def _launch(kernel: Any, num_rows: int, *arguments: Any, **options: Any) -> None:
    """One program a row of `arguments[0]`, on its device; ACC and BLOCK, which all kernels take, are decided here."""
    if num_rows == 0:
        return
    tiles = [x for x in arguments if isinstance(x, Tensor)]
    wide = rows.DOUBLE if wide_dtype(*tiles) == torch.float64 else rows.SINGLE
    block = min(BLOCK, 1 << max(4, (tiles[0].shape[1] - 1).bit_length()))  # a power of two
    with torch.cuda.device_of(tiles[0]) if tiles[0].is_cuda else nullcontext():
        kernel[(num_rows,)](*arguments, **options, ACC=wide, BLOCK=block, **OPTIONS)


def _sizes(*tiles: Tensor) -> tuple[int, ...]:
    """V, and how many numbers apart the rows of each tile are."""
    return tiles[0].shape[1], *(tile.stride(0) for tile in tiles)


def _numbers(count: int, num_rows: int, *tiles: Tensor) -> Tensor:
    """Room for `[count, n]` results."""
    return torch.empty(count, num_rows, dtype=wide_dtype(*tiles), device=tiles[0].device)


def _kind(beta: float) -> int:
    return 0 if beta == 0.0 else 1 if beta == 1.0 else 2


def _narrows(out: Tensor, *tiles: Tensor) -> bool:
    """Whether the rows of `out` lie in the first part of the wider rows of one of `tiles`."""
    return any(out.data_ptr() == x.data_ptr() and out.element_size() < x.element_size() for x in tiles)
