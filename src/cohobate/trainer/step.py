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
from torch import Tensor

from cohobate.align import aligned_batch, build_opsd_training_batch
from cohobate.align.rollout import AlignedBatch, AlignedSide, RolloutBatch, SamplingConfig
from cohobate.align.rollout_ops import completion_mask, select_rows
from cohobate.data import (
    CompletionView,
    PrivilegedContext,
    PromptRow,
    draw_on_policy,
    rollout_request,
    teacher_context,
)
from cohobate.objectives import Objective
from cohobate.parallel.world import all_reduce_max, keyed_seed
from cohobate.rollouts import MixedRollouts, RolloutSource


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """Rows with their completions; row i of every field is one completion."""

    rollout: RolloutBatch
    rows: tuple[PromptRow, ...]  # [B] the data row of each completion
    is_sampled: Tensor  # [B] bool
    sampling_seconds: float


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

    `widths` are the tokens of each row, both sides added. A row wider than the budget goes alone.
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


def without_pairs(token_id: int) -> AlignedBatch:
    """A micro-batch of one token and no pair: what a rank runs to stay in step when it has no rows left."""
    none = torch.zeros(0, dtype=torch.int64)
    one = torch.ones((1, 1), dtype=torch.int64)
    inputs = {"input_ids": one * token_id, "attention_mask": one, "position_ids": one * 0}
    side = AlignedSide(model_inputs=inputs, pair_index=none)
    return AlignedBatch(
        student=side,
        teacher=side,
        target_ids=none,
        weights=torch.zeros(0),
        row=none,
        is_sampled=torch.zeros(1, dtype=torch.bool),
        sample_ids=("",),
        sampler_logprobs=torch.zeros(0),
    )


def in_step(batches: Sequence[AlignedBatch], *, pad_token_id: int, at_least: int = 1) -> list[AlignedBatch]:
    """As many micro-batches as the rank with the most has: forward passes may be collectives. Every rank calls it."""
    wanted = all_reduce_max(max(len(batches), at_least))
    return [*batches, *[without_pairs(pad_token_id)] * (wanted - len(batches))]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAssembler:
    """Makes windows. Holds the parts that a step needs before any scoring; keeps nothing between calls."""

    rollouts: RolloutSource
    privileged: PrivilegedContext | None
    decode: Any  # the tokenizer's `decode`, for privileged contexts that read the completion
    pad_token_id: int
    seed: int
    on_policy_fraction: float
    max_rows: int  # completions in one micro-batch
    token_budget: int | None

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

    def align(self, rolled: RolledOut) -> list[AlignedBatch]:
        """Micro-batches of aligned pairs; every row's teacher prefix is complete and its own."""
        prefixes = self._teacher_prefixes(rolled)
        student_widths = rolled.rollout.attention_mask.sum(1).tolist()
        completions = [len(ids) for ids in completion_ids(rolled.rollout)]
        widths = [s + len(p) + c for s, p, c in zip(student_widths, prefixes, completions, strict=True)]
        plan = plan_micro_batches(widths, max_rows=self.max_rows, token_budget=self.token_budget)
        return [self._micro_batch(rolled, prefixes, rows) for rows in plan]

    def _micro_batch(self, rolled: RolledOut, prefixes: list[tuple[int, ...]], rows: tuple[int, ...]) -> AlignedBatch:
        rollout = select_rows(rolled.rollout, rows)
        context = teacher_context([prefixes[r] for r in rows], self.pad_token_id)
        batch = build_opsd_training_batch(rollout=rollout, teacher_context=context, pad_token_id=self.pad_token_id)
        return aligned_batch(
            batch,
            sample_ids=tuple(rolled.rows[r].sample_id for r in rows),
            is_sampled=rolled.is_sampled[list(rows)],
            sampler_logprobs=rollout.sampler_logprobs,
        )

    def _teacher_prefixes(self, rolled: RolledOut) -> list[tuple[int, ...]]:
        if self.privileged is None:
            return [row.prompt_ids for row in rolled.rows]
        completions = completion_ids(rolled.rollout)
        return [
            self.privileged(row, CompletionView(ids=ids, text=self.decode(ids, skip_special_tokens=True)))
            for row, ids in zip(rolled.rows, completions, strict=True)
        ]


def completion_ids(rollout: RolloutBatch) -> list[tuple[int, ...]]:
    """The attended completion tokens of each row."""
    chosen = completion_mask(rollout)
    return [tuple(ids[mask].tolist()) for ids, mask in zip(rollout.input_ids, chosen, strict=True)]
