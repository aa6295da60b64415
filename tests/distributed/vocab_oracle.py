# SPDX-License-Identifier: Apache-2.0
"""What the vocabulary-parallel operations mean, on whole float64 logits and in probability space, and data for them.

Gradients come from autograd through these definitions. No logsumexp, no log_softmax: nothing of the library's forms.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

V = 37  # odd, so that no split is even by chance
SPLITS = {
    2: {"even": [19, 18], "lopsided": [33, 4], "empty": [0, V]},
    3: {"even": [13, 12, 12], "lopsided": [1, 2, V - 3], "empty": [V, 0, 0]},
}
TOLERANCE = {  # of values, of gradients: relative and absolute in units of the logits' scale
    torch.float64: ((1e-10, 1e-10), (1e-9, 1e-10)),
    torch.float32: ((1e-5, 2e-6), (3e-5, 2e-6)),
    torch.bfloat16: ((1e-5, 2e-6), (4e-3, 2e-5)),
}


def probabilities(logits: Tensor) -> Tensor:
    powers = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def logprobs(logits: Tensor, index: Tensor, ignore_index: int = -100) -> Tensor:
    """Of `index [..., k]`."""
    chosen = probabilities(logits).gather(-1, index.clamp(min=0)).log()
    return torch.where(index == ignore_index, 0.0, chosen)


def entropy(logits: Tensor) -> Tensor:
    p = probabilities(logits)
    return -(p * p.log()).sum(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return kl(probabilities(teacher), probabilities(student))


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return kl(probabilities(student), probabilities(teacher))


def jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    s, t = probabilities(student), probabilities(teacher)
    m = beta * t + (1 - beta) * s
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def largest(logits: Tensor, k: int) -> tuple[list, list]:
    """Values and ids of the k largest of each row of `[N, V]`, ties to the lower id: sorted in plain Python."""
    rows = [sorted(range(len(row)), key=lambda v, row=row: (-row[v], v))[:k] for row in logits.tolist()]
    return [[row[v] for v in ids] for row, ids in zip(logits.tolist(), rows, strict=True)], rows


def most_likely(row: list[float], *, top_k: int | None = None, top_p: float | None = None) -> set[int]:
    """The ids that top-k and then top-p keep of one row of logits: sorted and added up in plain Python."""
    ids = sorted((v for v in range(len(row)) if row[v] > -math.inf), key=lambda v: (-row[v], v))[:top_k]
    if top_p is None:
        return set(ids)
    mass = [math.exp(row[v] - row[ids[0]]) for v in ids]
    for count in range(1, len(ids) + 1):
        if math.fsum(mass[:count]) >= top_p * math.fsum(mass):
            return set(ids[:count])
    return set(ids)


def draw(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def value_and_gradients(op: Callable[..., Tensor], *inputs: Tensor, weights: Tensor) -> list[Tensor]:
    """`op(*inputs)` and the gradient of its sum, weighted by position, by each of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = op(*leaves)
    return [value.detach(), *torch.autograd.grad((value * weights.to(value.dtype)).sum(), leaves)]


def differs(got: Tensor, want: Tensor, dtype: torch.dtype, *, gradient: bool, scale: float = 1.0) -> str:
    """Empty if `got` is `want` as far as `dtype` can tell, else by how much it is not."""
    relative, absolute = TOLERANCE[dtype][gradient]
    error = (got.double() - want).abs() - relative * want.abs() - absolute * scale
    if got.shape != want.shape or not bool((error <= 0).all()):
        return f"shape {list(got.shape)} for {list(want.shape)}, {float(error.max()):.3g} beyond tolerance"
    return ""
