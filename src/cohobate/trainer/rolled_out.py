# SPDX-License-Identifier: Apache-2.0
"""What a step has before anything is aligned: data rows and the completion of each."""

from dataclasses import dataclass

from torch import Tensor

from cohobate.align.rollout import RolloutBatch
from cohobate.align.rollout_ops import completion_mask
from cohobate.data import PromptRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """Rows with their completions; row i of every field is one completion."""

    rollout: RolloutBatch
    rows: tuple[PromptRow, ...]  # [B] the data row of each completion
    is_sampled: Tensor  # [B] bool
    sampling_seconds: float


def completion_ids(rollout: RolloutBatch) -> list[tuple[int, ...]]:
    """The attended completion tokens of each row."""
    chosen = completion_mask(rollout)
    return [tuple(ids[mask].tolist()) for ids, mask in zip(rollout.input_ids, chosen, strict=True)]
