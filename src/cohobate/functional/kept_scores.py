# SPDX-License-Identifier: Apache-2.0
"""From all that a model can say of N predictions to their K largest logits, a block of rows at a time.

`top_k_scores` needs the logits `[N, V]`; here they are made of hidden states, used up, and never there at once.
"""

import torch
from torch import Tensor

from cohobate.functional.chunked_head import row_chunks
from cohobate.functional.scores import DenseScores, HiddenScores, TopKScores, top_k_scores

_BLOCK_BYTES = 256 * 2**20  # of the logits that are there at a time
FIELDS = ("ids", "logits", "log_normalizer", "log_normalizer_t1", "realized_logit")  # of `TopKScores`, a row each


@torch.no_grad()
def kept_scores(
    scores: HiddenScores | DenseScores, target_ids: Tensor, top_k: int, *, temperature: float = 1.0
) -> TopKScores:
    """The `top_k` largest logits of each prediction and that of `target_ids [N]`, which it predicts; detached."""
    rows = scores.hidden if isinstance(scores, HiddenScores) else scores.dense
    target_ids = target_ids.to(rows.device)
    most = max(1, _BLOCK_BYTES // (4 * scores.vocab_size))
    parts = []
    for block in row_chunks(len(rows), most) if len(rows) else [slice(0, 0)]:
        logits = rows[block]
        if isinstance(scores, HiddenScores):
            logits = HiddenScores(hidden=logits, head=scores.head).logits()
        parts.append(top_k_scores(logits, target_ids[block], top_k, temperature=temperature, rows="pairs"))
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in FIELDS}
    return TopKScores(**joined, temperature=temperature, vocab_size=scores.vocab_size)
