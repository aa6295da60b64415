# SPDX-License-Identifier: Apache-2.0
"""What ranks that share one text agree on before any of them exchanges a number of it: go on together, or fail alike.

A rank that alone finds something wrong must not raise alone, or the others wait for it for ever; and ranks that bring
texts of different length would break the very exchange that could tell. So each rank first works out what it can by
itself, and says how that went in a few numbers of fixed count. Every rank sees the numbers of all and comes to one
judgement.

The ranks are a grid: the shards of the vocabulary by the shards of the text. `CheckedShards` (`shards.py`) does the
same along one axis, in an exchange that has to be made anyway.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from cohobate.parallel.shards import Group, rank_and_size, shards_of

Made = TypeVar("Made")
Table = list[list[list[float]]]
"""`[sequence shards][vocabulary shards][facts]`, equal on every rank."""
_MESSAGE_BYTES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The ranks that share a text, and this one's place."""

    vocabulary: Group
    sequence: Group

    @property
    def place(self) -> tuple[int, int]:
        """(rank among the shards of the sequence, rank among the shards of the vocabulary)."""
        return rank_and_size(self.sequence)[0], rank_and_size(self.vocabulary)[0]

    @property
    def shape(self) -> tuple[int, int]:
        return rank_and_size(self.sequence)[1], rank_and_size(self.vocabulary)[1]

    def table(self, facts: Sequence[float], device: torch.device) -> Table:
        """The facts of all ranks, as many on each: a maximum over the sequence, and one over the vocabulary."""
        mine = torch.full((*self.shape, len(facts)), -torch.inf, dtype=torch.float64, device=device)
        mine[self.place] = torch.tensor(facts, dtype=torch.float64, device=device)
        return shards_of(self.vocabulary).max(shards_of(self.sequence).max(mine)).tolist()

    def made_by_all(
        self, make: Callable[[], tuple[Made, Sequence[float]]], num_facts: int, device: torch.device
    ) -> tuple[Made, Table]:
        """What `make` gives here, and the facts that it gives on every rank.

        Raises:
            ValueError: on every rank alike, with the first message, if `make` raised anything on one of them. A rank
                without others raises what `make` raised.
        """
        made, facts, error = None, [0.0] * num_facts, None
        try:
            made, facts = make()
        except Exception as caught:  # whatever it is, the others are waiting
            error = caught
            if self.shape == (1, 1):
                raise
        table = self.table([float(error is not None), *facts], device)
        failed = [(c, v) for c, row in enumerate(table) for v, numbers in enumerate(row) if numbers[0]]
        if failed:
            raise ValueError(self._first_message(failed, error, device)) from error
        assert made is not None
        return made, [[numbers[1:] for numbers in row] for row in table]

    def _first_message(self, failed: list[tuple[int, int]], error: Exception | None, device: torch.device) -> str:
        text = "" if error is None else str(error) if isinstance(error, ValueError) else repr(error)
        letters = text.encode()[:_MESSAGE_BYTES]
        table = self.table([float(x) for x in letters.ljust(_MESSAGE_BYTES, b"\0")], device)
        (c, v), every = failed[0], len(failed) == self.shape[0] * self.shape[1]
        message = bytes(int(x) for x in table[c][v]).rstrip(b"\0").decode(errors="ignore")
        where = "" if every else f" (Found on rank {v} of the vocabulary's and {c} of the sequence's.)"
        return message + where
