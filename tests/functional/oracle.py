# SPDX-License-Identifier: Apache-2.0
"""Distributions, divergences and their gradients in plain Python floats, from the definitions in probability space.

No tensor, no logsumexp, no kl_div: a slip in the library's log-space forms cannot hide in here too. Gradients are
finite differences of the value, so a formula whose gradient belongs to another value is caught as well.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def softmax(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(x / temperature) for x in logits]
    return [x / math.fsum(powers) for x in powers]


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    """KL(p || q) with 0 log 0 = 0."""
    total = []
    for a, b in zip(p, q, strict=True):
        if a > 0 and b == 0:
            return math.inf
        if a > 0:
            total.append(a * math.log(a / b))
    return math.fsum(total)


def divergence(student: Sequence[float], teacher: Sequence[float], beta: float) -> float:
    """Of probabilities: 0 is KL(teacher || student), 1 KL(student || teacher); between, beta weights the teacher."""
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = [beta * t + (1 - beta) * s for s, t in zip(student, teacher, strict=True)]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def entropy(p: Sequence[float]) -> float:
    return -math.fsum(x * math.log(x) for x in p if x > 0)


def numeric_gradient(value: Callable[[list[float]], float], at: Sequence[float], step: float = 1e-5) -> list[float]:
    """Central differences, one coordinate at a time."""
    slopes = []
    for i in range(len(at)):
        up, down = list(at), list(at)
        up[i] += step
        down[i] -= step
        slopes.append((value(up) - value(down)) / (2 * step))
    return slopes


def draw(*shape: int, seed: int, scale: float = 1.5, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def log_of(*probabilities: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(probabilities, dtype=dtype).log()
