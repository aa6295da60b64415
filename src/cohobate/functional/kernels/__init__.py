# SPDX-License-Identifier: Apache-2.0
"""The passes over a tile of logits, and which implementation runs: one contract, several twins.

`plain.py` says what the functions mean and runs anywhere. The others compute the same faster where they can; each
names its twin, and one suite (`tests/functional/kernels`) holds all of them to it, value by value. Callers import the
module that `kernels_for` returns and never ask which one it is.
"""

from functools import cache
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

from cohobate.functional.kernels import cpu, plain

_WIDE = 2048  # ids from where on a row is worth the calls that it takes


def kernels_for(logits: Tensor) -> ModuleType:
    """The module of kernels for a tile like `logits`: the functions of `plain`, by the same names."""
    if logits.is_cuda and _has_triton():
        from cohobate.functional.kernels import gpu  # late: Triton is optional

        return gpu
    if logits.device.type == "cpu" and logits.shape[-1] >= _WIDE:
        return cpu
    return plain


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


__all__ = ["kernels_for"]
