# SPDX-License-Identifier: Apache-2.0
"""From two tensors of logits to a divergence and its gradient: `generalized_jsd_loss`, TRL's loss and DeepSpeed's.

All three mean over the valid tokens and weight the teacher by beta, so value and gradient are compared as they are.
DeepSpeed alone has the restriction to the teacher's top k; beside it stands what finding the k ids costs alone.
"""

import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness import OURS, REFERENCE, Case, Implementation

TRL, DEEPSPEED, TOPK = "TRL, GKD loss", "DeepSpeed", "torch.topk alone"
TINY = {"N": 16, "V": 512, "write": os.devnull}


class Inputs:
    """`[1, N, V]` logits of standard deviation 3, drawn independently."""

    def __init__(self, settings: dict[str, Any]) -> None:
        draw = torch.Generator().manual_seed(0)
        shape = (1, settings["N"], settings["V"])
        self.student = torch.randn(shape, generator=draw).mul_(3).requires_grad_()
        self.teacher = torch.randn(shape, generator=draw).mul_(3)
        self.mask = torch.ones(shape[:2], dtype=torch.bool)
        self.beta: float = settings["beta"]
        self.top_k: int | None = settings["top_k"]


class LogitsJob:
    def __init__(self, settings: dict[str, Any], loss: Callable[[Inputs], Tensor]) -> None:
        self.inputs = Inputs(settings)
        self._loss = loss
        self._value = torch.zeros(())

    def run(self) -> None:
        loss = self._loss(self.inputs)
        loss.backward()
        self._value = loss.detach()

    def clear(self) -> None:
        self.inputs.student.grad = None

    def facts(self, reference: str | None) -> dict[str, Any]:
        from safetensors.torch import load_file

        facts: dict[str, Any] = {"loss": float(self._value)}
        grad = self.inputs.student.grad
        if reference is not None and grad is not None:
            want = load_file(reference)
            facts["loss_error"] = abs(facts["loss"] / float(want["loss"]) - 1)
            facts["gradient_error"] = float((grad - want["grad"]).norm() / want["grad"].norm())
        return facts


class TopKJob:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._inputs = Inputs(settings)

    def run(self) -> None:
        assert self._inputs.top_k is not None
        torch.topk(self._inputs.teacher, self._inputs.top_k, dim=-1)

    def clear(self) -> None: ...
    def facts(self, reference: str | None) -> dict[str, Any]:
        return {}


class ReferenceJob:
    """The definition in float64, row by row in blocks, written to a file."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._inputs, self._write = Inputs(settings), settings["write"]

    def run(self) -> None:
        from safetensors.torch import save_file

        inputs = self._inputs
        grads, loss = [], torch.zeros((), dtype=torch.float64)
        for rows in torch.arange(inputs.mask.shape[1]).split(64):
            student = inputs.student.detach()[:, rows].double().requires_grad_()
            teacher = inputs.teacher[:, rows].double()
            value = _jsd(student, teacher, inputs.beta, inputs.top_k) / inputs.mask.shape[1]
            grads += [g.float() for g in torch.autograd.grad(value, student)]
            loss += value.detach()
        save_file({"loss": loss, "grad": torch.cat(grads, dim=1)}, self._write)

    def clear(self) -> None: ...
    def facts(self, reference: str | None) -> dict[str, Any]:
        return {}


def _jsd(student: Tensor, teacher: Tensor, beta: float, top_k: int | None) -> Tensor:
    if top_k is not None:
        ids = teacher.topk(top_k, dim=-1).indices
        student, teacher = student.gather(-1, ids), teacher.gather(-1, ids)
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0:
        return (t.exp() * (t - s)).sum()
    if beta == 1:
        return (s.exp() * (s - t)).sum()
    m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
    return (beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)).sum()


def _ours(settings: dict[str, Any]) -> LogitsJob:
    from cohobate import generalized_jsd_loss

    def loss(i: Inputs) -> Tensor:
        return generalized_jsd_loss(i.student, i.teacher, i.mask, beta=i.beta, teacher_top_k=i.top_k).loss

    return LogitsJob(settings, loss)


def _deepspeed(settings: dict[str, Any]) -> LogitsJob:
    from deepspeed.runtime.rollout.opsd import generalized_jsd_loss

    def loss(i: Inputs) -> Tensor:
        return generalized_jsd_loss(i.student, i.teacher, i.mask, beta=i.beta, teacher_top_k=i.top_k).loss

    return LogitsJob(settings, loss)


def _trl(settings: dict[str, Any]) -> LogitsJob:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    def loss(i: Inputs) -> Tensor:
        return GKDTrainer.generalized_jsd_loss(i.student, i.teacher, labels=i.mask.long(), beta=i.beta)

    return LogitsJob(settings, loss)


IMPLEMENTATIONS = {
    OURS: Implementation(build=_ours, package="cohobate"),
    TRL: Implementation(build=_trl, package="trl"),
    DEEPSPEED: Implementation(build=_deepspeed, package="deepspeed"),
    TOPK: Implementation(build=TopKJob, package="torch"),
    REFERENCE: Implementation(build=ReferenceJob, package="torch"),
}


def cases(*, quick: bool = False) -> list[Case]:
    rows, vocab = (32, 1024) if quick else (512, 49152)
    memory = "≤ gradient + 10 MB"

    def case(what: str, beta: float, top_k: int | None, peers: dict[str, str]) -> Case:
        return Case(
            name=f"{what}, {rows}×{vocab}, float32",
            settings={"N": rows, "V": vocab, "beta": beta, "top_k": top_k},
            implementations=(OURS, *peers),
            targets={OURS: memory, **peers},
            base=OURS,
        )

    return [
        case("JSD ½", 0.5, None, {TRL: "≥ 12×", DEEPSPEED: "≥ 8×"}),
        case("forward KL", 0.0, None, {TRL: "≥ 5×", DEEPSPEED: "≥ 4.5×"}),
        case("JSD ½ on the teacher's top 64", 0.5, 64, {DEEPSPEED: "≥ 3×", TOPK: ""}),
    ]
