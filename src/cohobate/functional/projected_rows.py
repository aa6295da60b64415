# SPDX-License-Identifier: Apache-2.0
"""What X-Token reads of the student's logits, row by row, over one part of the vocabulary or all of it.

Two autograd Functions. `ProjectedRows` pushes a row's distribution onto some teacher columns: it saves the logits, the
rows' normalisers and the result, and makes tiles of `[d, entries]` where a log-softmax would keep `[R, V]` twice.
`RowLogprobs` is that log-softmax, for the comparisons that need all of a row.

R rows that are read, V columns of this part, I teacher columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.chunked_head import row_chunks
from cohobate.functional.kernels import kernels_for
from cohobate.functional.logprobs import upcast
from cohobate.functional.moments import side_moments
from cohobate.functional.student_shards import StudentShards

EPS = 1e-10  # under the number of rows and under the student's projected mass, as published
_TILE_ENTRIES = 1 << 21  # of one [d, entries] tensor
_TILE_COLUMNS = 1 << 18  # of one [d, I] tensor: several of them stay in a core's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The entries of a projection on I columns: (student id, place among the columns, weight), one after another."""

    student: Tensor
    column: Tensor
    weight: Tensor
    columns: Tensor  # [I] teacher ids

    def here(self, shards: StudentShards) -> "Entries":
        """Those whose student id is in this part, with its column instead."""
        place, here = shards.place(self.student)
        return Entries(student=place[here], column=self.column[here], weight=self.weight[here], columns=self.columns)


