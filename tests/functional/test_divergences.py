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
from cohobate.functional.jsd_loss import JSDLossOutput, generalized_jsd_loss
from cohobate.functional.logprobs import log_softmax

from . import oracle
from .oracle import BETAS, log_of


def logit_lists(size: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(-30, 30), min_size=size, max_size=size)


def loss_and_gradient(
    student: Tensor, teacher: Tensor, mask: Tensor, **options: float
) -> tuple[JSDLossOutput, Tensor]:
    leaf = student.clone().requires_grad_()
    out = generalized_jsd_loss(leaf, teacher, mask, **options)
    out.loss.backward()
    assert leaf.grad is not None
    return out, leaf.grad


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


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_the_mean_of_the_definition_over_valid_positions(beta: float, masked: bool):
    student, teacher = oracle.draw(3, 4, 6, seed=3), oracle.draw(3, 4, 6, seed=4)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]).bool() if masked else torch.ones(3, 4).bool()
    out, grad = loss_and_gradient(student, teacher, mask, beta=beta, temperature=1.3)
    values = []
    for b in range(3):
        for r in range(4):
            if not mask[b, r]:
                assert grad[b, r].abs().max().item() == 0.0
                continue
            p_t = oracle.softmax(teacher[b, r].tolist(), 1.3)

            def value(logits: list[float], p_t: list[float] = p_t) -> float:
                return oracle.divergence(oracle.softmax(logits, 1.3), p_t, beta)

            values.append(value(student[b, r].tolist()))
            want = oracle.numeric_gradient(value, student[b, r].tolist())
            got = grad[b, r] * int(mask.sum())
            assert got.tolist() == pytest.approx(want, abs=1e-8)
    assert out.valid_token_count.item() == len(values)
    assert out.valid_token_count.dtype == torch.int64
    assert out.loss_sum.item() == pytest.approx(math.fsum(values), abs=1e-12)
    assert out.loss.item() == pytest.approx(math.fsum(values) / len(values), abs=1e-12)


def test_forward_and_reverse_name_the_right_directions():
    student, teacher = log_of(0.2, 0.8), log_of(0.9, 0.1)
    assert forward_kl(student, teacher).item() == pytest.approx(1.1457, abs=5e-5)
    assert reverse_kl(student, teacher).item() == pytest.approx(1.3627, abs=5e-5)


@pytest.mark.parametrize(("beta", "want"), [(0.0, 1.1457), (1.0, 1.3627), (0.001, 0.00114), (0.999, 0.00136)])
def test_beta_is_not_a_smooth_dial(beta: float, want: float):
    out = generalized_jsd_loss(log_of(0.2, 0.8)[None], log_of(0.9, 0.1)[None], torch.ones(1).bool(), beta=beta)
    assert out.loss.item() == pytest.approx(want, abs=0.6 * 10.0 ** (-4 if want > 1 else -5))


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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_identical_numbers_give_exactly_zero(beta: float, dtype: torch.dtype):
    logits = oracle.draw(50, 33, seed=5, scale=6.0, dtype=dtype)
    out = generalized_jsd_loss(logits, logits, torch.ones(50).bool(), beta=beta, temperature=0.7)
    assert out.loss_sum.item() == 0.0


@pytest.mark.parametrize("beta", [*BETAS, 0.3])
@pytest.mark.parametrize("widened", [torch.float32, torch.float64])
def test_identical_numbers_in_two_dtypes_give_exactly_zero(beta: float, widened: torch.dtype):
    logits = oracle.draw(20, 17, seed=6, scale=6.0, dtype=torch.bfloat16)
    for student, teacher in ((logits, logits.to(widened)), (logits.to(widened), logits)):
        leaf = student.clone().requires_grad_()
        out = generalized_jsd_loss(leaf, teacher, torch.ones(20).bool(), beta=beta)
        assert out.loss_sum.item() == 0.0
        out.loss.backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype == student.dtype
        assert leaf.grad.abs().max().item() < (1e-7 if beta in (0.0, 1.0) else 1e-30)


@given(st.integers(2, 6).flatmap(lambda v: st.tuples(logit_lists(v), logit_lists(v))), st.floats(0.01, 0.99))
def test_jsd_is_bounded_and_turns_around_with_beta(pair: tuple[list[float], list[float]], beta: float):
    s, t = (log_softmax(torch.tensor(x, dtype=torch.float64)) for x in pair)
    value = jsd(s, t, beta).item()
    bound = -(beta * math.log(beta) + (1 - beta) * math.log(1 - beta))  # the entropy of the coin; ln 2 at one half
    assert -1e-13 <= value <= bound + 1e-12
    assert jsd(t, s, 1 - beta).item() == pytest.approx(value, abs=1e-12)
    for kl in (forward_kl, reverse_kl):
        assert kl(s, t).item() >= -1e-13


