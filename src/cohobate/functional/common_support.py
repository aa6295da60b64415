# SPDX-License-Identifier: Apache-2.0
"""CSD: the divergence of two models with two tokenizers over events that both can express.

For each chunk of bytes that both sides spell (`align_bytes`) the support is a list of pairs (student token, teacher
token) that end the same bytes (`support_events.py`); whatever else a side could have written is one more event, REST.
Both partitions sum to one, so a Jensen-Shannon divergence or a KL between them is exact: no vocabulary is projected
onto another, no strings are compared.

A pair's log-probability is that of the realized prefix plus that of the final token, all read from rows of the
ordinary forward pass. What is read is worked out first (`support_plan.py`) and evaluated then
(`support_divergence.py`); between the two stands what may be wrong with the arguments, so that ranks that share a text
can agree to go on (`parallel/cross_tokenizer.py`).

S student tokens, N teacher tokens, Vs and Vt vocabularies, C chunks, K kept ids of a sparse teacher.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohobate.functional.divergences import check_beta
from cohobate.functional.logprobs import check_temperature
from cohobate.functional.runs import Ints
from cohobate.functional.scores import Rows, TopKScores
from cohobate.functional.student_shards import StudentShards, check_positions, row_places
from cohobate.functional.support_divergence import CommonSupport
from cohobate.functional.support_events import (
    ONE_TO_ONE,
    ChunkRows,
    ForcedMode,
    SupportOptions,
    check_ids,
    chunk_rows,
)
from cohobate.functional.support_plan import Plan, build_plan, read_teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSupportOutput:
    """What `common_support_divergence` says of each chunk."""

    divergence: Tensor  # [C] nats, float32 or float64; 0 where nothing could be compared; differentiable
    scorable: Tensor  # [C] bool: geometry alone, so it is known before any model runs; what counts
    kind: Tensor  # [C] int64: 0 = 1:1, 1 = 1:n, 2 = n:1, 3 = m:n


def common_support_divergence(
    student_logits: Tensor,
    student_ids: Tensor,
    teacher_scores: Tensor | TopKScores,
    teacher_ids: Tensor,
    chunks: Any,
    tables: Any,
    *,
    temperature: float = 1.0,
    beta: float = 0.5,
    realized_only_mismatch: bool = False,
    keep_realized: bool = True,
    min_support: int = 1,
    forced_mode: ForcedMode = "union",
    rows: Rows = "text",
) -> CommonSupportOutput:
    """Divergence in nats over the common support of each chunk of one text; `beta` 0 forward KL, 1 reverse KL.

    Args:
        student_logits: `[S, Vs]` raw, over the real ids; row p predicts token p + 1. All that gets gradients.
        student_ids, teacher_ids: `[S]`, `[N]` the text as each side's tokens.
        teacher_scores: `[N, Vt]` raw logits, or `TopKScores` of N rows. A pair whose teacher token is not among the
            kept ids leaves the support on both sides. K < Vt is another loss than K = Vt, which equals dense logits.
        chunks: what `align_tokens` gives: `student_start`, `student_end`, `teacher_start`, `teacher_end` `[C]`.
        tables: `SubtokenTables` of the two vocabularies.
        temperature: divides both sides' logits. Above or below 1 the product along a chain is no tempered joint
            probability; keep it at 1.
        realized_only_mismatch: chunks that are not 1:1 compare the realized pair only.
        keep_realized: the realized pair is in the support even if the tables or the kept ids lack it.
        min_support: a 1:n or n:1 chunk with fewer pairs is skipped (divergence 0, still scorable).
        forced_mode: how a sparse row makes room for the realized token: `"union"` beside the K kept ids, `"evict"` in
            place of the lowest of them.
        rows: `"pairs"` if row p predicts id p instead: S and N are predictions then, of one text or of several end to
            end, and chunks are ranges of them.

    Raises:
        ValueError: shapes, chunks or options that do not fit, and sparse scores of another temperature.
    """
    _check_width("student", student_logits.shape[-1], len(tables.student_to_teacher))
    prepared = prepare_common_support(
        student_logits,
        student_ids,
        teacher_scores,
        teacher_ids,
        chunks,
        tables,
        temperature=temperature,
        beta=beta,
        realized_only_mismatch=realized_only_mismatch,
        keep_realized=keep_realized,
        min_support=min_support,
        forced_mode=forced_mode,
        rows=rows,
    )
    return prepared.evaluate(StudentShards(width=student_logits.shape[-1]))


def common_support_loss_sum(output: CommonSupportOutput, *, mismatch_weight: float = 5.0) -> Tensor:
    """Sum of D over 1:1 chunks + `mismatch_weight` * the sum over the others, nats; divide by the step's chunks."""
    weights = torch.where(output.kind == ONE_TO_ONE, 1.0, mismatch_weight).to(output.divergence.dtype)
    return (output.divergence * weights).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSupport:
    """Arguments that fit, and all that is known before anything is exchanged."""

    logits: Tensor  # [S, W] the student's, the rows and columns that are here
    plan: Plan
    rows: ChunkRows
    vocab_size: int  # of the student

    @property
    def student_rows(self) -> Ints:
        """Every row of the text that a scorable chunk reads, wherever it is."""
        return self.rows.student_rows

    def evaluate(self, shards: StudentShards) -> CommonSupportOutput:
        """The divergence of the chunks whose last student row is here, 0 for the others.

        Exchanges over the vocabulary one maximum and two sums, over the sequence one sum, and one in backward.
        """
        divergence: Any = CommonSupport.apply(self.logits, self.plan, shards)
        device = self.logits.device
        return CommonSupportOutput(
            divergence=divergence,
            scorable=torch.from_numpy(self.rows.scorable).to(device),
            kind=torch.from_numpy(self.rows.kind).to(device),
        )


