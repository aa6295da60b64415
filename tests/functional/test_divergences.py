# SPDX-License-Identifier: Apache-2.0
"""Values and gradients against a probability-space oracle, the identities of a divergence, and known faults."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cohobate.functional.divergences import (
    clip_divergence,
    divergence,
    divergence_terms,
    forward_kl,
    jsd,
    reverse_kl,
)
from cohobate.functional.logprobs import log_softmax

from . import oracle
from .oracle import BETAS, log_of


def logit_lists(size: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(-30, 30), min_size=size, max_size=size)


# ------------------------------------------------------------------ the definition


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_value_and_gradient_equal_the_probability_space_definition(beta: float, temperature: float):
    student, teacher = oracle.draw(7, seed=1).tolist(), oracle.draw(7, seed=2).tolist()

    def value(logits: list[float]) -> float:
        return oracle.divergence(oracle.softmax(logits, temperature), oracle.softmax(teacher, temperature), beta)

    leaf = torch.tensor(student, dtype=torch.float64, requires_grad=True)
    got = divergence(
        log_softmax(leaf, temperature=temperature),
        log_softmax(torch.tensor(teacher, dtype=torch.float64), temperature=temperature),
        beta=beta,
    )
    got.backward()
    assert got.item() == pytest.approx(value(student), abs=1e-13)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx(oracle.numeric_gradient(value, student), abs=1e-8)


def test_forward_and_reverse_name_the_right_directions():
    student, teacher = log_of(0.2, 0.8), log_of(0.9, 0.1)
    assert forward_kl(student, teacher).item() == pytest.approx(1.1457, abs=5e-5)
    assert reverse_kl(student, teacher).item() == pytest.approx(1.3627, abs=5e-5)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_beta_weights_the_teacher(beta: float):
    # A teacher that is sure: KL(t || m) = -log(beta + (1 - beta) s0), which swapped weights would not give.
    student, teacher = [0.5, 0.5], [1.0, 0.0]
    m = [beta + (1 - beta) * 0.5, (1 - beta) * 0.5]
    want = beta * -math.log(m[0]) + (1 - beta) * (0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1]))
    assert jsd(log_of(*student), log_of(*teacher), beta).item() == pytest.approx(want, abs=1e-12)


def test_jsd_is_the_exact_expectation_and_not_one_over_student_samples():
    student, teacher = [0.9, 0.1], [0.6, 0.4]
    assert jsd(log_of(*student), log_of(*teacher), 0.5).item() == pytest.approx(0.06329, abs=5e-6)


# ------------------------------------------------------------------ identities


@pytest.mark.parametrize("beta", [*BETAS, 0.001, 0.3, 0.999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_identical_numbers_give_exactly_zero(beta: float, dtype: torch.dtype):
    logprobs = log_softmax(oracle.draw(50, 33, seed=5, scale=6.0, dtype=dtype))
    assert divergence_terms(logprobs, logprobs.double(), beta=beta).abs().max().item() == 0.0


@given(st.integers(2, 6).flatmap(lambda v: st.tuples(logit_lists(v), logit_lists(v))), st.floats(0.01, 0.99))
def test_jsd_is_bounded_and_turns_around_with_beta(pair: tuple[list[float], list[float]], beta: float):
    s, t = (log_softmax(torch.tensor(x, dtype=torch.float64)) for x in pair)
    value = jsd(s, t, beta).item()
    bound = -(beta * math.log(beta) + (1 - beta) * math.log(1 - beta))  # the entropy of the coin; ln 2 at one half
    assert -1e-13 <= value <= bound + 1e-12
    assert jsd(t, s, 1 - beta).item() == pytest.approx(value, abs=1e-12)
    for kl in (forward_kl, reverse_kl):
        assert kl(s, t).item() >= -1e-13


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_flow_to_both_sides_and_pass_gradcheck(beta: float):
    s, t = (oracle.draw(3, 5, seed=i).requires_grad_() for i in (7, 8))

    def both(s: Tensor, t: Tensor) -> Tensor:
        return divergence(s.log_softmax(-1), t.log_softmax(-1), beta=beta)

    assert torch.autograd.gradcheck(both, (s, t))
    assert torch.autograd.gradgradcheck(both, (s, t))


@pytest.mark.parametrize("beta", BETAS)
def test_each_log_probability_has_its_own_slope(beta: float):
    """Not through a softmax, which would cancel a constant forgotten in a row's slope."""
    s, t = (oracle.draw(3, 5, seed=i).requires_grad_() for i in (27, 28))
    assert torch.autograd.gradcheck(lambda s, t: divergence_terms(s, t, beta=beta), (s, t))


# ------------------------------------------------------------------ forbidden tokens, underflow, NaN

INF = math.inf


