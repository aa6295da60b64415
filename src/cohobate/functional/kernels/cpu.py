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

_PIECE = 24 * 1024  # numbers; from 32,768 on a torch operation wakes other threads
_ALONE = 2**18  # numbers; a smaller tile is done sooner than a thread has started

Array = np.ndarray
P = ParamSpec("P")
R = TypeVar("R")
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def _or_plain(kernel: Callable[P, R]) -> Callable[P, R]:
    """Leave a tile without numbers to the twin."""
    twin: Callable[P, R] = getattr(plain, kernel.__name__)

    @wraps(kernel)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        return kernel(*args, **kwargs) if first.numel() else twin(*args, **kwargs)

    return call


Reader = Callable[[int, Array], Array]
"""Row i of a tile `[V]`, perhaps in the buffer that it is given."""
Product = tuple[Array, Array | float]
"""A row `[V]` as the two factors of its last product, which is done where the row is wanted."""


@_or_plain
def pair_sums(student: Tensor, teacher: Tensor, scales: Scales = (1.0, 1.0)) -> tuple[Tensor, Tensor]:
    """As `plain.pair_sums`."""
    dtype = _wide(student, teacher)
    s, t = _reader(student, scales[0], dtype), _reader(teacher, scales[1], dtype)
    found: list[list[float]] = [[]] * len(student)

    def work(row: "_Row", i: int) -> None:
        row.load(s, t, i)
        maximum_s, maximum_t = row.maxima()
        z_s, z_t, above_s, above_t, gap_s, gap_t = row.pair_sums()
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
    s, t = _reader(student, scales[0], dtype), _reader(teacher, scales[1], dtype)
    log_z_s, log_z_t = log_z.tolist()
    found: list[list[float]] = [[]] * len(student)

    def work(row: "_Row", i: int) -> None:
        row.load(s, t, i)
        f_s, f_t = row.exponentials(log_z_s[i], log_z_t[i])
        log_ratio = log_z_t[i] - log_z_s[i]
        _, (gap, z_t) = row.gap_sums()
        mixture_s, mixture_t = row.log_mixture(log_ratio, beta)
        numbers = [-f_s * mixture_s, f_t * (gap - log_ratio * z_t - mixture_t)]
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
    s, t = _reader(student, scales[0], dtype), _reader(teacher, scales[1], dtype)
    write = _writer(out, dtype)
    sign = _sign(beta)
    (log_z_s, log_z_t), centers, coefficients = log_z.tolist(), center.tolist(), coefficient.tolist()

    def work(row: "_Row", i: int) -> None:
        if coefficients[i] == 0.0:
            write(i, None)
            return
        row.load(s, t, i)
        f_s, f_t = row.exponentials(log_z_s[i], log_z_t[i])
        log_ratio, number = log_z_t[i] - log_z_s[i], f_t / f_s
        if beta == 1.0:
            number = log_ratio - centers[i]
        elif beta != 0.0:
            row.log_mixture(log_ratio, beta)
            number = -centers[i]
        product = row.gradient(beta, number, sign * coefficients[i] * f_s)
        if not math.isfinite(row.total(product)):
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
    read = _reader(logits, scale, dtype)
    found: list[list[float]] = [[]] * len(logits)

    def work(row: "_Row", i: int) -> None:
        x = read(i, row.wide[0])
        maximum = float(x.max())
        shift = _shift(maximum)
        above = row.exp(x, shift, row.e_s)
        z, down = row.sum(row.e_s), shift - maximum
        f = math.exp(down)
        numbers = [maximum, f * z, f * (_dot(above, row.e_s) + down * z)]
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
    read, write = _reader(logits, scale, dtype), _writer(out, dtype)
    log_zs, constants = log_z.tolist(), constant.tolist()
    slopes = [0.0] * len(logits) if slope is None else slope.tolist()

    def work(row: "_Row", i: int) -> None:
        if constants[i] == slopes[i] == 0.0:
            write(i, None)
            return
        shift = _shift(log_zs[i])
        f = math.exp(shift - log_zs[i])
        above = row.exp(read(i, row.wide[0]), shift, row.e_s)
        product: Product = (row.e_s, f * constants[i])
        if slopes[i] != 0.0:  # log p = above + shift - log_z
            x = np.multiply(above, f * slopes[i], out=row.gap)
            product = (row.e_s, np.add(x, f * (constants[i] + slopes[i] * (shift - log_zs[i])), out=x))
            if not math.isfinite(row.total(product)):
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
    read = _reader(logits, 1.0, dtype)
    found = [0] * len(logits)

    def work(row: "_Row", i: int) -> None:
        found[i] = int(read(i, row.wide[0]).argmax())

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
    s, t = _reader(student, scales[0], dtype), _reader(teacher, scales[1], dtype)
    write = None if out is None else _writer(out, dtype)
    coefficients, sign = None if coefficient is None else coefficient.tolist(), _sign(beta)
    found: list[list[float]] = [[]] * len(student)

    def work(row: "_Row", i: int) -> None:
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


