# SPDX-License-Identifier: Apache-2.0
"""Small heads with all that a head may have, the fused call on them, its plain twin, and a watch on the work done."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cohobate.functional.divergences import divergence
from cohobate.functional.fused_linear import FusedDivergence, fused_linear_divergence
from cohobate.functional.logprobs import entropy, head_logits, log_softmax

from . import oracle

N, V, HS, HT = 7, 11, 5, 6


@dataclass
class Problem:
    """One student and one teacher over N rows, with everything that a head may have."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    weights: Tensor | None
    options: dict[str, float] = field(default_factory=dict)  # scale and softcap of both sides, temperature

    @property
    def student(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.hidden, self.weight, self.bias) if x is not None)


def problem(seed: int = 0, dtype: torch.dtype = torch.float64, *, rows: int = N, full: bool = True) -> Problem:
    def make(offset: int, *shape: int) -> Tensor:
        return oracle.draw(*shape, seed=seed * 100 + offset, scale=1.0, dtype=dtype)

    return Problem(
        hidden=make(1, rows, HS).requires_grad_(),
        weight=make(2, V, HS).requires_grad_(),
        bias=make(3, V).requires_grad_() if full else None,
        teacher_hidden=make(4, rows, HT),
        teacher_weight=make(5, V, HT),
        teacher_bias=make(6, V) if full else None,
        weights=make(7, rows).abs() if full else None,
        options={"temperature": 0.7, "student_scale": 0.8, "teacher_scale": 1.3, "student_softcap": 2.0}
        if full
        else {},
    )


def fused(p: Problem, beta: float, **more: Any) -> FusedDivergence:
    return fused_linear_divergence(
        p.hidden,
        p.weight,
        p.teacher_hidden,
        p.teacher_weight,
        beta=beta,
        weights=p.weights,
        student_bias=p.bias,
        teacher_bias=p.teacher_bias,
        **p.options,
        **more,
    )


def plain(p: Problem, beta: float) -> FusedDivergence:
    """The same through [N, V] and autograd."""
    o = p.options
    s, t = (
        log_softmax(
            head_logits(h, w, bias=b, scale=o.get(f"{side}_scale", 1.0), softcap=o.get(f"{side}_softcap")),
            temperature=o.get("temperature", 1.0),
        )
        for side, h, w, b in (
            ("student", p.hidden, p.weight, p.bias),
            ("teacher", p.teacher_hidden, p.teacher_weight, p.teacher_bias),
        )
    )
    value = divergence(s, t, beta=beta)
    weighted = value if p.weights is None else value * p.weights.to(value.dtype)
    return FusedDivergence(
        loss_sum=weighted.sum(),
        divergence=value.detach(),
        student_entropy=entropy(s).detach(),
        teacher_entropy=entropy(t),
        top1_agreement=(s.argmax(-1) == t.argmax(-1)).to(value.dtype),
        forward_kl=divergence(s, t, beta=0.0).detach(),
        reverse_kl=divergence(s, t, beta=1.0).detach(),
    )


def gradients(out: FusedDivergence, p: Problem) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.loss_sum * 0.37, p.student)


def assert_same(a: FusedDivergence, b: FusedDivergence, *, rtol: float, atol: float) -> None:
    for name in (f.name for f in fields(FusedDivergence)):
        x, y = getattr(a, name), getattr(b, name)
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


class Watch(TorchDispatchMode):
    """Counts matrix products over the vocabulary and remembers the largest output of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        self.products += name in ("mm", "addmm", "addmm_", "bmm", "matmul", "baddbmm")
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and x.dtype != torch.uint8:  # bytes of a buffer are counted as what they hold
                self.largest = max(self.largest, x.numel())
        return out


def big(rows: int, *, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(
        hidden=oracle.draw(rows, 4, seed=1, dtype=dtype).requires_grad_(),
        weight=oracle.draw(50, 4, seed=2, dtype=dtype).requires_grad_(),
        bias=oracle.draw(50, seed=3, dtype=dtype).requires_grad_(),
        teacher_hidden=oracle.draw(rows, 4, seed=4, dtype=dtype),
        teacher_weight=oracle.draw(50, 4, seed=5, dtype=dtype),
        teacher_bias=None,
        weights=oracle.draw(rows, seed=6).abs(),
        options={"student_softcap": 5.0},
    )


def products_of(call: Callable[[], Any]) -> int:
    with Watch() as watch:
        call()
    return watch.products
