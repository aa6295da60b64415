# SPDX-License-Identifier: Apache-2.0
"""How much memory operations take, by counting what they allocate; a resident size would depend on the day."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class NewMemory(TorchDispatchMode):
    """The bytes of every storage that operations made while it watched, by address."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self._alive = [x.untyped_storage() for x in known]  # so that no address is used twice
        self._known = {x.data_ptr() for x in self._alive}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._known:
                self._alive.append(x.untyped_storage())
                self.sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return out

    def larger_than(self, num_bytes: int) -> int:
        return sum(size > num_bytes for size in self.sizes.values())