@given(st.tuples(logit_lists(4), logit_lists(4)), st.sampled_from(BETAS), st.floats(-50, 50))
def test_a_constant_added_to_the_logits_changes_nothing(pair: tuple[list[float], list[float]], beta: float, c: float):
    student, teacher = (torch.tensor([x], dtype=torch.float64) for x in pair)
    mask = torch.ones(1).bool()
    plain = generalized_jsd_loss(student, teacher, mask, beta=beta).loss.item()
    moved = generalized_jsd_loss(student + c, teacher, mask, beta=beta).loss.item()
    assert moved == pytest.approx(plain, abs=1e-10, rel=1e-10)


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


def test_the_loss_treats_the_teacher_as_a_constant():
    student, teacher = (oracle.draw(2, 5, seed=i).requires_grad_() for i in (9, 10))
    generalized_jsd_loss(student, teacher, torch.ones(2).bool()).loss.backward()
    assert teacher.grad is None
    assert student.grad is not None
    assert student.grad.abs().max() > 0


def test_no_function_multiplies_by_the_square_of_the_temperature():
    student, teacher = oracle.draw(1, 5, seed=11), oracle.draw(1, 5, seed=12)
    mask = torch.ones(1).bool()
    hot = generalized_jsd_loss(student, teacher, mask, temperature=4.0).loss
    assert hot.item() == pytest.approx(generalized_jsd_loss(student / 4, teacher / 4, mask).loss.item(), abs=1e-14)


# ------------------------------------------------------------------ forbidden tokens, underflow, NaN

INF = math.inf


@pytest.mark.parametrize("beta", BETAS)
def test_a_token_that_both_forbid_adds_nothing_to_value_or_gradient(beta: float):
    student, teacher = [0.2, -1.0, 0.9], [1.0, 0.3, -0.4]
    padded = torch.tensor([[student[0], -INF, *student[1:]]], dtype=torch.float64)
    padded_t = torch.tensor([[teacher[0], -INF, *teacher[1:]]], dtype=torch.float64)
    out, grad = loss_and_gradient(padded, padded_t, torch.ones(1).bool(), beta=beta)

    def value(logits: list[float]) -> float:
        return oracle.divergence(oracle.softmax(logits), oracle.softmax(teacher), beta)

    want = oracle.numeric_gradient(value, student)
    assert out.loss.item() == pytest.approx(value(student), abs=1e-13)
    assert grad[0].tolist() == pytest.approx([want[0], 0.0, *want[1:]], abs=1e-8)


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


def test_a_forbidden_token_costs_infinity_even_if_its_weight_underflows():
    student, teacher = torch.tensor([0.0, -INF]), log_softmax(torch.tensor([0.0, -200.0]))
    assert teacher.exp()[1].item() == 0.0
    assert forward_kl(student, teacher).item() == INF


def test_jsd_survives_a_token_that_underflows_on_both_sides():
    student, teacher = torch.tensor([[0.0, -200.0, 1.0]]), torch.tensor([[1.0, -200.0, 0.0]])
    out, grad = loss_and_gradient(student, teacher, torch.ones(1).bool(), beta=0.5)
    assert out.loss.item() == pytest.approx(0.11094, abs=5e-6)
    assert grad[0].tolist() == pytest.approx([-0.0983, 0.0, 0.0983], abs=5e-5)


def test_reverse_kl_in_log_form_survives_an_underflowing_student():
    out, grad = loss_and_gradient(
        torch.tensor([[0.0, -200.0]]), torch.tensor([[0.0, -1.0]]), torch.ones(1).bool(), beta=1
    )
    assert out.loss.item() == pytest.approx(0.3133, abs=5e-5)
    assert grad[0].tolist() == [0.0, 0.0]


