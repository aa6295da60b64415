# SPDX-License-Identifier: Apache-2.0
"""Collecting things of unequal size from all ranks: names, rows of numbers, and the largest of each number.

Every rank must reach every call, with nothing to give as well. Only plain tensors travel.
"""

import json
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from cohobate.parallel.world import World, all_reduce_max, collective_device, current_world


def gather_rows(rows: Tensor, *, world: World | None = None) -> Tensor:
    """`rows [n, M]` of every rank below each other, in rank order: `-> [sum of n, M]` on the device of `rows`."""
    world = world or current_world()
    if world.size == 1:
        return rows
    longest = all_reduce_max(rows.shape[0], world=world)
    device = collective_device(world)
    padded = torch.zeros((longest + 1, *rows.shape[1:]), dtype=rows.dtype, device=device)
    padded[: rows.shape[0]] = rows.to(device)
    length = torch.tensor([rows.shape[0]], device=device)
    parts = [torch.empty_like(padded) for _ in range(world.size)]
    lengths = [torch.empty_like(length) for _ in range(world.size)]
    dist.all_gather(parts, padded, group=world.group)
    dist.all_gather(lengths, length, group=world.group)
    kept = [part[: int(n)] for part, n in zip(parts, lengths, strict=True)]
    return torch.cat(kept).to(rows.device)


def union_of_names(names: Iterable[str], *, world: World | None = None) -> list[str]:
    """Every name that any rank gives, sorted, equal on every rank; what a reduction over named values needs first."""
    own = sorted(set(names))
    world = world or current_world()
    if world.size == 1:
        return own
    text = b"".join(json.dumps(name).encode() + b"\n" for name in own)
    encoded = torch.tensor(list(text), dtype=torch.uint8)
    everyone = bytes(gather_rows(encoded, world=world).tolist()).decode()
    return sorted({json.loads(line) for line in everyone.splitlines()})


def all_reduce_largest(values: Mapping[str, float], *, world: World | None = None) -> dict[str, float]:
    """The largest of each value over all ranks. The keys must be the same on every rank (see `union_of_names`)."""
    world = world or current_world()
    keys = sorted(values)
    packed = torch.tensor([values[key] for key in keys], dtype=torch.float64, device=collective_device(world))
    if world.size > 1 and keys:
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=world.group)
    return dict(zip(keys, packed.tolist(), strict=True))
