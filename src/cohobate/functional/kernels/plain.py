# SPDX-License-Identifier: Apache-2.0
"""What a loss over the vocabulary needs of a tile of logits, in plain torch: the twin of every kernel beside it.

A tile is `[n, V]`: some rows, and all ids or one shard's. A divergence is made of three passes over a pair of tiles,
and between two passes there is nothing but numbers per row, which shards of a vocabulary can add up:

    pair_sums        maxima and exponential sums; from them (`moments.py`) both normalisers, entropies and KLs
    mixture_sums     what a JSD adds up, once the normalisers are known
    pair_gradient    the gradient by the student's logits, once the divergence is known

The gradient by the *teacher's* logits is the same function with the sides swapped and beta mirrored, since
D_beta(s, t) = D_(1 - beta)(t, s). One side alone (log-probabilities, entropy) needs `side_sums`, `softmax_gradient`.

Every function takes raw logits of any float dtype and one `scale` per side (1 / temperature, times the head's own),
works in float32 (float64 stays), and agrees with its twins about -inf: a token at -inf on both sides adds 0; one that
only the weighting side forbids adds 0; one that only the other side forbids makes the sum infinite. A row whose
coefficient is 0 has gradient 0 whatever it holds. A shard may be empty (V = 0). n rows, V ids of the tile.
"""

import math
import sys

import torch
from torch import Tensor

from cohobate.functional.divergences import over_mixture
from cohobate.functional.kernels.compose import Scales, divergence_of_passes
from cohobate.functional.logprobs import upcast


def pair_sums(student: Tensor, teacher: Tensor, scales: Scales = (1.0, 1.0)) -> tuple[Tensor, Tensor]:
    """Maxima `[2, n]` and sums `[6, n]` of two tiles `[n, V]`; -inf and 0 where a row has nothing to sum.

    With m the row's maximum and e = exp(x - m), the sums are, in order,
        sum e_s    sum e_t    sum e_s (x_s - m_s)    sum e_t (x_t - m_t)    sum e_s (x_t - x_s)    sum e_t (x_t - x_s)
    """
    s, t = upcast(student) * scales[0], upcast(teacher) * scales[1]  # [n, V]
    maximum_s, maximum_t = _maximum(s), _maximum(t)  # [n]
    above_s, above_t = s - _finite(maximum_s)[:, None], t - _finite(maximum_t)[:, None]
    e_s, e_t = above_s.exp(), above_t.exp()
    gap = t - s  # NaN where both forbid, which no sum reads
    sums = [
        e_s.sum(-1),
        e_t.sum(-1),
        _weighted(e_s, s, above_s),
        _weighted(e_t, t, above_t),
        _weighted(e_s, s, gap),
        _weighted(e_t, t, gap),
    ]
    return torch.stack([maximum_s, maximum_t]), torch.stack(sums)


def mixture_sums(student: Tensor, teacher: Tensor, log_z: Tensor, beta: float, scales: Scales = (1.0, 1.0)) -> Tensor:
    """`[2, n]`: sum p_s (s - log m) and sum p_t (t - log m), with m = beta p_t + (1 - beta) p_s.

    `log_z [2, n]` normalises student and teacher over the whole vocabulary: s = x_s - log_z[0].
    """
    s, t = _logprobs(student, teacher, log_z, scales)
    student_over_m, teacher_over_m = over_mixture(t - s, beta)
    return torch.stack([_weighted(s.exp(), s, student_over_m), _weighted(t.exp(), t, teacher_over_m)])


