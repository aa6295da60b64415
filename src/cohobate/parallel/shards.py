# SPDX-License-Identifier: Apache-2.0
"""How the shards of a vocabulary meet: sums per row over a process group, in place of gathered logits.

Implements `functional.moments.Shards` for a tensor-parallel group. Numbers are reduced in the dtype they come in
(float32, or float64 for float64 logits), on the device they lie on, in one collective each; what comes back is equal
on every rank to the last bit, and what went in is left alone. Nothing is validated and nothing is recorded for
autograd: callers are autograd Functions whose backward pass is local.

`CheckedShards` adds the validation that a group needs. A rank that alone finds something wrong must not raise alone,
or the others wait for it for ever. So each rank's facts ride along in the first maximum, and every rank judges the
same table.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cohobate.functional.moments import WHOLE, Shards, together
from cohobate.functional.ordered import from_ordered_bits, ordered_bits, packed_keys, unpacked_keys

Agreed = TypeVar("Agreed")
Group = dist.ProcessGroup | None
"""The ranks that hold the shards; None: this process holds every id."""


def shards_of(group: Group, vocab_start_index: int = 0) -> Shards:
    """The shards of a vocabulary over `group`; `WHOLE`, which exchanges nothing, for None or a group of one."""
    if group is None or dist.get_world_size(group) == 1:
        return WHOLE
    return GroupShards(group, vocab_start_index)


class GroupShards:
    """`moments.Shards` over a process group. `vocab_start_index` is the global id of this rank's first column."""

    def __init__(self, group: dist.ProcessGroup, vocab_start_index: int = 0):
        self.group = group
        self.vocab_start_index = vocab_start_index

    def max(self, values: Tensor, /) -> Tensor:
        return self._reduced(values, dist.ReduceOp.MAX)

    def sum(self, values: Tensor, /) -> Tensor:
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor, ids: Tensor, /) -> tuple[Tensor, Tensor]:
        """The largest of `values [n]` over the group and its global id, of several the lowest: one collective.

        float32 and narrower: value and id make one int64 that sorts like the pair, so one MAX does. float64 leaves no
        room for the id: the pairs `[2, n]` of all ranks are gathered. NaN counts as largest.
        """
        global_ids = ids + self.vocab_start_index
        if values.dtype != torch.float64:
            value, winner = unpacked_keys(self._reduced(packed_keys(values, global_ids), dist.ReduceOp.MAX))
            return value.to(values.dtype), winner
        mine = torch.stack([ordered_bits(values), global_ids])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, mine, group=self.group)
        bits, owners = torch.stack(everyone, dim=1)  # [ranks, n] each
        highest = bits.amax(0)
        winner = owners.masked_fill(bits != highest, torch.iinfo(torch.int64).max).amin(0)
        return from_ordered_bits(highest, torch.float64), winner

    def _reduced(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        reduced = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, op=op, group=self.group)
        return reduced


class CheckedShards(Generic[Agreed]):
    """`Shards` of one call: the maximum carries `facts` of each rank, and `check` judges them on every rank alike.

    `facts` are numbers that float32 holds exactly. `check` gets one list of facts for each rank, in rank order; it
    raises for all of them or for none, and what it returns is then `agreed`. `passenger`, if given, is called between
    maximum and sum, and the tensor it returns is added up along with the sum: `carried`.
    """

    def __init__(
        self,
        group: Group,
        facts: Sequence[float],
        check: Callable[[list[list[float]]], Agreed],
        passenger: Callable[[], Tensor] | None = None,
    ):
        self._shards = shards_of(group)
        self._rank, self._size = rank_and_size(group)
        self._facts, self._check, self._passenger = facts, check, passenger
        self.agreed: Agreed | None = None
        self.carried: Tensor | None = None

    def max(self, values: Tensor, /) -> Tensor:
        table = torch.full((self._size, len(self._facts)), -torch.inf, dtype=values.dtype)
        table[self._rank] = torch.tensor(self._facts, dtype=values.dtype)
        highest, table = together(self._shards.max, values, table.to(values.device))
        self.agreed = self._check(table.tolist())
        return highest

    def sum(self, values: Tensor, /) -> Tensor:
        if self._passenger is None:
            return self._shards.sum(values)
        total, self.carried = together(self._shards.sum, values, self._passenger().to(values.dtype))
        self._passenger = None
        return total

    def largest(self, values: Tensor, ids: Tensor, /) -> tuple[Tensor, Tensor]:
        return self._shards.largest(values, ids)


def rank_and_size(group: Group) -> tuple[int, int]:
    """This process among the shards: 0 of 1 where the vocabulary is not split."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
