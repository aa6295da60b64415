# SPDX-License-Identifier: Apache-2.0
"""The chunk loop over a vocabulary head: raw products to tempered logits and back, and gradients added up over chunks.

Shared by all `fused_*.py`, so that scale, soft-cap, temperature, accumulation dtype and the size of a
chunk are decided once. Buffers are worked on in place: whoever calls owns the `[n, V]` tile that it hands in.

N rows, n rows of one chunk, V vocabulary, H hidden. "Wide" is float32, or float64 where an input is float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cohobate.functional.logprobs import check_softcap
from cohobate.functional.workspace import gradient

# Bytes of all [n, V] tiles of one chunk together.
CHUNK_BYTES_CPU = 640 * 2**20  # 512 rows of a vocabulary of 150,000: each chunk reads and writes all of dW once
CHUNK_BYTES_DEVICE = 512 * 2**20
_MOST_ROWS_CPU = 512  # with more of them the products are no faster
_ROWS_DEVICE = 128  # a chunk is a multiple of it: products are made in tiles of so many rows
_TILES = 2  # of the wide dtype, alive at once: the student's, whose gradient takes its place, and the teacher's
_BLOCK = 8192  # ids at a time where a product of low precision is widened: 512 rows of them stay in a cache


def row_chunks(num_rows: int, rows: int) -> Iterator[slice]:
    """Slices of at most `rows` rows, as even as they come: the one chunk loop."""
    if num_rows == 0:
        return
    num_chunks = -(-num_rows // rows)
    even = -(-num_rows // num_chunks)
    for start in range(0, num_rows, even):
        yield slice(start, min(start + even, num_rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHead:
    """How raw products become tempered logits, and how a gradient goes the way back."""

    scale: float
    softcap: float | None
    temperature: float

    def __post_init__(self) -> None:
        check_softcap(self.softcap)

    @property
    def slope(self) -> float:
        """d(tempered logits) / d(raw), but for the soft-cap's share."""
        return self.scale / self.temperature

    @property
    def kernel_scale(self) -> float:
        """What is left to multiply a projected tile by: only a soft-cap's tanh is kept without it."""
        return 1.0 if self.softcap is None else self.softcap / self.temperature

    def project(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Tempered logits over `kernel_scale` into `out [n, V]`; `hidden [n, H]`, `weight [V, H]` of one dtype.

        Where they are of low precision and `out` is not, the logits are as exact as float32's.
        """
        factor = self.slope if self.softcap is None else self.scale / self.softcap
        if out.dtype != weight.dtype:
            _wide_product(hidden, weight, out)
            if bias is not None:
                out.add_(bias)
            if factor != 1.0:
                out.mul_(factor)
        elif bias is None:
            torch.addmm(out, hidden, weight.T, beta=0, alpha=factor, out=out)
        else:
            torch.addmm(bias.to(out.dtype), hidden, weight.T, beta=factor, alpha=factor, out=out)
        return out if self.softcap is None else out.tanh_()


class HeadGradients:
    """dX, dW and db of one head, added up over chunks: dW and db in the wide dtype, dX in its own, unless told."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        needs: tuple[bool, bool, bool],
        wide: torch.dtype,
        hidden_dtype: torch.dtype | None = None,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        device = weight.device
        self.hidden = torch.empty_like(hidden, dtype=hidden_dtype) if needs[0] else None  # [N, H]
        self.weight = gradient(tuple(weight.shape), weight_dtype or wide, device) if needs[1] else None  # [V, H]
        self.bias = torch.zeros(weight.shape[0], dtype=wide, device=device) if needs[2] else None  # [V]
        self._first = True
        if self.weight is not None and hidden.shape[0] == 0:
            self.weight.zero_()

    def add(self, rows: slice, grad: Tensor, hidden: Tensor, weight: Tensor, factor: Tensor | None) -> None:
        """Take one chunk's `grad [n, V]` of the raw products; `hidden [n, H]` and `weight [V, H]` as multiplied.

        `factor [n]` weights the rows: one of factor 0 is taken out of `hidden` too, as 0 x NaN is NaN.
        """
        narrow = grad.to(weight.dtype)
        if factor is not None:
            hidden = hidden.masked_fill((factor == 0)[:, None], 0.0)
        if self.hidden is not None:
            if self.hidden.dtype == weight.dtype:
                torch.mm(narrow, weight, out=self.hidden[rows])
            else:
                self.hidden[rows] = narrow @ weight
        if self.weight is not None:
            _add_product(self.weight, narrow.T, hidden, first=self._first)
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        self._first = False


def _wide_product(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """`hidden [n, H] @ weight.T`, into `out [n, V]` of a wider dtype: if of low precision, as exact as float32."""
    if hidden.dtype.itemsize > 2:
        out.copy_(hidden @ weight.T)
        return
    if hidden.dtype == torch.float16 and hidden.device.type == "cpu":  # above 65504 a float16 product is infinite
        for ids in _blocks(weight.shape[0]):
            out[:, ids] = hidden.float() @ weight[ids].float().T
        return
    if hidden.device.type == "cuda" and out.dtype == torch.float32:
        torch.mm(hidden, weight.T, out_dtype=torch.float32, out=out)
        return
    for ids in _blocks(weight.shape[0]):
        high = hidden @ weight[ids].T
        low = torch.addmm(high, hidden, weight[ids].T, beta=-1)  # what rounding took from `high`
        out[:, ids].copy_(high).add_(low)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """`total += left @ right`, or `=` for the first; a `total` of a wider dtype adds up in it."""
    if total.dtype == left.dtype:
        torch.mm(left, right, out=total) if first else total.addmm_(left, right)
    elif total.device.type == "cuda" and total.dtype == torch.float32:
        beta = 0 if first else 1
        torch.addmm(total, left, right, out_dtype=torch.float32, beta=beta, out=total)
    else:
        for ids in _blocks(total.shape[0]):
            part = left[ids] @ right
            total[ids].copy_(part) if first else total[ids].add_(part)


def _blocks(num_ids: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, num_ids, _BLOCK))


def scaled_for_backward(grad: Tensor | None, factor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """`factor * grad` in `dtype` for a gradient saved by the forward pass: in its own memory if nobody needs it again.

    So autograd can make it the leaf's `.grad` without another tensor of the head's size.
    """
    if grad is None:
        return None
    if grad.dtype != dtype or _graph_is_kept():
        return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))
    # Reading the number would make another device wait.
    return grad if factor.device.type == "cpu" and factor.item() == 1.0 else grad.mul_(factor)


