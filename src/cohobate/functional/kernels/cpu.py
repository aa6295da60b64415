# SPDX-License-Identifier: Apache-2.0
"""The passes over a tile of logits on a CPU: one row at a time, which the second-level cache holds.

Twin: `plain.py`, whose torch operations each stream the whole tile through memory and wake all threads. Here a thread
takes a row through all operations while it is in the cache, and another thread takes the next row. The operations are
numpy's, which let go of the interpreter's lock, write where they are told and wake nobody (torch's `exp` does, even
for few numbers). What a row needs besides is done on Python floats: under the lock threads wait for each other. No
mask is made: arithmetic with -inf leaves a NaN or an infinity in a row's sums, and such a row is done again by the
twin.

It pays for rows of thousands of ids (`kernels_for`). bfloat16 and float16 rows are widened one at a time.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from cohobate.functional.kernels import plain
from cohobate.functional.kernels.compose import Scales
from cohobate.functional.kernels.cpu_row import Row, reader, writer

_ALONE = 2**18  # numbers; a smaller tile is done sooner than a thread has started

P = ParamSpec("P")
R = TypeVar("R")


def _or_plain(kernel: Callable[P, R]) -> Callable[P, R]:
    """Leave a tile without numbers to the twin."""
    twin: Callable[P, R] = getattr(plain, kernel.__name__)

    @wraps(kernel)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        return kernel(*args, **kwargs) if first.numel() else twin(*args, **kwargs)

    return call


@_or_plain
def pair_sums(student: Tensor, teacher: Tensor, scales: Scales = (1.0, 1.0)) -> tuple[Tensor, Tensor]:
    """As `plain.pair_sums`."""
    dtype = _wide(student, teacher)
    s, t = reader(student, scales[0], dtype), reader(teacher, scales[1], dtype)
    found: list[list[float]] = [[]] * len(student)

    def work(row: Row, i: int) -> None:
        row.load(s, t, i)
        (maximum_s, maximum_t), (z_s, z_t, above_s, above_t, gap_s, gap_t) = row.pair_sums()
        down_s, down_t = row.shift_s - maximum_s, row.shift_t - maximum_t
        f_s, f_t = math.exp(down_s), math.exp(down_t)
        sums = [z_s, z_t, above_s + down_s * z_s, above_t + down_t * z_t, gap_s, gap_t]
        numbers = [maximum_s, maximum_t, *(f * x for f, x in zip((f_s, f_t) * 3, sums, strict=True))]
        if not _finite(numbers):
            again = plain.pair_sums(student[i : i + 1], teacher[i : i + 1], scales)
            numbers = torch.cat(again).squeeze(-1).tolist()
        found[i] = numbers

    _each_row(work, student, dtype)
    columns = torch.tensor(found, dtype=dtype).T
    return columns[:2], columns[2:]


@_or_plain
def mixture_sums(student: Tensor, teacher: Tensor, log_z: Tensor, beta: float, scales: Scales = (1.0, 1.0)) -> Tensor:
    """As `plain.mixture_sums`."""
    dtype = _wide(student, teacher)
    s, t = reader(student, scales[0], dtype), reader(teacher, scales[1], dtype)
    log_z_s, log_z_t = log_z.tolist()
    found: list[list[float]] = [[]] * len(student)

    def work(row: Row, i: int) -> None:
        row.load(s, t, i)
        f_s, f_t = row.exponentials(log_z_s[i], log_z_t[i])
        log_ratio = log_z_t[i] - log_z_s[i]
        (_, z_s), (gap, z_t) = row.gap_sums()
        mixture_s, mixture_t, base = row.log_mixture(log_ratio, beta)
        numbers = [-f_s * (mixture_s + base * z_s), f_t * (gap - (log_ratio + base) * z_t - mixture_t)]
        if not _finite(numbers):
            at = slice(i, i + 1)
            numbers = plain.mixture_sums(student[at], teacher[at], log_z[:, at], beta, scales).squeeze(-1).tolist()
        found[i] = numbers

    _each_row(work, student, dtype)
    return torch.tensor(found, dtype=dtype).T


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
    """As `plain.pair_gradient`."""
    dtype = _wide(student, teacher)
    s, t = reader(student, scales[0], dtype), reader(teacher, scales[1], dtype)
    write = writer(out, dtype)
    sign = _sign(beta)
    (log_z_s, log_z_t), centers, coefficients = log_z.tolist(), center.tolist(), coefficient.tolist()

    def work(row: Row, i: int) -> None:
        if coefficients[i] == 0.0:
            write(i, None)
            return
        row.load(s, t, i)
        f_s, f_t = row.exponentials(log_z_s[i], log_z_t[i])
        log_ratio, number = log_z_t[i] - log_z_s[i], f_t / f_s
        if beta == 1.0:
            number = log_ratio - centers[i]
        elif beta != 0.0:
            *_, base = row.log_mixture(log_ratio, beta)
            number = -centers[i] - base
        product = row.gradient(beta, number, sign * coefficients[i] * f_s)
        if not row.is_finite(product):
            at = slice(i, i + 1)
            again = student.new_empty(1, student.shape[1], dtype=dtype)
            numbers = (log_z[:, at], center[at], coefficient[at])
            plain.pair_gradient(student[at], teacher[at], *numbers, beta, again, scales)
            product = (again[0].numpy(), 1.0)
        write(i, product)

    _each_row(work, student, dtype)
    return out


@_or_plain
def side_sums(logits: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """As `plain.side_sums`."""
    dtype = _wide(logits)
    read = reader(logits, scale, dtype)
    found: list[list[float]] = [[]] * len(logits)

    def work(row: Row, i: int) -> None:
        row.load_one(read, i)
        maximum, z, above = row.side_sums()
        down = row.shift_s - maximum
        f = math.exp(down)
        numbers = [maximum, f * z, f * (above + down * z)]
        if not _finite(numbers):
            maxima, sums = plain.side_sums(logits[i : i + 1], scale)
            numbers = [maxima.item(), *sums.squeeze(-1).tolist()]
        found[i] = numbers

    _each_row(work, logits, dtype)
    columns = torch.tensor(found, dtype=dtype).T
    return columns[0], columns[1:]


@_or_plain
def softmax_gradient(
    logits: Tensor, log_z: Tensor, constant: Tensor, slope: Tensor | None, out: Tensor, scale: float = 1.0
) -> Tensor:
    """As `plain.softmax_gradient`."""
    dtype = _wide(logits)
    read, write = reader(logits, scale, dtype), writer(out, dtype)
    log_zs, constants = log_z.tolist(), constant.tolist()
    slopes = [0.0] * len(logits) if slope is None else slope.tolist()

    def work(row: Row, i: int) -> None:
        if constants[i] == slopes[i] == 0.0:
            write(i, None)
            return
        row.load_one(read, i)
        product = row.softmax_gradient(log_zs[i], constants[i], slopes[i])
        if slopes[i] != 0.0 and not row.is_finite(product):
            at = slice(i, i + 1)
            again = logits.new_empty(1, logits.shape[1], dtype=dtype)
            numbers = (log_z[at], constant[at], None if slope is None else slope[at])
            product = (plain.softmax_gradient(logits[at], *numbers, again, scale)[0].numpy(), 1.0)
        write(i, product)

    _each_row(work, logits, dtype)
    return out


@_or_plain
def argmax(logits: Tensor) -> Tensor:
    """As `plain.argmax`."""
    dtype = _wide(logits)
    read = reader(logits, 1.0, dtype)
    found = [0] * len(logits)

    def work(row: Row, i: int) -> None:
        row.load_one(read, i)
        found[i] = int(row.s.argmax())

    _each_row(work, logits, dtype)
    return torch.tensor(found)


@_or_plain
def divergence_rows(
    student: Tensor,
    teacher: Tensor,
    beta: float,
    coefficient: Tensor | None = None,
    out: Tensor | None = None,
    scales: Scales = (1.0, 1.0),
) -> Tensor:
    """As `plain.divergence_rows`: all passes while a row is at hand."""
    dtype = _wide(student, teacher)
    s, t = reader(student, scales[0], dtype), reader(teacher, scales[1], dtype)
    write = None if out is None else writer(out, dtype)
    coefficients, sign = None if coefficient is None else coefficient.tolist(), _sign(beta)
    found: list[list[float]] = [[]] * len(student)

    def work(row: Row, i: int) -> None:
        row.load(s, t, i)
        six, z_s, number = _six(row, beta)
        product = None
        if not _finite(six):
            at = slice(i, i + 1)
            weight = None if coefficient is None else coefficient[at]
            again = None if out is None else student.new_empty(1, student.shape[1], dtype=dtype)
            six = plain.divergence_rows(student[at], teacher[at], beta, weight, again, scales).squeeze(-1).tolist()
            product = None if again is None else (again[0].numpy(), 1.0)
        elif coefficients is not None and coefficients[i] != 0.0:
            product = row.gradient(beta, number, sign * coefficients[i] / z_s)
        found[i] = six
        if write is not None:
            write(i, product)

    _each_row(work, student, dtype)
    return torch.tensor(found, dtype=dtype).T


def _six(row: Row, beta: float) -> tuple[list[float], float, float]:
    """`plain.divergence_rows`' six numbers, the student's normaliser, and the number that `row.gradient` wants."""
    _, sums = row.pair_sums()
    z_s, z_t, above_s, above_t, gap_s, gap_t = sums
    if not _finite(sums):
        return sums, z_s, math.nan
    near = 0.5 < z_t / z_s < 2.0  # then the difference is exact, and so is its logarithm
    log_ratio = math.log1p((z_t - z_s) / z_s) if near else math.log(z_t / z_s)
    log_ratio += row.shift_t - row.shift_s
    forward, reverse = gap_t / z_t - log_ratio, log_ratio - gap_s / z_s
    value, number = (forward, z_s / z_t) if beta == 0.0 else (reverse, gap_s / z_s)
    if 0.0 < beta < 1.0:
        mixture_s, mixture_t, base = row.log_mixture(log_ratio, beta)
        number = mixture_s / z_s
        value = beta * (forward - base - mixture_t / z_t) - (1.0 - beta) * (base + number)
    entropies = math.log(z_s) - above_s / z_s, math.log(z_t) - above_t / z_t
    return [value, *entropies, float(row.agree), forward, reverse], z_s, number


def _sign(beta: float) -> float:
    """What `Row.gradient`'s slope holds besides the coefficient and the normaliser."""
    return 1.0 if beta == 0.0 else -1.0 if beta == 1.0 else beta - 1.0


def _each_row(work: Callable[[Row, int], None], tile: Tensor, dtype: torch.dtype) -> None:
    """Call `work` for every row of `tile [n, V]`, from as many threads as torch is given."""
    num_rows, width = tile.shape
    left = iter(range(num_rows))  # whoever is free takes the next

    def run() -> None:
        row = Row(width, dtype)
        with np.errstate(all="ignore"), torch.no_grad():
            for i in left:
                work(row, i)

    others = min(torch.get_num_threads(), num_rows) - 1
    if others < 1 or tile.numel() < _ALONE:
        run()
        return
    with ThreadPoolExecutor(others) as pool:
        futures = [pool.submit(run) for _ in range(others)]
        run()
        for future in futures:
            future.result()


def _finite(numbers: list[float]) -> bool:
    return math.isfinite(sum(numbers))


def _wide(*tiles: Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tiles) else torch.float32
