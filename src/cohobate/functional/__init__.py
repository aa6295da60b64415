# SPDX-License-Identifier: Apache-2.0
"""Tensors in, tensors out: every formula of the library, once. No config, process group, logging or model."""

from cohobate.functional.common_support import (
    CommonSupportOutput,
    common_support_divergence,
    common_support_loss_sum,
)
from cohobate.functional.divergences import (
    clip_divergence,
    divergence,
    divergence_terms,
    forward_kl,
    jsd,
    reverse_kl,
)
from cohobate.functional.estimators import (
    clipped_surrogate,
    iw_opd_weights,
    k1,
    k2,
    k3,
    min_max,
    sampled_kl_loss,
    select_top_share,
    tip_scores,
)
from cohobate.functional.fused_linear import FusedDivergence, fused_linear_divergence
from cohobate.functional.fused_logprobs import (
    FusedTokenLoss,
    TokenLoss,
    fused_linear_logprobs,
    fused_linear_token_loss,
)
from cohobate.functional.fused_topk import fused_linear_topk
from cohobate.functional.jsd_loss import JSDLossOutput, generalized_jsd_loss
from cohobate.functional.logprobs import (
    entropy,
    gather_last,
    head_logits,
    log_softmax,
    real_vocabulary,
    scale_and_cap,
    token_logprobs,
    upcast,
)
from cohobate.functional.projection import ProjectedOutput, projected_kl
from cohobate.functional.ranked import RankedOutput, ranked_divergence, sorted_distance
from cohobate.functional.reduce import divide_by_count, masked_sum, select_valid
from cohobate.functional.scores import (
    DenseScores,
    HiddenScores,
    OutputHead,
    SampledScores,
    TeacherScores,
    TopKScores,
    top_k_scores,
)
from cohobate.functional.topk import log_tail_mass, topk_divergence
from cohobate.functional.workspace import release_workspace

__all__ = [
    "CommonSupportOutput",
    "DenseScores",
    "FusedDivergence",
    "FusedTokenLoss",
    "HiddenScores",
    "JSDLossOutput",
    "OutputHead",
    "ProjectedOutput",
    "RankedOutput",
    "SampledScores",
    "TeacherScores",
    "TokenLoss",
    "TopKScores",
    "clip_divergence",
    "clipped_surrogate",
    "common_support_divergence",
    "common_support_loss_sum",
    "divergence",
    "divergence_terms",
    "divide_by_count",
    "entropy",
    "forward_kl",
    "fused_linear_divergence",
    "fused_linear_logprobs",
    "fused_linear_token_loss",
    "fused_linear_topk",
    "gather_last",
    "generalized_jsd_loss",
    "head_logits",
    "iw_opd_weights",
    "jsd",
    "k1",
    "k2",
    "k3",
    "log_softmax",
    "log_tail_mass",
    "masked_sum",
    "min_max",
    "projected_kl",
    "ranked_divergence",
    "real_vocabulary",
    "release_workspace",
    "reverse_kl",
    "sampled_kl_loss",
    "scale_and_cap",
    "select_top_share",
    "select_valid",
    "sorted_distance",
    "tip_scores",
    "token_logprobs",
    "top_k_scores",
    "topk_divergence",
    "upcast",
]
