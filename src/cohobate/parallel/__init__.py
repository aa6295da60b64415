# SPDX-License-Identifier: Apache-2.0
"""The formulas of `functional` over process groups, and the groups themselves."""

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
from cohobate.parallel.world import World, all_reduce_max, all_reduce_sum, any_rank, current_world, keyed_seed

__all__ = [
    "VocabParallelLMHead",
    "World",
    "all_reduce_max",
    "all_reduce_sum",
    "any_rank",
    "current_world",
    "keyed_seed",
    "shard_lm_head",
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
