# SPDX-License-Identifier: Apache-2.0
"""From hidden states and an output head to log-probabilities of given tokens, without ever holding `[N, V]`.

What a policy gradient, a sampled-token loss or cross-entropy needs of the student. `fused_linear_logprobs` gives the
log-probabilities and takes any upstream gradient; as that is one number per row and not known in the forward pass, the
backward pass projects once more: four matrix products. Where the loss of a token is a known function of its own
log-probability, `fused_linear_token_loss` takes its gradient while the logits are there: three.

N rows, V vocabulary, H hidden, n rows of one chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.chunked_head import scaled_for_backward
from cohobate.functional.kernels import kernels_for
from cohobate.functional.logprobs import gather_last, put_last
from cohobate.functional.moments import side_moments
from cohobate.functional.student_head import HeadOptions, HeadPlan, Precision, StudentHead
from cohobate.functional.workspace import set_aside

TokenLoss = Callable[[Tensor, slice], Tensor]
"""From log-probabilities `[n]` of the rows of a slice to their losses `[n]`, each of its own log-probability alone."""


def fused_linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    chunk_bytes: int | None = None,
    logits: Precision = "accurate",
) -> tuple[Tensor, Tensor]:
    """Log-probability of `target_ids [N]` and entropy of each row, in nats: `([N] differentiable, [N] detached)`.

    `hidden [N, H]`, `weight [V, H]`, `bias [V]`; logits as in `fused_linear_divergence`, and the same dtypes and
    chunks. Only the inputs and `[N]` statistics are kept for the backward pass, which projects once more; if the loss
    is known beforehand, `fused_linear_token_loss` need not.
    """
    options = HeadOptions(
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        chunk_size=chunk_size,
        chunk_bytes=chunk_bytes,
        logits=logits,
    )
    plan = options.plan(hidden, weight, bias)
    _check_targets(target_ids, hidden, weight)
    out: Any = _FusedLogprobs.apply(hidden, weight, bias, target_ids, plan)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTokenLoss:
    """What `fused_linear_token_loss` returns, in nats. All but `loss_sum` is detached `[N]`, float32 or float64."""

    loss_sum: Tensor  # scalar; differentiable in the student's tensors
    loss: Tensor  # of each row
    logprobs: Tensor  # of the target ids
    entropy: Tensor  # of the student's distribution


def fused_linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    token_loss: TokenLoss,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    chunk_bytes: int | None = None,
    logits: Precision = "accurate",
) -> FusedTokenLoss:
    """Sum over rows of `token_loss(logprobs [n], rows) -> [n]` of the log-probabilities of `target_ids [N]`.

    Cross-entropy is `lambda logprobs, rows: -weights[rows] * logprobs`. `token_loss` is called once for each chunk of
    rows, with a slice into the N and log-probabilities that want a gradient; it may detach them (a policy gradient's
    advantage). The loss of a row may depend on its own log-probability alone, and nothing else gets a gradient
    through it. A row whose loss has slope 0 adds nothing to any gradient, whatever it holds.

    All else is as in `fused_linear_logprobs`, with three matrix products instead of four: the gradient is made in the
    forward pass, `loss_sum` may be scaled by any scalar upstream.
    """
    options = HeadOptions(
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        chunk_size=chunk_size,
        chunk_bytes=chunk_bytes,
        logits=logits,
    )
    plan = options.plan(hidden, weight, bias)
    _check_targets(target_ids, hidden, weight)
    out: Any = _FusedTokenLoss.apply(hidden, weight, bias, target_ids, token_loss, plan)
    return FusedTokenLoss(**dict(zip((field.name for field in fields(FusedTokenLoss)), out, strict=True)))


class _FusedLogprobs(torch.autograd.Function):
    """log p_n[y_n] and the entropy.   Twin: `logprobs.token_logprobs` of `logprobs.head_logits(...)`

    With g_n from upstream, the gradient by tempered logits is g_n (onehot(y_n) - p_n); p is made again from the saved
    normaliser.   Saved: the inputs and log Z [N].
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target_ids: Tensor, plan: HeadPlan
    ) -> Any:
        stats = torch.empty(3, hidden.shape[0], dtype=plan.wide, device=hidden.device)
        student = StudentHead(hidden, weight, bias, replace(plan, needs=(False, False, False)))
        for rows, z in student.chunks():
            stats[:, rows] = _token_stats(z, target_ids[rows], student)
        logprobs, ent, log_z = stats.unbind(0)
        ctx.save_for_backward(hidden, weight, bias, target_ids, log_z)
        ctx.plan = plan
        ctx.mark_non_differentiable(ent)
        return logprobs, ent

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprobs: Tensor, *_: Tensor
    ) -> Any:
        hidden, weight, bias, target_ids, log_z = ctx.saved_tensors
        student = StudentHead(hidden, weight, bias, ctx.plan)
        for rows, z in student.chunks():
            _add_token_gradient(z, target_ids[rows], log_z[rows], grad_logprobs[rows], rows, student)
        grads = student.gradients
        grad_weight = None if grads.weight is None else grads.weight.to(weight.dtype)
        grad_bias = None if grads.bias is None or bias is None else grads.bias.to(bias.dtype)
        return grads.hidden, grad_weight, grad_bias, None, None  # target_ids: integers; plan: no tensors


