# SPDX-License-Identifier: Apache-2.0
"""Rows of text in the tokens of a student and three teachers, what all of them predict, and the terms by definition.

Teachers 0 and 1 have vocabularies of their own, teacher 2 has the student's. Chunks, rows and pairs are walked one at
a time in float64; the divergence of a chunk is the oracle of `tests/functional/csd_oracle.py`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohobate.align import AlignedBatch, AlignedSide, Chunks, TeacherSide, align_bytes
from cohobate.functional.scores import (
    DenseScores,
    HiddenScores,
    OutputHead,
    SeveralScores,
    top_k_scores,
)
from cohobate.vocab import Projection, SubtokenTables
from functional import csd_oracle
from functional.csd_oracle import World

HIDDEN, SAME = 4, 2
STUDENT_HEAD = {"scale": 0.8, "softcap": 4.0}


@dataclass(frozen=True)
class Row:
    """One text: nothing of it depends on the other rows."""

    name: str
    worlds: tuple[World, World]  # its tokens on the student's side and those of teachers 0 and 1
    chunks: tuple[Chunks, Chunks]
    weights: Tensor  # [n]
    sampled: bool
    hidden: Tensor  # [n, H] of the student, a leaf
    known: tuple[Tensor, Tensor, Tensor]  # [m, H] of each teacher

    @property
    def ids(self) -> list[int]:
        return self.worlds[0].student_ids


@dataclass(frozen=True)
class Heads:
    student: OutputHead
    teachers: tuple[OutputHead, OutputHead, OutputHead]

    @property
    def leaves(self) -> list[Tensor]:
        assert self.student.bias is not None
        return [self.student.weight, self.student.bias]


def vocabularies(seed: int = 3) -> tuple[World, World]:
    """The student's with each of two others."""
    first, other = csd_oracle.world(seed), csd_oracle.world(seed + 100)
    second = replace(
        first,
        teacher=other.teacher,
        forward=csd_oracle.chains(first.student, other.teacher),
        reverse=csd_oracle.chains(other.teacher, first.student),
    )
    return first, second


def tables(seed: int = 3) -> tuple[SubtokenTables, SubtokenTables]:
    first, second = (SubtokenTables.from_chains(made.forward, made.reverse) for made in vocabularies(seed))
    return first, second


def projections(seed: int = 3) -> tuple[Projection, Projection]:
    """Each student token on the first three of its chain, weights 1, .1, .01 made to add up to 1."""

    def one(made: World) -> Projection:
        indices, weights = [], []
        for chain in made.forward:
            merged: dict[int, float] = {}
            for place, token in enumerate(chain[:3]):
                merged[token] = merged.get(token, 0.0) + 0.1**place
            entries = sorted(merged.items(), key=lambda entry: (-entry[1], entry[0]))
            indices.append([*(token for token, _ in entries), *[-1] * (3 - len(entries))])
            weights.append([*(w / sum(merged.values()) for _, w in entries), *[0.0] * (3 - len(entries))])
        exact = [len(chain) == 1 for chain in made.forward]
        return Projection.from_rows(indices, weights, exact, teacher_vocab_size=len(made.teacher))

    first, second = (one(made) for made in vocabularies(seed))
    return first, second


