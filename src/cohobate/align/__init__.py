# SPDX-License-Identifier: Apache-2.0
"""Which predictions speak of the same thing."""

from cohobate.align.cross_tokenizer import TeacherText, TeacherTokens, with_teachers
from cohobate.align.opsd import OPSDTrainingBatch, TeacherContext, aligned_batch, build_opsd_training_batch
from cohobate.align.packing import PackRow, PackSide, plan_lockstep
from cohobate.align.response import ResponseTokenBatch, align_rollout_logits
from cohobate.align.rollout import (
    AlignedBatch,
    AlignedSide,
    RolloutBatch,
    RolloutRequest,
    SamplingConfig,
    TeacherSide,
)
from cohobate.align.rollout_ops import completion_mask, concat_rollouts, select_rows
from cohobate.align.spans import Chunks, align_bytes, align_regions, common_truncation
from cohobate.align.token_spans import align_tokens

__all__ = [
    "AlignedBatch",
    "AlignedSide",
    "Chunks",
    "OPSDTrainingBatch",
    "PackRow",
    "PackSide",
    "ResponseTokenBatch",
    "RolloutBatch",
    "RolloutRequest",
    "SamplingConfig",
    "TeacherContext",
    "TeacherSide",
    "TeacherText",
    "TeacherTokens",
    "align_bytes",
    "align_regions",
    "align_rollout_logits",
    "align_tokens",
    "aligned_batch",
    "build_opsd_training_batch",
    "common_truncation",
    "completion_mask",
    "concat_rollouts",
    "plan_lockstep",
    "select_rows",
    "with_teachers",
]
