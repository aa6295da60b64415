# SPDX-License-Identifier: Apache-2.0
"""The student's head during one call of a fused function that projects the student alone (top-k, sampled tokens).

What such a function does with its tile of logits differs; how the tile comes about and how a gradient by its logits
becomes one by the raw products does not, and is here. N rows, V vocabulary, H hidden, n rows of one chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cohobate.functional.chunked_head import (
    ChunkHead,
    HeadGradients,
    check_side,
    needed_gradients,
    row_chunks,
    rows_per_chunk,
)
from cohobate.functional.logprobs import check_temperature, product_dtype, wide_dtype
from cohobate.functional.workspace import tile

Precision = Literal["accurate", "fast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """What the caller may say of the head, as in `fused_linear_divergence`; checked against the tensors at birth."""

    temperature: float
    scale: float
    softcap: float | None
    chunk_size: int | None
    chunk_bytes: int | None
    logits: Precision

    def plan(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor) -> "HeadPlan":
        """How to work through `hidden [N, H]`. `others` have a say in the wide dtype. Raises what cannot work."""
        check_temperature(self.temperature)
        check_side("", hidden, weight, bias)
        if self.logits not in ("accurate", "fast"):
            raise ValueError(f"logits must be 'accurate' or 'fast', got {self.logits!r}.")
        wide, products = wide_dtype(hidden, weight, *others), product_dtype(hidden, weight)
        return HeadPlan(
            head=ChunkHead(scale=self.scale, softcap=self.softcap, temperature=self.temperature),
            products=products,
            wide=wide,
            tiles=products if self.logits == "fast" and products.itemsize == 2 else wide,
            needs=needed_gradients(hidden, weight, bias),
            rows=rows_per_chunk(hidden, weight.shape[0], wide, self.chunk_size, self.chunk_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    """Decided once for a call."""

    head: ChunkHead
    products: torch.dtype  # of the matrix products
    wide: torch.dtype  # of everything per row, and of dW and db while they add up
    tiles: torch.dtype  # of logits
    needs: tuple[bool, bool, bool]  # dX, dW, db
    rows: int  # of a chunk

    @property
    def with_grad(self) -> bool:
        return any(self.needs)


class StudentHead:
    """`hidden [N, H]`, `weight [V, H]`, `bias [V]` and their plan: tiles out, gradients in."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: HeadPlan) -> None:
        self.plan = plan
        self.scale = plan.head.kernel_scale  # what kernels multiply a tile by
        self.gradients = HeadGradients(hidden, weight, plan.needs, plan.wide)
        self._hidden = hidden
        self._weight = weight.to(plan.products)
        self._bias = None if bias is None else bias.to(plan.wide)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows, and their tile: `scale` times it are the tempered logits `[n, V]`. The next one overwrites it."""
        with torch.autocast(self._hidden.device.type, enabled=False):
            for rows in row_chunks(self._hidden.shape[0], self.plan.rows):
                yield rows, self._tile(self._hidden[rows])

    def _tile(self, hidden: Tensor) -> Tensor:
        out = tile("student", (hidden.shape[0], self._weight.shape[0]), self.plan.tiles, hidden.device)
        return self.plan.head.project(hidden.to(self.plan.products), self._weight, self._bias, out)

    def gradient_tile(self, student: Tensor) -> Tensor:
        """Where kernels write the gradient by the tempered logits: into the tile `student [n, V]`, if that can be.

        With a soft-cap it cannot, as the tile is needed once more. A narrower row lies in the first part of a wider
        one, which on a CPU has been read by then.
        """
        if self.plan.head.softcap is not None:
            return tile("gradient", (student.shape[0], student.shape[1]), self.plan.products, student.device)
        if student.dtype == self.plan.products:
            return student
        if student.dtype.itemsize > self.plan.products.itemsize:
            return student.view(self.plan.products)[:, : student.shape[1]]
        return torch.empty_like(student, dtype=self.plan.products)

    def add(self, rows: slice, student: Tensor, grad: Tensor, slopes: Tensor) -> None:
        """Take the gradient `[n, V]` by the tempered logits *times the head's slope* (`plan.head.slope`).

        `slopes [n]` are 0 in rows without a gradient, whatever stands there.
        """
        if self.plan.head.softcap is not None:
            grad.mul_(student.square_().neg_().add_(1.0))  # d tanh(x) / dx = 1 - tanh(x)^2
            grad.masked_fill_((slopes == 0)[:, None], 0.0)  # NaN in such a row's tanh
        self.gradients.add(rows, grad, self._hidden[rows].to(self.plan.products), self._weight, slopes)
