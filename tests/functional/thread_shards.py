# SPDX-License-Identifier: Apache-2.0
"""A group of threads as the shards of a vocabulary: every exchange of real ranks, in one process and counted."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


class ThreadShards:
    """`moments.Shards` of one thread among `len(starts)`; `starts` are the global ids of the shards' first columns."""

    def __init__(self, meeting: "Meeting", rank: int, start: int) -> None:
        self._meeting, self._rank, self._start = meeting, rank, start
        self.exchanged: list[str] = []

    def max(self, values: Tensor, /) -> Tensor:
        self.exchanged.append("max")
        return torch.stack(self._meeting.exchange(self._rank, values)).amax(0)

    def sum(self, values: Tensor, /) -> Tensor:
        self.exchanged.append("sum")
        return torch.stack(self._meeting.exchange(self._rank, values)).sum(0)

    def largest(self, values: Tensor, ids: Tensor, /) -> tuple[Tensor, Tensor]:
        self.exchanged.append("largest")
        packed = torch.stack([values.double(), (ids + self._start).double()])
        every, owners = torch.stack(self._meeting.exchange(self._rank, packed), dim=1)
        highest = every.amax(0)
        return highest.to(values.dtype), torch.where(every == highest, owners, torch.inf).amin(0).long()


class Meeting:
    """Where threads hand each other tensors. One that fails breaks the meeting for all, so none waits for ever."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self._slots: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, values: Tensor) -> list[Tensor]:
        self._slots[rank] = values.detach().clone()
        self.barrier.wait()
        everyone = list(self._slots)
        self.barrier.wait()
        return everyone


def on_shards(cuts: list[int], call: Callable[[slice, ThreadShards], R]) -> list[R]:
    """`call(ids, shards)` in a thread for each shard `[cuts[k], cuts[k + 1])`, and what they return."""
    meeting = Meeting(len(cuts) - 1)

    def run(rank: int) -> R:
        try:
            return call(slice(cuts[rank], cuts[rank + 1]), ThreadShards(meeting, rank, cuts[rank]))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(cuts) - 1) as pool:
        return [job.result() for job in [pool.submit(run, rank) for rank in range(len(cuts) - 1)]]
