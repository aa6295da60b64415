# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which ids of a vocabulary, agreed on by all ranks from what each knows of itself.

Every function here reads the same table on every rank (see `CheckedShards`), so all ranks reach the same layout or
raise the same error. Shards are contiguous, of any widths, also none; together they are ids 0, 1, 2, ... without gap
or overlap. A rank that is not told where its shard begins takes it to follow the lower ranks'.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

_UNKNOWN = -1.0
_EXACT = 2.0**24  # whole numbers up to here are exact in float32, in which facts may travel


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpan:
    """What one rank was told of its shard's place."""

    start: int | None = None
    stop: int | None = None
    vocab_size: int | None = None  # ids from here on are padding and take no part

    def facts(self, width: int) -> list[float]:
        """The numbers of one rank that `agreed_layout` needs; `width` columns are there."""
        told = (self.start, self.stop, self.vocab_size)
        return [float(width), *(_UNKNOWN if x is None else exact(x) for x in told)]

    def expected_start(self, width: int, rank: int) -> int:
        """Where the shard begins if all ranks' shards are as wide as this one; checked by `agreed_layout`."""
        if self.start is not None:
            return self.start
        return rank * width if self.stop is None else self.stop - width

    def real_columns(self, logits: Tensor, rank: int) -> Tensor:
        """`logits [..., W]` without its columns of padding, which come last: a view."""
        if self.vocab_size is None:
            return logits
        width = logits.shape[-1]
        return logits[..., : min(max(self.vocab_size - self.expected_start(width, rank), 0), width)]


NUM_SPAN_FACTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The first id and the width of each rank's shard, and the number of ids that are no padding."""

    starts: tuple[int, ...]
    widths: tuple[int, ...]
    vocab_size: int

    @property
    def order(self) -> list[int]:
        """The ranks in the order of their ids."""
        return sorted(range(len(self.starts)), key=lambda rank: (self.starts[rank], self.widths[rank]))


def agreed_layout(table: Sequence[Sequence[float]]) -> Layout:
    """The layout that all ranks' `ShardSpan.facts` describe, one row a rank.

    Raises:
        ValueError: a range that does not fit the shard's width, shards that leave a gap or overlap, a vocabulary
            size that differs between ranks or that the shards do not reach.
    """
    widths = [int(row[0]) for row in table]
    told = [tuple(None if x == _UNKNOWN else int(x) for x in row[1:NUM_SPAN_FACTS]) for row in table]
    for rank, (width, (start, stop, _)) in enumerate(zip(widths, told, strict=True)):
        if start is not None and stop is not None and stop - start != width:
            raise ValueError(
                f"rank {rank} holds {width} columns, but vocab_start_index={start} and vocab_end_index={stop} span "
                f"{stop - start}. The end is exclusive and the range is that of the shard, padding included."
            )
    sizes = {size for _, _, size in told}
    if len(sizes) > 1:
        raise ValueError(f"global_vocab_size must be the same on every rank, got {[size for *_, size in told]}.")
    starts = _starts(widths, [(start, stop) for start, stop, _ in told], cut=sizes != {None})
    covered = sum(widths)
    size = sizes.pop()
    if size is not None and not 0 < size <= covered:
        raise ValueError(f"global_vocab_size must be in [1, {covered}], the columns of all shards, got {size}.")
    return Layout(starts=starts, widths=tuple(widths), vocab_size=covered if size is None else size)


def _starts(widths: list[int], told: list[tuple[int | None, int | None]], *, cut: bool) -> tuple[int, ...]:
    following = [sum(widths[:rank]) for rank in range(len(widths))]
    knows = [start is not None or stop is not None for start, stop in told]
    if not any(knows):
        if cut and len(set(widths)) > 1:
            raise ValueError(
                f"global_vocab_size with shards of unequal widths {widths} needs vocab_start_index on every rank: a "
                "rank must know which of its columns are padding before it hears of the others."
            )
        return tuple(following)
    if not all(knows):
        raise ValueError(
            f"vocab_start_index must be given on every rank or on none; rank {knows.index(False)} has none."
        )
    starts = tuple(
        start if start is not None else (stop or 0) - width for width, (start, stop) in zip(widths, told, strict=True)
    )
    spans = sorted((start, start + width) for start, width in zip(starts, widths, strict=True) if width)
    position = 0
    for start, stop in spans:
        if start != position:
            raise ValueError(
                f"the shards must cover the ids from 0 on without gap or overlap, got {spans}: one of them begins at "
                f"{start}, where {position} was next. Check vocab_start_index on each rank."
            )
        position = stop
    return starts


def exact(number: int) -> float:
    """`number`, or the nearest that float32 tells from all ids: out of range stays out of range."""
    return min(max(float(number), -_EXACT), _EXACT)
