# SPDX-License-Identifier: Apache-2.0
"""The passes over a tile of logits, and which implementation runs: one contract, several twins.

`plain.py` says what the functions mean and runs anywhere. The others compute the same faster where they can; each
names its twin, and one suite (`tests/functional/kernels`) holds all of them to it, value by value. Callers import the
module that `kernels_for` returns and never ask which one it is.
"""

from types import ModuleType

from torch import Tensor

from cohobate.functional.kernels import plain


def kernels_for(logits: Tensor) -> ModuleType:
    """The module of kernels for a tile like `logits`: the functions of `plain`, by the same names."""
    return plain


__all__ = ["kernels_for"]
