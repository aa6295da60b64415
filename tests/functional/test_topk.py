# SPDX-License-Identifier: Apache-2.0
"""What a teacher's top k says: bucketed distributions in plain floats, and a bound on the full divergence."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cohobate.functional.divergences import divergence
from cohobate.functional.topk import log_tail_mass, topk_divergence

from . import oracle
from .oracle import BETAS, log_of


def support(teacher_logits: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The teacher's k largest, sorted by id, with true log-probabilities."""
    logprobs = (teacher_logits / temperature).log_softmax(-1)
    ids = logprobs.topk(k, dim=-1).indices.sort(-1).values
    return ids, logprobs.gather(-1, ids)


def bucketed(p: list[float], ids: list[int]) -> list[float]:
    rest = math.fsum(x for v, x in enumerate(p) if v not in ids)
    return [p[v] for v in ids] + [rest]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_tail_goes_into_one_bucket_on_each_side(beta: float, k: int):
    student, teacher = oracle.draw(1, 7, seed=1), oracle.draw(1, 7, seed=2)
    ids, logprobs = support(teacher, k, 0.8)
    p_t = bucketed(oracle.softmax(teacher[0].tolist(), 0.8), ids[0].tolist())

    def value(logits: list[float]) -> float:
        return oracle.divergence(bucketed(oracle.softmax(logits, 0.8), ids[0].tolist()), p_t, beta)

    leaf = student.clone().requires_grad_()
    got = topk_divergence(leaf, ids, logprobs, beta=beta, temperature=0.8)
    got.sum().backward()
    assert got.item() == pytest.approx(value(student[0].tolist()), abs=1e-12)
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == pytest.approx(oracle.numeric_gradient(value, student[0].tolist()), abs=1e-8)


P_TEACHER, P_STUDENT = log_of(0.5, 0.3, 0.2)[None], log_of(0.7, 0.2, 0.1)[None]


@pytest.mark.parametrize(
    ("tail", "k", "want"),
    [("bucket", 3, 0.0920), ("bucket", 1, 0.0872), ("drop", 1, -0.1682), ("renormalize", 2, 0.0595)],
)
def test_what_each_tail_makes_of_one_example(tail: str, k: int, want: float):
    ids, logprobs = support(P_TEACHER, k)
    got = topk_divergence(P_STUDENT, ids, logprobs, beta=0.0, tail=tail)  # pyright: ignore[reportArgumentType]
    assert got.item() == pytest.approx(want, abs=5e-5)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "drop"])
def test_the_whole_vocabulary_equals_the_full_divergence(beta: float, tail: str):
    student, teacher = oracle.draw(4, 6, seed=3), oracle.draw(4, 6, seed=4)
    ids, logprobs = support(teacher, 6)
    both = []
    for call in (
        lambda z: topk_divergence(z, ids, logprobs, beta=beta, tail=tail),  # pyright: ignore[reportArgumentType]
        lambda z: divergence(z.log_softmax(-1), teacher.log_softmax(-1), beta=beta),
    ):
        leaf = student.clone().requires_grad_()
        value = call(leaf)
        value.sum().backward()
        both.append((value.detach(), leaf.grad))
    torch.testing.assert_close(both[0], both[1], rtol=1e-12, atol=1e-14)


# The teacher's tail is 1 - kept, so it is known to one epsilon: logits in a range where that is far below 1e-9.
logits = st.lists(st.floats(-5, 5), min_size=6, max_size=6)


@given(logits, logits, st.sampled_from(BETAS))
def test_the_bucket_is_a_lower_bound_that_grows_with_k(student: list[float], teacher: list[float], beta: float):
    s, t = torch.tensor([student], dtype=torch.float64), torch.tensor([teacher], dtype=torch.float64)
    values = [topk_divergence(s, *support(t, k), beta=beta).item() for k in range(1, 7)]
    full = divergence(s.log_softmax(-1), t.log_softmax(-1), beta=beta).item()
    assert values[0] >= -1e-12
    assert all(a <= b + 1e-9 for a, b in pairwise(values))
    assert values[-1] == pytest.approx(full, abs=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_whose_kept_mass_rounds_to_one_gives_a_finite_loss_and_gradient(beta: float):
    teacher = torch.tensor([[1 - 1e-9]]).log()  # float32: exactly 0
    assert teacher.item() == 0.0
    student = torch.tensor([[3.0, 0.0, -1.0]], requires_grad=True)
    value = topk_divergence(student, torch.tensor([[0]]), teacher, beta=beta)
    value.sum().backward()
    assert value.isfinite().all()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert student.grad[0, 0] < 0  # the teacher's token is still raised


def test_the_floor_is_one_machine_epsilon_and_moves_nothing_above_it():
    assert log_tail_mass(torch.tensor([[0.0]])).exp().item() == pytest.approx(torch.finfo(torch.float32).eps)
    assert log_tail_mass(log_of(0.6, 0.6)[None]).exp().item() == pytest.approx(torch.finfo(torch.float64).eps)
    assert log_tail_mass(log_of(0.5, 0.3)[None]).exp().item() == pytest.approx(0.2, abs=1e-15)


def test_a_sure_student_still_learns_about_the_tail():
    student = torch.tensor([[0.0, -20.0]], requires_grad=True)
    topk_divergence(student, torch.tensor([[0]]), torch.tensor([[0.5]]).log(), beta=0.0).sum().backward()
    assert student.grad is not None
    assert student.grad[0].tolist() == pytest.approx([0.5, -0.5], abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "drop"])
