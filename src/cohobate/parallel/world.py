# SPDX-License-Identifier: Apache-2.0
"""Who takes part, sums over everybody, and randomness that does not depend on who takes part.

One process is the degenerate case of the same code: the same packing, the same result types, and no collective. Only
plain tensors travel: the `*_object` collectives of torch pickle, and nothing here does. Every rank must reach every
call, also a rank without a single row.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Ranks that disagree about the keys must still send buffers of one length, or the collective itself breaks before the
# disagreement can be named. Padding to a multiple of this many float64 makes that so for every realistic set of keys.
_SLOTS = 64
# Fingerprints below 2^16 keep the sum of squares exact in float64 for up to 2^20 ranks.
_FINGERPRINT_BITS = 16

_SeedPart = int | str | float | bool | bytes | None | tuple["_SeedPart", ...]


def keyed_seed(*parts: _SeedPart) -> int:
    """A seed in [0, 2^63) that is a function of `parts` alone: not of rank, world size or any generator's state.

    `parts` are plain Python values (tuples of them too); `1`, `1.0`, `True` and `"1"` are four different keys. A
    tensor or NumPy scalar is refused, because its text depends on the library that prints it.
    """
    for part in parts:
        _check_seed_part(part)
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def _check_seed_part(part: object) -> None:
    if type(part) is tuple:
        for inner in part:
            _check_seed_part(inner)
    elif part is not None and type(part) not in (int, str, float, bool, bytes):
        raise TypeError(
            f"keyed_seed needs plain int, float, bool, str, bytes, None or tuples of them, got {type(part).__name__}. "
            "Convert it first, for example with int(...) or .item()."
        )


@dataclass(frozen=True, slots=True)
class World:
    """This process among the processes of a group."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None  # None: the default group, or no group at all when size is 1


def current_world(group: dist.ProcessGroup | None = None) -> World:
    """The world of `group` (default: all processes); rank 0 of 1 when torch.distributed is not in use."""
    if not (dist.is_available() and dist.is_initialized()):
        return World(rank=0, size=1)
    return World(rank=dist.get_rank(group), size=dist.get_world_size(group), group=group)


def all_reduce_sum(values: Mapping[str, float | Tensor], *, world: World | None = None) -> dict[str, float]:
    """The sum of each value over all ranks, in float64, equal on every rank: one collective for the whole mapping.

    `values` are numbers or scalar tensors (any device; detached here); the keys must be the same on every rank, in any
    order, and come back sorted. Integers are exact up to 2^53. Ranks with different keys raise `RuntimeError` on every
    rank instead of adding unlike things.
    """
    world = world or current_world()
    keys = sorted(values)
    mark = float(keyed_seed("keys", *keys) >> (63 - _FINGERPRINT_BITS))
    packed = _pack(keys, values, mark).to(collective_device(world))
    if world.size > 1:
        dist.all_reduce(packed, op=dist.ReduceOp.SUM, group=world.group)
    numbers: list[float] = packed.tolist()
    # The marks come last, at a place that does not depend on the number of keys. Their variance is 0 exactly when all
    # ranks packed the same keys.
    mark_sum, square_sum = numbers[-2:]
    if square_sum * world.size != mark_sum * mark_sum:
        raise RuntimeError(
            f"all_reduce_sum needs the same keys on every rank; rank {world.rank} has {keys}. A rank with nothing to "
            "add gives 0 for each key."
        )
    return dict(zip(keys, numbers[: len(keys)], strict=True))


def _pack(keys: list[str], values: Mapping[str, float | Tensor], mark: float) -> Tensor:
    """One float64 vector on the host: the values in the order of `keys`, zeros, the mark and its square."""
    packed = torch.zeros(-(-(len(keys) + 2) // _SLOTS) * _SLOTS, dtype=torch.float64)
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for slot, key in enumerate(keys):
        value = values[key]
        if not isinstance(value, Tensor):
            packed[slot] = value
        elif value.numel() != 1:
            shape = tuple(value.shape)
            raise ValueError(f"all_reduce_sum needs scalars, but {key!r} has shape {shape}. Sum it first.")
        else:
            by_device.setdefault(value.device, []).append((slot, value.detach().reshape(())))
    for members in by_device.values():  # one transfer for each device
        packed[[slot for slot, _ in members]] = torch.stack([value.double() for _, value in members]).cpu()
    packed[-2:] = torch.tensor([mark, mark * mark], dtype=torch.float64)
    return packed


def all_reduce_max(value: int, *, world: World | None = None) -> int:
    """The largest `value` of all ranks, equal on every rank."""
    world = world or current_world()
    packed = torch.tensor([value], dtype=torch.int64, device=collective_device(world))
    if world.size > 1:
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=world.group)
    return int(packed)


def any_rank(flag: bool, *, world: World | None = None) -> bool:
    """Whether `flag` is true on at least one rank, equal on every rank."""
    return all_reduce_max(int(flag), world=world) > 0


def collective_device(world: World) -> torch.device:
    """Where the group can reduce: the CPU if a backend serves it (gloo), else this process's accelerator (nccl)."""
    if world.size == 1:
        return torch.device("cpu")
    served = [pair.split(":")[0] for pair in str(dist.get_backend_config(world.group)).split(",")]
    if "cpu" in served:
        return torch.device("cpu")
    return torch.device(served[0], torch.accelerator.current_device_index())
