# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of logits that are there anyway, by the kernels: nothing of `[n, V]` is kept but those logits.

`torch`'s logsumexp and gather together make three more tensors of the logits' size on the way back; this makes one.
Where there are hidden states and a head but no logits yet, `fused_logprobs.py` never makes `[N, V]` at all.
n rows, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.kernels import kernels_for
from cohobate.functional.logprobs import gather_last, put_last
from cohobate.functional.moments import side_moments


def token_nll(logits: Tensor, target_ids: Tensor) -> Tensor:
    """Minus the log-probability in nats of `target_ids [n]` under raw `logits [n, V]`: `-> [n]`, float32 or float64.

    A row whose value gets no gradient gets none, whatever it holds.
    """
    value: Any = _TokenNLL.apply(logits, target_ids)
    return value


class _TokenNLL(torch.autograd.Function):
    """log Z_n - z_n[y_n], gradient softmax(z_n) - onehot(y_n).   Twin: `-logprobs.token_logprobs`
    Saved: the logits (an input), the ids, log Z [n]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target_ids: Tensor) -> Tensor:
        log_z, _ = side_moments(*kernels_for(logits).side_sums(logits, 1.0))  # [n]
        ctx.save_for_backward(logits, target_ids, log_z)
        return log_z - gather_last(logits, target_ids).to(log_z.dtype)

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(ctx: Any, grad_value: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, target_ids, log_z = ctx.saved_tensors
        grad_value = grad_value.to(log_z.dtype)
        out = torch.empty_like(logits)  # [n, V]
        kernels_for(logits).softmax_gradient(logits, log_z, grad_value, None, out, 1.0)
        logprob = gather_last(logits, target_ids).to(log_z.dtype) - log_z
        of_target = grad_value * torch.expm1(logprob)  # p nears 1: not p - 1 of a narrow tile
        put_last(out, target_ids[:, None], of_target.masked_fill(grad_value == 0, 0.0)[:, None])
        return out, None  # target_ids: integers
