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
    from cohobate.functional.common_support import common_support_divergence, common_support_loss_sum
    from cohobate.functional.divergences import forward_kl, jsd, reverse_kl
    from cohobate.functional.estimators import iw_opd_weights, sampled_kl_loss
    from cohobate.functional.fused_linear import fused_linear_divergence
    from cohobate.functional.fused_logprobs import fused_linear_logprobs, fused_linear_token_loss
    from cohobate.functional.fused_topk import fused_linear_topk
    from cohobate.functional.jsd_loss import JSDLossOutput, generalized_jsd_loss
    from cohobate.functional.projection import projected_kl
    from cohobate.functional.scores import top_k_scores
    from cohobate.functional.topk import topk_divergence
    from cohobate.parallel.cross_tokenizer import vocab_parallel_common_support, vocab_parallel_projected_kl
    from cohobate.parallel.lm_head import VocabParallelLMHead, shard_lm_head, vocab_parallel_fused_divergence
    from cohobate.parallel.vocab import (
        vocab_parallel_cross_entropy,
        vocab_parallel_entropy,
        vocab_parallel_jsd,
        vocab_parallel_kl_div,
        vocab_parallel_logprobs,
    )
    from cohobate.parallel.vocab_sample import vocab_parallel_sample
    from cohobate.parallel.vocab_topk import vocab_parallel_argmax, vocab_parallel_topk
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
    "VocabParallelLMHead": "parallel.lm_head",
    "align_rollout_logits": "align.response",
    "build_opsd_training_batch": "align.opsd",
    "common_support_divergence": "functional.common_support",
    "common_support_loss_sum": "functional.common_support",
    "forward_kl": "functional.divergences",
    "fused_linear_divergence": "functional.fused_linear",
    "fused_linear_logprobs": "functional.fused_logprobs",
    "fused_linear_token_loss": "functional.fused_logprobs",
    "fused_linear_topk": "functional.fused_topk",
    "generalized_jsd_loss": "functional.jsd_loss",
    "iw_opd_weights": "functional.estimators",
    "jsd": "functional.divergences",
    "projected_kl": "functional.projection",
    "reverse_kl": "functional.divergences",
    "sampled_kl_loss": "functional.estimators",
    "shard_lm_head": "parallel.lm_head",
    "top_k_scores": "functional.scores",
    "topk_divergence": "functional.topk",
    "vocab_parallel_argmax": "parallel.vocab_topk",
    "vocab_parallel_common_support": "parallel.cross_tokenizer",
    "vocab_parallel_cross_entropy": "parallel.vocab",
    "vocab_parallel_entropy": "parallel.vocab",
    "vocab_parallel_fused_divergence": "parallel.lm_head",
    "vocab_parallel_jsd": "parallel.vocab",
    "vocab_parallel_kl_div": "parallel.vocab",
    "vocab_parallel_logprobs": "parallel.vocab",
    "vocab_parallel_projected_kl": "parallel.cross_tokenizer",
    "vocab_parallel_sample": "parallel.vocab_sample",
    "vocab_parallel_topk": "parallel.vocab_topk",
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
    "VocabParallelLMHead",
    "align_rollout_logits",
    "build_opsd_training_batch",
    "common_support_divergence",
    "common_support_loss_sum",
    "forward_kl",
    "fused_linear_divergence",
    "fused_linear_logprobs",
    "fused_linear_token_loss",
    "fused_linear_topk",
    "generalized_jsd_loss",
    "iw_opd_weights",
    "jsd",
    "projected_kl",
    "reverse_kl",
    "sampled_kl_loss",
    "shard_lm_head",
    "top_k_scores",
    "topk_divergence",
    "vocab_parallel_argmax",
    "vocab_parallel_common_support",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_fused_divergence",
    "vocab_parallel_jsd",
    "vocab_parallel_kl_div",
    "vocab_parallel_logprobs",
    "vocab_parallel_projected_kl",
    "vocab_parallel_sample",
    "vocab_parallel_topk",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'cohobate' has no attribute {name!r}")
    value = getattr(import_module(f"cohobate.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
