# SPDX-License-Identifier: Apache-2.0
"""X-Token: the student's distribution pushed onto the teacher's vocabulary, compared chunk by chunk.

Rows of a chunk are averaged before they are projected (projecting is linear), and chunks are sums over runs of rows,
so no one-hot matrix of chunks by rows is ever multiplied. Three losses:

    pkl     projected student against the teacher's most important columns, both normalised there
    gold    the tokens that both have, compared one by one; what is left, compared by rank (a distance of sorted
            probabilities, which knows nothing of what the tokens mean)
    hkl     gold with more pairs: also those that the projection holds for almost the same

`common_support.py` compares events instead and is exact where this approximates: a chunk's average row is no event.

S student tokens, N teacher tokens, Vs and Vt vocabularies, C chunks, I columns.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cohobate.functional.divergences import divergence
from cohobate.functional.largest import largest_entries
from cohobate.functional.logprobs import check_temperature, log_softmax, other_ids
from cohobate.functional.runs import joined_runs
from cohobate.functional.support_events import check_chunks, check_ids

Mode = Literal["pkl", "gold", "hkl"]
_EPS = 1e-10  # under the number of rows and under the student's projected mass, as published


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedOutput:
    """What `projected_kl` says of each chunk."""

    divergence: Tensor  # [C] nats, float32 or float64; 0 where not valid; differentiable
    valid: Tensor  # [C] bool: both sides keep a row, and the chunk passes `exact_only`


def projected_kl(
    student_logits: Tensor,
    student_ids: Tensor,
    teacher_logits: Tensor,
    teacher_ids: Tensor,
    chunks: Any,
    projection: Any,
    *,
    temperature: float = 1.0,
    vocab_top_k: int = 8192,
    reverse: bool = False,
    exact_only: bool = False,
    mode: Mode = "pkl",
    uncommon_top_k: int = 8192,
    drop_unreachable: bool = True,
    columns: Tensor | None = None,
) -> ProjectedOutput:
    """X-Token's divergence in nats of each chunk of one text; not multiplied by the temperature's square.

    Args:
        student_logits, teacher_logits: `[S, Vs]`, `[N, Vt]` raw, over the real ids; row p predicts token p + 1. The
            teacher is a constant. A token at position 0 has no row; a chunk needs one row on each side.
        student_ids, teacher_ids: `[S]`, `[N]` the text as each side's tokens.
        chunks: what `align_tokens` gives.
        projection: `Projection` of the two vocabularies.
        reverse: KL(student || teacher) instead of KL(teacher || student).
        exact_only: only 1:1 chunks whose student token is exactly the teacher's.
        vocab_top_k: (pkl) so many columns: those with the largest teacher logit in any row that takes part.
        columns: (pkl) teacher ids `[I]` to use instead, when several texts or ranks must share them.
        drop_unreachable: (pkl) leave out columns that no student token projects to. Kept, as published, each adds the
            teacher's mass there times 23 nats, whatever the student does.
        uncommon_top_k: (gold, hkl) so many of the sorted probabilities are compared.

    Raises:
        ValueError: shapes or options that do not fit.
    """
    check_temperature(temperature)
    if mode not in ("pkl", "gold", "hkl"):
        raise ValueError(f"mode must be 'pkl', 'gold' or 'hkl', got {mode!r}.")
    if uncommon_top_k < 0:
        raise ValueError(f"uncommon_top_k must be >= 0, got {uncommon_top_k}.")
    _check_shapes(student_logits, student_ids, teacher_logits, teacher_ids, projection)
    check_chunks(chunks, len(student_ids), len(teacher_ids))
    teacher_logits = teacher_logits.detach()
    ours = _ChunkMean.of(chunks.student_start, chunks.student_end, student_logits)
    theirs = _ChunkMean.of(chunks.teacher_start, chunks.teacher_end, teacher_logits)
    valid = (ours.count > 0) & (theirs.count > 0)
    if exact_only:
        valid = valid & _exact(chunks, student_ids, teacher_ids, projection).to(valid.device)
    ours, theirs = ours.only(valid), theirs.only(valid)
    if mode == "pkl":
        if columns is None:
            columns = _important(teacher_logits, theirs, vocab_top_k)
        else:
            _check_columns(columns, teacher_logits.shape[1])
        value = _projected(
            student_logits, teacher_logits, ours, theirs, projection, columns, temperature, reverse, drop_unreachable
        )
    else:
        pairs = projection.strict_pairs if mode == "gold" else projection.relaxed_pairs
        common = tuple(torch.from_numpy(ids).to(student_logits.device) for ids in pairs)
        s, t = (
            mean(log_softmax(logits[mean.rows], temperature=temperature))
            for mean, logits in ((ours, student_logits), (theirs, teacher_logits))
        )
        value = _by_pairs(s, t, common[0], common[1], uncommon_top_k, reverse)
    return ProjectedOutput(divergence=torch.where(valid, value, 0.0), valid=valid)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkMean:
    """The rows of each chunk on one side, and means over them."""

    rows: Tensor  # [R] positions, chunk after chunk
    chunk: Tensor  # [R] the chunk of each
    count: Tensor  # [C] rows of each chunk

    @classmethod
    def of(cls, start: np.ndarray, end: np.ndarray, like: Tensor) -> "_ChunkMean":
        first = np.maximum(start.astype(np.int64) - 1, 0)
        lengths = np.maximum(end - 1 - first, 0)  # rows start - 1 .. end - 2, without the one before position 0
        found = (*joined_runs(first, lengths), lengths)
        rows, chunk, count = (torch.from_numpy(x).to(like.device) for x in found)
        return cls(rows=rows, chunk=chunk, count=count)

    def only(self, valid: Tensor) -> "_ChunkMean":
        """The rows of the chunks that are `valid [C]`. No other row is read, so nothing in it reaches a gradient."""
        used = valid[self.chunk]
        return replace(self, rows=self.rows[used], chunk=self.chunk[used])

    def __call__(self, values: Tensor) -> Tensor:
        """Mean of `values [R, X]`, those of the rows, over each chunk: `[C, X]`; 0 for a chunk without."""
        total = values.new_zeros(self.count.shape[0], values.shape[1]).index_add(0, self.chunk, values)
        return total / (self.count.to(total.dtype)[:, None] + _EPS)


def _important(teacher_logits: Tensor, theirs: _ChunkMean, k: int) -> Tensor:
    """The `k` ids whose largest logit over all rows that take part is largest, ascending: `[I]`."""
    if k < 1:
        raise ValueError(f"vocab_top_k must be >= 1, got {k}.")
    if theirs.rows.shape[0] == 0:
        return theirs.rows
    importance = teacher_logits[theirs.rows].amax(0)  # [Vt]
    _, ids = largest_entries(importance[None], min(k, importance.shape[0]))
    return ids[0].sort().values


def _projected(
    student_logits: Tensor,
    teacher_logits: Tensor,
    ours: _ChunkMean,
    theirs: _ChunkMean,
    projection: Any,
    columns: Tensor,
    temperature: float,
    reverse: bool,
    drop_unreachable: bool,
) -> Tensor:
    student, column, weight, columns = _entries(projection, columns.to(student_logits.device), drop_unreachable)
    probs = ours(log_softmax(student_logits[ours.rows], temperature=temperature).exp())  # [C, Vs]
    mass = probs[:, student] * weight.to(probs.dtype)  # [C, entries]
    r = probs.new_zeros(probs.shape[0], columns.shape[0]).index_add(1, column, mass)  # [C, I]
    r = torch.log(r / (r.sum(-1, keepdim=True) + _EPS) + _EPS)
    q = theirs(log_softmax(teacher_logits[theirs.rows][:, columns], temperature=temperature))  # [C, I]
    return divergence(r, q, beta=1.0 if reverse else 0.0)


def _entries(projection: Any, columns: Tensor, drop_unreachable: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(student id, place among the columns, weight) of the entries on `columns`, and the columns that are left."""
    place = np.full(projection.teacher_vocab_size, -1, dtype=np.int64)
    wanted = columns.cpu().numpy()
    if drop_unreachable:
        reachable = np.zeros(projection.teacher_vocab_size, dtype=np.bool_)
        reachable[projection.indices[projection.indices >= 0]] = True
        wanted = wanted[reachable[wanted]]
    place[wanted] = np.arange(len(wanted))
    student, slot = np.nonzero((projection.indices >= 0) & (place[projection.indices] >= 0))
    column = place[projection.indices[student, slot]]
    arrays = (student, column, projection.weights[student, slot], wanted)
    found = [torch.from_numpy(np.ascontiguousarray(x)).to(columns.device) for x in arrays]
    return found[0], found[1], found[2], found[3]


