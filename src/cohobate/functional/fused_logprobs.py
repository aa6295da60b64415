# SPDX-License-Identifier: Apache-2.0
"""From hidden states and an output head to log-probabilities of given tokens, without ever holding `[N, V]`.

What a policy gradient, a sampled-token loss or cross-entropy needs of the student. The upstream gradient, one number
per row, is not known in the forward pass, so the backward pass projects once more (`fused_linear.py` need not).

N rows, V vocabulary, H hidden, n rows of one chunk.
"""

from dataclasses import dataclass
from typing import Any

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
    wide_dtype,
)
from cohobate.functional.logprobs import check_temperature, product_dtype

_FORBIDDEN = -1e30  # stands for -inf where a bias may hold one: far below any log-probability, yet 0 x it is 0


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
) -> tuple[Tensor, Tensor]:
    """Log-probability of `target_ids [N]` and entropy of each row, in nats: `([N] differentiable, [N] detached)`.

    `hidden [N, H]`, `weight [V, H]`, `bias [V]`; logits as in `fused_linear_divergence`, and the same dtypes and
    chunks. Only the inputs and `[N]` statistics are kept for the backward pass, which projects once more.
    """
    check_temperature(temperature)
    check_side("", hidden, weight, bias)
    if target_ids.shape != hidden.shape[:1]:
        raise ValueError(f"target_ids must be [N] = [{hidden.shape[0]}], got {list(target_ids.shape)}.")
    wide = wide_dtype(hidden, weight)
    plan = _LogprobsPlan(
        head=ChunkHead(scale=scale, softcap=softcap, temperature=temperature),
        dtype=product_dtype(hidden, weight),
        needs=needed_gradients(hidden, weight, bias),
        wide=wide,
        rows=rows_per_chunk(hidden, weight.shape[0], wide, chunk_size, chunk_bytes),
    )
    out: Any = _FusedLogprobs.apply(hidden, weight, bias, target_ids, plan)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogprobsPlan:
    head: ChunkHead
    dtype: torch.dtype
    needs: tuple[bool, bool, bool]
    wide: torch.dtype
    rows: int


class _FusedLogprobs(torch.autograd.Function):
    """log p_n[y_n] and the entropy.   Twin: `logprobs.token_logprobs` of `logprobs.head_logits(...)`

    With g_n from upstream, the gradient by tempered logits is g_n (onehot(y_n) - p_n); p is made again from the saved
    normaliser.   Saved: the inputs and log Z [N].
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target_ids: Tensor, plan: _LogprobsPlan
    ) -> Any:
        picked, ent, log_z = (torch.empty(hidden.shape[0], dtype=plan.wide, device=hidden.device) for _ in range(3))
        weight_n = weight.to(plan.dtype)  # [V, H]
        bias_w = None if bias is None else bias.to(plan.wide)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in row_chunks(hidden.shape[0], plan.rows):
                z, _ = plan.head.logits((hidden[rows].to(plan.dtype) @ weight_n.T).to(plan.wide), bias_w)  # [n, V]
                log_z[rows] = torch.logsumexp(z, dim=-1)
                picked[rows] = z.gather(-1, target_ids[rows, None]).squeeze(-1) - log_z[rows]
                logprobs = z.sub_(log_z[rows, None])
                if bias is not None:
                    logprobs.clamp_(min=_FORBIDDEN)
                ent[rows] = -logprobs.mul_(logprobs.exp()).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, target_ids, log_z)
        ctx.plan = plan
        ctx.mark_non_differentiable(ent)
        return picked, ent

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_picked: Tensor, *_: Tensor
    ) -> Any:
        hidden, weight, bias, target_ids, log_z = ctx.saved_tensors
        plan: _LogprobsPlan = ctx.plan
        grads = HeadGradients(hidden, weight, plan.needs, plan.wide)
        weight_n = weight.to(plan.dtype)  # [V, H]
        bias_w = None if bias is None else bias.to(plan.wide)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in row_chunks(hidden.shape[0], plan.rows):
                hidden_n = hidden[rows].to(plan.dtype)  # [n, H]
                z, tanh = plan.head.logits((hidden_n @ weight_n.T).to(plan.wide), bias_w)  # [n, V]
                grad = z.sub_(log_z[rows, None]).exp_().neg_()  # onehot - p, without the onehot
                ids = target_ids[rows, None]
                grad.scatter_add_(-1, ids, torch.ones_like(ids, dtype=grad.dtype))
                factor = grad_picked[rows]
                grads.add(rows, plan.head.back(grad, tanh, factor), hidden_n, weight_n, factor)
        grad_weight = None if grads.weight is None else grads.weight.to(weight.dtype)
        grad_bias = None if grads.bias is None or bias is None else grads.bias.to(bias.dtype)
        return grads.hidden, grad_weight, grad_bias, None, None  # target_ids: integers; plan: no tensors