def pair_gradient(
    student: Tensor,
    teacher: Tensor,
    log_z: Tensor,
    center: Tensor,
    coefficient: Tensor,
    beta: float,
    out: Tensor,
    scales: Scales = (1.0, 1.0),
) -> Tensor:
    """Write `coefficient [n]` times the gradient by the student's scaled logits into `out [n, V]`, and return it.

        beta 0:  p_s - p_t      beta 1:  p_s (s - t - center)      between:  (1 - beta) p_s (s - log m - center)

    `center [n]` is the mean over p_s of what stands before it: the reverse KL at beta 1, `mixture_sums(...)[0]`
    between, unread at 0. `out` has any float dtype and may be `student` or `teacher` itself, or, narrower, the first
    part of their rows.
    """
    s, t = _logprobs(student, teacher, log_z, scales)
    p_s = s.exp()
    if beta == 0.0:
        grad = p_s - t.exp()
    elif beta == 1.0:
        grad = torch.where(s == -math.inf, 0.0, p_s * (s - t - center[:, None]))
    else:
        student_over_m, _ = over_mixture(t - s, beta)
        grad = torch.where(s == -math.inf, 0.0, (1 - beta) * p_s * (student_over_m - center[:, None]))
    grad = torch.where((coefficient == 0)[:, None], 0.0, coefficient[:, None] * grad)
    return out.copy_(grad)


def side_sums(logits: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Maximum `[n]` and sums `[2, n]` of one tile `[n, V]`: sum e and sum e (x - m), with e = exp(x - m)."""
    x = upcast(logits) * scale
    maximum = _maximum(x)
    above = x - _finite(maximum)[:, None]
    e = above.exp()
    return maximum, torch.stack([e.sum(-1), _weighted(e, x, above)])


def softmax_gradient(
    logits: Tensor, log_z: Tensor, constant: Tensor, slope: Tensor | None, out: Tensor, scale: float = 1.0
) -> Tensor:
    """Write `p (constant + slope log p)` into `out [n, V]`, and return it; `log_z`, `constant`, `slope` are `[n]`.

    Rows whose `constant` and `slope` are both 0 are 0. `out` has any float dtype and may be `logits` itself.
    """
    logp = upcast(logits) * scale - log_z[:, None]
    factor = constant[:, None] if slope is None else constant[:, None] + slope[:, None] * logp
    idle = constant == 0 if slope is None else (constant == 0) & (slope == 0)
    return out.copy_(torch.where(idle[:, None] | (logp == -math.inf), 0.0, logp.exp() * factor))


def argmax(logits: Tensor) -> Tensor:
    """Index `[n]` of the largest entry of each row of `[n, V]`, V >= 1: of several, the lowest."""
    return logits.argmax(-1)


def divergence_rows(
    student: Tensor,
    teacher: Tensor,
    beta: float,
    coefficient: Tensor | None = None,
    out: Tensor | None = None,
    scales: Scales = (1.0, 1.0),
) -> Tensor:
    """All passes over two tiles `[n, V]` that hold the whole vocabulary: `[6, n]`, and with `out` the gradient.

    The six are divergence, student entropy, teacher entropy, top-1 agreement (0 or 1), forward KL, reverse KL. With
    `out [n, V]` given, `coefficient [n]` times the divergence's gradient by the student's scaled logits is written
    there; `out` may be `student` or `teacher`, or, narrower, the first part of their rows.
    """
    return divergence_of_passes(sys.modules[__name__], student, teacher, beta, coefficient, out, scales)


def _logprobs(student: Tensor, teacher: Tensor, log_z: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    s, t = upcast(student) * scales[0] - log_z[0][:, None], upcast(teacher) * scales[1] - log_z[1][:, None]
    return s, t


def _maximum(x: Tensor) -> Tensor:
    return x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -math.inf)


def _finite(maximum: Tensor) -> Tensor:
    """0 for a row without an allowed token, whose exponentials are then 0 and not NaN."""
    return maximum.masked_fill(maximum == -math.inf, 0.0)


def _weighted(weights: Tensor, x: Tensor, values: Tensor) -> Tensor:
    """Sum of `weights * values [n, V]`: 0 where x forbids the token; infinite values count even if a weight is 0."""
    product = torch.where(values.isinf(), values, weights * values)
    return torch.where(x == -math.inf, 0.0, product).sum(-1)