def _six(row: "_Row", beta: float) -> tuple[list[float], float, float]:
    """`plain.divergence_rows`' six numbers, the student's normaliser, and the number that `row.gradient` wants."""
    row.maxima()
    z_s, z_t, above_s, above_t, gap_s, gap_t = sums = row.pair_sums()
    if not _finite(sums):
        return sums, z_s, math.nan
    near = 0.5 < z_t / z_s < 2.0  # then the difference is exact, and so is its logarithm
    log_ratio = math.log1p((z_t - z_s) / z_s) if near else math.log(z_t / z_s)
    log_ratio += row.shift_t - row.shift_s
    forward, reverse = gap_t / z_t - log_ratio, log_ratio - gap_s / z_s
    value, number = (forward, z_s / z_t) if beta == 0.0 else (reverse, gap_s / z_s)
    if 0.0 < beta < 1.0:
        mixture_s, mixture_t = row.log_mixture(log_ratio, beta)
        value, number = beta * (forward - mixture_t / z_t) - (1.0 - beta) * mixture_s / z_s, mixture_s / z_s
    entropies = math.log(z_s) - above_s / z_s, math.log(z_t) - above_t / z_t
    return [value, *entropies, float(row.agree), forward, reverse], z_s, number


def _sign(beta: float) -> float:
    """What `_Row.gradient`'s slope holds besides the coefficient and the normaliser."""
    return 1.0 if beta == 0.0 else -1.0 if beta == 1.0 else beta - 1.0


class _Row:
    """What one thread holds of the row that it is at: `[V]` each.

    s, t        scaled logits: the tile's own where its dtype and scale allow
    e_s, e_t    exponentials of s - shift_s and t - shift_t
    gap         t - s, until `log_mixture` takes its place
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.wide = [np.empty(width, _NUMPY[dtype]) for _ in range(2)]
        self._exponentials, self._gap_and_one = (np.empty((2, width), _NUMPY[dtype]) for _ in range(2))
        self.e_s, self.e_t = self._exponentials
        self.gap, self._one = self._gap_and_one
        self._one[:] = 1.0
        self.shift_s = self.shift_t = 0.0
        self.agree = False  # whether both sides have the same most likely token

    def load(self, s: Reader, t: Reader, i: int) -> None:
        self.s, self.t = s(i, self.wide[0]), t(i, self.wide[1])

    def sum(self, x: Array) -> float:
        return _dot(x, self._one)  # twice as fast as x.sum()

    def total(self, product: Product) -> float:
        x, y = product
        return _dot(x, y) if isinstance(y, np.ndarray) else self.sum(x)

    def maxima(self) -> tuple[float, float]:
        """The maxima of s and t, which set the shifts."""
        top_s, top_t = self.s.argmax(), self.t.argmax()
        self.agree = bool(top_s == top_t)
        maximum_s, maximum_t = float(self.s[top_s]), float(self.t[top_t])
        self.shift_s, self.shift_t = _shift(maximum_s), _shift(maximum_t)
        return maximum_s, maximum_t

    def exp(self, x: Array, shift: float, out: Array) -> Array:
        """`exp(x - shift)` into `out`; returns x - shift, which may lie in the place of the gap."""
        above = x if shift == 0.0 else np.subtract(x, shift, out=self.gap)
        np.exp(above, out=out)
        return above

    def exponentials(self, log_z_s: float, log_z_t: float) -> tuple[float, float]:
        """Make the exponentials and the gap; returns what turns the former into probabilities."""
        self.shift_s, self.shift_t = _shift(log_z_s), _shift(log_z_t)
        self.exp(self.s, self.shift_s, self.e_s)
        self.exp(self.t, self.shift_t, self.e_t)
        np.subtract(self.t, self.s, out=self.gap)
        return math.exp(self.shift_s - log_z_s), math.exp(self.shift_t - log_z_t)

    def gap_sums(self) -> list[list[float]]:
        """`[sum e_s gap, sum e_s], [sum e_t gap, sum e_t]`: one small product costs half of four dot products."""
        return np.matmul(self._exponentials, self._gap_and_one.T).tolist()

    def pair_sums(self) -> list[float]:
        """`plain.pair_sums`' six sums, with the shifts instead of the maxima; leaves the exponentials and the gap."""
        above_s = _dot(self.exp(self.s, self.shift_s, self.e_s), self.e_s)
        above_t = _dot(self.exp(self.t, self.shift_t, self.e_t), self.e_t)
        np.subtract(self.t, self.s, out=self.gap)
        (gap_s, z_s), (gap_t, z_t) = self.gap_sums()
        return [z_s, z_t, above_s, above_t, gap_s, gap_t]

    def log_mixture(self, log_ratio: float, beta: float) -> tuple[float, float]:
        """`log(m / p_s) = log1p(beta expm1(t - s))` of normalised s, t, in place of the gap; its sums over e_s, e_t.

        `log_ratio` is the teacher's log-normaliser minus the student's. Exactly 0 where both sides are equal, and as
        exact as the gap itself where they nearly are.
        """
        x = np.subtract(self.gap, log_ratio, out=self.gap)
        np.expm1(x, out=x)
        np.multiply(x, beta, out=x)
        np.log1p(x, out=x)
        mixture_s, mixture_t = np.matmul(self._exponentials, x).tolist()
        return mixture_s, mixture_t

    def gradient(self, beta: float, number: float, slope: float) -> Product:
        """At beta 0 `slope (e_s - number e_t)`, else `slope e_s (x - number)`, x the gap or what took its place."""
        if beta == 0.0:
            x = self.e_t if number == 1.0 else np.multiply(self.e_t, number, out=self.e_t)
            return np.subtract(self.e_s, x, out=x), slope
        x = np.subtract(self.gap, number, out=self.gap)
        return np.multiply(x, slope, out=x), self.e_s


