# SPDX-License-Identifier: Apache-2.0
"""From hidden states and heads to a divergence and its gradients: ours, peers, and the four products that all need.

Every implementation gets the same numbers and gives the gradient of the *sum* over the rows; Liger means over the
rows, so its results are multiplied back. All weight the teacher by beta: m = beta t + (1 - beta) s.
"""

import inspect
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness import FLOOR, OURS, REFERENCE, Case, Implementation

TRL, LIGER, LIGER_COMPILED, FULL = "TRL", "Liger", "Liger, compiled", "PyTorch, all logits"
OURS_BF16 = "Cohobate, fast logits"
TINY = {"N": 32, "H": 64, "V": 2048, "write": os.devnull}
PEERS = (FULL, TRL, LIGER, LIGER_COMPILED)


class Inputs:
    """Logits of standard deviation 3 on both sides, drawn independently; the student's tensors want gradients."""

    def __init__(self, settings: dict[str, Any]) -> None:
        rows, hidden, vocab = settings["N"], settings["H"], settings["V"]
        self.beta: float = settings["beta"]
        self.device = torch.device(settings.get("device", "cpu"))
        dtype = getattr(torch, settings.get("dtype", "float32"))
        draw = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=draw, device=self.device).mul_(scale).to(dtype)

        self.student_hidden = normal(rows, hidden).requires_grad_()
        self.student_weight = normal(vocab, hidden, scale=3 / hidden**0.5).requires_grad_()
        self.teacher_hidden = normal(rows, hidden)
        self.teacher_weight = normal(vocab, hidden, scale=3 / hidden**0.5)


class FusedJob:
    """One forward and backward of `loss(inputs)`, whose value is the sum over rows divided by `divisor`."""

    def __init__(self, settings: dict[str, Any], loss: Callable[[Inputs], Tensor], *, mean: bool = False) -> None:
        self.inputs = Inputs(settings)
        self._loss = loss
        self._divisor = settings["N"] if mean else 1
        self._value: Tensor | None = None

    def run(self) -> None:
        loss = self._loss(self.inputs)
        loss.backward()
        self._value = loss.detach()

    def clear(self) -> None:
        self.inputs.student_hidden.grad = self.inputs.student_weight.grad = None

    def facts(self, reference: str | None) -> dict[str, Any]:
        assert self._value is not None
        facts: dict[str, Any] = {"loss": float(self._value.double()) * self._divisor}
        if reference is not None:
            from safetensors.torch import load_file

            want = load_file(reference)
            facts["loss_error"] = abs(facts["loss"] / float(want["loss"]) - 1)
            facts["gradient_error"] = max(
                _relative(self.inputs.student_hidden.grad, want["hidden"], self._divisor),
                _relative(self.inputs.student_weight.grad, want["weight"], self._divisor),
            )
        return facts


def _relative(got: Tensor | None, want: Tensor, factor: float) -> float:
    """Norm of the difference over the norm of what is wanted, in slices: a head has millions of numbers."""
    assert got is not None
    off = size = 0.0
    for a, b in zip(got.detach().cpu().split(4096), want.split(4096), strict=True):
        off += float((a.double() * factor - b.double()).square().sum())
        size += float(b.double().square().sum())
    return math.sqrt(off / size)


