# SPDX-License-Identifier: Apache-2.0
"""Two models of one vocabulary, compared on columns that all rows share: a same-tokenizer teacher beside others.

X-Token compares another tokenizer's teacher on its most important columns (`projection.py`), so a teacher that needs
no projection is compared in the same way: both sides renormalised on the columns, whose normaliser over the whole
vocabulary then cancels. On all columns it is the ordinary KL.

Not for one teacher over the whole vocabulary: `fused_linear.py` does that without logits. n rows, V vocabulary, I
columns.
"""

import torch
from torch import Tensor

from cohobate.functional.divergences import divergence
from cohobate.functional.largest import largest_entries
from cohobate.functional.logprobs import log_softmax, upcast


def same_support_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    columns: Tensor | None = None,
    temperature: float = 1.0,
    reverse: bool = False,
) -> Tensor:
    """KL(teacher || student) in nats of each row, or with `reverse` KL(student || teacher): `-> [n]`.

    Args:
        student_logits: `[n, V]` raw; differentiable.
        teacher_logits: `[n, I]` raw, of the columns alone; a constant.
        columns: `[I]` the ids to compare on, where both sides are renormalised; None for all V.
    """
    if columns is not None:
        student_logits = student_logits[:, columns]
    s, t = (log_softmax(x, temperature=temperature) for x in (student_logits, teacher_logits.detach()))
    return divergence(s, t, beta=1.0 if reverse else 0.0)


def important_columns(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` ids with the largest logit in any row of `logits [n, V]`, and that logit: `([k], [k])`, best first.

    Of equal ones the lower id; none if there are no rows. So the k of many rows are among those of each part of them.
    """
    if logits.shape[0] == 0:
        return logits.new_zeros(0, dtype=torch.int64), upcast(logits.new_zeros(0))
    values, ids = largest_entries(logits.amax(0)[None], min(k, logits.shape[1]))
    return ids[0], values[0]
