# SPDX-License-Identifier: Apache-2.0
"""From the sums over a tile of logits (`kernels`) to normalisers, entropies and divergences per row.

The sums of several shards of a vocabulary add up once they speak of one maximum: `Shards` says how. A whole vocabulary
is the one-shard case, where nothing is exchanged. This is the only place where sums of shards meet, so that one
process and many run the same formulas.

n rows. float32, or float64 where the logits are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Shards(Protocol):
    """How numbers per row are combined over the shards of a vocabulary; what comes back is equal on all of them."""

    def max(self, values: Tensor, /) -> Tensor:
        """The largest over the shards of each number; of `values`' shape and dtype."""
        ...

    def sum(self, values: Tensor, /) -> Tensor:
        """The sum over the shards of each number; of `values`' shape and dtype."""
        ...

    def largest(self, values: Tensor, ids: Tensor, /) -> tuple[Tensor, Tensor]:
        """The largest of `values [n]` and its global id `[n]`, of several the lowest; `ids [n]` are own columns."""
        ...


class WholeVocabulary:
    """One shard holds every id: nothing to combine."""

    def max(self, values: Tensor, /) -> Tensor:
        return values

    def sum(self, values: Tensor, /) -> Tensor:
        return values

    def largest(self, values: Tensor, ids: Tensor, /) -> tuple[Tensor, Tensor]:
        return values, ids


WHOLE = WholeVocabulary()


def together(exchange: Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """What `exchange`, a maximum or a sum over shards, makes of two tensors of one dtype, in one exchange."""
    found = exchange(torch.cat([first.reshape(-1), second.reshape(-1)]))
    return found[: first.numel()].view(first.shape), found[first.numel() :].view(second.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMoments:
    """What `pair_sums` of all shards say of each row, in nats."""

    log_z: Tensor  # [2, n] logsumexp of the student's and the teacher's scaled logits
    student_entropy: Tensor  # [n]
    teacher_entropy: Tensor  # [n]
    forward_kl: Tensor  # [n] KL(teacher || student)
    reverse_kl: Tensor  # [n] KL(student || teacher)


def pair_moments(maxima: Tensor, sums: Tensor, shards: Shards = WHOLE) -> PairMoments:
    """Combine `pair_sums`' `maxima [2, n]`, `sums [6, n]`: one maximum and one sum over the shards. NaN for a row
    without an allowed token."""
    highest = shards.max(maxima)  # [2, n]
    z_s, z_t, above_s, above_t, gap_s, gap_t = shards.sum(_recentred(maxima, sums, highest))
    log_z_s, log_z_t = highest[0] + z_s.log(), highest[1] + z_t.log()
    log_z = torch.stack([log_z_s, log_z_t])
    return PairMoments(
        log_z=log_z,
        student_entropy=z_s.log() - above_s / z_s,
        teacher_entropy=z_t.log() - above_t / z_t,
        forward_kl=gap_t / z_t - (log_z_t - log_z_s),
        reverse_kl=(log_z_t - log_z_s) - gap_s / z_s,
    )


def side_moments(maximum: Tensor, sums: Tensor, shards: Shards = WHOLE) -> tuple[Tensor, Tensor]:
    """`(log_z [n], entropy [n])` from `side_sums`' `maximum [n]`, `sums [2, n]`: one maximum, one sum over shards."""
    highest = shards.max(maximum)
    factor, shift = _factor(maximum, highest)
    z, above = shards.sum(torch.stack([factor * sums[0], factor * (sums[1] + shift * sums[0])]))
    return highest + z.log(), z.log() - above / z


def _recentred(maxima: Tensor, sums: Tensor, highest: Tensor) -> Tensor:
    """`sums [6, n]` as if exp(x - highest) had been summed."""
    (f_s, f_t), (shift_s, shift_t) = _factor(maxima, highest)
    z_s, z_t, above_s, above_t, gap_s, gap_t = sums
    return torch.stack(
        [
            f_s * z_s,
            f_t * z_t,
            f_s * (above_s + shift_s * z_s),
            f_t * (above_t + shift_t * z_t),
            torch.where(gap_s.isinf(), gap_s, f_s * gap_s),
            torch.where(gap_t.isinf(), gap_t, f_t * gap_t),
        ]
    )


def _factor(maximum: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
    """`exp(maximum - highest)` and that difference; 0 for a shard without an allowed token."""
    nothing = maximum == -math.inf
    shift = (maximum - highest).masked_fill(nothing, 0.0)
    return shift.exp().masked_fill(nothing, 0.0), shift