@pytest.mark.parametrize(
    ("beta", "student", "teacher", "want"),
    [
        (0.0, [0.0, -INF], [0.0, 0.0], INF),  # forward KL: the student forbids what the teacher allows
        (1.0, [0.0, 0.0], [0.0, -INF], INF),  # reverse KL: the teacher forbids what the student allows
        (0.0, [0.0, 0.0], [0.0, -INF], math.log(2)),
        (1.0, [0.0, -INF], [0.0, 0.0], math.log(2)),
        (0.5, [0.0, -INF], [-INF, 0.0], math.log(2)),
        (0.5, [0.0, -INF], [0.0, 0.0], 0.5 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2)) + 0.5 * math.log(4 / 3)),
    ],
)
def test_a_token_that_one_side_forbids(beta: float, student: list[float], teacher: list[float], want: float):
    s, t = (torch.tensor(x, dtype=torch.float64).requires_grad_() for x in (student, teacher))
    value = divergence(s.log_softmax(-1), t.log_softmax(-1), beta=beta)
    value.backward()
    assert value.item() == pytest.approx(want, abs=1e-13)
    for side in (s, t):
        assert side.grad is not None
        assert side.grad.isfinite().all()


@pytest.mark.parametrize("beta", BETAS)
def test_a_token_that_both_forbid_adds_nothing_to_value_or_gradient(beta: float):
    student, teacher = [0.2, 0.5, 0.3], [0.6, 0.1, 0.3]
    s = torch.tensor([*student, 0.0], dtype=torch.float64).log().requires_grad_()
    terms = divergence_terms(s, torch.tensor([*teacher, 0.0], dtype=torch.float64).log(), beta=beta)
    terms.sum().backward()
    assert terms[3].item() == 0.0
    assert terms.sum().item() == pytest.approx(oracle.divergence(student, teacher, beta), abs=1e-13)
    assert s.grad is not None
    assert s.grad.isfinite().all()
    assert s.grad[3].item() == 0.0


def test_a_forbidden_token_costs_infinity_even_if_its_weight_underflows():
    student, teacher = torch.tensor([0.0, -INF]), log_softmax(torch.tensor([0.0, -200.0]))
    assert teacher.exp()[1].item() == 0.0
    assert forward_kl(student, teacher).item() == INF


# ------------------------------------------------------------------ clips


P_TEACHER, P_STUDENT = (0.7, 0.2, 0.1), (0.55, 0.3, 0.15)


def test_the_pointwise_clip_caps_from_above_only():
    terms = divergence_terms(log_of(*P_STUDENT), log_of(*P_TEACHER), beta=0.0)
    value, share = clip_divergence(terms, clip="pointwise", limit=0.05)
    want = [t * math.log(t / s) for s, t in zip(P_STUDENT, P_TEACHER, strict=True)]
    assert value.item() == pytest.approx(math.fsum(min(x, 0.05) for x in want), abs=1e-13)
    assert min(want) < -0.05, "an entry below minus the limit must be there, and stay"
    assert share.item() == pytest.approx(1 / 3)


def test_a_token_clip_keeps_the_divergence_or_switches_the_position_off():
    near = log_of(*P_STUDENT).requires_grad_()
    value, share = clip_divergence(divergence_terms(near, log_of(*P_TEACHER), beta=0.0), clip="token", limit=0.05)
    assert value.item() == pytest.approx(0.0472, abs=5e-5)
    assert share.item() == 0.0
    far = log_of(0.1, 0.2, 0.7).requires_grad_()
    value, share = clip_divergence(divergence_terms(far, log_of(*P_TEACHER), beta=0.0), clip="token", limit=0.05)
    value.backward()
    assert value.item() == 0.05
    assert share.item() == 1.0
    assert far.grad is not None
    assert far.grad.tolist() == [0.0, 0.0, 0.0]


def test_no_clip_is_the_sum():
    terms = oracle.draw(4, 5, seed=21)
    value, share = clip_divergence(terms, clip="none")
    torch.testing.assert_close(value, terms.sum(-1))
    assert share.tolist() == [0.0] * 4


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5, math.nan])
def test_jsd_refuses_the_ends_and_names_the_functions_to_use(beta: float):
    with pytest.raises(ValueError, match="use forward_kl or reverse_kl"):
        jsd(log_of(0.5, 0.5), log_of(0.5, 0.5), beta)


def test_unequal_shapes_are_refused_and_never_broadcast():
    for teacher in ((2, 3, 5), (1, 3, 4)):
        with pytest.raises(ValueError, match="must have one shape"):
            forward_kl(torch.zeros(2, 3, 4), torch.zeros(teacher))


def test_an_unknown_clip_or_a_missing_limit_is_refused():
    with pytest.raises(ValueError, match="needs a limit >= 0 in nats, got None"):
        clip_divergence(torch.zeros(3), clip="token")
    with pytest.raises(ValueError, match="clip must be 'none', 'token' or 'pointwise'"):
        clip_divergence(torch.zeros(3), clip="row", limit=1.0)  # pyright: ignore[reportArgumentType]
