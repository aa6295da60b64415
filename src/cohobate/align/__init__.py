# SPDX-License-Identifier: Apache-2.0
"""Which predictions speak of the same thing."""

from cohobate.align.opsd import OPSDTrainingBatch, TeacherContext, aligned_batch, build_opsd_training_batch
from cohobate.align.response import ResponseTokenBatch, align_rollout_logits
from cohobate.align.rollout import (
    AlignedBatch,
    AlignedSide,
    RolloutBatch,
    RolloutRequest,
    SamplingConfig,
)
from cohobate.align.rollout_ops import completion_mask, concat_rollouts, select_rows

__all__ = [
    "AlignedBatch",
    "AlignedSide",
    "OPSDTrainingBatch",
    "ResponseTokenBatch",
    "RolloutBatch",
    "RolloutRequest",
    "SamplingConfig",
    "TeacherContext",
    "align_rollout_logits",
    "aligned_batch",
    "build_opsd_training_batch",
    "completion_mask",
    "concat_rollouts",
    "select_rows",
]