class FloorJob:
    """The two projections and the two products of the gradients, into memory that is already there."""

    def __init__(self, settings: dict[str, Any]) -> None:
        with torch.no_grad():
            self.inputs = inputs = Inputs(settings)
            rows = min(settings["N"], 512) if inputs.device.type == "cpu" else settings["N"]
            self._rows = rows
            self._student = inputs.student_hidden.new_empty(rows, settings["V"])
            self._teacher = torch.empty_like(self._student)
            self._grad_hidden = torch.empty_like(inputs.student_hidden)
            self._grad_weight = torch.empty_like(inputs.student_weight)
            for memory in (self._student, self._teacher, self._grad_weight):
                memory.zero_()  # its pages are there from now on

    def run(self) -> None:
        inputs = self.inputs
        with torch.no_grad():
            for start in range(0, inputs.student_hidden.shape[0], self._rows):
                rows = slice(start, start + self._rows)
                torch.mm(inputs.student_hidden[rows], inputs.student_weight.T, out=self._student)
                torch.mm(inputs.teacher_hidden[rows], inputs.teacher_weight.T, out=self._teacher)
                torch.mm(self._student, inputs.student_weight, out=self._grad_hidden[rows])
                if start == 0:
                    torch.mm(self._student.T, inputs.student_hidden[rows], out=self._grad_weight)
                else:
                    self._grad_weight.addmm_(self._student.T, inputs.student_hidden[rows])

    def clear(self) -> None:
        self._grad_weight.zero_()

    def facts(self, reference: str | None) -> dict[str, Any]:
        return {}


