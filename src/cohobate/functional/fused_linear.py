# SPDX-License-Identifier: Apache-2.0
"""From hidden states and output heads to a divergence, without ever holding `[N, V]`.

A vocabulary of 150,000 makes logits the largest tensor of a training step: two models, gradients, float32. So rows go
in chunks, and a chunk's logits are used up before the next is made. `fused_linear_divergence` takes the *gradient* too
while the logits are there, so that nothing is projected twice: four matrix products over the vocabulary in all
(student, teacher, dX, dW), which is the floor; without a gradient only the first two. Its backward pass only scales.

Not here: the formulas' meaning (`divergences.py`, the plain twins), the mask and the mean (`reduce.py`), sharded heads
(`parallel`). N rows, V vocabulary, H hidden, n rows of one chunk.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.chunked_head import (
    ChunkHead,
    HeadGradients,
    check_side,
    needed_gradients,
    row_chunks,
    rows_per_chunk,
    scaled_for_backward,
)
from cohobate.functional.divergences import check_beta
from cohobate.functional.kernels import kernels_for
from cohobate.functional.kernels.compose import divergence_of_passes
from cohobate.functional.logprobs import check_temperature, product_dtype, wide_dtype
from cohobate.functional.moments import WHOLE, Shards
from cohobate.functional.reduce import weigh
from cohobate.functional.workspace import tile


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedDivergence:
    """What `fused_linear_divergence` returns, in nats. All but `loss_sum` is detached `[N]`, float32 or float64."""

    loss_sum: Tensor  # scalar: sum of weights * divergence; differentiable in the student's tensors
    divergence: Tensor  # the divergence that beta names, unweighted
    student_entropy: Tensor
    teacher_entropy: Tensor
    top1_agreement: Tensor  # 1.0 where both sides have the same most likely token, else 0.0
    forward_kl: Tensor  # KL(teacher || student)
    reverse_kl: Tensor  # KL(student || teacher)


def fused_linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    weights: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_scale: float = 1.0,
    teacher_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    chunk_size: int | None = None,
    chunk_bytes: int | None = None,
    logits: Literal["accurate", "fast"] = "accurate",
    shards: Shards = WHOLE,
) -> FusedDivergence:
    """Weighted sum over rows of what `beta` names, in nats: 0 forward KL, 1 reverse KL, between them JSD.

    Args:
        student_hidden, student_weight: `[N, Hs]`, `[V, Hs]`; with `student_bias [V]`, all that gets gradients.
        teacher_hidden, teacher_weight: `[N, Ht]`, `[V, Ht]`; constants, as is `teacher_bias [V]`.
        weights: `[N]`, any float dtype, a constant. A row of weight 0 adds 0 to value and gradient, whatever it holds.
        student_scale, student_softcap, ...: logits are `softcap((h W^T + bias) * scale)`, then `/ temperature`.
        chunk_size: rows of a chunk; by default as many as `chunk_bytes` (a default by device) allows for its tiles.
        logits: of bfloat16 or float16 products. `"accurate"` are float32's, for half as many products again on a CPU,
            for nothing on CUDA; `"fast"` are rounded to the products' dtype, which puts the gradient off by about 2 %.
        shards: if the heads (and biases) hold one shard of the ids, how the shards meet; both heads are cut alike and
            hidden states and weights are equal on all shards. Then dX is the sum over the shards, dW, db are the
            shard's own, and all else is equal on all of them. Exchanged: one maximum for each call, for each chunk a
            maximum, a sum, a `largest` and (0 < beta < 1) another sum, and one sum for dX.

    Products run in the inputs' dtype (autocast's where it rules), all else in float32, or float64 if an input is
    float64. dW is accumulated in that wide dtype. N = 0 gives zeros with a gradient path. On a CPU the tiles are kept
    for the next call (`workspace.py`).

    Raises:
        ValueError: shapes or numbers that do not fit; heads of different width must be cut to the shared real ids.
    """
    check_beta(beta)
    check_temperature(temperature)
    if logits not in ("accurate", "fast"):
        raise ValueError(f"logits must be 'accurate' or 'fast', got {logits!r}.")
    student = ChunkHead(scale=student_scale, softcap=student_softcap, temperature=temperature)
    teacher = ChunkHead(scale=teacher_scale, softcap=teacher_softcap, temperature=temperature)
    check_side("student", student_hidden, student_weight, student_bias)
    check_side("teacher", teacher_hidden, teacher_weight, teacher_bias)
    num_rows, vocab_size = student_hidden.shape[0], student_weight.shape[0]
    if teacher_hidden.shape[0] != num_rows:
        raise ValueError(
            f"student has {num_rows} rows and teacher {teacher_hidden.shape[0]}; they must be the same pairs."
        )
    if teacher_weight.shape[0] != vocab_size:
        raise ValueError(
            f"student's head has {vocab_size} ids and teacher's {teacher_weight.shape[0]}. Padded heads over one "
            "tokenizer are cut to the real ids first (OutputHead.cut); two vocabularies need another loss."
        )
    if weights is not None and weights.shape != (num_rows,):
        raise ValueError(f"weights must be [N] = [{num_rows}], got {list(weights.shape)}.")
    widest = vocab_size if shards is WHOLE else _widest_shard(shards, student_hidden, vocab_size)
    wide = wide_dtype(student_hidden, student_weight, teacher_hidden, teacher_weight)
    plan = _DivergencePlan(
        beta=beta,
        student=student,
        teacher=teacher,
        student_dtype=product_dtype(student_hidden, student_weight),
        teacher_dtype=product_dtype(teacher_hidden, teacher_weight),
        teacher_hidden=teacher_hidden.detach(),
        teacher_weight=teacher_weight.detach(),
        teacher_bias=None if teacher_bias is None else teacher_bias.detach().to(wide),
        weights=None if weights is None else weights.detach().to(wide),
        needs=needed_gradients(student_hidden, student_weight, student_bias),
        wide=wide,
        fast=logits == "fast",
        rows=rows_per_chunk(student_hidden, widest, wide, chunk_size, chunk_bytes),
        shards=shards,
    )
    out: Any = _FusedDivergence.apply(student_hidden, student_weight, student_bias, plan)
    return FusedDivergence(**dict(zip((field.name for field in fields(FusedDivergence)), out, strict=True)))


def _widest_shard(shards: Shards, hidden: Tensor, vocab_size: int) -> int:
    """The most ids that a shard holds: every shard must take the same chunks. Raises on all if their rows differ."""
    num_rows = hidden.shape[0]
    facts = torch.tensor([vocab_size, num_rows, -num_rows], dtype=torch.float64, device=hidden.device)
    widest, most, least = (int(x) for x in shards.max(facts).tolist())
    if most != -least:
        raise ValueError(
            f"the shards of one vocabulary must see the same rows; one has {-least} and another {most}. Give each "
            "rank of the group the same hidden states."
        )
    return widest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One model's head during one call."""

    name: str
    head: ChunkHead
    weight: Tensor  # [V, H] in the dtype of the products
    bias: Tensor | None  # [V] wide
    tile_dtype: torch.dtype

    def tile(self, hidden: Tensor) -> Tensor:
        """`head.kernel_scale` times it are the tempered logits of `hidden [n, H]`: `[n, V]`."""
        out = tile(self.name, (hidden.shape[0], self.weight.shape[0]), self.tile_dtype, hidden.device)
        return self.head.project(hidden.to(self.weight.dtype), self.weight, self.bias, out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DivergencePlan:
    """Everything `_FusedDivergence` needs and gives no gradient to."""

    beta: float
    student: ChunkHead
    teacher: ChunkHead
    student_dtype: torch.dtype
    teacher_dtype: torch.dtype
    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    weights: Tensor | None
    needs: tuple[bool, bool, bool]
    wide: torch.dtype
    fast: bool
    rows: int
    shards: Shards


class _FusedDivergence(torch.autograd.Function):
    """sum_n w_n D_n.   Twin: `divergences.divergence` of `logprobs.log_softmax(logprobs.head_logits(...))`

    The value and the gradient of a row by its tempered logits are `kernels.plain`'s.
    Saved: dX [N, H], dW [V, H], db [V], whichever are asked for.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _DivergencePlan) -> Any:
        num_rows, wide = hidden.shape[0], plan.wide
        stats = torch.empty(6, num_rows, dtype=wide, device=hidden.device)  # rows as in FusedDivergence
        partial = plan.shards is not WHOLE  # dX is then one shard's share, and others' are added to it
        adds_up = num_rows > plan.rows or weight.dtype != plan.student_dtype  # else dW is one product, rounded once
        kept = wide if adds_up else weight.dtype
        grads = HeadGradients(hidden, weight, plan.needs, wide, wide if partial else None, kept)
        student, teacher = _sides(weight, bias, plan)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in row_chunks(num_rows, plan.rows):
                s = student.tile(hidden[rows])  # [n, V]
                t = teacher.tile(plan.teacher_hidden[rows])  # [n, V]
                weights = None if plan.weights is None else plan.weights[rows]  # [n]
                stats[:, rows], grad = _divergence_tile(s, t, weights, student, plan)
                if grad is not None:
                    grads.add(rows, grad, hidden[rows].to(student.weight.dtype), student.weight, weights)
        if partial and grads.hidden is not None:
            grads.hidden = plan.shards.sum(grads.hidden).to(hidden.dtype)
        loss_sum = (stats[0] if plan.weights is None else weigh(stats[0], plan.weights)).sum()
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        details = stats.unbind(0)
        ctx.mark_non_differentiable(*details)
        return loss_sum, *details

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_loss: Tensor, *_: Tensor
    ) -> Any:
        grad_hidden, grad_weight, grad_bias = (
            scaled_for_backward(grad, grad_loss, dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return grad_hidden, grad_weight, grad_bias, None  # plan: the teacher and the weights are constants


def _sides(weight: Tensor, bias: Tensor | None, plan: _DivergencePlan) -> tuple[_Side, _Side]:
    def tile_dtype(products: torch.dtype) -> torch.dtype:
        return products if plan.fast and products.itemsize == 2 else plan.wide

    return (
        _Side(
            name="student",
            head=plan.student,
            weight=weight.to(plan.student_dtype),
            bias=None if bias is None else bias.to(plan.wide),
            tile_dtype=tile_dtype(plan.student_dtype),
        ),
        _Side(
            name="teacher",
            head=plan.teacher,
            weight=plan.teacher_weight.to(plan.teacher_dtype),
            bias=plan.teacher_bias,
            tile_dtype=tile_dtype(plan.teacher_dtype),
        ),
    )


def _divergence_tile(
    s: Tensor, t: Tensor, weights: Tensor | None, student: _Side, plan: _DivergencePlan
) -> tuple[Tensor, Tensor | None]:
    """Statistics `[6, n]`, ordered as in `FusedDivergence`, and the gradient `[n, V]` by the student's raw products.

    The tiles `s, t [n, V]` are used up.
    """
    kernels = kernels_for(s)
    scales = (student.head.kernel_scale, plan.teacher.kernel_scale)
    capped = student.head.softcap is not None
    coefficient = out = None
    if any(plan.needs):
        slope = student.head.slope
        coefficient = s.new_full(s.shape[:1], slope, dtype=plan.wide) if weights is None else weights * slope  # [n]
        out = t if capped else _gradient_tile(s, student.weight.dtype)  # a soft-cap's tanh, s, is needed again
    if plan.shards is WHOLE:
        stats = kernels.divergence_rows(s, t, plan.beta, coefficient, out, scales)
    else:
        stats = divergence_of_passes(kernels, s, t, plan.beta, coefficient, out, scales, plan.shards)
    if out is not None and capped:
        out.mul_(s.square_().neg_().add_(1.0))  # d tanh(x) / dx = 1 - tanh(x)^2
        if weights is not None:
            out.masked_fill_((weights == 0)[:, None], 0.0)  # NaN in such a row's tanh
    return stats, out


def _gradient_tile(student: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the gradient in the products' dtype goes: over `student [n, V]`, if narrower in its rows' first part."""
    return student if student.dtype == dtype else student.view(dtype)[:, : student.shape[1]]