def rows_of_text(lengths: Sequence[int], *, seed: int = 3, dtype: torch.dtype = torch.float64) -> list[Row]:
    """Random texts of so many bytes; every third is the student's own, some pairs have weight 0."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    made = []
    for number, length in enumerate(lengths):
        text = bytes(rng.choices(b"abc", k=length))
        first, second = (csd_oracle.retold(world, text, seed * 1000 + number) for world in vocabularies(seed))
        second = replace(second, student_ids=first.student_ids)
        chunks = tuple(
            align_bytes([w.student[i] for i in w.student_ids], [w.teacher[i] for i in w.teacher_ids])
            for w in (first, second)
        )
        n, sizes = len(first.student_ids), (len(first.teacher_ids), len(second.teacher_ids), len(first.student_ids))

        def draw(size: int) -> Tensor:
            return torch.randn(size, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)

        weights = torch.rand(n, generator=generator) + 0.5
        weights[torch.rand(n, generator=generator) < 0.1] = 0.0
        made.append(
            Row(
                name=f"row-{number}",
                worlds=(first, second),
                chunks=(chunks[0], chunks[1]),
                weights=weights,
                sampled=number % 3 == 2,
                hidden=draw(n).requires_grad_(),
                known=(draw(sizes[0]), draw(sizes[1]), draw(sizes[2])),
            )
        )
    return made


def heads(seed: int = 3, dtype: torch.dtype = torch.float64) -> Heads:
    generator = torch.Generator().manual_seed(seed + 50)
    first, second = vocabularies(seed)

    def draw(*shape: int) -> Tensor:
        return (1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    size = len(first.student)
    student = OutputHead(weight=draw(size, HIDDEN).requires_grad_(), bias=draw(size).requires_grad_(), **STUDENT_HEAD)
    widths = (len(first.teacher), len(second.teacher), size)
    of_teachers = [OutputHead(weight=draw(width, HIDDEN), bias=draw(width)) for width in widths]
    return Heads(student=student, teachers=(of_teachers[0], of_teachers[1], of_teachers[2]))


def batch_of(
    rows: Sequence[Row], teachers: Sequence[int] = (0,), routes: Mapping[str, int] | None = None
) -> AlignedBatch:
    """The rows as one micro-batch, predictions and chunks numbered through them.

    `routes`: by a row's name the place in `teachers` of the one that reads it; None: all do.
    """
    target = torch.tensor([i for row in rows for i in row.ids], dtype=torch.int64)
    index = torch.tensor([r for r, row in enumerate(rows) for _ in row.ids], dtype=torch.int64)
    sides = tuple(_side(rows, teacher, target, index, _read(rows, i, routes)) for i, teacher in enumerate(teachers))
    return AlignedBatch(
        student=AlignedSide(model_inputs={}, pair_index=torch.arange(len(target))),
        teacher=sides[0],
        teachers=sides,
        target_ids=target,
        weights=torch.cat([torch.zeros(0), *(row.weights for row in rows)]),
        row=index,
        is_sampled=torch.tensor([row.sampled for row in rows], dtype=torch.bool),
        sample_ids=tuple(row.name for row in rows),
    )


def _read(rows: Sequence[Row], place: int, routes: Mapping[str, int] | None) -> tuple[int, ...] | None:
    return None if routes is None else tuple(r for r, row in enumerate(rows) if routes[row.name] == place)


def _side(
    rows: Sequence[Row], teacher: int, target: Tensor, index: Tensor, read: tuple[int, ...] | None
) -> TeacherSide:
    if teacher == SAME:
        some = torch.tensor([read is None or r in read for r in index.tolist()], dtype=torch.bool)
        number = torch.arange(int(some.sum()))
        return TeacherSide(model_inputs={}, pair_index=number, target_ids=target[some], row=index[some], rows=read)
    columns: list[list[int]] = [[], [], [], []]
    ids: list[int] = []
    row_of: list[int] = []
    before = 0
    for r, row in enumerate(rows):
        if read is not None and r not in read:
            before += len(row.ids)
            continue
        for s0, s1, t0, t1 in row.chunks[teacher]:
            for column, value in zip(columns, (s0 + before, s1 + before, t0 + len(ids), t1 + len(ids)), strict=True):
                column.append(value)
        ids += row.worlds[teacher].teacher_ids
        row_of += [r] * len(row.worlds[teacher].teacher_ids)
        before += len(row.ids)
    names = ("student_start", "student_end", "teacher_start", "teacher_end")
    return TeacherSide(
        model_inputs={},
        pair_index=torch.arange(len(ids)),
        target_ids=torch.tensor(ids, dtype=torch.int64),
        row=torch.tensor(row_of, dtype=torch.int64),
        chunks=Chunks(**{n: np.array(c, dtype=np.int32) for n, c in zip(names, columns, strict=True)}),
        rows=read,
    )


def student_of(rows: Sequence[Row], made: Heads, *, dense: bool = False) -> HiddenScores | DenseScores:
    scores = HiddenScores(hidden=_joined([row.hidden for row in rows], made.student.weight), head=made.student)
    return DenseScores(dense=scores.logits()) if dense else scores


def teacher_of(rows: Sequence[Row], made: Heads, teacher: int, how: str | int = "hidden", **options: Any) -> Any:
    """Its scores as `"hidden"`, `"dense"`, or the k largest."""
    scores = HiddenScores(
        hidden=_joined([row.known[teacher] for row in rows], made.student.weight), head=made.teachers[teacher]
    )
    if how == "hidden":
        return scores
    if how == "dense":
        return DenseScores(dense=scores.logits())
    assert isinstance(how, int)
    ids = batch_of(rows, [teacher]).teachers[0].target_ids
    return top_k_scores(scores.logits(), ids, how, rows="pairs", **options)


def teachers_of(
    rows: Sequence[Row],
    made: Heads,
    teachers: Sequence[int],
    how: str | int = "hidden",
    routes: Mapping[str, int] | None = None,
) -> Any:
    scores = tuple(
        teacher_of(
            [row for row in rows if routes is None or routes[row.name] == place],
            made,
            i,
            "hidden" if i == SAME else how,
        )
        for place, i in enumerate(teachers)
    )
    return scores[0] if len(scores) == 1 else SeveralScores(scores=scores)


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like.new_zeros(0, HIDDEN), *parts])


# ------------------------------------------------------------------ by definition


def logits_of(hidden: Tensor, head: OutputHead) -> Tensor:
    raw = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    raw = raw * head.scale
    return raw if head.softcap is None else head.softcap * torch.tanh(raw / head.softcap)


def least_weight(row: Row, start: int, end: int) -> float:
    """Of a run of pairs; 0 if one of them has none."""
    return min(float(w) for w in row.weights[start:end])


def csd_sum(rows: Sequence[Row], made: Heads, teacher: int, *, mismatch_weight: float = 5.0, **options: Any) -> Tensor:
    """Weighted divergences of one teacher's chunks, row by row and chunk by chunk; no T^2."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        world = row.worlds[teacher]
        # the oracle speaks of a text whose token 0 nothing predicts
        text = replace(world, student_ids=[0, *world.student_ids], teacher_ids=[0, *world.teacher_ids])
        student, known = logits_of(row.hidden, made.student), logits_of(row.known[teacher], made.teachers[teacher])
        for s0, s1, t0, t1 in row.chunks[teacher]:
            weight = least_weight(row, s0, s1) * (1.0 if s1 - s0 == t1 - t0 == 1 else mismatch_weight)
            if weight:
                chunk = (s0 + 1, s1 + 1, t0 + 1, t1 + 1)
                total = total + weight * csd_oracle.common_support(student, known, text, chunk, **options)
    return total