class _FusedTokenLoss(torch.autograd.Function):
    """sum_n f_n(log p_n[y_n]).   Twin: `token_loss` of `logprobs.token_logprobs` of `logprobs.head_logits(...)`

    The slopes f_n' come from autograd over [n] numbers; the gradient by tempered logits is f_n' (onehot(y_n) - p_n).
    Saved: dX [N, H], dW [V, H], db [V], whichever are asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        token_loss: TokenLoss,
        plan: HeadPlan,
    ) -> Any:
        details = torch.empty(3, hidden.shape[0], dtype=plan.wide, device=hidden.device)  # as in FusedTokenLoss
        student = StudentHead(hidden, weight, bias, plan)
        for rows, z in student.chunks():
            logprobs, ent, log_z = _token_stats(z, target_ids[rows], student)
            loss, slopes = _loss_and_slopes(token_loss, logprobs, rows, with_grad=plan.with_grad)
            details[:, rows] = torch.stack([loss.to(plan.wide), logprobs, ent])
            if plan.with_grad:
                _add_token_gradient(z, target_ids[rows], log_z, slopes, rows, student)
        grads = student.gradients
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        out = details.unbind(0)
        ctx.mark_non_differentiable(*out)
        return out[0].sum(), *out

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
        return grad_hidden, grad_weight, grad_bias, None, None, None  # target_ids, token_loss, plan: no gradient


def _token_stats(z: Tensor, ids: Tensor, student: StudentHead) -> Tensor:
    """`[3, n]` of a tile `z [n, V]`: log-probability of `ids [n]`, entropy, normaliser."""
    log_z, ent = side_moments(*kernels_for(z).side_sums(z, student.scale))
    return torch.stack([_picked(z, ids, student.scale, log_z), ent, log_z])


def _add_token_gradient(
    z: Tensor, ids: Tensor, log_z: Tensor, slopes: Tensor, rows: slice, student: StudentHead
) -> None:
    """Add to the student's gradients that of `slopes [n]` times the log-probabilities; uses the tile `z [n, V]` up."""
    slopes = slopes.to(log_z.dtype) * student.plan.head.slope
    of_target = -slopes * torch.expm1(_picked(z, ids, student.scale, log_z))  # p nears 1: not 1 - p of a narrow tile
    out = kernels_for(z).softmax_gradient(z, log_z, -slopes, None, student.gradient_tile(z), student.scale)
    put_last(out, ids[:, None], of_target.masked_fill(slopes == 0, 0.0)[:, None])
    student.add(rows, z, out, slopes)


def _picked(z: Tensor, ids: Tensor, scale: float, log_z: Tensor) -> Tensor:
    """Log-probabilities `[n]` of `ids [n]`."""
    return gather_last(z, ids).to(log_z.dtype) * scale - log_z


def _loss_and_slopes(
    token_loss: TokenLoss, logprobs: Tensor, rows: slice, *, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """Losses `[n]` and their derivatives `[n]` by the log-probabilities, 0 unless asked for."""
    with torch.set_grad_enabled(with_grad):
        leaf = logprobs.detach().requires_grad_(with_grad)
        with set_aside():  # the tile is needed again, and `token_loss` may call anything
            loss = token_loss(leaf, rows)
        if loss.shape != leaf.shape:
            raise ValueError(
                f"token_loss must give one loss for each of {leaf.shape[0]} rows, got {list(loss.shape)}."
            )
        if not loss.requires_grad:
            return loss.detach(), torch.zeros_like(logprobs)
        (slopes,) = torch.autograd.grad(loss.sum(), leaf, materialize_grads=True)
    return loss.detach(), slopes


def _check_targets(target_ids: Tensor, hidden: Tensor, weight: Tensor) -> None:
    if target_ids.shape != hidden.shape[:1]:
        raise ValueError(f"target_ids must be [N] = [{hidden.shape[0]}], got {list(target_ids.shape)}.")
    if target_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target_ids must be int64 or int32, got {target_ids.dtype}.")
    if target_ids.device.type != "cpu":
        return  # reading the numbers would make the device wait
    wrong = ((target_ids < 0) | (target_ids >= weight.shape[0])).nonzero().squeeze(-1).tolist()
    if wrong:
        raise ValueError(
            f"target_ids[{wrong[0]}] is {int(target_ids[wrong[0]])}, outside 0 to {weight.shape[0] - 1}. Select the "
            "rows that have a target first: there is no ignored label here."
        )
