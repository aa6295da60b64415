# SPDX-License-Identifier: Apache-2.0
"""Distil language models on their own rollouts.

The public names, each loaded on first use: `import cohobate` itself imports no torch and starts no thread, GPU query
or logging set-up.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cohobate.align.opsd import OPSDTrainingBatch, TeacherContext, build_opsd_training_batch
    from cohobate.align.response import ResponseTokenBatch, align_rollout_logits
    from cohobate.align.rollout import RolloutBatch, RolloutRequest, SamplingConfig
    from cohobate.functional.divergences import forward_kl, jsd, reverse_kl
    from cohobate.functional.estimators import iw_opd_weights, sampled_kl_loss
    from cohobate.functional.fused_linear import fused_linear_divergence
    from cohobate.functional.fused_logprobs import fused_linear_logprobs
    from cohobate.functional.jsd_loss import JSDLossOutput, generalized_jsd_loss
    from cohobate.functional.topk import topk_divergence
    from cohobate.trainer.config import DistillationConfig
    from cohobate.trainer.trainer import DistillationTrainer

__version__ = "0.1.0"

_HOME = {
    "DistillationConfig": "trainer.config",
    "DistillationTrainer": "trainer.trainer",
    "JSDLossOutput": "functional.jsd_loss",
    "OPSDTrainingBatch": "align.opsd",
    "ResponseTokenBatch": "align.response",
    "RolloutBatch": "align.rollout",
    "RolloutRequest": "align.rollout",
    "SamplingConfig": "align.rollout",
    "TeacherContext": "align.opsd",
    "align_rollout_logits": "align.response",
    "build_opsd_training_batch": "align.opsd",
    "forward_kl": "functional.divergences",
    "fused_linear_divergence": "functional.fused_linear",
    "fused_linear_logprobs": "functional.fused_logprobs",
    "generalized_jsd_loss": "functional.jsd_loss",
    "iw_opd_weights": "functional.estimators",
    "jsd": "functional.divergences",
    "reverse_kl": "functional.divergences",
    "sampled_kl_loss": "functional.estimators",
    "topk_divergence": "functional.topk",
}

__all__ = [
    "DistillationConfig",
    "DistillationTrainer",
    "JSDLossOutput",
    "OPSDTrainingBatch",
    "ResponseTokenBatch",
    "RolloutBatch",
    "RolloutRequest",
    "SamplingConfig",
    "TeacherContext",
    "align_rollout_logits",
    "build_opsd_training_batch",
    "forward_kl",
    "fused_linear_divergence",
    "fused_linear_logprobs",
    "generalized_jsd_loss",
    "iw_opd_weights",
    "jsd",
    "reverse_kl",
    "sampled_kl_loss",
    "topk_divergence",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'cohobate' has no attribute {name!r}")
    value = getattr(import_module(f"cohobate.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
