# SPDX-License-Identifier: Apache-2.0
"""Losses that compare probabilities by rank: ULD, and the hybrid that GOLD makes of it. For comparison only.

ULD (2402.12030) sorts both sides' probabilities and adds up the differences of the largest, the second largest, and so
on: no vocabulary has to correspond to another, since no token is looked at. That is its whole weakness. Permute the
student's ids and the value stays what it was; a student that is sure of the wrong token is as good as one that is sure
of the right one, and gets no gradient. It teaches how sure to be, never of what, so it goes with a cross-entropy and
is weak alone. The hybrid compares the tokens that both sides have column by column, and sorts only what is left: what
it says of the sorted part is ULD's.

Neither knows events of several tokens. In a chunk where the teacher writes "ad" as "a", "d", the student's column "ad"
meets whatever the teacher gives its own "ad" after "a". `common_support.py` pairs the student's "ad" with the
teacher's "d" there; prefer it wherever sub-token tables can be built.

Row p of a text predicts token p + 1, so what a chunk is read from begins one row before its first token; published
code begins at the token itself and compares predictions of what stands after it.

S student tokens, N teacher tokens, Vs and Vt vocabularies, C chunks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohobate.functional.divergences import jsd
from cohobate.functional.logprobs import gather_last, log_softmax, other_ids, upcast_pair
from cohobate.functional.runs import Ints, joined_runs
from cohobate.functional.scores import Rows, realized_ids
from cohobate.functional.support_events import check_chunks, check_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedOutput:
    """What `ranked_divergence` says of each chunk."""

    divergence: Tensor  # [C] 0 where not valid; differentiable
    valid: Tensor  # [C] bool: something predicts the chunk's first token on both sides


def ranked_divergence(
    student_logits: Tensor,
    student_ids: Tensor,
    teacher_logits: Tensor,
    teacher_ids: Tensor,
    chunks: Any,
    *,
    common: tuple[Any, Any] | None = None,
    beta: float = 0.5,
    common_weight: float = 1.0,
    sorted_weight: float = 1.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    rows: Rows = "text",
) -> RankedOutput:
    """Distance of each chunk's sorted probabilities, in probability; with `common`, plus nats: `-> [C]`.

    A side is read as the probabilities, over its last token, of what it really wrote up to there followed by any
    token: `P(a_1) .. P(a_{m-1}) P(. | a_1 .. a_{m-1})`. They add up to 1 in a chunk of one token, to less in others.
    Not multiplied by the temperature's square.

    Args:
        student_logits, teacher_logits: `[S, Vs]`, `[N, Vt]` raw, over the real ids. The teacher is a constant.
        student_ids, teacher_ids: `[S]`, `[N]` the text of both sides; with `rows="pairs"` what each row predicts.
        chunks: what `align_tokens` gives; with `rows="pairs"` ranges of rows.
        common: student ids and teacher ids `[n], [n]` that spell the same (`SubtokenTables.common`,
            `Projection.strict_pairs`): these are compared one by one, by the generalised JSD of `beta` over the
            probabilities as they are, and only the others are sorted. None: all are sorted, which is ULD.
        common_weight, sorted_weight: what the two parts are multiplied by.
        top_k: compare so many of the sorted probabilities; None: all. A side that has fewer has 0 there.

    Raises:
        ValueError: shapes, ids or options that do not fit.
    """
    _check_sides(("student", student_logits, student_ids), ("teacher", teacher_logits, teacher_ids))
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be >= 1, or None for all, got {top_k}.")
    s0, s1, t0, t1 = check_chunks(chunks, len(student_ids), len(teacher_ids))
    ours, theirs = _ChunkRows.of(s0, s1, rows), _ChunkRows.of(t0, t1, rows)
    valid = ours.predicted & theirs.predicted
    student = ours.logprobs(student_logits, student_ids, valid, temperature, rows)  # [valid, Vs]
    teacher = theirs.logprobs(teacher_logits.detach(), teacher_ids, valid, temperature, rows)  # [valid, Vt]
    student, teacher = upcast_pair(student, teacher.to(student.device))
    value = student.new_zeros(student.shape[0])
    if common is not None:
        both, student, teacher = _divided(student, teacher, common)
        value = value + common_weight * jsd(*both, beta)
    value = value + sorted_weight * sorted_distance(student.exp(), teacher.exp(), top_k=top_k)
    places = torch.from_numpy(np.flatnonzero(valid)).to(value.device)
    return RankedOutput(
        divergence=value.new_zeros(len(valid)).index_add(0, places, value),
        valid=torch.from_numpy(valid).to(value.device),
    )


def sorted_distance(student: Tensor, teacher: Tensor, *, top_k: int | None = None) -> Tensor:
    """`sum_k |k-th largest of student - k-th largest of teacher|`: `[..., Vs], [..., Vt] -> [...]`, blind to order.

    The shorter side goes on with zeros, so no probability of the longer one is left out. 0 where both hold the same
    numbers in whatever order; at most the two sums together.
    """
    width = max(student.shape[-1], teacher.shape[-1])
    k = width if top_k is None else min(top_k, width)
    return (_largest(student, k) - _largest(teacher, k)).abs().sum(-1)


def _largest(values: Tensor, k: int) -> Tensor:
    found = values.topk(min(k, values.shape[-1])).values
    return torch.nn.functional.pad(found, (0, k - found.shape[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkRows:
    """The logits rows from which one side's chunks are read."""

    predicted: np.ndarray  # [C] bool: there is a row for the first token, and a token
    first: Ints  # [C] the row that predicts the first token
    last: Ints  # [C] the row that predicts the last one

    @classmethod
    def of(cls, start: Ints, end: Ints, rows: Rows) -> "_ChunkRows":
        shift = 1 if rows == "text" else 0
        return cls(predicted=(start >= shift) & (end > start), first=start - shift, last=end - 1 - shift)

    def logprobs(self, logits: Tensor, ids: Tensor, valid: np.ndarray, temperature: float, rows: Rows) -> Tensor:
        """Of the tokens up to the last one as they are, followed by any: `[valid chunks, V]`."""
        first, last = self.first[valid], self.last[valid]
        written, chunk = joined_runs(first, last - first)  # the rows before the last one, and the chunk of each
        at = torch.from_numpy(written).to(logits.device)
        realized = realized_ids(ids, rows).to(logits.device)
        logp = gather_last(log_softmax(logits[at], temperature=temperature), realized[at].long())
        prefix = logp.new_zeros(len(last)).index_add(0, torch.from_numpy(chunk).to(logits.device), logp)
        any_token = log_softmax(logits[torch.from_numpy(last).to(logits.device)], temperature=temperature)
        return prefix[:, None] + any_token


