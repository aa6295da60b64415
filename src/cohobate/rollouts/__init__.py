# SPDX-License-Identifier: Apache-2.0
"""Who writes the completion."""

from cohobate.align.rollout import RolloutBatch, RolloutRequest, SamplingConfig
from cohobate.rollouts.local import LocalRollouts
from cohobate.rollouts.mixed import MixedRollouts
from cohobate.rollouts.protocol import RemoteRollouts, RolloutSource
from cohobate.rollouts.recorded import RecordedRollouts
from cohobate.rollouts.vllm import VLLMRollouts, VLLMRolloutsConfig

__all__ = [
    "LocalRollouts",
    "MixedRollouts",
    "RecordedRollouts",
    "RemoteRollouts",
    "RolloutBatch",
    "RolloutRequest",
    "RolloutSource",
    "SamplingConfig",
    "VLLMRollouts",
    "VLLMRolloutsConfig",
]
