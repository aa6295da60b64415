# SPDX-License-Identifier: Apache-2.0
"""From logits to log-probabilities: the one place for upcast, scale, soft-cap, temperature, gather and vocabulary cut.

These steps are short, which is why they get written in many places and then differ: a bf16 softmax on one side gives a
divergence between equal models, a forgotten soft-cap gives another model, dividing log-probabilities (instead of
logits) by a temperature gives numbers that are no distribution. Every other module takes them from here.

N rows, V vocabulary, H hidden. Nothing here multiplies by T squared.
"""

import math

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """`x` in float32, or as it is if it is float64. A half-precision side is widened before any exponential."""
    return x if x.dtype == torch.float64 else x.float()


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of `tensors` is, else float32: the dtype in which everything but matrix products is computed."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def upcast_pair(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides in float32, or in float64 if either is: equal numbers stay equal whatever dtype each came in."""
    wide = wide_dtype(student, teacher)
    return student.to(wide), teacher.to(wide)


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless `0 < temperature < inf`."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a finite number > 0, got {temperature}.")


def check_softcap(softcap: float | None) -> None:
    """Raise ValueError unless `softcap` is None or `0 < softcap < inf`."""
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be a finite number > 0 or None, got {softcap}.")


def real_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """The first `vocab_size` columns of `logits [..., V]`: the ids that the tokenizer really has.

    Heads are padded to round widths, differently for each model size. The padded columns are cut on both sides
    *before* normalising; cutting to the narrower head, or padding a side with zeros, leaves mass on ids that mean
    nothing.
    """
    width = logits.shape[-1]
    if not 1 <= vocab_size <= width:
        raise ValueError(f"cannot cut logits of {width} ids to {vocab_size}: vocab_size must be in [1, {width}].")
    return logits[..., :vocab_size]


def scale_and_cap(raw: Tensor, *, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """`softcap(raw * scale)`, where a soft-cap `c` means `c * tanh(x / c)` (Gemma 2). Keeps the dtype."""
    check_softcap(softcap)
    scaled = raw if scale == 1.0 else raw * scale
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which `hidden @ weight.T` is done: autocast's where it rules, else the wider of the two.

    Autocast leaves float64 alone, and so do we.
    """
    wider = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    if wider != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return wider


def head_logits(
    hidden: Tensor, weight: Tensor, *, bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Raw logits `softcap((h W^T + bias) * scale)`: `[N, H], [V, H], [V] -> [N, V]` in float32 (float64 for float64).

    The product runs in the inputs' dtype (autocast's under autocast), as in the model itself; all after it is upcast.
    """
    dtype = product_dtype(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        raw = upcast(hidden.to(dtype) @ weight.to(dtype).T)  # [N, V]
        if bias is not None:
            raw = raw + bias.to(raw.dtype)
        return scale_and_cap(raw, scale=scale, softcap=softcap)


def log_softmax(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities in nats of `logits / temperature`: `[..., V] -> [..., V]`, float32 or float64."""
    check_temperature(temperature)
    wide = upcast(logits)
    return torch.log_softmax(wide if temperature == 1.0 else wide / temperature, dim=-1)


def gather_last(values: Tensor, ids: Tensor) -> Tensor:
    """`values [..., V]` at `ids`: `[...] -> [...]`, or `[..., K] -> [..., K]` if it has as many axes as `values`."""
    if ids.dim() == values.dim():
        return values.gather(-1, ids)
    return values.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def other_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """The ids `[V - n]` of a vocabulary that are not among the distinct `ids [n]`, ascending."""
    left = torch.ones(vocab_size, dtype=torch.bool, device=ids.device)
    left[ids] = False
    return left.nonzero().squeeze(-1)


def put_last(target: Tensor, ids: Tensor, values: Tensor | float) -> Tensor:
    """Write `values [n, K]` into `target [n, V]` at `ids [n, K]`, and return it; its dtype stays.

    An id may stand twice in a row only with equal values.

    `target.scatter_` does the same, but by way of a float32 copy of the whole `target` if that is bfloat16 on a CPU.
    """
    rows = torch.arange(target.shape[0], device=target.device)[:, None]
    target[rows, ids] = values.to(target.dtype) if isinstance(values, Tensor) else values
    return target


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability in nats of each of `ids [...]` under `logits [..., V]` at `temperature`: `-> [...]`."""
    check_temperature(temperature)
    wide = upcast(logits) / temperature
    return gather_last(wide, ids) - torch.logsumexp(wide, dim=-1)


def entropy(logprobs: Tensor) -> Tensor:
    """Entropy in nats of `logprobs [..., V]`: `-> [...]`. A token at -inf adds 0 to value and gradient."""
    finite = torch.where(logprobs == -math.inf, 0.0, logprobs)
    return -(logprobs.exp() * finite).sum(-1)
