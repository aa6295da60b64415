# SPDX-License-Identifier: Apache-2.0
"""What a CSD loss reads of the student's logits, worked out before they are touched: rows, ids, the teacher's numbers.

Ids, tables and the teacher's scores are constants. All that is known of them ends up here as flat integer and float
tensors on the student's device, so that the differentiable part (`common_support.py`) is gathers and segment sums.
Of a text whose rows lie on several ranks a rank plans the chunks whose last row it has, and reads the teacher's rows
of those alone; of the other chunks it plans the rows that it has to hand over.

S student tokens, N teacher tokens, C chunks, M of them mine, D of those 1:1, K kept ids of a sparse teacher, E listed
events, P rows before the last of their chunk.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohobate.functional.chunked_head import row_chunks
from cohobate.functional.kernels import kernels_for
from cohobate.functional.logprobs import gather_last, other_ids, upcast
from cohobate.functional.moments import side_moments
from cohobate.functional.scores import Rows, TopKScores, realized_ids
from cohobate.functional.support_events import ONE_TO_ONE, ChunkRows, SupportOptions, mismatch_pairs

_TILE_ENTRIES = 1 << 24  # of the teacher's logits that are copied at a time where only some rows are read


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that needs no gradient: which logits of the student are read, and the teacher's side in numbers."""

    scale: float  # 1 / temperature
    beta: float
    mine: Tensor  # [M] the chunks whose last row is here: those that are evaluated
    last_row: Tensor  # [C] the student's row that predicts a chunk's last token; 0 where not mine
    prefix_chunk: Tensor  # [P] one entry for each student row before the last of its chunk
    prefix_row: Tensor  # [P]
    prefix_id: Tensor  # [P] the token realized there
    event_chunk: Tensor  # [E]
    event_id: Tensor  # [E] final student token
    event_teacher: Tensor  # [E] the teacher's log-probability of the pair, prefix included
    dense: "WholeRows | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRows:
    """1:1 chunks against a teacher's whole row: every common token is an event, so the events are columns."""

    chunk: Tensor  # [D]
    teacher_row: Tensor  # [D]
    teacher_logits: Tensor  # [N, Vt]
    teacher_log_z: Tensor  # [N]
    student_common: Tensor  # [n] ids, pair by pair
    teacher_common: Tensor  # [n]
    teacher_other: Tensor  # [Vt - n] ids that are in no pair: REST


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTeacher:
    """A teacher that says everything of a row."""

    scale: float  # 1 / temperature
    realized: Tensor  # [N] log-probability of the token that row p predicts, y_(p + 1)
    logits: Tensor  # [N, Vt] raw
    log_z: Tensor  # [N] at the temperature

    def look_up(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and visibility of `ids [E]` in `rows [E]`."""
        logprobs = upcast(self.logits[rows, ids]) * self.scale - self.log_z[rows]
        return logprobs, torch.ones_like(ids, dtype=torch.bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTeacher:
    """A teacher that says some ids' log-probabilities, and always that of the realized token."""

    scale: float  # 1 / temperature
    realized: Tensor  # [N] as above
    ids: Tensor  # [N, K + 1] kept ids and the realized one
    logprobs: Tensor  # [N, K + 1]
    visible: Tensor  # [N, K + 1] bool

    def look_up(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and visibility of `ids [E]` in `rows [E]`; 0 where not visible."""
        hit = (self.ids[rows] == ids[:, None]) & self.visible[rows]  # [E, K + 1]
        return torch.where(hit, self.logprobs[rows], 0.0).sum(-1), hit.any(-1)


def read_teacher(
    scores: Tensor | TopKScores,
    teacher_ids: Tensor,
    temperature: float,
    options: SupportOptions,
    rows: Rows = "text",
    needed: Tensor | None = None,
) -> DenseTeacher | SparseTeacher:
    """The teacher of N rows from raw logits `[N, Vt]` or kept ids, and the text's `teacher_ids [N]`.

    Args:
        needed: the rows that are read; None: all of them.
    """
    following = realized_ids(teacher_ids, rows)
    if isinstance(scores, Tensor):
        logits = scores.detach()
        log_z = _log_normalizers(logits, 1 / temperature, needed)
        realized = upcast(gather_last(logits, following)) / temperature - log_z
        return DenseTeacher(scale=1 / temperature, realized=realized, logits=logits, log_z=log_z)
    realized = scores.realized_logit / temperature - scores.log_normalizer
    kept = scores.ids == following[:, None]  # [N, K]
    visible = torch.ones_like(kept)
    forced = ~kept.any(-1, keepdim=True)  # [N, 1] the realized token is not among the kept
    if not options.keep_realized:
        forced = torch.zeros_like(forced)
    elif options.forced_mode == "evict":
        # of equal logits the highest id goes; ids ascend, so that is the last of the lowest
        lowest = (scores.logits == scores.logits.amin(-1, keepdim=True)).long()
        last = (lowest.cumsum(-1) == lowest.sum(-1, keepdim=True)) & (lowest == 1)
        visible &= ~(last & forced)
    return SparseTeacher(
        scale=1 / temperature,
        realized=realized,
        ids=torch.cat([scores.ids, following[:, None]], -1),
        logprobs=torch.cat([scores.logprobs(), realized[:, None]], -1),
        visible=torch.cat([visible, forced], -1),
    )


def _log_normalizers(logits: Tensor, scale: float, needed: Tensor | None) -> Tensor:
    """`[N]` logsumexp of each row of the scaled `logits [N, Vt]`, and 0 for rows that are not needed."""
    if needed is None:
        return side_moments(*kernels_for(logits).side_sums(logits, scale))[0]
    log_z = upcast(logits.new_zeros(logits.shape[0]))
    for part in row_chunks(needed.shape[0], max(1, _TILE_ENTRIES // max(1, logits.shape[1]))):
        rows = needed[part]
        log_z[rows] = side_moments(*kernels_for(logits).side_sums(logits[rows], scale))[0]
    return log_z


_Events = tuple[Tensor, Tensor, Tensor]  # chunk, final student token, the teacher's log-probability of the final: [E]


def build_plan(
    student_ids: Tensor,
    teacher_ids: Tensor,
    teacher: DenseTeacher | SparseTeacher,
    chunks: Any,
    rows: ChunkRows,
    tables: Any,
    options: SupportOptions,
    beta: float,
) -> Plan:
    """The plan of one text, `student_ids [S]` and `teacher_ids [N]`, whose C chunks have the geometry `rows`."""
    one_to_one = _tensor(np.flatnonzero(rows.mine & (rows.kind == ONE_TO_ONE)), student_ids)
    last_t = _tensor(rows.teacher_row, student_ids)
    singles = _Singles(
        chunk=one_to_one,
        teacher_row=last_t[one_to_one],
        student_id=student_ids[_tensor(rows.student_token, student_ids)[one_to_one]],
        teacher_id=teacher_ids[_tensor(rows.teacher_token, student_ids)[one_to_one]],
    )
    pairs = mismatch_pairs(rows, chunks, student_ids.cpu().numpy(), teacher_ids.cpu().numpy(), tables, options)
    chunk, final_s, final_t = (_tensor(x, student_ids) for x in (pairs.chunk, pairs.student_id, pairs.teacher_id))
    logprob, visible = teacher.look_up(last_t[chunk], final_t)
    parts: list[_Events] = [(chunk[visible], final_s[visible], logprob[visible])]
    whole = None
    if isinstance(teacher, SparseTeacher):
        parts.append(_kept_events(singles, teacher, tables, options))
    else:
        whole, forced = _whole_rows(singles, teacher, tables, options)
        parts.append(forced)
    event_chunk, event_id, event_teacher = (torch.cat(column) for column in zip(*parts, strict=True))
    row_t, chunk_t = (_tensor(x, student_ids) for x in rows.teacher_prefix)
    prefix = teacher.realized.new_zeros(len(rows.kind)).index_add_(0, chunk_t, teacher.realized[row_t])
    row_s, token_s, chunk_s = (_tensor(x, student_ids) for x in rows.student_prefix)
    return Plan(
        scale=teacher.scale,
        beta=beta,
        mine=_tensor(np.flatnonzero(rows.mine), student_ids),
        last_row=_tensor(rows.student_row, student_ids),
        prefix_chunk=chunk_s,
        prefix_row=row_s,
        prefix_id=student_ids[token_s],
        event_chunk=event_chunk,
        event_id=event_id,
        event_teacher=event_teacher + prefix[event_chunk],
        dense=whole,
    )


def _tensor(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Singles:
    """The scorable 1:1 chunks and the tokens realized there: `[D]` each."""

    chunk: Tensor
    teacher_row: Tensor
    student_id: Tensor
    teacher_id: Tensor


def _kept_events(singles: _Singles, teacher: SparseTeacher, tables: Any, options: SupportOptions) -> _Events:
    """1:1 chunks against sparse rows: the visible ids that the student has too, and the realized pair."""
    ids = teacher.ids[singles.teacher_row]  # [D, K + 1]
    student = _tensor(tables.teacher_to_student.counterpart, ids).long()[ids]
    visible = teacher.visible[singles.teacher_row]
    if options.keep_realized:
        is_realized = ids == singles.teacher_id[:, None]
        visible = visible & (is_realized | (student != singles.student_id[:, None]))  # no student id twice
        student = torch.where(is_realized, singles.student_id[:, None], student)
    visible = visible & (student >= 0)
    row, slot = visible.nonzero(as_tuple=True)
    return singles.chunk[row], student[row, slot], teacher.logprobs[singles.teacher_row[row], slot]


def _whole_rows(
    singles: _Singles, teacher: DenseTeacher, tables: Any, options: SupportOptions
) -> tuple[WholeRows, _Events]:
    """1:1 chunks against whole rows; those whose realized pair is not common have their events listed instead."""
    ours, theirs = (_tensor(x, singles.chunk).long() for x in tables.common)  # [n]
    student_of = _tensor(tables.teacher_to_student.counterpart, singles.chunk).long()
    listed = student_of[singles.teacher_id] != singles.student_id
    if not options.keep_realized:
        listed = torch.zeros_like(listed)
    events: list[_Events] = [(singles.chunk[:0], ours[:0], teacher.log_z[:0])]
    for i in listed.nonzero().squeeze(-1).tolist():
        a, b, row = singles.student_id[i], singles.teacher_id[i], singles.teacher_row[i]
        apart = (ours != a) & (theirs != b)
        final_s, final_t = torch.cat([a[None], ours[apart]]), torch.cat([b[None], theirs[apart]])
        logprob, _ = teacher.look_up(row.expand_as(final_t), final_t)
        events.append((singles.chunk[i].expand_as(final_s), final_s, logprob))
    whole = WholeRows(
        chunk=singles.chunk[~listed],
        teacher_row=singles.teacher_row[~listed],
        teacher_logits=teacher.logits,
        teacher_log_z=teacher.log_z,
        student_common=ours,
        teacher_common=theirs,
        teacher_other=other_ids(theirs, len(tables.teacher_to_student)),
    )
    chunk, final_s, logprob = (torch.cat(column) for column in zip(*events, strict=True))
    return whole, (chunk, final_s, logprob)
