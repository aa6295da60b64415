# SPDX-License-Identifier: Apache-2.0
"""CSD and X-Token of a student whose logits are split over ranks: columns by tensor, rows by context parallelism.

Each rank holds `[S_local, V_local]`, and no logits are gathered. Ranks of a tensor-parallel group exchange the numbers
per row that a softmax needs and the single logits that a chunk names, and all compute the same loss. Ranks of a
context-parallel group each compute a share of it: a chunk belongs to the rank that has the row of its last token, and
the other ranks hand over what their rows say of its earlier ones, in one sum forwards and one backwards. A rank with
nothing to give takes part in every exchange. The formulas are those of one process (`functional.common_support`,
`functional.projection`): without groups this is that process.

Ids, chunks and options are the same on every rank of the two groups, and so is the teacher, whose vocabulary is whole;
of its rows a rank reads those of its own chunks alone. Rows lie where `positions` says, in any layout, zigzag as well.
Data parallelism is another group, whose ranks have other texts: they count chunks and add up losses as ever.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from cohobate.functional.common_support import CommonSupportOutput, prepare_common_support
from cohobate.functional.projection import ProjectedOutput, prepare_projected
from cohobate.functional.runs import Ints
from cohobate.functional.scores import Rows, TopKScores
from cohobate.functional.student_shards import StudentShards, added
from cohobate.parallel.agreement import Grid, Table
from cohobate.parallel.layout import NUM_SPAN_FACTS, ShardSpan, agreed_layout
from cohobate.parallel.shards import Group, shards_of
from cohobate.parallel.vocab_topk import vocab_parallel_topk
from cohobate.parallel.world import keyed_seed

Evaluation = Literal["owner", "replicated"]
_NUM_FACTS = 4 + NUM_SPAN_FACTS


class _Prepared(Protocol):
    @property
    def student_rows(self) -> Ints: ...  # every row of the text that is read, once for each reading
    @property
    def vocab_size(self) -> int: ...  # of the student


P = TypeVar("P", bound=_Prepared)


def vocab_parallel_common_support(
    student_logits: Tensor,
    student_ids: Tensor,
    teacher_scores: Tensor | TopKScores,
    teacher_ids: Tensor,
    chunks: Any,
    tables: Any,
    *,
    tp_group: Group = None,
    vocab_start_index: int | None = None,
    cp_group: Group = None,
    positions: Tensor | None = None,
    evaluation: Evaluation = "owner",
    rows: Rows = "text",
    **options: Any,
) -> CommonSupportOutput:
    """`common_support_divergence` of logits in shards: `scorable` and `kind` of all C chunks, on every rank.

    Args:
        student_logits: `[S_local, V_local]`, this rank's rows and columns. Columns beyond the tables' ids are padding
            and take no part; rows too, whose position is outside the text.
        student_ids, teacher_scores, teacher_ids, chunks, tables: as there, of the whole text, on every rank.
        vocab_start_index: the global id of the first column; by default the shards lie in rank order.
        positions: `[S_local]` which row of the text each row is (-1 for padding); needed with `cp_group`. Every row
            that a chunk reads lies on exactly one rank of that group.
        evaluation: `"owner"`: a chunk's divergence stands on the rank that has its last student row and is 0 on the
            others, so that each rank's loss is a share, the complete value their sum, and nothing is divided.
            `"replicated"`: it stands on every rank, and each divides its loss by the size of `cp_group`. In both,
            gradients are summed over `cp_group`, and a ratio of losses is made of complete values.
        options: those of `common_support_divergence`.

    Every rank of the groups goes backward through what it gets, also through zeros.

    Raises:
        ValueError: on every rank alike: as there, ranks whose texts or options differ, shards of the vocabulary that
            leave a gap, and rows that no rank or more than one has.
    """

    part = _Part(
        grid=Grid(vocabulary=tp_group, sequence=cp_group),
        logits=student_logits,
        start=vocab_start_index,
        positions=positions,
        evaluation=evaluation,
    )
    prepared, shards = part.agreed(
        lambda places: prepare_common_support(
            student_logits,
            student_ids,
            teacher_scores,
            teacher_ids,
            chunks,
            tables,
            positions=places,
            rows=rows,
            **options,
        ),
        lambda: _shared(student_ids, teacher_ids, chunks, teacher_scores, {"rows": rows, **options}),
    )
    output = prepared.evaluate(shards)
    return replace(output, divergence=part.everywhere(output.divergence, shards))


def vocab_parallel_projected_kl(
    student_logits: Tensor,
    student_ids: Tensor,
    teacher_logits: Tensor,
    teacher_ids: Tensor,
    chunks: Any,
    projection: Any,
    *,
    tp_group: Group = None,
    vocab_start_index: int | None = None,
    cp_group: Group = None,
    positions: Tensor | None = None,
    evaluation: Evaluation = "owner",
    rows: Rows = "text",
    **options: Any,
) -> ProjectedOutput:
    """`projected_kl` of logits in shards, in each of its modes: `valid` of all C chunks, on every rank.

    Without `columns` in the options, those of all ranks' chunks are chosen together. The other arguments, what each
    rank gets and the errors: `vocab_parallel_common_support`; the options: `projected_kl`.
    """
    part = _Part(
        grid=Grid(vocabulary=tp_group, sequence=cp_group),
        logits=student_logits,
        start=vocab_start_index,
        positions=positions,
        evaluation=evaluation,
    )
    prepared, shards = part.agreed(
        lambda places: prepare_projected(
            student_logits,
            student_ids,
            teacher_logits,
            teacher_ids,
            chunks,
            projection,
            positions=places,
            rows=rows,
            **options,
        ),
        lambda: _shared(student_ids, teacher_ids, chunks, teacher_logits, {"rows": rows, **options}),
    )
    output = prepared.evaluate(shards)
    return replace(output, divergence=part.everywhere(output.divergence, shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """This rank's part of the logits, and where it was said to lie."""

    grid: Grid
    logits: Tensor  # [S_local, V_local]
    start: int | None  # the first column's id
    positions: Tensor | None  # [S_local]
    evaluation: Evaluation

    def agreed(
        self, prepare: Callable[[Ints | None], P], shared: Callable[[], tuple[bytes | str, ...]]
    ) -> tuple[P, StudentShards]:
        """What `prepare` makes of the rows here, once all ranks have made theirs of the same text."""

        def make() -> tuple[P, Sequence[float]]:
            places = self._places()
            prepared = prepare(places)
            text = _number(*shared(), self.evaluation, str(self.logits.dtype), str(self.logits.requires_grad))
            span = ShardSpan(start=self.start).facts(self.logits.shape[1])
            return prepared, [text, *_row_facts(places, prepared.student_rows), *span]

        prepared, table = self.grid.made_by_all(make, _NUM_FACTS, self.logits.device)
        first_id, width = self._columns(table, prepared.vocab_size)
        _check_texts(table)
        _check_rows(table, prepared.student_rows)
        shards = StudentShards(
            width=width,
            first_id=first_id,
            vocabulary=shards_of(self.grid.vocabulary, first_id),
            sequence=shards_of(self.grid.sequence),
            largest=self._largest,
        )
        return prepared, shards

    def everywhere(self, divergence: Tensor, shards: StudentShards) -> Tensor:
        """`divergence [C]` where it belongs, or on every rank of the sequence."""
        return divergence if self.evaluation == "owner" else added(divergence, shards.sequence, both_ways=True)

    def _places(self) -> Ints | None:
        """The row of the text that each row here is; None if they are all of them, in order."""
        if self.evaluation not in ("owner", "replicated"):
            raise ValueError(f"evaluation must be 'owner' or 'replicated', got {self.evaluation!r}.")
        if self.positions is None:
            if self.grid.shape[0] > 1:
                raise ValueError("with cp_group each rank must say with positions which rows of the text it has.")
            return None
        if self.positions.is_floating_point() or self.positions.dtype in (torch.bool, torch.uint8):
            raise ValueError(f"positions must be signed integers, got {self.positions.dtype}.")
        return self.positions.detach().cpu().numpy().astype(np.int64)

    def _columns(self, table: Table, vocab_size: int) -> tuple[int, int]:
        """The id of the first column here, and the number of columns that are no padding."""
        layouts = [agreed_layout([facts[-NUM_SPAN_FACTS:] for facts in row]) for row in table]
        for layout in layouts:
            if layout.vocab_size < vocab_size:
                raise ValueError(
                    f"the shards of the student's logits have {layout.vocab_size} columns, its vocabulary "
                    f"{vocab_size} ids. Every id must lie on a rank of tp_group."
                )
        sequence, vocabulary = self.grid.place
        first = layouts[sequence].starts[vocabulary]
        return first, min(max(vocab_size - first, 0), self.logits.shape[1])

    def _largest(self, values: Tensor, k: int) -> Tensor:
        """The `k` largest of each row over all shards of the vocabulary, descending: `[n, here] -> [n, k]`."""
        if k == 0:
            return values[:, :0]
        return vocab_parallel_topk(values, k, tp_group=self.grid.vocabulary)[0]