def _by_pairs(s: Tensor, t: Tensor, student: Tensor, teacher: Tensor, uncommon_top_k: int, reverse: bool) -> Tensor:
    """KL over the paired ids, not normalised there, plus the distance of the sorted rest: `[C]`."""
    kl = divergence(s[:, student], t[:, teacher], beta=1.0 if reverse else 0.0)  # [C]
    rest_s, rest_t = (x[:, other_ids(ids, x.shape[1])].exp() for x, ids in ((s, student), (t, teacher)))
    k = min(rest_s.shape[1], rest_t.shape[1], uncommon_top_k)
    return kl + (rest_s.topk(k).values - rest_t.topk(k).values).abs().sum(-1)


def _exact(chunks: Any, student_ids: Tensor, teacher_ids: Tensor, projection: Any) -> Tensor:
    """`[C]` bool: one token on each side, and the student's stands exactly for the teacher's."""
    single = (chunks.student_end - chunks.student_start == 1) & (chunks.teacher_end - chunks.teacher_start == 1)
    ours, theirs = student_ids.cpu().numpy()[chunks.student_start], teacher_ids.cpu().numpy()[chunks.teacher_start]
    return torch.from_numpy(single & projection.exact[ours] & (projection.indices[ours, 0] == theirs))


def _check_columns(columns: Tensor, vocab_size: int) -> None:
    if columns.dim() != 1 or columns.is_floating_point() or columns.dtype in (torch.bool, torch.uint8):
        raise ValueError(f"columns must be [I] signed integers, got {list(columns.shape)} of {columns.dtype}.")
    ids = np.sort(columns.cpu().numpy())
    if len(ids) and (ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) == 0).any()):
        raise ValueError(f"columns must be distinct teacher ids of 0 to {vocab_size - 1}, got {columns.tolist()[:8]}.")


def _check_shapes(
    student_logits: Tensor, student_ids: Tensor, teacher_logits: Tensor, teacher_ids: Tensor, projection: Any
) -> None:
    for side, logits, ids, width in (
        ("student", student_logits, student_ids, projection.student_vocab_size),
        ("teacher", teacher_logits, teacher_ids, projection.teacher_vocab_size),
    ):
        if logits.dim() != 2 or ids.shape != logits.shape[:1]:
            raise ValueError(
                f"the {side} has ids {list(ids.shape)} and logits {list(logits.shape)}; wanted [S], [S, V]."
            )
        if logits.shape[1] != width:
            raise ValueError(
                f"the {side}'s logits have {logits.shape[1]} columns, the projection {width} ids. Cut padded heads to "
                "the real ids, and check that the projection is that of this pair, not swapped."
            )
        check_ids(side, ids, width)