class ReferenceJob:
    """Everything in float64 from the definition, a few rows at a time, written to a file for the others to read."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def run(self) -> None:
        from safetensors.torch import save_file

        inputs, beta = Inputs(self._settings), self._settings["beta"]
        weight = inputs.student_weight.detach().double()
        teacher_weight = inputs.teacher_weight.double()
        hidden = inputs.student_hidden.detach().double()
        grad_weight, grad_hidden = torch.zeros_like(weight), torch.zeros_like(hidden)
        loss = torch.zeros((), dtype=torch.float64)
        for rows in torch.arange(hidden.shape[0], device=hidden.device).split(128):
            z = (hidden[rows] @ weight.T).requires_grad_()
            value = _divergence(z, inputs.teacher_hidden[rows].double() @ teacher_weight.T, beta)
            (grad,) = torch.autograd.grad(value, z)
            grad_hidden[rows] = grad @ weight
            grad_weight.addmm_(grad.T, hidden[rows])
            loss += value.detach().cpu()
        tensors = {"loss": loss, "hidden": grad_hidden.cpu(), "weight": grad_weight.float().cpu()}
        save_file(tensors, self._settings["write"])

    def clear(self) -> None: ...
    def facts(self, reference: str | None) -> dict[str, Any]:
        return {}


def _divergence(student_logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    """The sum over rows, as a user would write it with PyTorch."""
    s, t = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    kl = torch.nn.functional.kl_div
    if beta == 0:
        return kl(s, t, reduction="sum", log_target=True)
    if beta == 1:
        return kl(t, s, reduction="sum", log_target=True)
    m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
    return beta * kl(m, t, reduction="sum", log_target=True) + (1 - beta) * kl(m, s, reduction="sum", log_target=True)


def ours(**options: Any) -> Callable[[dict[str, Any]], FusedJob]:
    def build(settings: dict[str, Any]) -> FusedJob:
        from cohobate.functional import fused_linear_divergence

        missing = set(options) - set(inspect.signature(fused_linear_divergence).parameters)
        if missing:
            raise ImportError(f"fused_linear_divergence has no {', '.join(missing)} here")

        def loss(inputs: Inputs) -> Tensor:
            return fused_linear_divergence(
                inputs.student_hidden,
                inputs.student_weight,
                inputs.teacher_hidden,
                inputs.teacher_weight,
                beta=inputs.beta,
                **options,
            ).loss_sum

        return FusedJob(settings, loss)

    return build


def _trl(settings: dict[str, Any]) -> FusedJob:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def loss(inputs: Inputs) -> Tensor:
        divergence, _ = ChunkedDivergenceFunction.apply(
            inputs.student_hidden,
            inputs.student_weight,
            None,
            inputs.teacher_hidden,
            inputs.teacher_weight,
            None,
            inputs.beta,
        )
        return divergence.sum()

    return FusedJob(settings, loss)


def _liger(*, compiled: bool) -> Callable[[dict[str, Any]], FusedJob]:
    def build(settings: dict[str, Any]) -> FusedJob:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        module = LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=settings["beta"], compiled=compiled
        )
        labels = torch.zeros(settings["N"], dtype=torch.int64, device=settings.get("device", "cpu"))

        def loss(inputs: Inputs) -> Tensor:
            student, teacher = inputs.student_weight, inputs.teacher_weight
            return module(inputs.student_hidden, student, inputs.teacher_hidden, teacher, labels)

        return FusedJob(settings, loss, mean=True)

    return build


def _full(settings: dict[str, Any]) -> FusedJob:
    def loss(inputs: Inputs) -> Tensor:
        student = inputs.student_hidden @ inputs.student_weight.T
        teacher = inputs.teacher_hidden @ inputs.teacher_weight.T
        return _divergence(student.float(), teacher.float(), inputs.beta)

    return FusedJob(settings, loss)


IMPLEMENTATIONS = {
    FLOOR: Implementation(build=FloorJob, package="torch"),
    OURS: Implementation(build=ours(), package="cohobate"),
    OURS_BF16: Implementation(build=ours(logits="fast"), package="cohobate"),
    TRL: Implementation(build=_trl, package="trl"),
    LIGER: Implementation(build=_liger(compiled=False), package="liger-kernel"),
    LIGER_COMPILED: Implementation(build=_liger(compiled=True), package="liger-kernel", warm_first=True),
    FULL: Implementation(build=_full, package="torch"),
    REFERENCE: Implementation(build=ReferenceJob, package="torch"),
}


def _case(beta: float, rows: int, hidden: int, vocab: int, target: str) -> Case:
    name = {0.0: "forward KL", 1.0: "reverse KL"}.get(beta, f"JSD {beta:g}")
    return Case(
        name=f"{name}, N={rows}, H={hidden}, V={vocab}",
        settings={"beta": beta, "N": rows, "H": hidden, "V": vocab},
        implementations=(FLOOR, OURS, *PEERS),
        targets={OURS: target},
    )


def _bf16_case(beta: float, rows: int, accurate: str, rounded: str) -> Case:
    case = _case(beta, rows, 576, 49152, accurate)
    return Case(
        name=f"bf16, {case.name}",
        settings={**case.settings, "dtype": "bfloat16"},
        implementations=(FLOOR, OURS, OURS_BF16, *PEERS),
        targets={OURS: accurate, OURS_BF16: rounded},
    )


def cases(*, quick: bool = False) -> list[Case]:
    """The float32 rows."""
    if quick:
        return [_case(0.5, 64, 64, 2048, "")]
    return [
        _case(0.5, 512, 576, 49152, "≤ 1.14×, ≤ gradients + 2 tiles"),
        _case(0.5, 2048, 576, 49152, "≤ 1.10×, ≤ gradients + 2 tiles"),
        _case(0.0, 512, 576, 49152, "≤ 1.08×"),
        _case(0.0, 2048, 576, 49152, "≤ 1.06×"),
        _case(1.0, 512, 576, 49152, "≤ 1.08×"),
        _case(1.0, 2048, 576, 49152, "≤ 1.06×"),
        _case(0.0, 512, 896, 151936, "≤ 1.08×"),
        _case(0.5, 512, 896, 151936, "≤ 1.10×"),
    ]


def bf16_cases(*, quick: bool = False) -> list[Case]:
    """The bfloat16 rows; the targets hold where the CPU multiplies bfloat16 itself."""
    if quick:
        return []
    native = _has_bf16_products()
    accurate = "≤ 1.9×, error ≤ 3e-3" if native else ""
    found = []
    for rows in (512, 2048):
        found.append(_bf16_case(0.0, rows, accurate, "≤ 1.18×" if native else ""))
        found.append(_bf16_case(0.5, rows, accurate, "≤ 1.27×" if native else ""))
    return found


def _has_bf16_products() -> bool:
    try:
        return any(word in open("/proc/cpuinfo").read() for word in ("avx512_bf16", "amx_bf16"))
    except OSError:
        return False
