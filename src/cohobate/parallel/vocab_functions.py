# SPDX-License-Identifier: Apache-2.0
"""The autograd Functions of `vocab.py`: statistics forwards, which ranks exchange; a local gradient backwards.

Saved for the backward pass: the logits as they came and some numbers per row. No copy of logits in a wider dtype is
made but by the plain kernels, in bounded chunks of rows. N rows, n rows of one tile, k ids a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from cohobate.functional.kernels import kernels_for
from cohobate.functional.logprobs import wide_dtype
from cohobate.functional.moments import pair_moments, side_moments
from cohobate.functional.workspace import fresh
from cohobate.parallel.layout import ShardSpan
from cohobate.parallel.shards import CheckedShards, Group, shards_of
from cohobate.parallel.tiles import num_rows, row_tiles
from cohobate.parallel.vocab_index import IGNORED, ChosenIds, slopes_at_columns, write_at_columns


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """What `Logprobs` needs besides tensors."""

    group: Group
    span: ShardSpan
    ignore_index: int
    inplace: bool


class Logprobs(torch.autograd.Function):
    """l_j = x_j - log Z for the ids j of each row: dl_j/dx_v = [v = j] - p_v.   Twin: functional.token_logprobs

    Saved: the logits, log Z, and the ids as columns of this shard.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, options: IndexOptions) -> Tensor:
        kernels = kernels_for(logits)
        chosen = ChosenIds(logits, index, options.group, options.span, options.ignore_index)
        log_z, _ = side_moments(*_side_sums(kernels, chosen.real), chosen.shards)  # [N]
        ctx.save_for_backward(logits, log_z, chosen.columns)
        ctx.kernels, ctx.width, ctx.inplace = kernels, chosen.real.shape[-1], options.inplace
        return torch.where(chosen.columns == IGNORED, 0.0, chosen.logits - log_z[:, None]).view(index.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, log_z, columns = ctx.saved_tensors
        grad = grad_values.reshape(columns.shape).to(log_z.dtype)  # [N, k]
        grad = torch.where((columns == IGNORED) | (log_z == -torch.inf)[:, None], 0.0, grad)
        total = grad.sum(-1)  # [N]
        grad_logits = _gradient_buffer(logits, ctx.inplace)
        grad_logits[..., ctx.width :] = 0  # padding
        tiles = row_tiles(ctx.kernels, logits[..., : ctx.width], grad_logits[..., : ctx.width])
        for rows, (x, out) in tiles:
            at_columns = slopes_at_columns(x, columns[rows], log_z[rows], grad[rows], total[rows])  # read x before out
            ctx.kernels.softmax_gradient(x, log_z[rows], -total[rows], None, out)
            write_at_columns(out, columns[rows], at_columns)
        return grad_logits, None, None  # index, options


class Entropy(torch.autograd.Function):
    """h = -sum_v p_v log p_v: dh/dx_v = -p_v (log p_v + h).   Twin: functional.entropy

    Saved: the logits, log Z and h.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group, inplace: bool) -> Tensor:
        ctx.kernels, ctx.inplace = kernels_for(logits), inplace
        log_z, entropy = side_moments(*_side_sums(ctx.kernels, logits), shards_of(group))  # [N]
        ctx.save_for_backward(logits, log_z, entropy)
        return entropy.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_entropy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, log_z, entropy = ctx.saved_tensors
        slope = -_coefficient(grad_entropy, log_z)  # [N]
        constant = torch.where(slope == 0, 0.0, slope * entropy)
        grad_logits = _gradient_buffer(logits, ctx.inplace)
        for rows, (x, out) in row_tiles(ctx.kernels, logits, grad_logits):
            ctx.kernels.softmax_gradient(x, log_z[rows], constant[rows], slope[rows], out)
        return grad_logits, None, None  # group, inplace


@dataclass(frozen=True, slots=True)
class PairOptions:
    """What `Divergence` needs besides tensors."""

    group: Group
    beta: float
    inplace: bool


class Divergence(torch.autograd.Function):
    """D_beta(s, t), 0 forward KL, 1 reverse KL, between them JSD.   Twin: functional.divergence

    The gradient by the student is `kernels.pair_gradient`; by the teacher the same with the sides swapped and beta
    mirrored, D_beta(s, t) = D_(1 - beta)(t, s). Saved: both logits, log Z of both, and the center of both gradients.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, options: PairOptions) -> Tensor:
        kernels, beta = kernels_for(student), options.beta
        shards = CheckedShards(options.group, _pair_facts(student, teacher), _check_pair)
        fits = student.shape == teacher.shape  # if not, the first maximum raises on every rank
        moments = pair_moments(*_pair_sums(kernels, student, teacher if fits else student), shards)
        if beta in (0.0, 1.0):
            value = moments.reverse_kl if beta else moments.forward_kl
            centers = torch.stack([value, value])
        else:
            centers = shards.sum(_mixture_sums(kernels, student, teacher, moments.log_z, beta))  # [2, N]
            value = (1 - beta) * centers[0] + beta * centers[1]
        ctx.save_for_backward(student, teacher, moments.log_z, centers)
        ctx.kernels, ctx.options = kernels, options
        return value.view(student.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_value: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        student, teacher, log_z, centers = ctx.saved_tensors
        gradient, beta = ctx.kernels.pair_gradient, ctx.options.beta
        coefficient = _coefficient(grad_value, log_z.amin(0))  # [N]
        needs_student, needs_teacher, _ = ctx.needs_input_grad
        grad_teacher = _gradient_buffer(teacher, inplace=False) if needs_teacher else None
        if grad_teacher is not None:  # before the student's, which may overwrite the student
            for rows, (s, t, out) in row_tiles(ctx.kernels, student, teacher, grad_teacher):
                swapped = log_z[:, rows].flip(0)
                gradient(t, s, swapped, centers[1, rows], coefficient[rows], 1 - beta, out)
        grad_student = _gradient_buffer(student, ctx.options.inplace) if needs_student else None
        if grad_student is not None:
            for rows, (s, t, out) in row_tiles(ctx.kernels, student, teacher, grad_student):
                gradient(s, t, log_z[:, rows], centers[0, rows], coefficient[rows], beta, out)
        return grad_student, grad_teacher, None  # options


def _side_sums(kernels: ModuleType, logits: Tensor) -> tuple[Tensor, Tensor]:
    """`kernels.side_sums` of all rows: `[N]`, `[2, N]`."""
    maximum, sums = _per_row(1, logits)[0], _per_row(2, logits)
    for rows, (x,) in row_tiles(kernels, logits):
        maximum[rows], sums[:, rows] = kernels.side_sums(x)
    return maximum, sums


def _pair_sums(kernels: ModuleType, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """`kernels.pair_sums` of all rows: `[2, N]`, `[6, N]`."""
    maxima, sums = _per_row(2, student, teacher), _per_row(6, student, teacher)
    for rows, (s, t) in row_tiles(kernels, student, teacher):
        maxima[:, rows], sums[:, rows] = kernels.pair_sums(s, t)
    return maxima, sums


def _mixture_sums(kernels: ModuleType, student: Tensor, teacher: Tensor, log_z: Tensor, beta: float) -> Tensor:
    """`kernels.mixture_sums` of all rows: `[2, N]`."""
    sums = torch.empty_like(log_z)
    for rows, (s, t) in row_tiles(kernels, student, teacher):
        sums[:, rows] = kernels.mixture_sums(s, t, log_z[:, rows], beta)
    return sums


def _coefficient(grad: Tensor, log_z: Tensor) -> Tensor:
    """`grad` as `[N]`, and 0 for a row without an allowed token, whose gradient would be NaN."""
    return torch.where(log_z == -torch.inf, 0.0, grad.reshape(-1).to(log_z.dtype))


def _gradient_buffer(logits: Tensor, inplace: bool) -> Tensor:
    """Where the gradient goes: fresh memory, or the logits' own, which autograd then knows to be used up."""
    if not inplace or any(
        stride == 0 and size > 1 for size, stride in zip(logits.shape, logits.stride(), strict=True)
    ):
        # The rows of an expanded tensor are one, and each has a gradient of its own.
        return fresh(tuple(logits.shape), logits.dtype, logits.device)
    increment_version(logits)  # kernels may write past autograd's eyes; a second backward pass must not read this
    return logits.detach()


def _per_row(count: int, *logits: Tensor) -> Tensor:
    """Room for `count` statistics of each row: `[count, N]`."""
    return torch.empty(count, num_rows(logits[0]), dtype=wide_dtype(*logits), device=logits[0].device)


def _pair_facts(student: Tensor, teacher: Tensor) -> list[float]:
    """What the other ranks must know of a pair before they may go on."""
    return [float(student.shape[-1]), float(teacher.shape[-1]), float(student.shape[:-1] == teacher.shape[:-1])]


def _check_pair(table: Sequence[Sequence[float]]) -> None:
    """Raise ValueError unless on each rank student and teacher hold the same columns of the same rows."""
    for rank, (student_width, teacher_width, same_rows) in enumerate(table):
        if student_width != teacher_width:
            raise ValueError(
                f"student and teacher must be split over the group alike; rank {rank} holds {int(student_width)} "
                f"columns of the student and {int(teacher_width)} of the teacher. Columns are compared where they "
                "lie, so two degrees of tensor parallelism, or heads padded to different widths, do not fit. Cut "
                "padding first; or let the teacher's group keep its top k with vocab_parallel_topk, and compare "
                "those with the student's vocab_parallel_logprobs, which works at any degree."
            )
        if not same_rows:
            raise ValueError(
                f"student and teacher must have the same leading axes; on rank {rank} they differ. Select the aligned "
                "positions of both first."
            )