def _shared(
    student_ids: Tensor, teacher_ids: Tensor, chunks: Any, teacher: Tensor | TopKScores, options: dict[str, Any]
) -> tuple[bytes | str, ...]:
    """What all ranks must share, in a few keys."""
    names = ("student_start", "student_end", "teacher_start", "teacher_end")
    columns = (np.asarray(getattr(chunks, name), dtype=np.int64).tobytes() for name in names)
    texts = (ids.detach().cpu().long().numpy().tobytes() for ids in (student_ids, teacher_ids))
    scores = teacher if isinstance(teacher, Tensor) else teacher.logits  # the kept ids of a row are as many everywhere
    kind = (type(teacher).__name__, str(scores.dtype), scores.shape[1])
    plain = {name: x.tolist() if isinstance(x, Tensor) else x for name, x in sorted(options.items())}
    return (*texts, *columns, repr(kind), repr(plain))


def _number(*keys: bytes | str) -> float:
    """A number of the keys alone, exact in float64."""
    return float(keyed_seed(*keys) >> 11)


def _row_facts(places: Ints | None, read: Ints) -> list[float]:
    """Which rows are here, in a number; how many times one of them is read; and a sum that tells which these are."""
    if places is None:
        return [0.0, float(len(read)), float(_marks(read).sum())]
    here = np.isin(read, places)
    return [_number(places.tobytes()), float(here.sum()), float(_marks(read)[here].sum())]