def test_a_vocabulary_whose_rest_the_student_forbids_has_a_finite_gradient(beta: float, tail: str):
    student = torch.tensor([[1.0, 0.0, -math.inf, -math.inf]], requires_grad=True)
    ids, logprobs = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.3]]).log()
    topk_divergence(student, ids, logprobs, beta=beta, tail=tail).sum().backward()  # pyright: ignore[reportArgumentType]
    assert student.grad is not None
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "drop"])
def test_gradcheck(beta: float, tail: str):
    ids, logprobs = support(oracle.draw(3, 6, seed=5), 3)
    student = oracle.draw(3, 6, seed=6).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: topk_divergence(z, ids, logprobs, beta=beta, tail=tail),  # pyright: ignore[reportArgumentType]
        student,
    )


def test_the_temperature_divides_the_students_logits_only():
    student, teacher = oracle.draw(2, 5, seed=7), oracle.draw(2, 5, seed=8)
    ids, logprobs = support(teacher, 3, 2.0)
    hot = topk_divergence(student, ids, logprobs, beta=0.5, temperature=2.0)
    torch.testing.assert_close(hot, topk_divergence(student / 2, ids, logprobs, beta=0.5))


def test_the_teacher_is_a_constant_and_half_precision_is_widened():
    student, teacher = oracle.draw(2, 5, seed=9, dtype=torch.bfloat16), oracle.draw(2, 5, seed=10, dtype=torch.float32)
    ids, logprobs = support(teacher, 3)
    logprobs.requires_grad_()
    leaf = student.clone().requires_grad_()
    value = topk_divergence(leaf, ids, logprobs, beta=0.5)
    value.sum().backward()
    assert value.dtype == torch.float32
    assert logprobs.grad is None
    torch.testing.assert_close(value, topk_divergence(student.float(), ids, logprobs, beta=0.5), rtol=0, atol=0)


def test_no_rows_give_an_empty_loss_on_the_graph():
    student = torch.zeros(0, 5, requires_grad=True)
    value = topk_divergence(student, torch.zeros(0, 2).long(), torch.zeros(0, 2), beta=0.5)
    assert value.shape == (0,)
    value.sum().backward()
    assert student.grad is not None


def test_a_support_whose_loss_is_identically_zero_is_refused():
    with pytest.raises(ValueError, match="identically zero"):
        topk_divergence(torch.zeros(1, 3), torch.zeros(1, 1).long(), torch.zeros(1, 1), beta=0.0, tail="renormalize")


@pytest.mark.parametrize("k", [0, 4])
def test_a_k_outside_the_vocabulary_is_refused(k: int):
    with pytest.raises(ValueError, match=rf"K must be in \[1, 3\], got {k}"):
        topk_divergence(torch.zeros(2, 3), torch.zeros(2, k).long(), torch.zeros(2, k), beta=0.0)


def test_shapes_and_names_that_do_not_fit_are_refused():
    student, ids = torch.zeros(2, 3), torch.zeros(2, 2).long()
    with pytest.raises(ValueError, match=r"with N = 2, got \(1, 2\)"):
        topk_divergence(student, ids[:1], torch.zeros(1, 2), beta=0.0)
    with pytest.raises(ValueError, match="must have one shape"):
        topk_divergence(student, ids, torch.zeros(2, 1), beta=0.0)
    with pytest.raises(ValueError, match="tail must be 'bucket', 'renormalize' or 'drop', got 'clamp'"):
        topk_divergence(student, ids, torch.zeros(2, 2), beta=0.0, tail="clamp")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="temperature"):
        topk_divergence(student, ids, torch.zeros(2, 2), beta=0.0, temperature=0.0)
    with pytest.raises(ValueError, match="beta"):
        topk_divergence(student, ids, torch.zeros(2, 2), beta=2.0)
