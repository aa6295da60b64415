# SPDX-License-Identifier: Apache-2.0
"""Where tiles of logits and a head's gradient lie, so that they need not be fresh memory each time.

On a CPU fresh memory is dear: the system hands it out zeroed, page by page, at a fifth of a millisecond for each
megabyte, which for a tile of 100 MB is more than the elementwise work on it. So each thread keeps the tiles of its
last call and the memory of its last gradient (which is lent again once nobody holds that gradient), `KEEP_BYTES` in
all, until `release_workspace()`. What is larger is fresh each time, from numpy, which asks for huge pages and so pays
less. Other devices have an allocator that keeps memory by itself.
"""

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

KEEP_BYTES = 1280 * 2**20  # two tiles and a gradient for a vocabulary of 150,000
_GIVEN = "(given away)"  # no tile's name: the buffer that is lent out beyond a call


class _Kept(threading.local):
    """One buffer for each name. Thread-local, so that two threads never write into one."""

    def __init__(self) -> None:
        self.buffers: dict[str, np.ndarray] = {}  # bytes
        self.lent: weakref.ref[np.ndarray] | None = None  # what a tensor outside stands on: dead when that is gone

    def bytes(self, name: str, size: int) -> np.ndarray:
        """The buffer called `name`, made anew if it is too small, and kept if the bound allows it."""
        buffer = self.buffers.get(name)
        if buffer is None or buffer.size < size:
            self.buffers.pop(name, None)  # before the larger one is made
            buffer = _fresh_bytes(size)
            if size + sum(x.size for x in self.buffers.values()) <= KEEP_BYTES:
                self.buffers[name] = buffer
        return buffer[:size]


_kept = _Kept()


def tile(name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor for this call; on a CPU it may lie where this thread's last tile called `name` lay."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(_kept.bytes(name, math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)


def fresh(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor for the caller to give away, of which nothing is kept; on a CPU from huge pages."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(_fresh_bytes(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)


def gradient(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor for the caller to give away; on a CPU where the last such one lay, if that is free."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    if _kept.lent is not None and _kept.lent() is not None:
        _kept.buffers.pop(_GIVEN, None)  # theirs now
    buffer = _kept.bytes(_GIVEN, math.prod(shape) * dtype.itemsize)
    _kept.lent = weakref.ref(buffer)
    return torch.from_numpy(buffer).view(dtype).view(shape)


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside, this thread has another workspace: for a caller's function that may call what uses tiles too."""
    buffers, lent = _kept.buffers, _kept.lent
    _kept.buffers, _kept.lent = {}, None
    try:
        yield
    finally:
        _kept.buffers, _kept.lent = buffers, lent


def release_workspace() -> None:
    """Give back the memory that this thread keeps."""
    _kept.buffers.clear()


def _fresh_bytes(num_bytes: int) -> np.ndarray:
    """Bytes that begin where a cache line does."""
    line = 64
    raw = np.empty(num_bytes + line, np.uint8)
    start = -raw.ctypes.data % line
    return raw[start : start + num_bytes]