def _marks(rows: Ints) -> Ints:
    """A number below 2^32 for each row, such that no few rows add up to others' sum but by chance: `[n]`."""
    numbers = np.random.default_rng(0).integers(1 << 32, size=int(rows.max(initial=0)) + 1)
    return numbers[rows]


def _check_texts(table: Table) -> None:
    first = table[0][0]
    for c, row in enumerate(table):
        for v, facts in enumerate(row):
            if facts[0] != first[0]:
                raise ValueError(
                    f"every rank must bring the same ids, chunks and options; those of rank {v} of the vocabulary's "
                    f"and {c} of the sequence's are not those of the first."
                )
            if facts[1] != row[0][1]:
                raise ValueError(
                    f"ranks that share rows must have the same positions; rank {v} of the vocabulary's, {c} of the "
                    "sequence's, has others than the first of its group."
                )


def _check_rows(table: Table, read: Ints) -> None:
    held = [row[0] for row in table]
    count, mark = sum(facts[2] for facts in held), sum(facts[3] for facts in held)
    if (count, mark) != (len(read), _marks(read).sum()):
        raise ValueError(
            f"of the {len(read)} student rows that chunks read, the ranks of cp_group have {int(count)}. Each must "
            "lie on exactly one of them: check positions, which count rows of the whole text from 0."
        )
