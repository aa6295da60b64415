# SPDX-License-Identifier: Apache-2.0
"""Evaluation as the student will be used: on its own completions, graded if there is a grader.

A method that trains on recorded completions alone is evaluated on recorded ones, by the same objective and the same
counts, without generation. Rows are dealt to ranks by index, so every row counts once, however many ranks there are;
a rank whose rows are done goes on without any, because under sharded weights sampling and scoring are collectives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cohobate.align.rollout import AlignedBatch, SamplingConfig
from cohobate.data import PromptRow
from cohobate.objectives import ObjectiveOutput
from cohobate.parallel.world import all_reduce_max, current_world
from cohobate.trainer.lessons import taught
from cohobate.trainer.metrics import MetricSums, add_alignment_metrics, add_rollout_metrics
from cohobate.trainer.rolled_out import RolledOut, completion_ids
from cohobate.trainer.step import StepAssembler

Grader = Callable[[Mapping[str, Any], str], float]


def my_rows(num_rows: int) -> range:
    """Indices of the rows that this rank evaluates."""
    world = current_world()
    return range(world.rank, num_rows, world.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How rows are evaluated. `score` runs student, teacher and objective without gradient; None only grades."""

    assembler: StepAssembler
    sampling: SamplingConfig
    eos_token_ids: tuple[int, ...]
    batch_size: int
    recorded: bool  # take each row's recorded completion instead of sampling one
    grader: Grader | None
    score: Callable[[AlignedBatch], ObjectiveOutput] | None
    counts: Callable[[AlignedBatch], dict[str, float]]
    with_lessons: Callable[[RolledOut, MetricSums], RolledOut] | None = None  # None: no group is sampled

    def __call__(self, rows: Sequence[PromptRow]) -> dict[str, float]:
        """Metrics over the rows of all ranks; `rows` are this rank's. Every rank must call it."""
        sums, terms = MetricSums(), MetricSums()
        for i in range(all_reduce_max(-(-len(rows) // self.batch_size))):
            rolled = self.assembler.roll_out(
                rows[i * self.batch_size : (i + 1) * self.batch_size],
                sampling=self.sampling,
                epoch=0,
                purpose="evaluation",
                fraction=0.0 if self.recorded else 1.0,
            )
            sums.spent("sampling", rolled.sampling_seconds)
            add_rollout_metrics(
                sums,
                rolled.rollout,
                rolled.is_sampled,
                eos_token_ids=self.eos_token_ids,
                max_new_tokens=self.sampling.max_new_tokens,
            )
            if self.grader is not None:
                self._grade(sums, rolled, self.grader)
            if self.score is not None:
                rolled = rolled if self.with_lessons is None else self.with_lessons(rolled, sums)
                trained = taught(rolled)
                aligned = self.assembler.align(rolled if trained is None else rolled.select(trained))
                add_alignment_metrics(sums, aligned)
                for batch in aligned:
                    self._add(batch, self.score(batch), sums, terms)
        result = sums.reduce()
        parts = terms.reduce()
        if parts:
            result["loss"] = sum(parts.values())
        return result

    def _add(self, batch: AlignedBatch, output: ObjectiveOutput, sums: MetricSums, terms: MetricSums) -> None:
        sums.add_metrics(output.metrics)
        counts = self.counts(batch)
        for name, term in output.terms.items():
            terms.add(name, term.sum.detach(), counts[term.count])

    def _grade(self, sums: MetricSums, rolled: RolledOut, grader: Grader) -> None:
        for row, ids in zip(rolled.rows, completion_ids(rolled.rollout), strict=True):
            text = self.assembler.decode(ids, skip_special_tokens=True)
            sums.add("accuracy", float(grader(row.row, text)), 1)
