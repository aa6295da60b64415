# SPDX-License-Identifier: Apache-2.0
"""The chunk loop over a vocabulary head: raw products to tempered logits and back, and gradients added up over chunks.

Shared by everything in `fused_linear.py`, so that scale, soft-cap, temperature, accumulation dtype and the size of a
chunk are decided once. Buffers are worked on in place: whoever calls owns the `[n, V]` tile that it hands in.

N rows, n rows of one chunk, V vocabulary, H hidden. "Wide" is float32, or float64 where an input is float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cohobate.functional.logprobs import check_softcap

# Bytes of all [n, V] tiles of one chunk together. A processor without its own memory wants tiles near its caches.
CHUNK_BYTES_CPU = 128 * 2**20
CHUNK_BYTES_DEVICE = 1024 * 2**20
_TILES = 8  # [n, V] buffers alive at once in the widest place of a chunk


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

    def logits(self, raw: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tempered logits, in place of `raw [n, V]`, and (with a soft-cap) the tanh that the way back needs."""
        if bias is not None:
            raw.add_(bias)
        if self.softcap is None:
            factor = self.scale / self.temperature
            return (raw if factor == 1.0 else raw.mul_(factor)), None
        tanh = raw.mul_(self.scale / self.softcap).tanh_()
        return tanh * (self.softcap / self.temperature), tanh

    def logprobs(self, raw: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of `raw [n, V]`, whose logits are freed on return, and the tanh as above."""
        logits, tanh = self.logits(raw, bias)
        return logits.log_softmax(-1), tanh

    def back(self, grad: Tensor, tanh: Tensor | None, factor: Tensor | None) -> Tensor:
        """`factor [n] * d(tempered logits)/d(raw)`, in place of `grad [n, V]`; a row of factor 0 is 0 even if NaN."""
        if tanh is not None:
            grad.mul_(tanh.square_().neg_().add_(1.0))
        slope = self.scale / self.temperature
        if factor is not None:
            return grad.mul_((factor * slope)[:, None]).masked_fill_((factor == 0)[:, None], 0.0)
        return grad if slope == 1.0 else grad.mul_(slope)


class HeadGradients:
    """dX, dW and db of one head, added up over chunks: dW and db in the wide dtype."""

    def __init__(self, hidden: Tensor, weight: Tensor, needs: tuple[bool, bool, bool], wide: torch.dtype) -> None:
        self.hidden = torch.empty_like(hidden) if needs[0] else None  # [N, H]
        self.weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs[1] else None  # [V, H]
        self.bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if needs[2] else None  # [V]

    def add(self, rows: slice, grad: Tensor, hidden: Tensor, weight: Tensor, factor: Tensor | None) -> None:
        """Take one chunk's `grad [n, V]` of the raw products; `hidden [n, H]` and `weight [V, H]` as multiplied.

        `factor [n]` is what `ChunkHead.back` got: a row of factor 0 is taken out of `hidden` too, as 0 x NaN is NaN.
        """
        narrow = grad.to(weight.dtype)
        if factor is not None:
            hidden = hidden.masked_fill((factor == 0)[:, None], 0.0)
        if self.hidden is not None:
            self.hidden[rows] = narrow @ weight
        if self.weight is not None:
            if narrow.dtype == self.weight.dtype:
                self.weight.addmm_(narrow.T, hidden)
            else:
                self.weight += narrow.T @ hidden
        if self.bias is not None:
            self.bias += grad.sum(0)


def needed_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[bool, bool, bool]:
    """Which of dX, dW, db the backward pass will be asked for: none where autograd is off."""
    if not torch.is_grad_enabled():
        return (False, False, False)
    return (hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of `tensors` is, else float32: the dtype of everything but the matrix products."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def rows_per_chunk(
    hidden: Tensor, vocab_size: int, wide: torch.dtype, chunk_size: int | None, chunk_bytes: int | None
) -> int:
    """Rows of one chunk: `chunk_size`, or as many as `chunk_bytes` (by default the device's budget) has tiles for."""
    if chunk_size is not None:
        if chunk_bytes is not None or chunk_size < 1:
            raise ValueError(f"give chunk_size >= 1 or chunk_bytes, not both; got {chunk_size} and {chunk_bytes}.")
        return chunk_size
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES_CPU if hidden.device.type == "cpu" else CHUNK_BYTES_DEVICE
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be >= 1, got {chunk_bytes}.")
    return max(1, chunk_bytes // (_TILES * vocab_size * wide.itemsize))


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
