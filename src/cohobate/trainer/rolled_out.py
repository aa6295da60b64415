# SPDX-License-Identifier: Apache-2.0
"""What a step has before anything is aligned: data rows and the completion of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cohobate.align.rollout import RolloutBatch, SamplingConfig
from cohobate.align.rollout_ops import completion_mask, policy_versions, select_rows
from cohobate.data import Lesson, PromptRow, rollout_request
from cohobate.rollouts import RecordedRollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """Rows with their completions; row i of every field is one completion."""

    rollout: RolloutBatch
    rows: tuple[PromptRow, ...]  # [B] the data row of each completion
    is_sampled: Tensor  # [B] bool
    sampling_seconds: float
    lessons: tuple[Lesson, ...] | None = None  # [B] what each completion's group teaches, in a run with lessons

    def select(self, rows: Sequence[int]) -> "RolledOut":
        """The given completions in the given order; what it took to sample them all stays as it was."""
        return replace(
            self,
            rollout=select_rows(self.rollout, rows),
            rows=tuple(self.rows[r] for r in rows),
            is_sampled=self.is_sampled[list(rows)],
            lessons=None if self.lessons is None else tuple(self.lessons[r] for r in rows),
        )

    def stamped(self, step: int) -> "RolledOut":
        """With the policy of every row: sampled ones of a source that says none are by the weights of `step`."""
        said = policy_versions(self.rollout)
        by_now = torch.where(self.is_sampled.to(said.device) & (said < 0), step, said)
        return replace(self, rollout=replace(self.rollout, policy_version=by_now))

    def fresh(self, *, step: int, max_staleness: int) -> "RolledOut":
        """Without the rows that weights of more than `max_staleness` optimizer steps before `step` have written."""
        version = policy_versions(self.rollout)
        kept = (version < 0) | (version >= step - max_staleness)
        return self if bool(kept.all()) else self.select(kept.nonzero()[:, 0].tolist())


def recorded(rows: Sequence[PromptRow], pad_token_id: int) -> RolledOut:
    """The rows with their recorded completions; one without is taken as empty."""
    source = RecordedRollouts([row.completion_ids or () for row in rows], pad_token_id=pad_token_id)
    return RolledOut(
        rollout=source.sample(rollout_request(rows, pad_token_id), SamplingConfig()),
        rows=tuple(rows),
        is_sampled=torch.zeros(len(rows), dtype=torch.bool),
        sampling_seconds=0.0,
    )


def completion_ids(rollout: RolloutBatch) -> list[tuple[int, ...]]:
    """The attended completion tokens of each row."""
    chosen = completion_mask(rollout)
    return [tuple(ids[mask].tolist()) for ids, mask in zip(rollout.input_ids, chosen, strict=True)]