def prepare_common_support(
    student_logits: Tensor,
    student_ids: Tensor,
    teacher_scores: Tensor | TopKScores,
    teacher_ids: Tensor,
    chunks: Any,
    tables: Any,
    *,
    positions: Ints | None = None,
    temperature: float = 1.0,
    beta: float = 0.5,
    rows: Rows = "text",
    **support: Any,
) -> PreparedSupport:
    """Check the arguments of `common_support_divergence` and plan what it reads; nothing is exchanged.

    Args:
        student_logits: `[S_here, W]` some rows and columns, the columns not checked.
        positions: `[S_here]` the row of the text that each is, outside 0 to S - 1 for padding; None: all, in order.
        support: the fields of `SupportOptions`.
    """
    check_beta(beta)
    check_temperature(temperature)
    options = SupportOptions(**support)
    _check_sides(student_logits, student_ids, positions, teacher_scores, teacher_ids, tables)
    if isinstance(teacher_scores, TopKScores) and teacher_scores.temperature != temperature:
        raise ValueError(
            f"the teacher's scores were normalised at temperature {teacher_scores.temperature}, not {temperature}. "
            "Score again, or use that temperature."
        )
    student_ids, teacher_ids = student_ids.long(), teacher_ids.long()
    student_logits, teacher_scores = _of_one_width(student_logits, teacher_scores)
    row_of = None if positions is None else row_places(positions, len(student_ids))
    geometry = chunk_rows(chunks, len(student_ids), len(teacher_ids), rows, row_of)
    with torch.no_grad():
        needed = None if positions is None else _teacher_rows(geometry).to(teacher_ids.device)
        teacher = read_teacher(teacher_scores, teacher_ids, temperature, options, rows, needed)
        plan = build_plan(student_ids, teacher_ids, teacher, chunks, geometry, tables, options, beta)
    vocab_size = len(tables.student_to_teacher)
    return PreparedSupport(logits=student_logits, plan=plan, rows=geometry, vocab_size=vocab_size)


def _teacher_rows(rows: ChunkRows) -> Tensor:
    """The teacher's rows that the chunks of this part read, once each."""
    return torch.from_numpy(np.union1d(rows.teacher_row[rows.mine], rows.teacher_prefix[0]))


def _of_one_width(student: Tensor, teacher: Tensor | TopKScores) -> tuple[Tensor, Tensor | TopKScores]:
    """Both sides as they are, or in float64 if one is: their numbers are added up together."""
    of_teacher = teacher if isinstance(teacher, Tensor) else teacher.logits
    if torch.float64 not in (student.dtype, of_teacher.dtype):
        return student, teacher
    if isinstance(teacher, Tensor):
        return student.double(), teacher.double()
    names = ("logits", "log_normalizer", "log_normalizer_t1", "realized_logit")
    return student.double(), replace(teacher, **{name: getattr(teacher, name).double() for name in names})


def _check_sides(
    student_logits: Tensor,
    student_ids: Tensor,
    positions: Ints | None,
    teacher: Tensor | TopKScores,
    teacher_ids: Tensor,
    tables: Any,
) -> None:
    if student_logits.dim() != 2:
        raise ValueError(f"the student's logits must be [S, Vs], got {list(student_logits.shape)}.")
    dense = isinstance(teacher, Tensor)
    teacher_rows = teacher.shape[0] if dense else teacher.ids.shape[0]
    _check_width("teacher", teacher.shape[-1] if dense else teacher.vocab_size, len(tables.teacher_to_student))
    student_rows = len(student_logits) if positions is None else len(student_ids)
    for side, ids, rows, width in (
        ("student", student_ids, student_rows, len(tables.student_to_teacher)),
        ("teacher", teacher_ids, teacher_rows, len(tables.teacher_to_student)),
    ):
        if ids.dim() != 1 or ids.shape[0] != rows:
            raise ValueError(f"the {side} has ids {list(ids.shape)} and {rows} rows of scores; wanted one row per id.")
        check_ids(side, ids, width)
    check_positions(positions, student_logits)


def _check_width(side: str, width: int, wanted: int) -> None:
    if width != wanted:
        raise ValueError(
            f"the {side}'s scores have {width} columns, the tables {wanted} ids. Cut padded heads to the "
            "real ids, and check that the tables are those of this pair, not swapped."
        )
