# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step go together, decided once for the student and every teacher.

Each model spells a row in its own number of tokens and has its own memory. If each packed for itself, a micro-batch of
one would hold other rows than that of another, and chunks that compare the two would be split over several passes. So
one plan, made from lengths alone, holds for all sides: a bin is full as soon as *one* side is. Every rank makes as
many micro-batches as every other, since forward passes may be collectives, and every rank finds the same plan, since
nothing else enters it.

How the rows of a bin are laid into one forward pass is `packed_rows.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cohobate.errors import DataError

Bin = tuple[int, ...]  # places of rows in the sequence that was planned


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRow:
    """One data row, which all sides keep in one bin."""

    sample_id: str  # durable: what a message calls the row
    lengths: tuple[int, ...]  # tokens on each side, in the sides' order; exact: nothing cut, nothing rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSide:
    """One model: the student or a teacher."""

    name: str  # for messages
    capacity: int  # tokens that one forward pass may hold, padding included
    row_multiple: int = 1  # each row takes up a multiple of so many tokens
    physical_size: Callable[[Sequence[int]], int] = sum  # of the rounded lengths of a bin; falls when a row leaves

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.row_multiple < 1:
            raise ValueError(
                f"PackSide {self.name!r} needs capacity and row_multiple >= 1, got {self.capacity} and "
                f"{self.row_multiple}."
            )

    def rounded(self, length: int) -> int:
        return -(-length // self.row_multiple) * self.row_multiple


def padded_size(lengths: Sequence[int]) -> int:
    """Tokens of a rectangle of rows as wide as the widest: `PackSide.physical_size` of a model that cannot pack."""
    return len(lengths) * max(lengths, default=0)


def plan_lockstep(
    rows: Sequence[PackRow], sides: Sequence[PackSide], *, world: int = 1
) -> tuple[tuple[Bin, ...], ...]:
    """The bins of each of `world` ranks, the same number on every rank: `plan[rank][micro-batch]` are rows.

    Rank r gets the r-th of `world` contiguous shards of equal size; where the rows do not go round, the last shards
    are shorter or empty. A rank with fewer bins than another divides its own, and has empty bins once each of its rows
    stands alone. Every row is in exactly one bin.

    Raises:
        DataError: a row that some side cannot hold even alone, or that does not tell one length for each side.
    """
    if world < 1:
        raise ValueError(f"world must be >= 1, got {world}.")
    share = -(-len(rows) // world)
    plans = []
    for rank in range(world):
        start = rank * share
        shard = fill_bins(rows[start : start + share], sides)
        plans.append(tuple(tuple(start + place for place in places) for places in shard))
    most = max(map(len, plans))
    return tuple(with_num_bins(plan, most, rows, sides) for plan in plans)


def fill_bins(rows: Sequence[PackRow], sides: Sequence[PackSide]) -> tuple[Bin, ...]:
    """First-fit decreasing over one rank's rows: by their largest share of a capacity, ties by place.

    Raises DataError as `plan_lockstep`.
    """
    if not sides:
        raise ValueError("a plan needs at least one side.")
    for row in rows:
        _check_fits(row, sides)
    filled: list[list[int]] = []
    for place in sorted(range(len(rows)), key=lambda place: (-_share(rows[place], sides), place)):
        for places in filled:
            if _fits([rows[p] for p in (*places, place)], sides):
                places.append(place)
                break
        else:
            filled.append([place])
    return tuple(map(tuple, filled))


def with_num_bins(
    bins: Sequence[Bin], num_bins: int, rows: Sequence[PackRow], sides: Sequence[PackSide]
) -> tuple[Bin, ...]:
    """At least `num_bins` bins: the last (smallest) row of the fullest goes into one of its own, time and again.

    The fullest is that with the largest share of a capacity among those of several rows; without one, a bin is empty.
    A rank that knows the largest number of bins of all ranks needs nothing else of them.
    """
    made = [list(places) for places in bins]
    while len(made) < num_bins:
        divisible = [places for places in made if len(places) > 1]
        if not divisible:
            made.append([])
            continue
        fullest = max(divisible, key=lambda places: _filling([rows[place] for place in places], sides))
        made.append([fullest.pop()])
    return tuple(map(tuple, made))


def _share(row: PackRow, sides: Sequence[PackSide]) -> float:
    return max(length / side.capacity for length, side in zip(row.lengths, sides, strict=True))


def _filling(rows: Sequence[PackRow], sides: Sequence[PackSide]) -> float:
    return max(_size(rows, i, side) / side.capacity for i, side in enumerate(sides))


def _fits(rows: Sequence[PackRow], sides: Sequence[PackSide]) -> bool:
    return all(_size(rows, i, side) <= side.capacity for i, side in enumerate(sides))


def _size(rows: Sequence[PackRow], i: int, side: PackSide) -> int:
    return side.physical_size([side.rounded(row.lengths[i]) for row in rows])


def _check_fits(row: PackRow, sides: Sequence[PackSide]) -> None:
    if len(row.lengths) != len(sides) or min(row.lengths, default=0) < 0:
        raise DataError(
            f"row {row.sample_id!r} must tell its length on each of {len(sides)} sides "
            f"({', '.join(side.name for side in sides)}), got {list(row.lengths)}."
        )
    for i, side in enumerate(sides):
        size = _size([row], i, side)
        if size > side.capacity:
            padded = "" if size == row.lengths[i] else f", {size} with padding"
            raise DataError(
                f"row {row.sample_id!r} has {row.lengths[i]} tokens for the {side.name}{padded}, more than the "
                f"{side.capacity} that one micro-batch of the {side.name} holds. Raise its budget, shorten the row, "
                "or leave it out."
            )