def test_a_sure_student_still_learns_a_token_that_it_thinks_impossible():
    _, grad = loss_and_gradient(torch.tensor([[0.0, -20.0]]), torch.zeros(1, 2), torch.ones(1).bool(), beta=0.0)
    assert grad[0].tolist() == pytest.approx([0.5, -0.5], abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("poison", [math.nan, -INF, INF])
@pytest.mark.parametrize("side", ["student", "teacher", "both"])
def test_what_stands_in_a_masked_slot_reaches_neither_value_nor_gradient(beta: float, poison: float, side: str):
    student, teacher = oracle.draw(2, 3, seed=13), oracle.draw(2, 3, seed=14)
    mask = torch.tensor([True, False])
    clean, clean_grad = loss_and_gradient(student, teacher, mask, beta=beta)
    if side != "teacher":
        student[1] = poison
    if side != "student":
        teacher[1] = poison
    out, grad = loss_and_gradient(student, teacher, mask, beta=beta)
    assert out.loss.item() == clean.loss.item()
    assert torch.equal(grad, clean_grad)
    assert grad[1].tolist() == [0.0, 0.0, 0.0]


def test_a_nan_in_a_valid_slot_is_not_hidden():
    student = torch.tensor([[0.0, math.nan]])
    for beta in BETAS:
        assert generalized_jsd_loss(student, torch.zeros(1, 2), torch.ones(1).bool(), beta=beta).loss.isnan()


@pytest.mark.parametrize("beta", BETAS)
def test_no_valid_token_gives_a_zero_with_a_gradient_path(beta: float):
    student = torch.full((2, 3, 4), math.nan)
    out, grad = loss_and_gradient(student, student, torch.zeros(2, 3).bool(), beta=beta)
    assert out.loss.item() == out.loss_sum.item() == 0.0
    assert out.valid_token_count.item() == 0
    assert torch.equal(grad, torch.zeros(2, 3, 4))
    empty, grad = loss_and_gradient(torch.zeros(2, 0, 4), torch.zeros(2, 0, 4), torch.zeros(2, 0).bool(), beta=beta)
    assert empty.loss.item() == 0.0
    assert grad.shape == (2, 0, 4)


# ------------------------------------------------------------------ precision


@pytest.mark.parametrize("beta", [*BETAS, 0.001, 0.999])
@pytest.mark.parametrize(("spread", "tolerance"), [(1e-3, 1e-3), (1.0, 1e-4), (30.0, 1e-4)])
def test_float32_is_close_to_float64_for_near_and_far_distributions(beta: float, spread: float, tolerance: float):
    teacher = oracle.draw(64, 200, seed=15, scale=4.0, dtype=torch.float32)
    student = teacher + oracle.draw(64, 200, seed=16, scale=spread, dtype=torch.float32)
    mask = torch.ones(64).bool()
    exact, exact_grad = loss_and_gradient(student.double(), teacher.double(), mask, beta=beta)
    single, single_grad = loss_and_gradient(student, teacher, mask, beta=beta)
    assert single.loss.item() == pytest.approx(exact.loss.item(), rel=1e-5, abs=1e-7)
    assert (single_grad - exact_grad).abs().max().item() < tolerance * exact_grad.abs().max().item()


def test_half_precision_sides_are_each_widened_before_the_softmax():
    student, teacher = oracle.draw(9, 11, seed=17, dtype=torch.bfloat16), oracle.draw(9, 11, seed=18)
    mixed = generalized_jsd_loss(student, teacher.float(), torch.ones(9).bool()).loss
    want = [
        oracle.divergence(oracle.softmax(s), oracle.softmax(t), 0.5)
        for s, t in zip(student.double().tolist(), teacher.float().double().tolist(), strict=True)
    ]
    assert mixed.dtype == torch.float32
    assert mixed.item() == pytest.approx(math.fsum(want) / 9, rel=1e-6)


# ------------------------------------------------------------------ top-k and clips


@pytest.mark.parametrize("beta", BETAS)
def test_teacher_top_k_normalises_both_sides_over_the_teachers_choice(beta: float):
    student, teacher = oracle.draw(1, 6, seed=19), oracle.draw(1, 6, seed=20)
    kept = sorted(range(6), key=lambda v: -teacher[0, v].item())[:3]
    want = oracle.divergence(
        oracle.softmax([student[0, v].item() for v in kept]),
        oracle.softmax([teacher[0, v].item() for v in kept]),
        beta,
    )
    mask = torch.ones(1).bool()
    got, grad = loss_and_gradient(student, teacher, mask, beta=beta, teacher_top_k=3)
    assert got.loss.item() == pytest.approx(want, abs=1e-13)
    assert {v for v in range(6) if grad[0, v] != 0} <= set(kept)
    whole = generalized_jsd_loss(student, teacher, mask, beta=beta, teacher_top_k=6).loss.item()
    assert whole == pytest.approx(generalized_jsd_loss(student, teacher, mask, beta=beta).loss.item(), abs=1e-13)


P_TEACHER, P_STUDENT = (0.7, 0.2, 0.1), (0.55, 0.3, 0.15)


def test_clipping_each_entry_turns_the_gradient_around():
    student, teacher = log_of(*P_STUDENT)[None], log_of(*P_TEACHER)[None]
    mask = torch.ones(1).bool()
    plain, grad = loss_and_gradient(student, teacher, mask, beta=0.0)
    assert plain.loss.item() == pytest.approx(0.0472, abs=5e-5)
    assert grad[0].tolist() == pytest.approx([-0.15, 0.10, 0.05], abs=1e-12)
    clipped, grad = loss_and_gradient(student, teacher, mask, beta=0.0, pointwise_clip=0.05)
    assert clipped.loss.item() == pytest.approx(-0.0716, abs=5e-5)
    assert grad[0].tolist() == pytest.approx([0.165, -0.11, -0.055], abs=1e-12)  # token 0 is pushed down


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


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan])
def test_a_beta_outside_the_unit_interval_is_refused(beta: float):
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\]"):
        generalized_jsd_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1).bool(), beta=beta)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5, math.nan])