def same_sum(
    rows: Sequence[Row],
    made: Heads,
    *,
    columns: Sequence[int] | None = None,
    temperature: float = 1.0,
    reverse: bool = False,
    head: OutputHead | None = None,
) -> Tensor:
    """Weighted KL of the same-tokenizer teacher's pairs, renormalised on the columns; no T^2."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        student, known = logits_of(row.hidden, made.student), logits_of(row.known[SAME], head or made.teachers[SAME])
        for s, t, weight in zip(student, known, row.weights.tolist(), strict=True):
            if not weight:
                continue
            chosen = list(range(len(s)) if columns is None else columns)
            s, t = ((x[chosen] / temperature).log_softmax(-1) for x in (s, t))
            first, second = (s, t) if reverse else (t, s)
            total = total + weight * (first.exp() * (first - second)).sum()
    return total


def ce_sum(rows: Sequence[Row], made: Heads, *, every: bool = False) -> Tensor:
    """Weighted negative log-likelihood of the recorded rows, or of every one."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        if row.sampled and not every:
            continue
        student = logits_of(row.hidden, made.student)
        for z, token, weight in zip(student, row.ids, row.weights.tolist(), strict=True):
            if weight:
                total = total - weight * z.log_softmax(-1)[token]
    return total


def num_chunks(rows: Sequence[Row], teacher: int) -> int:
    return sum(len(row.ids) if teacher == SAME else len(row.chunks[teacher]) for row in rows)


def num_labels(rows: Sequence[Row]) -> int:
    return sum(len(row.ids) for row in rows if not row.sampled)


def own_text_scores(rows: Sequence[Row], made: Heads, teacher: int, metric: str) -> float:
    """Mean over the teacher's own tokens, in rows of which some pair takes part; larger is better."""
    values = []
    for row in rows:
        known = logits_of(row.known[teacher], made.teachers[teacher])
        ids = row.ids if teacher == SAME else row.worlds[teacher].teacher_ids
        for place, (z, token) in enumerate(zip(known, ids, strict=True)):
            p = z.softmax(-1)
            if float(row.weights.max()) == 0 or (teacher == SAME and not row.weights[place]):
                continue
            score = {"ce": p[token].log(), "entropy": (p * p.log()).sum(), "max_prob": p.max()}[metric]
            values.append(float(score))
    return sum(values) / len(values)


def most_important(rows: Sequence[Row], made: Heads, teacher: int, k: int) -> list[int]:
    """The k ids with the largest logit in any row of a chunk (pair) that takes part, ties to the lower id."""
    largest: dict[int, float] = {}
    for row in rows:
        known = logits_of(row.known[teacher], made.teachers[teacher])
        chunks = [(i, i + 1, i, i + 1) for i in range(len(row.ids))] if teacher == SAME else list(row.chunks[teacher])
        for s0, s1, t0, t1 in chunks:
            if least_weight(row, s0, s1):
                for v in range(known.shape[1]):
                    largest[v] = max(largest.get(v, -1e30), *known[t0:t1, v].tolist())
    return sorted(sorted(largest, key=lambda v: (-largest[v], v))[:k])


def loss_of(out: Any, counts: dict[str, float]) -> Tensor:
    """As the trainer divides."""
    return torch.stack([term.sum / counts[term.count] for term in out.terms.values()]).sum()


def metric(out: Any, name: str) -> float:
    return float(out.metrics[name].sum) / float(out.metrics[name].count)