class ProjectedRows(torch.autograd.Function):
    """r_j = sum_v p_v W_vj of each row, p = softmax(scale z).   Twin: `softmax(-1) @ W`

    dL/dz_v = scale p_v (sum_j W_vj g_j - sum_j r_j g_j) with g = dL/dr: what is subtracted is in the result, so the
    backward pass exchanges nothing. Saved: the logits (an input), log Z [S], r [R, I].
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, entries: Entries, scale: float, shards: StudentShards
    ) -> Tensor:
        real = logits[:, : shards.width]
        log_z, _ = side_moments(*kernels_for(real).side_sums(real, scale), shards=shards.vocabulary)  # [S]
        mine = entries.here(shards)
        projected = log_z.new_zeros(rows.shape[0], mine.columns.shape[0])  # [R, I]
        for part, mass in _masses(real, log_z, rows, mine, scale):
            projected[part].index_add_(1, mine.column, mass)
        projected = shards.vocabulary.sum(projected)
        ctx.save_for_backward(logits, log_z, projected)
        ctx.rows, ctx.entries, ctx.scale, ctx.shards = rows, mine, scale, shards
        return projected

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_projected: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, log_z, projected = ctx.saved_tensors
        rows, entries, shards = ctx.rows, ctx.entries, ctx.shards
        center = (projected * grad_projected).sum(-1) * ctx.scale  # [R]
        softmax_part = torch.zeros_like(log_z).index_add_(0, rows, center)  # [S]
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)  # [S, W]
        grad[:, shards.width :] = 0  # padding
        real, out = logits[:, : shards.width], grad[:, : shards.width]
        kernels_for(real).softmax_gradient(real, log_z, -softmax_part, None, out, ctx.scale)
        flat = grad.view(-1)
        for part, mass in _masses(real, log_z, rows, entries, ctx.scale):
            slopes = mass * grad_projected[part][:, entries.column] * ctx.scale  # [d, entries]
            places = rows[part, None] * grad.shape[1] + entries.student
            flat.index_add_(0, places.reshape(-1), slopes.reshape(-1).to(grad.dtype))
        return grad, None, None, None, None  # rows, entries, scale, shards


def _masses(
    real: Tensor, log_z: Tensor, rows: Tensor, entries: Entries, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """`p_v W_vj` of each entry that is here, some of the rows at a time: `[d, entries]`."""
    weight = entries.weight.to(log_z.dtype)
    for part in row_chunks(rows.shape[0], max(1, _TILE_ENTRIES // max(1, entries.student.shape[0]))):
        at = rows[part, None]
        chosen = upcast(real[at, entries.student]) if real.shape[1] else log_z.new_zeros(at.shape[0], 0)
        yield part, (chosen * scale - log_z[at]).exp_().mul_(weight)


class MassDivergence(torch.autograd.Function):
    """KL of a chunk's projected mass m and the teacher's mean log-probabilities q, `[M]`, with the published floors:

        n = m / (sum m + EPS) + EPS,   forward sum_j e^q_j (q_j - log n_j)     dL/dn_j = -e^q_j / n_j
                                       reverse sum_j n_j (log n_j - q_j)       dL/dn_j = log n_j - q_j + 1
        dL/dm_j = (dL/dn_j - sum_k dL/dn_k m_k / (sum m + EPS)) / (sum m + EPS)

    Some chunks at a time, because the dozen steps would each read and write [M, I]. Saved: m, q.
    Twin: `divergence(log n, q)`.
    """

    @staticmethod
    def forward(ctx: Any, mass: Tensor, q: Tensor, reverse: bool) -> Tensor:
        ctx.save_for_backward(mass, q)
        ctx.reverse = reverse
        value = mass.new_empty(mass.shape[0])
        for part in row_chunks(*_tiles(mass)):
            n = _floored(mass[part])[0]
            if reverse:
                value[part] = n.log().sub_(q[part]).mul_(n).sum(-1)
            else:
                p = q[part].exp()
                value[part] = torch.where(p > 0, n.log_().neg_().add_(q[part]).mul_(p), 0.0).sum(-1)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_value: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        mass, q = ctx.saved_tensors
        grad = torch.empty_like(mass)
        for part in row_chunks(*_tiles(mass)):
            n, total = _floored(mass[part])
            slopes = n.log_().sub_(q[part]).add_(1) if ctx.reverse else q[part].exp().div_(n).neg_()
            slopes -= (slopes * mass[part]).sum(-1, keepdim=True) / total
            grad[part] = slopes.mul_(grad_value[part, None] / total)
        return grad, None, None  # the teacher is a constant; a flag


def _tiles(mass: Tensor) -> tuple[int, int]:
    return mass.shape[0], max(1, _TILE_COLUMNS // max(1, mass.shape[1]))


def _floored(mass: Tensor) -> tuple[Tensor, Tensor]:
    """`n`, fresh, and `sum m + EPS` of each row."""
    total = mass.sum(-1, keepdim=True).add_(EPS)
    return (mass / total).add_(EPS), total


class RowLogprobs(torch.autograd.Function):
    """l_v = scale z_v - log Z of some rows, `[R, V]`.   Twin: functional.log_softmax

    dL/dz_v = scale (g_v - p_v sum_u g_u), u over the whole vocabulary: one sum in the backward pass. Saved: l.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, scale: float, shards: StudentShards) -> Tensor:
        real = logits[rows, : shards.width]
        log_z, _ = side_moments(*kernels_for(real).side_sums(real, scale), shards=shards.vocabulary)  # [R]
        logprobs = upcast(real) * scale - log_z[:, None]
        ctx.save_for_backward(logprobs)
        ctx.rows, ctx.scale, ctx.shards, ctx.like = rows, scale, shards, (logits.shape, logits.new_empty(0))
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (logprobs,) = ctx.saved_tensors
        total = ctx.shards.vocabulary.sum(grad_logprobs.sum(-1))  # [R]
        slopes = ctx.scale * (grad_logprobs - logprobs.exp() * total[:, None])
        shape, like = ctx.like
        grad = like.new_zeros(shape)  # [S, W]
        grad[:, : ctx.shards.width].index_add_(0, ctx.rows, slopes.to(grad.dtype))
        return grad, None, None, None  # rows, scale, shards
