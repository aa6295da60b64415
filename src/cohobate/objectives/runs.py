# SPDX-License-Identifier: Apache-2.0
"""Values read off the student's logits, each from a run of neighbouring pairs, in blocks that cut no run in two.

Chunks of two tokenizations are runs of unequal length, and several teachers have several sets of them; cross-entropy
has runs of one pair. Whatever is to be read of a row is read while its logits are there, once, so the head is
projected once for all teachers and the cross-entropy together.

N pairs, V vocabulary, U runs, n pairs of one block, u runs in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cohobate.align.spans import Chunks
from cohobate.functional.head_blocks import blocked_head_loss, rows_per_block
from cohobate.functional.runs import Ints
from cohobate.functional.same_support import same_support_divergence
from cohobate.functional.scores import HiddenScores, TopKScores
from cohobate.functional.token_nll import token_nll
from cohobate.objectives.compared import Compared, RowScores, moved, picked
from cohobate.objectives.pair_divergences import rows_of
from cohobate.objectives.protocol import StudentScores

ReadRuns = Callable[[Tensor, int, slice], Tensor]
"""From raw logits `[n, V]` of neighbouring pairs, the number of the first, and which runs: their values `[u]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """U runs of pairs that do not overlap, and how the value of each is read."""

    start: Ints  # [U] first pair, ascending
    end: Ints  # [U] one past the last
    values: ReadRuns


def label_runs(target_ids: Tensor, labels: Tensor, *, learns: bool = True) -> Runs:
    """Minus the log-probability of `target_ids [N]` at temperature 1, of the pairs numbered `labels [U]`.

    `learns=False`: without a gradient, for a number that is only logged.
    """
    start = labels.cpu().numpy()

    def values(logits: Tensor, first: int, units: slice) -> Tensor:
        pairs = labels[units]
        rows = at_rows(logits, pairs - first)
        return token_nll(rows if learns else rows.detach(), target_ids[pairs])

    return Runs(start=start, end=start + 1, values=values)


def chunk_runs(
    side: Compared,
    scores: RowScores,
    student_ids: Tensor,
    divergence: Callable[[tuple[Tensor, Tensor], tuple[Tensor | TopKScores, Tensor], Chunks], Tensor],
) -> Runs:
    """`divergence` of the chunks of a teacher with a tokenizer of its own, from logits (scores) and ids of both sides.

    The teacher's logits are made for the rows of a block, and gone after it.
    """
    chunks, teacher_ids = side.chunks, side.text.target_ids
    assert chunks is not None

    def values(logits: Tensor, first: int, units: slice) -> Tensor:
        some = picked(chunks, units)
        start, end = int(some.teacher_start.min()), int(some.teacher_end.max())
        said = rows_of(scores, slice(start, end))
        with torch.no_grad():
            known = said if isinstance(said, TopKScores) else said.logits()
        ours = (logits, student_ids[first : first + logits.shape[0]])
        return divergence(ours, (known, teacher_ids[start:end]), moved(some, first, start))

    return Runs(start=side.start, end=side.end, values=values)


def pair_runs(side: Compared, teacher: Callable[[Tensor], Tensor], columns: Tensor | None, **options: Any) -> Runs:
    """`same_support_divergence` of each pair, of logits that `teacher` gives for rows of the student's own tokens."""

    pairs = side.text.pairs[side.rows]  # [U]

    def values(logits: Tensor, first: int, units: slice) -> Tensor:
        with torch.no_grad():
            known = teacher(side.rows[units])
        return same_support_divergence(at_rows(logits, pairs[units] - first), known, columns=columns, **options)

    return Runs(start=side.start, end=side.end, values=values)


def at_rows(logits: Tensor, rows: Tensor) -> Tensor:
    """`logits [n, V]` at ascending distinct `rows`: themselves where that is all of them."""
    return logits if rows.shape[0] == logits.shape[0] else logits[rows]


def read_runs(student: StudentScores, sets: Sequence[Runs]) -> list[Tensor]:
    """The values `[U]` of each set of runs, differentiable in the student; logits are made a block of rows at a time.

    A run that is longer than a block makes a block of its own size. Without any run the values hang on the graph too.
    """
    rows = student.hidden if isinstance(student, HiddenScores) else student.dense
    blocks = plan_blocks(sets, rows.shape[0], rows_per_block(rows, student.vocab_size))
    units = [[_within(runs, block) for runs in sets] for block in blocks]

    def values(logits: Tensor, number: int) -> Tensor:
        first = blocks[number].start
        return torch.cat([_read(runs, logits, first, some) for runs, some in zip(sets, units[number], strict=True)])

    if isinstance(student, HiddenScores):
        head = student.head
        found = blocked_head_loss(
            student.hidden, head.weight, blocks, values, bias=head.bias, scale=head.scale, softcap=head.softcap
        )
    else:
        found = _read_dense(student.dense, blocks, values)
    sizes = [[some.stop - some.start for some in of_block] for of_block in units]
    parts = [of_block.split(size) for of_block, size in zip(found, sizes, strict=True)]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def plan_blocks(sets: Sequence[Runs], num_pairs: int, rows: int) -> list[slice]:
    """Blocks of about `rows` pairs over every run, cut where no run goes on; at least one, if need be of no pair."""
    inside = np.zeros(num_pairs + 1, dtype=np.int64)  # how many runs begin less end at each place between two pairs
    covered = np.zeros(num_pairs + 1, dtype=np.int64)
    for runs in sets:
        for counts, first in ((covered, runs.start), (inside, runs.start + 1)):
            np.add.at(counts, first, 1)
            np.add.at(counts, runs.end, -1)
    cuts = np.flatnonzero(np.cumsum(inside) == 0)
    wanted = np.flatnonzero(np.cumsum(covered) > 0)
    blocks: list[slice] = []
    done = 0
    while (at := int(np.searchsorted(wanted, done))) < len(wanted):
        start = int(wanted[at])
        place = int(np.searchsorted(cuts, start + rows, side="right")) - 1
        if cuts[place] <= start:  # the run that begins here is longer than a block
            place += 1
        done = int(cuts[place])
        last = int(wanted[int(np.searchsorted(wanted, done)) - 1])
        blocks.append(slice(start, last + 1))
    return blocks or [slice(0, 0)]


def _within(runs: Runs, block: slice) -> slice:
    first, last = np.searchsorted(runs.start, [block.start, block.stop])
    return slice(int(first), int(last))


def _read(runs: Runs, logits: Tensor, first: int, units: slice) -> Tensor:
    if units.start == units.stop:
        return logits.new_zeros(0)
    return runs.values(logits, first, units)


def _read_dense(dense: Tensor, blocks: Sequence[slice], values: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
    """The same of logits that are there already; of several blocks each is computed again in the backward pass."""
    if len(blocks) == 1:
        return [values(dense[blocks[0]], 0) + dense[:0].sum()]
    edges = [0, *(edge for block in blocks for edge in (block.start, block.stop)), dense.shape[0]]
    pieces = dense.split([after - before for before, after in pairwise(edges)])[1::2]
    return [
        checkpoint(values, piece, number, use_reentrant=False, preserve_rng_state=False)
        for number, piece in enumerate(pieces)
    ]
