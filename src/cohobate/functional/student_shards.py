# SPDX-License-Identifier: Apache-2.0
"""One part of a student's logits, and how the parts meet: some rows of a text, some columns of its vocabulary.

A loss over chunks reads single logits and the normalisers of rows. Those add up: over the shards of a vocabulary
(tensor parallelism) and over the shards of a text (context parallelism). So the losses are written for one part, with
the two sums as arguments, and whole logits are the part that has everything, where nothing is exchanged. What is
summed and how often does not depend on the rows at hand: a part without any row or column exchanges the same.

Not here: process groups, and what a group must agree on before it exchanges anything (`parallel/cross_tokenizer.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.logprobs import upcast
from cohobate.functional.moments import WHOLE, Shards
from cohobate.functional.runs import Ints


def _own_largest(values: Tensor, k: int, /) -> Tensor:
    return values.topk(k).values


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentShards:
    """The columns of one part, and the sums over all parts; its rows are known before (`rows_here`)."""

    width: int  # columns here that are real ids; what follows them is padding
    first_id: int = 0  # of the first column
    vocabulary: Shards = WHOLE
    sequence: Shards = WHOLE
    largest: Callable[[Tensor, int], Tensor] = _own_largest  # [n, here] -> [n, k] of all shards of the vocabulary

    def place(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each of `ids`, 0 for another shard's, and whether it is here."""
        column = ids - self.first_id
        here = (column >= 0) & (column < self.width)
        return torch.where(here, column, 0), here

    def pick(self, logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """`logits [S, W]` at `rows [E]`, `ids [E]`, wide, and 0 where another shard has the id."""
        if self.vocabulary is WHOLE:
            return upcast(logits[rows, ids])
        if self.width == 0:
            return upcast(logits.new_zeros(ids.shape))
        column, here = self.place(ids)
        return torch.where(here, upcast(logits[rows, column]), 0.0)

    def add_at(self, gradient: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
        """Add `values [E]` to `gradient [S, W]` at `rows [E]`, `ids [E]` where these are here."""
        if self.vocabulary is not WHOLE:
            ids, here = self.place(ids)
            values = torch.where(here, values, 0.0)
        if self.width:
            gradient.index_put_((rows, ids), values.to(gradient.dtype), accumulate=True)


def check_positions(positions: Ints | None, logits: Tensor) -> None:
    """Raise ValueError unless `positions`, if any, are one for each row of `logits [S_here, W]`."""
    if positions is not None and positions.shape != logits.shape[:1]:
        raise ValueError(
            f"positions {list(positions.shape)} must name each of the {logits.shape[0]} rows of the student's logits: "
            "[S_here] rows of the text."
        )


def row_places(positions: Ints, num_rows: int) -> Ints:
    """`[num_rows]` where each row of a text is among the rows here, -1 where it is not.

    Args:
        positions: the row of the text that each row here is; outside 0 to `num_rows` - 1 it is padding.

    Raises:
        ValueError: a row is here twice.
    """
    here = np.flatnonzero((positions >= 0) & (positions < num_rows))
    named, counts = np.unique(positions[here], return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"positions name row {named[counts > 1][0]} twice. Mark rows of padding with -1.")
    place = np.full(num_rows, -1, dtype=np.int64)
    place[positions[here]] = here
    return place


def rows_here(rows: Ints, row_of: Ints | None) -> Ints:
    """Where each of `rows` lies in this part, -1 where another has it; `row_of [S]` says so, None: all are here."""
    return rows if row_of is None else row_of[rows]


def added(values: Tensor, shards: Shards, *, both_ways: bool) -> Tensor:
    """The sum of `values` over `shards`, differentiable.

    Args:
        both_ways: the gradient is summed as well, for parts whose losses are shares of one; else it is handed through,
            for parts that all compute the same loss.
    """
    if shards is WHOLE:
        return values
    total: Any = _Added.apply(values, shards, both_ways)
    return total


class _Added(torch.autograd.Function):
    """y = sum over the shards of x. dL/dx is dL/dy of every shard added up, or its own. Saved: nothing."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shards: Shards, both_ways: bool) -> Tensor:
        ctx.shards, ctx.both_ways = shards, both_ways
        return shards.sum(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.shards.sum(grad) if ctx.both_ways else grad, None, None  # shards, both_ways