def _graph_is_kept() -> bool:
    """Whether the backward pass under way leaves the graph for another one; True where torch does not say."""
    autograd = getattr(torch._C, "_autograd", None)
    asked = getattr(autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or asked()


def needed_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[bool, bool, bool]:
    """Which of dX, dW, db the backward pass will be asked for: none where autograd is off."""
    if not torch.is_grad_enabled():
        return (False, False, False)
    return (hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)


def rows_per_chunk(
    hidden: Tensor, vocab_size: int, wide: torch.dtype, chunk_size: int | None, chunk_bytes: int | None
) -> int:
    """Rows of one chunk: `chunk_size`, or as many as `chunk_bytes` (by default the device's budget) has tiles for."""
    if chunk_size is not None:
        if chunk_bytes is not None or chunk_size < 1:
            raise ValueError(f"give chunk_size >= 1 or chunk_bytes, not both; got {chunk_size} and {chunk_bytes}.")
        return chunk_size
    on_cpu = hidden.device.type == "cpu"
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES_CPU if on_cpu else CHUNK_BYTES_DEVICE
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be >= 1, got {chunk_bytes}.")
    rows = max(1, chunk_bytes // max(1, _TILES * vocab_size * wide.itemsize))
    if on_cpu:
        return min(rows, _MOST_ROWS_CPU)
    return rows - rows % _ROWS_DEVICE if rows > _ROWS_DEVICE else rows


def check_side(side: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless `hidden [N, H]`, `weight [V, H]` and `bias [V]` fit; `side` is the prefix of their names."""
    prefix = f"{side}_" if side else ""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"wanted {prefix}hidden [N, H] and {prefix}weight [V, H], got "
            f"{list(hidden.shape)} and {list(weight.shape)}."
        )
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise TypeError(f"{prefix}hidden and {prefix}weight must be floating, got {hidden.dtype} and {weight.dtype}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{prefix}bias must be [V] = [{weight.shape[0]}], got {list(bias.shape)}.")
