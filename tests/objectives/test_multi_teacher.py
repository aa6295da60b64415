# SPDX-License-Identifier: Apache-2.0
"""Several teachers of the student's own tokenizer, as `objective.kind multi_teacher` makes them: no chunk, no label.

What one teacher comes to is `DivergenceObjective`; what several come to is written here in plain Python floats.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cohobate.align import AlignedBatch, AlignedSide, TeacherSide
from cohobate.errors import ConfigError
from cohobate.functional.scores import DenseScores, HiddenScores, OutputHead, SeveralScores
from cohobate.objectives import CommonSupportObjective, DivergenceObjective

N, V, H = 7, 11, 4
SETTINGS: dict[str, Any] = {"same_vocab_top_k": None, "dynamic_scaling": "off", "ce_weight": 0.0}


def objective_of(num_teachers: int, beta: float, **options: Any) -> CommonSupportObjective:
    return CommonSupportObjective(parts=(None,) * num_teachers, same_vocab_beta=beta, **SETTINGS | options)


def scores_of(seed: int, dtype: torch.dtype, *, width: int = V, grad: bool = False) -> HiddenScores:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    head = OutputHead(weight=draw(width, H), bias=draw(width), scale=0.7, softcap=6.0)
    return HiddenScores(hidden=draw(N, H), head=head)


def batch_of(num_teachers: int, *, recorded: bool = True, width: int = V) -> AlignedBatch:
    index = torch.arange(N)
    ids, row = torch.arange(N) * 3 % width, torch.tensor([0, 0, 0, 1, 1, 1, 1])
    side = TeacherSide(model_inputs={}, pair_index=index, target_ids=ids, row=row)
    return AlignedBatch(
        student=AlignedSide(model_inputs={}, pair_index=index),
        teacher=side,
        teachers=(side,) * num_teachers,
        target_ids=ids,
        weights=torch.tensor([1.0, 0.5, 0.0, 1.5, 1.0, 1.0, 2.0]),
        row=row,
        is_sampled=torch.tensor([not recorded, not recorded]),
        sample_ids=("a", "b"),
    )


def run(objective: Any, student: HiddenScores, known: Any, batch: AlignedBatch) -> tuple[Any, list[Tensor]]:
    out = objective(student, known, batch)
    counts = objective.counts(batch)
    parts = [term.sum / counts[term.count] for term in out.terms.values() if counts[term.count]]
    loss = torch.stack(parts).sum()
    leaves = [student.hidden, student.head.weight, student.head.bias]
    return out, [loss.detach(), *torch.autograd.grad(loss, leaves)]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("dtype", "width", "rtol"), [(torch.float64, V, 1e-11), (torch.float32, V, 1e-5), (torch.float32, 2500, 1e-4)]
)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_one_teacher_is_the_divergence_objective(
    beta: float, dtype: torch.dtype, width: int, rtol: float, temperature: float
):
    """Times the temperature's square, which an objective over several teachers has and that one has not."""
    student, teacher = scores_of(1, dtype, width=width, grad=True), scores_of(2, dtype, width=width)
    out, wanted = run(DivergenceObjective(beta=beta, temperature=temperature), student, teacher, batch_of(0))
    for known in (teacher, DenseScores(dense=teacher.logits())):
        objective = objective_of(1, beta, temperature=temperature)
        ours, found = run(objective, student, SeveralScores(scores=(known,)), batch_of(1, width=width))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, temperature**2 * other, rtol=rtol, atol=rtol * 0.01)
        torch.testing.assert_close(ours.pair_loss, temperature**2 * out.pair_loss, rtol=rtol, atol=rtol * 0.01)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_mean_of_two_teachers_that_are_one_is_that_one(beta: float):
    student, teacher = scores_of(1, torch.float64, grad=True), scores_of(2, torch.float64)
    _, wanted = run(objective_of(1, beta), student, teacher, batch_of(1))
    both = SeveralScores(scores=(teacher, teacher))
    for weights in ((), (0.25, 0.75)):
        objective = objective_of(2, beta, kd_mode="averaged_logits", weights=weights)
        _, found = run(objective, student, both, batch_of(2))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


def softmax(logits: Sequence[float]) -> list[float]:
    powers = [math.exp(x - max(logits)) for x in logits]
    return [power / sum(powers) for power in powers]


def by_hand(student: Sequence[float], teacher: Sequence[float], beta: float) -> float:
    """The divergence that `beta` names, from probabilities."""
    p, q = softmax(teacher), softmax(student)

    def kl(a: Sequence[float], b: Sequence[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    if beta in (0.0, 1.0):
        return kl(q, p) if beta else kl(p, q)
    mixture = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("mode", ["sum", "averaged_logits"])
def test_several_teachers_are_what_plain_floats_say(beta: float, mode: Any):
    share = 0.3
    student = scores_of(1, torch.float64, grad=True)
    teachers = scores_of(2, torch.float64), scores_of(3, torch.float64)
    batch = batch_of(2)
    objective = objective_of(2, beta, kd_mode=mode, weights=(share, 1 - share))
    _, (loss, *_) = run(objective, student, SeveralScores(scores=teachers), batch)
    rows = [side.logits().detach().tolist() for side in (student, *teachers)]
    total = 0.0
    for s, first, second, weight in zip(*rows, batch.weights.tolist(), strict=True):
        if mode == "sum":
            value = share * by_hand(s, first, beta) + (1 - share) * by_hand(s, second, beta)
        else:
            mean = [share * a + (1 - share) * b for a, b in zip(first, second, strict=True)]
            value = by_hand(s, mean, beta)
        total += weight * value / N
    assert loss.item() == pytest.approx(total, rel=1e-9)


def test_a_cross_entropy_of_weight_0_is_logged_and_teaches_nothing():
    student, teacher = scores_of(1, torch.float64, grad=True), scores_of(2, torch.float64)
    batch, sampled = batch_of(1), batch_of(1, recorded=False)
    out, found = run(objective_of(1, 0.5), student, teacher, batch)
    _, wanted = run(objective_of(1, 0.5), student, teacher, sampled)
    assert float(out.metrics["ce"].count) == 6.0
    logprobs = student.logits().detach().log_softmax(-1).gather(-1, batch.target_ids[:, None])[:, 0]
    torch.testing.assert_close(out.metrics["ce"].sum, -logprobs[batch.weights != 0].sum())
    assert not out.metrics["ce"].sum.requires_grad
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_pair_of_weight_0_may_hold_anything():
    student, teacher = scores_of(1, torch.float64, grad=True), scores_of(2, torch.float64)
    _, wanted = run(objective_of(1, 0.3), student, teacher, batch_of(1))
    hidden = teacher.hidden.clone()
    hidden[2] = math.nan
    broken = HiddenScores(hidden=hidden, head=teacher.head)
    _, found = run(objective_of(1, 0.3), student, broken, batch_of(1))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_settings_that_mean_nothing_without_a_second_vocabulary_are_refused():
    with pytest.raises(ConfigError, match=r"normalize_teacher_by_vocab weighs .* all of them have the student's"):
        objective_of(2, 0.5, normalize_teacher_by_vocab=True)
    with pytest.raises(ConfigError, match=r"beta must be in \[0, 1\]"):
        objective_of(2, 1.5)