def _each_row(work: Callable[[_Row, int], None], tile: Tensor, dtype: torch.dtype) -> None:
    """Call `work` for every row of `tile [n, V]`, from as many threads as torch is given."""
    num_rows, width = tile.shape
    left = iter(range(num_rows))  # whoever is free takes the next

    def run() -> None:
        row = _Row(width, dtype)
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


def _reader(tile: Tensor, scale: float, dtype: torch.dtype) -> Reader:
    """What gives row i of `scale * tile [n, V]` in `dtype`: a view of it, or in the buffer `[V]` that it is handed."""
    if tile.dtype == torch.bfloat16 and dtype == torch.float32:
        bits = tile.detach().view(torch.uint16).numpy()

        def widen(i: int, buffer: Array) -> Array:  # numpy knows no bfloat16: the upper half of a float32
            np.left_shift(bits[i], 16, out=buffer.view(np.uint32), dtype=np.uint32)
            return buffer if scale == 1.0 else np.multiply(buffer, scale, out=buffer)

        return widen
    rows = (tile.detach().to(dtype) if tile.dtype == torch.bfloat16 else tile.detach()).numpy()
    if rows.dtype == _NUMPY[dtype]:
        return lambda i, buffer: rows[i] if scale == 1.0 else np.multiply(rows[i], scale, out=buffer)

    def convert(i: int, buffer: Array) -> Array:
        np.copyto(buffer, rows[i])
        return buffer if scale == 1.0 else np.multiply(buffer, scale, out=buffer)

    return convert


def _writer(out: Tensor, dtype: torch.dtype) -> Callable[[int, Product | None], None]:
    """What writes a row, or 0 for None, into row i of `out [n, V]`."""
    if out.dtype == dtype:
        rows = out.detach().numpy()

        def write(i: int, product: Product | None) -> None:
            if product is None:
                rows[i] = 0.0
            else:
                np.multiply(*product, out=rows[i])

        return write

    def narrow(i: int, product: Product | None) -> None:
        if product is None:
            out[i] = 0.0
            return
        x, y = product
        row = torch.from_numpy(np.multiply(x, y, out=x))
        for target, source in zip(out[i].split(_PIECE), row.split(_PIECE), strict=True):
            target.copy_(source)

    return narrow


def _shift(level: float) -> float:
    """What to take off logits before the exponential, where `level` is about their largest: mostly nothing."""
    return 0.0 if abs(level) < 32.0 else level


def _dot(x: Array, y: Array) -> float:
    return float(np.dot(x, y))


def _finite(numbers: list[float]) -> bool:
    return math.isfinite(sum(numbers))


def _wide(*tiles: Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tiles) else torch.float32
