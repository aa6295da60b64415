# SPDX-License-Identifier: Apache-2.0
"""What one thread does with one row of a pair of tiles on a CPU, while it is in the cache: the arithmetic of `cpu.py`.

The whole row goes through one operation after another. (In pieces, for a row of 150,000 that with all that is made of
it does not fit the second-level cache, the additional calls cost more than the cache gives.) Sums are float32, of
float32 logits, over `_BLOCK` numbers and float64 above: over a whole row they would be wrong in the fifth digit.
Nothing here knows of -inf, which leaves NaN or infinity in a row's sums: the caller looks.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_BLOCK = 4096  # numbers that are summed in their own dtype
_SERIAL = 24 * 1024  # numbers; from 32,768 on a torch operation wakes other threads

Array = np.ndarray
Reader = Callable[[int, Array], Array]
"""Row i of a tile `[V]`, perhaps in the buffer that it is given."""
Product = tuple[Array, Array | float]
"""A row `[V]` as the two factors of its last product, which is done where the row is wanted."""
Writer = Callable[[int, Product | None], None]
"""Writes the product, or 0 for None, into row i of a tile."""

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


class Row:
    """A student's and a teacher's row `[V]`, one pair after another in the same buffers.

    s, t        scaled logits: the tile's own where its dtype and scale allow
    e_s, e_t    exponentials of s - shift_s and t - shift_t
    gap         t - s, until `log_mixture` takes its place

    `log_ratio` is the teacher's log-normaliser minus the student's.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._wide = [np.empty(width, _NUMPY[dtype]) for _ in range(2)]
        padded = -(-width // _BLOCK) * _BLOCK if width > _BLOCK else width
        exponentials, gap_and_one = (np.empty((2, padded), _NUMPY[dtype]) for _ in range(2))
        exponentials[:, width:], gap_and_one[0, width:], gap_and_one[1] = 0.0, 0.0, 1.0
        self.e_s, self.e_t = exponentials[:, :width]
        self.gap, self._one = gap_and_one[:, :width]
        blocks = (2, -1, min(_BLOCK, padded))
        self._exponentials, self._gap_and_one = exponentials.reshape(blocks), gap_and_one.reshape(blocks)
        self.shift_s = self.shift_t = 0.0
        self.agree = False  # whether both sides have the same most likely token

    def load(self, s: Reader, t: Reader, i: int) -> None:
        self.s, self.t = s(i, self._wide[0]), t(i, self._wide[1])

    def load_one(self, s: Reader, i: int) -> None:
        self.s = s(i, self._wide[0])

    def side_sums(self) -> tuple[float, float, float]:
        """The maximum of s, which sets its shift, `sum e_s` and `sum e_s (s - shift_s)`."""
        maximum = float(self.s.max())
        self.shift_s = _shift(maximum)
        above = dot(self._exp(self.s, self.shift_s, self.e_s), self.e_s)
        return maximum, dot(self.e_s, self._one), above

    def pair_sums(self) -> tuple[list[float], list[float]]:
        """The maxima of s and t, which set the shifts, and `plain.pair_sums`' six sums, with the shifts instead of the
        maxima; leaves the exponentials and the gap."""
        top_s = self.s.argmax()
        self.shift_s = _shift(float(self.s[top_s]))
        above_s = dot(self._exp(self.s, self.shift_s, self.e_s), self.e_s)
        top_t = self.t.argmax()
        self.shift_t = _shift(float(self.t[top_t]))
        above_t = dot(self._exp(self.t, self.shift_t, self.e_t), self.e_t)
        self.agree = bool(top_s == top_t)
        np.subtract(self.t, self.s, out=self.gap)
        (gap_s, z_s), (gap_t, z_t) = self.gap_sums()
        return [float(self.s[top_s]), float(self.t[top_t])], [z_s, z_t, above_s, above_t, gap_s, gap_t]

    def exponentials(self, log_z_s: float, log_z_t: float) -> tuple[float, float]:
        """Make the exponentials and the gap; returns what turns the former into probabilities."""
        self.shift_s, self.shift_t = _shift(log_z_s), _shift(log_z_t)
        self._exp(self.s, self.shift_s, self.e_s)
        self._exp(self.t, self.shift_t, self.e_t)
        np.subtract(self.t, self.s, out=self.gap)
        return math.exp(self.shift_s - log_z_s), math.exp(self.shift_t - log_z_t)

    def gap_sums(self) -> list[list[float]]:
        """`[sum e_s gap, sum e_s], [sum e_t gap, sum e_t]`: small products cost half of four dot products."""
        blocks = np.matmul(self._exponentials.transpose(1, 0, 2), self._gap_and_one.transpose(1, 2, 0))
        return blocks.sum(0, dtype=np.float64).tolist()

    def log_mixture(self, log_ratio: float, beta: float) -> tuple[float, float, float]:
        """`log(m / p_s) = log1p(beta expm1(t - s))` of normalised s, t, is `base` plus what takes the gap's place.

        Returns its sums over e_s, e_t, and the base. Exactly 0 where both sides are equal, and as exact as the gap
        itself where they nearly are. The normalisers' part is taken out of the logarithm, which saves a pass,
            1 + beta expm1(gap - r) = (1 + b) (1 + a expm1(gap)),  b = beta expm1(-r),  a = beta exp(-r) / (1 + b),
        unless r is so large that `expm1(gap)` of a likely token could be rounded to -1.
        """
        x = self.gap
        if abs(log_ratio) > 1.0:
            np.subtract(x, log_ratio, out=x)
            log_ratio = 0.0
        b = beta * math.expm1(-log_ratio)
        np.expm1(x, out=x)
        np.multiply(x, beta * math.exp(-log_ratio) / (1.0 + b), out=x)
        np.log1p(x, out=x)
        mixture_s, mixture_t = np.vecdot(self._exponentials, self._gap_and_one[0]).sum(-1, dtype=np.float64).tolist()
        return mixture_s, mixture_t, math.log1p(b)

    def gradient(self, beta: float, number: float, slope: float) -> Product:
        """At beta 0 `slope (e_s - number e_t)`, else `slope e_s (x - number)`, x the gap or what took its place."""
        if beta == 0.0:
            x = self.e_t if number == 1.0 else np.multiply(self.e_t, number, out=self.e_t)
            return np.subtract(self.e_s, x, out=x), slope
        x = np.subtract(self.gap, number, out=self.gap)
        return np.multiply(x, slope, out=x), self.e_s

    def softmax_gradient(self, log_z: float, constant: float, slope: float) -> Product:
        """`p (constant + slope log p)`, p the student's probabilities, which `log_z` normalises."""
        shift = _shift(log_z)
        f = math.exp(shift - log_z)
        above = self._exp(self.s, shift, self.e_s)
        if slope == 0.0:
            return self.e_s, f * constant
        x = np.multiply(above, f * slope, out=self.gap)  # log p = above + shift - log_z
        return self.e_s, np.add(x, f * (constant + slope * (shift - log_z)), out=x)

    def is_finite(self, product: Product) -> bool:
        """Whether all numbers of a product are: their sum then is."""
        x, y = product
        return math.isfinite(dot(x, y if isinstance(y, np.ndarray) else self._one))

    def _exp(self, x: Array, shift: float, out: Array) -> Array:
        """`exp(x - shift)` into `out`; returns x - shift, which may lie in the place of the gap."""
        above = x if shift == 0.0 else np.subtract(x, shift, out=self.gap)
        np.exp(above, out=out)
        return above


def reader(tile: Tensor, scale: float, dtype: torch.dtype) -> Reader:
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


def writer(out: Tensor, dtype: torch.dtype) -> Writer:
    """What writes rows of `out [n, V]`."""
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
        for target, source in zip(out[i].split(_SERIAL), row.split(_SERIAL), strict=True):
            target.copy_(source)

    return narrow


def dot(x: Array, y: Array) -> float:
    return float(np.dot(x, y))


def _shift(level: float) -> float:
    """What to take off logits before the exponential, where `level` is about their largest: mostly nothing."""
    return 0.0 if abs(level) < 32.0 else level
