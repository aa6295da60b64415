# SPDX-License-Identifier: Apache-2.0
"""What CSD and X-Token share: several teachers, each with its own tokens, and the student's cross-entropy in one loss.

A term is a sum over one teacher's chunks and has that teacher's own count: the chunks that can be scored, known from
geometry before any model runs. The temperature's square, the teacher's weight and the scale are in the sums, in no
count. How terms are weighed against each other is `aggregate.py`; how the student's logits are read, block by block,
once for all teachers and the cross-entropy, is `runs.py`; which chunks take part is `compared.py`.

Some things are chosen from the teachers' rows: which columns to compare, whom to listen to. A choice made in every
micro-batch would make the loss depend on how the step was cut up, so it is made over the step (`StepObjective`), which
costs one more forward pass of both models where there is something to choose. `chosen_over="call"` is as published.

N student pairs, U runs of pairs that are compared.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohobate.align.rollout import AlignedBatch
from cohobate.functional.logprobs import wide_dtype
from cohobate.functional.reduce import weigh
from cohobate.functional.runs import Ints
from cohobate.functional.scores import TeacherScores, TopKScores
from cohobate.objectives.aggregate import (
    CE,
    complete_values,
    count_of,
    dynamic_scale,
    joined_values,
    kd_term,
    term_counts,
)
from cohobate.objectives.compared import Compared, RowScores, TeacherText, check_sides, compared, teacher_text
from cohobate.objectives.protocol import Metric, ObjectiveOutput, StudentScores, Term
from cohobate.objectives.runs import Runs, chunk_runs, label_runs, pair_runs, read_runs
from cohobate.objectives.teacher_options import TeacherOptions
from cohobate.objectives.teacher_rows import (
    Choice,
    chosen_columns,
    known_rows,
    logits_at,
    mean_logits,
    teacher_scores,
)
from cohobate.parallel.gather import gather_rows
from cohobate.parallel.world import World, all_reduce_sum, current_world


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralTeachersObjective(TeacherOptions):
    """An objective but for the divergence of a chunk, which a method adds (`cross_tokenizer.py`).

    Terms `kd/0`, `kd/1`, ..., in `chunks/0`, `chunks/1`, ..., or all in `chunks` where each row is routed to one
    teacher, and `ce` in `ce_tokens`, all in nats.
    """

    def counts(self, batch: AlignedBatch) -> dict[str, float]:
        chunks = []
        for text in self._texts(batch):
            counted = text.pairs if text.chunks is None else self.counted(batch.target_ids, text).nonzero()[0]
            chunks.append(float(len(counted)))
        return term_counts(float(self._is_label(batch).sum()), chunks, routed=self.routed)

    def __call__(
        self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch, /
    ) -> ObjectiveOutput:
        sides, scores = self._read_sides(student, teacher, batch)
        choice = self.choice
        if choice is None:  # a call outside a step is a step of its own
            known = self._known(sides, scores)
            choice = self._chosen(gather_rows(known, world=self._world) if self.chooses else known)
        sides = [side if self._is_compared(i, choice) else side.without_runs() for i, side in enumerate(sides)]
        labels = (self._is_label(batch) & (batch.weights != 0)).nonzero().squeeze(-1)
        runs = self._runs(sides, scores, batch.target_ids, choice)
        *divergences, nll = read_runs(student, [*runs, label_runs(batch.target_ids, labels, learns=self.learns_ce)])
        weighted = [
            self._weighted(side, 1.0 if self.averages else choice.weights[i], divergence)
            for i, (side, divergence) in enumerate(zip(sides, divergences, strict=True))
        ]
        weighted_nll = weigh(nll, batch.weights[labels])
        values = {kd_term(i): of_runs.sum() for i, of_runs in enumerate(weighted)} | {CE: weighted_nll.sum()}
        kd_scale, ce_scale = self._scales(values, batch)
        shares = [(side.end - 1, kd_scale * of_runs) for side, of_runs in zip(sides, weighted, strict=True)]
        return ObjectiveOutput(
            terms={
                name: Term(
                    sum=(ce_scale if name == CE else kd_scale) * value, count=count_of(name, routed=self.routed)
                )
                for name, value in values.items()
            },
            metrics=self._metrics(sides, divergences, nll, choice, kd_scale) | self._row_shares(sides),
            pair_loss=_by_pair(batch.num_pairs, [*shares, (labels.cpu().numpy(), ce_scale * weighted_nll)]),
            step_values={n: v.detach() for n, v in values.items()} if self.looks_back else {},
        )

    # ---- one step and the next --------------------------------------------------------------------------------------

    @property
    def needs_step(self) -> bool:
        """Whether something is to be chosen from the whole step."""
        return self.chosen_over == "step" and self.chooses

    @property
    def held_out(self) -> Any:
        """On all columns and with fixed weights: a held-out loss depends on its own rows and on no earlier step.

        Only which teacher is selected, or how surely each speaks, is that of each call.
        """
        settings = {"dynamic_scaling": "off", "chosen_over": "call", "choice": None, "step_counts": None}
        return replace(self, **settings, **self.on_all_columns())

    def measure(self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch, /) -> Tensor:
        """What one micro-batch says for the choices of its step: rows of `teacher_rows.py`."""
        return self._known(*self._read_sides(student, teacher, batch))

    def prepared(self, step_measures: Tensor, /) -> Any:
        """The objective of the step whose micro-batches said `step_measures [n, 3]`."""
        return replace(self, choice=self._chosen(step_measures))

    def with_counts(self, counts: Mapping[str, float]) -> Any:
        """The objective of the step with these counts: the ratio of one call's values needs them."""
        return replace(self, step_counts=dict(counts)) if self.dynamic_scaling == "call" else self

    def after_step(self, values: Mapping[str, float], counts: Mapping[str, float]) -> Any:
        """The objective of the next step, after one whose `step_values` added up to `values` over all ranks.

        A step without a ratio (no chunk, no label, or an overflow) leaves the scale as it was.
        """
        if not self.looks_back:
            return self
        kd, ce = joined_values(values, counts, routed=self.routed)
        scale = dynamic_scale(kd, ce)
        known = kd != 0 and ce != 0 and 0 < scale < math.inf
        return replace(self, scale=scale) if known else self

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs; empty where no step depends on the one before."""
        return {"kd_scale": torch.tensor(self.last_scale, dtype=torch.float64)} if self.looks_back else {}

    def with_state_dict(self, state: Mapping[str, Tensor]) -> Any:
        """The objective that goes on from a `state_dict`."""
        return replace(self, scale=float(state["kd_scale"])) if self.looks_back else self

    # ---- inside -----------------------------------------------------------------------------------------------------

    @property
    def _world(self) -> World:
        return current_world(self.group)

    def _is_compared(self, teacher: int, choice: Choice) -> bool:
        return teacher == 0 if self.averages else choice.weights[teacher] != 0

    def _is_label(self, batch: AlignedBatch) -> Tensor:
        """`[N]` bool: the pairs whose token the cross-entropy is of."""
        if self.ce_rows == "all":
            return torch.ones_like(batch.row, dtype=torch.bool)
        return ~batch.is_sampled[batch.row]

    def _texts(self, batch: AlignedBatch) -> list[TeacherText]:
        return [
            teacher_text(batch, i, own_tokenizer=part is not None, routed=self.routed)
            for i, part in enumerate(self.parts)
        ]

    def _read_sides(
        self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch
    ) -> tuple[list[Compared], tuple[RowScores, ...]]:
        """What takes part of the batch, for each teacher, and what it says; all of it checked."""
        texts = self._texts(batch)
        scores = check_sides(
            student,
            teacher,
            batch,
            texts,
            name=type(self).__name__,
            artefact=self.artefact,
            sizes=[None if part is None else self.sizes(part) for part in self.parts],
            kinds=[self.kinds_of(i) for i in range(len(self.parts))],
            temperature=self.temperature,
        )
        sides = []
        for text in texts:
            counted = None if text.chunks is None else self.counted(batch.target_ids, text)
            sides.append(compared(batch, text, counted))
        return sides, scores

    def _known(self, sides: Sequence[Compared], scores: Sequence[RowScores]) -> Tensor:
        return known_rows(sides, scores, self.aggregation.score, self._chosen_numbers())

    def _chosen_numbers(self) -> list[int | None]:
        return [self.chosen_number(i) for i in range(len(self.parts))]

    def _chosen(self, known: Tensor) -> Choice:
        """The choices, from what all micro-batches and ranks know."""
        rules = self.aggregation
        sizes = [self.student_size or 0 if part is None else self.sizes(part)[1] for part in self.parts]
        scores = None if rules.score is None else teacher_scores(known, len(self.parts))
        columns = [None if k is None else chosen_columns(known, i, k) for i, k in enumerate(self._chosen_numbers())]
        return Choice(weights=rules.teacher_weights(scores, sizes), columns=tuple(columns))

    def _runs(
        self, sides: Sequence[Compared], scores: Sequence[RowScores], student_ids: Tensor, choice: Choice
    ) -> list[Runs]:
        """How each teacher's runs are read."""
        options = {"temperature": self.temperature, "beta": self.pair_beta}
        found = []
        for i, (side, said, columns) in enumerate(zip(sides, scores, choice.columns, strict=True)):
            if side.chunks is not None:
                found.append(chunk_runs(side, said, student_ids, partial(self.divergence, i, columns)))
            elif self.averages:
                found.append(pair_runs(side, mean_logits(scores, self.weights), None, **options))
            else:
                assert not isinstance(said, TopKScores)
                found.append(pair_runs(side, logits_at(said, columns), columns, **options))
        return found

    def _weighted(self, side: Compared, share: float, divergence: Tensor) -> Tensor:
        """`[U]` what each run adds to its term, but for the scale."""
        factors = torch.from_numpy(self.factors(side.mismatched)).to(divergence) * side.weights.to(divergence)
        return weigh(divergence, self.temperature**2 * share * factors)

    def _scales(self, values: Mapping[str, Tensor], batch: AlignedBatch) -> tuple[float, float]:
        """What multiplies the terms of the teachers, and that of the cross-entropy."""
        if self.dynamic_scaling == "off":
            return self.kd_weight, self.ce_weight
        if self.looks_back:
            return self.last_scale, 1.0
        counts = self.step_counts
        if counts is None:
            counts = all_reduce_sum(self.counts(batch), world=self._world)
        return dynamic_scale(*complete_values(values, counts, routed=self.routed, world=self._world)), 1.0

    def _metrics(
        self, sides: Sequence[Compared], divergences: Sequence[Tensor], nll: Tensor, choice: Choice, kd_scale: float
    ) -> dict[str, Metric]:
        """A teacher that is not compared has a weight of 0, and its mean is over nothing."""

        def mean(values: Tensor) -> Metric:
            return Metric(sum=values.detach().sum(), count=float(values.numel()))

        def number(value: float) -> Metric:
            return Metric(sum=torch.tensor(value, dtype=torch.float64), count=1.0)

        own = [side.mismatched for side in sides if side.chunks is not None]
        mismatched = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.bool_), *own]))
        found = {"ce": mean(nll), "kd/scale": number(kd_scale), "chunks/mismatch_share": mean(mismatched.double())}
        for i, weight in enumerate(choice.weights):
            found[f"teacher{i}/weight"] = number(weight)
        names = ["kd/average"] if self.averages else [f"kd/teacher{i}" for i in range(len(sides))]
        return found | {name: mean(divergence) for name, divergence in zip(names, divergences, strict=False)}

    def _row_shares(self, sides: Sequence[Compared]) -> dict[str, Metric]:
        """Of all rows, how many each teacher answered; where each answers all, there is nothing to say."""
        if not self.routed:
            return {}
        rows = [float(len(side.text.rows or ())) for side in sides]
        return {
            f"teacher{i}/row_share": Metric(sum=torch.tensor(number, dtype=torch.float64), count=sum(rows))
            for i, number in enumerate(rows)
        }


def _by_pair(num_pairs: int, parts: Sequence[tuple[Ints, Tensor]]) -> Tensor:
    """`[N]` detached: values added up at their pairs."""
    first = parts[0][1]
    total = torch.zeros(num_pairs, dtype=wide_dtype(*(values for _, values in parts)), device=first.device)
    for pairs, values in parts:
        total.index_add_(0, torch.from_numpy(pairs).to(total.device), values.detach().to(total.dtype))
    return total
