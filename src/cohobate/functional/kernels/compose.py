# SPDX-License-Identifier: Apache-2.0
"""A divergence per row out of the passes of any backend, for a whole vocabulary or one shard of it.

The one place that says in which order the passes go and where shards meet between them. A backend whose
`divergence_rows` does it all in one go equals this; over shards everybody goes through here.
"""

from types import ModuleType

import torch
from torch import Tensor

from cohobate.functional.logprobs import gather_last, wide_dtype
from cohobate.functional.moments import WHOLE, Shards, pair_moments

Scales = tuple[float, float]  # of the student's and of the teacher's raw logits


def divergence_of_passes(
    passes: ModuleType,
    student: Tensor,
    teacher: Tensor,
    beta: float,
    coefficient: Tensor | None = None,
    out: Tensor | None = None,
    scales: Scales = (1.0, 1.0),
    shards: Shards = WHOLE,
) -> Tensor:
    """`plain.divergence_rows` for tiles `[n, V]` that may be one shard's; the six `[6, n]` are equal on all shards.

    Exchanges one maximum, one sum and one `largest`; for 0 < beta < 1 one more sum.
    """
    agreement = _top1_agreement(passes, student, teacher, shards)
    maxima, sums = passes.pair_sums(student, teacher, scales)
    read = pair_moments(maxima, sums, shards)
    if beta == 0.0:
        value = center = read.forward_kl
    elif beta == 1.0:
        value = center = read.reverse_kl
    else:
        center, other = shards.sum(passes.mixture_sums(student, teacher, read.log_z, beta, scales))
        value = (1 - beta) * center + beta * other
    if out is not None:
        assert coefficient is not None
        passes.pair_gradient(student, teacher, read.log_z, center, coefficient, beta, out, scales)
    entropies = (read.student_entropy, read.teacher_entropy)
    return torch.stack([value, *entropies, agreement.to(value.dtype), read.forward_kl, read.reverse_kl])


def _top1_agreement(passes: ModuleType, student: Tensor, teacher: Tensor, shards: Shards) -> Tensor:
    """Whether both sides' largest logit is the same token's: `[n]`, bool."""
    if shards is WHOLE:
        return passes.argmax(student) == passes.argmax(teacher)
    wide = wide_dtype(student, teacher)  # the same on every shard, also on an empty one
    if student.shape[-1] == 0:  # never wins
        ids = torch.zeros(2 * student.shape[0], dtype=torch.int64, device=student.device)
        values = torch.full(ids.shape, -torch.inf, dtype=wide, device=student.device)
    else:
        best = [passes.argmax(x) for x in (student, teacher)]
        ids = torch.cat(best)
        values = torch.cat([gather_last(x, i).to(wide) for x, i in zip((student, teacher), best, strict=True)])
    _, winners = shards.largest(values, ids)
    ours, theirs = winners.chunk(2)
    return ours == theirs