def test_jsd_refuses_the_ends_and_names_the_functions_to_use(beta: float):
    with pytest.raises(ValueError, match="use forward_kl or reverse_kl"):
        jsd(log_of(0.5, 0.5), log_of(0.5, 0.5), beta)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be a finite number > 0, got 0.0"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"teacher_top_k": 0}, r"teacher_top_k must be in \[1, 4\], got 0"),
        ({"teacher_top_k": 5}, r"teacher_top_k must be in \[1, 4\], got 5"),
        ({"pointwise_clip": -0.1}, "pointwise_clip must be >= 0"),
        ({"pointwise_clip": math.nan}, "pointwise_clip must be >= 0"),
    ],
)
def test_an_option_outside_its_range_is_refused(options: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        generalized_jsd_loss(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.ones(2, 3).bool(), **options)


@pytest.mark.parametrize(
    ("student", "teacher", "mask", "message"),
    [
        ((2, 3, 4), (2, 3, 5), (2, 3), "must have one shape"),
        ((2, 3, 4), (1, 3, 4), (2, 3), "must have one shape"),
        ((2, 3, 4), (2, 3, 4), (2, 4), r"wanted \(2, 3\), got \(2, 4\)"),
        ((2, 3, 4), (2, 3, 4), (2, 1), r"wanted \(2, 3\), got \(2, 1\)"),
        ((2, 3, 4), (2, 3, 4), (3,), r"wanted \(2, 3\), got \(3,\)"),
    ],
)
def test_unequal_shapes_are_refused_and_never_broadcast(
    student: tuple[int, ...], teacher: tuple[int, ...], mask: tuple[int, ...], message: str
):
    with pytest.raises(ValueError, match=message):
        generalized_jsd_loss(torch.zeros(student), torch.zeros(teacher), torch.ones(mask).bool())
    if student != teacher:
        with pytest.raises(ValueError, match="must have one shape"):
            forward_kl(torch.zeros(student), torch.zeros(teacher))


def test_integer_logits_are_refused():
    with pytest.raises(TypeError, match=r"teacher_logits must be floating, got torch\.int64"):
        generalized_jsd_loss(torch.zeros(1, 2), torch.zeros(1, 2).long(), torch.ones(1).bool())


def test_a_mask_of_numbers_is_taken_if_it_is_a_mask_and_refused_if_it_is_weights():
    student, teacher = oracle.draw(3, 4, seed=22), oracle.draw(3, 4, seed=23)
    mask = torch.tensor([True, False, True])
    want = generalized_jsd_loss(student, teacher, mask)
    for dtype in (torch.int64, torch.int32, torch.float32):
        assert generalized_jsd_loss(student, teacher, mask.to(dtype)) == want
    with pytest.raises(ValueError, match="only 0 and 1"):
        generalized_jsd_loss(student, teacher, torch.tensor([1.0, 0.5, 0.0]))


def test_an_unknown_clip_or_a_missing_limit_is_refused():
    with pytest.raises(ValueError, match="needs a limit >= 0 in nats, got None"):
        clip_divergence(torch.zeros(3), clip="token")
    with pytest.raises(ValueError, match="clip must be 'none', 'token' or 'pointwise'"):
        clip_divergence(torch.zeros(3), clip="row", limit=1.0)  # pyright: ignore[reportArgumentType]