def _divided(
    student: Tensor, teacher: Tensor, common: tuple[Any, Any]
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Both sides at the common ids, in one order; and the student's, and the teacher's, other columns."""
    sides, others = [], []
    for side, values, given in (("student", student, common[0]), ("teacher", teacher, common[1])):
        ids = torch.as_tensor(given)
        check_ids(side, ids, values.shape[1])
        if ids.dim() != 1 or ids.unique().numel() != ids.numel():
            raise ValueError(f"common must hold {side} ids [n], each id once, got {ids.numel()} of {list(ids.shape)}.")
        ids = ids.to(values.device, torch.int64)
        sides.append(values[:, ids])
        others.append(values[:, other_ids(ids, values.shape[1])])
    if sides[0].shape != sides[1].shape:
        raise ValueError(
            f"common must pair ids: got {sides[0].shape[1]} of the student and {sides[1].shape[1]} of the teacher."
        )
    return (sides[0], sides[1]), others[0], others[1]


def _check_sides(*sides: tuple[str, Tensor, Tensor]) -> None:
    for side, logits, ids in sides:
        if logits.dim() != 2 or ids.shape != logits.shape[:1]:
            raise ValueError(
                f"the {side} has ids {list(ids.shape)} and logits {list(logits.shape)}; wanted one id for each row, "
                "[S] and [S, V]."
            )
        check_ids(side, ids, logits.shape[1])
