# SPDX-License-Identifier: Apache-2.0
"""One optimizer step, from data rows to micro-batches of aligned pairs and the denominators of the whole step.

Everything that a loss is divided by is known here, before the first backward: counts come from the aligned geometry of
all micro-batches and are summed over all ranks. So neither accumulation, nor how rows fall into micro-batches, nor the
number of ranks can change loss or gradient.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cohobate.align.packing import PackRow, PackSide, fill_bins, with_num_bins
from cohobate.align.rollout import AlignedBatch, SamplingConfig
from cohobate.data import PromptRow, draw_on_policy, rollout_request
from cohobate.objectives import Objective
from cohobate.parallel.world import all_reduce_max, keyed_seed
from cohobate.rollouts import MixedRollouts, RolloutSource
from cohobate.trainer.aligners import Aligner
from cohobate.trainer.rolled_out import RolledOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The micro-batches of one optimizer step on this rank."""

    groups: tuple[tuple[AlignedBatch, ...], ...]  # one group for each batch that transformers counts

    def micro_batches(self) -> list[AlignedBatch]:
        return [batch for group in self.groups for batch in group]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroup:
    """What transformers passes to one `training_step`: consecutive micro-batches and the objective of this step."""

    batches: tuple[AlignedBatch, ...]
    objective: Objective

    def num_tokens(self) -> int:
        return sum(batch.student.model_inputs["input_ids"].numel() for batch in self.batches)


def plan_micro_batches(
    widths: Sequence[int], *, max_rows: int, token_budget: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Which rows go together: `max_rows` at a time in order, or by width so that `rows * widest` keeps to a budget.

    `widths` are the tokens of each row, all sides added. A row wider than the budget goes alone.
    """
    if token_budget is None:
        return tuple(tuple(range(s, min(s + max_rows, len(widths)))) for s in range(0, len(widths), max_rows))
    plan: list[tuple[int, ...]] = []
    current: list[int] = []
    widest = 0
    for row in sorted(range(len(widths)), key=lambda r: (-widths[r], r)):
        widest = max(widest, widths[row]) if current else widths[row]
        if current and widest * (len(current) + 1) > token_budget:
            plan.append(tuple(current))
            current, widest = [], widths[row]
        current.append(row)
    return (*plan, tuple(current)) if current else tuple(plan)


def spread(batches: Sequence[AlignedBatch], num_groups: int) -> tuple[tuple[AlignedBatch, ...], ...]:
    """The micro-batches in `num_groups` consecutive groups of nearly equal size; each has at least one."""
    sizes = [len(batches) // num_groups + (g < len(batches) % num_groups) for g in range(num_groups)]
    starts = [sum(sizes[:g]) for g in range(num_groups)]
    return tuple(tuple(batches[s : s + n]) for s, n in zip(starts, sizes, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAssembler:
    """Makes windows. Holds the parts that a step needs before any scoring; keeps nothing between calls."""

    rollouts: RolloutSource
    aligner: Aligner  # the one that the teacher needs
    decode: Any  # the tokenizer's `decode`, for graders
    pad_token_id: int
    seed: int
    on_policy_fraction: float
    max_rows: int  # completions in one micro-batch
    token_budget: int | None
    packing: bool = False  # the budget is what each model's pass holds without padding

    def roll_out(
        self,
        rows: Sequence[PromptRow],
        *,
        sampling: SamplingConfig,
        epoch: int,
        purpose: str = "rollout",
        fraction: float | None = None,
    ) -> RolledOut:
        """Sample or take each row's completion. The choice and the draw are keyed by row, so ranks do not matter."""
        fraction = self.on_policy_fraction if fraction is None else fraction
        chosen = [
            row.completion_ids is None or draw_on_policy(row.sample_id, seed=self.seed, epoch=epoch, fraction=fraction)
            for row in rows
        ]
        is_sampled = torch.tensor(chosen, dtype=torch.bool)
        seeds = torch.tensor([keyed_seed(self.seed, purpose, epoch, row.sample_id) for row in rows], dtype=torch.int64)
        source = MixedRollouts(
            self.rollouts,
            is_sampled=is_sampled,
            completions=[row.completion_ids for row in rows],
            pad_token_id=self.pad_token_id,
        )
        started = time.perf_counter()
        rollout = source.sample(rollout_request(rows, self.pad_token_id, seeds=seeds), sampling)
        n = sampling.n_samples_per_prompt
        return RolledOut(
            rollout=rollout,
            rows=tuple(row for row in rows for _ in range(n)),
            is_sampled=is_sampled.repeat_interleave(n),
            sampling_seconds=time.perf_counter() - started,
        )

    def align(self, rolled: RolledOut, *, at_least: int = 1) -> list[AlignedBatch]:
        """Micro-batches of aligned pairs; every row's teacher prefix is complete and its own.

        As many as the rank with the most rows makes, and `at_least` so many: forward passes may be collectives. So
        every rank calls this.
        """
        reading = self.aligner.read(rolled)
        rows = [
            PackRow(sample_id=row.sample_id, lengths=lengths)
            for row, lengths in zip(rolled.rows, reading.lengths, strict=True)
        ]
        sides = self._sides(len(rows[0].lengths) if rows else 1)
        plan = fill_bins(rows, sides) if sides else self._padded_plan(rows)
        wanted = all_reduce_max(max(len(plan), at_least))
        if sides:
            plan = with_num_bins(plan, wanted, rows, sides)
        batches = [reading.batch(places) for places in plan if places]
        return [*batches, *[self.aligner.without_pairs(self.pad_token_id)] * (wanted - len(batches))]

    def _padded_plan(self, rows: Sequence[PackRow]) -> tuple[tuple[int, ...], ...]:
        widths = [sum(row.lengths) for row in rows]
        return plan_micro_batches(widths, max_rows=self.max_rows, token_budget=self.token_budget)

    def _sides(self, num_sides: int) -> list[PackSide]:
        """The models whose rows are packed, each with the whole budget; none where rows are padded."""
        if not self.packing or self.token_budget is None:
            return []
        names = ["student", *(f"teacher {i}" for i in range(num_sides - 1))]
        return [PackSide(name=name, capacity=self.token_budget) for name in names]
