# SPDX-License-Identifier: Apache-2.0
"""The loss on logits: against the probability-space oracle, its masks and layouts, and how much memory it takes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cohobate.functional import jsd_loss
from cohobate.functional.divergences import divergence
from cohobate.functional.jsd_loss import JSDLossOutput, generalized_jsd_loss
from cohobate.functional.logprobs import log_softmax

from . import oracle
from .memory import NewMemory
from .oracle import BETAS, log_of

INF = math.inf
P_TEACHER, P_STUDENT = (0.7, 0.2, 0.1), (0.55, 0.3, 0.15)


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


@pytest.mark.parametrize(("beta", "want"), [(0.0, 1.1457), (1.0, 1.3627), (0.001, 0.00114), (0.999, 0.00136)])
def test_beta_is_not_a_smooth_dial(beta: float, want: float):
    out = generalized_jsd_loss(log_of(0.2, 0.8)[None], log_of(0.9, 0.1)[None], torch.ones(1).bool(), beta=beta)
    assert out.loss.item() == pytest.approx(want, abs=0.6 * 10.0 ** (-4 if want > 1 else -5))


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


@given(st.tuples(logit_lists(4), logit_lists(4)), st.sampled_from(BETAS), st.floats(-50, 50))
def test_a_constant_added_to_the_logits_changes_nothing(pair: tuple[list[float], list[float]], beta: float, c: float):
    student, teacher = (torch.tensor([x], dtype=torch.float64) for x in pair)
    mask = torch.ones(1).bool()
    plain = generalized_jsd_loss(student, teacher, mask, beta=beta).loss.item()
    moved = generalized_jsd_loss(student + c, teacher, mask, beta=beta).loss.item()
    assert moved == pytest.approx(plain, abs=1e-10, rel=1e-10)


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


@pytest.mark.parametrize("beta", [*BETAS, 0.001, 0.999])
@pytest.mark.parametrize(("spread", "tolerance"), [(1e-3, 2e-3), (1.0, 1e-4), (30.0, 1e-4)])
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


def test_clipping_each_entry_turns_the_gradient_around():
    student, teacher = log_of(*P_STUDENT)[None], log_of(*P_TEACHER)[None]
    mask = torch.ones(1).bool()
    plain, grad = loss_and_gradient(student, teacher, mask, beta=0.0)
    assert plain.loss.item() == pytest.approx(0.0472, abs=5e-5)
    assert grad[0].tolist() == pytest.approx([-0.15, 0.10, 0.05], abs=1e-12)
    clipped, grad = loss_and_gradient(student, teacher, mask, beta=0.0, pointwise_clip=0.05)
    assert clipped.loss.item() == pytest.approx(-0.0716, abs=5e-5)
    assert grad[0].tolist() == pytest.approx([0.165, -0.11, -0.055], abs=1e-12)  # token 0 is pushed down


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan])
def test_a_beta_outside_the_unit_interval_is_refused(beta: float):
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\]"):
        generalized_jsd_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1).bool(), beta=beta)


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


# ------------------------------------------------------------------ the gradient that the forward pass makes


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("options", [{}, {"teacher_top_k": 3}, {"pointwise_clip": 0.02}])
def test_gradcheck(beta: float, options: dict):
    teacher, mask = oracle.draw(3, 5, seed=30), torch.tensor([True, False, True])
    for output in (0, 1):
        assert torch.autograd.gradcheck(
            lambda z, output=output: generalized_jsd_loss(z, teacher, mask, beta=beta, temperature=0.7, **options)[
                output
            ],
            oracle.draw(3, 5, seed=31).requires_grad_(),
        )


@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_equal_the_plain_twin_however_both_outputs_are_scaled(beta: float):
    student, teacher = oracle.draw(4, 9, seed=32).requires_grad_(), oracle.draw(4, 9, seed=33)
    mask = torch.tensor([True, True, False, True])
    out = generalized_jsd_loss(student, teacher, mask, beta=beta, temperature=1.4)
    plain = divergence(
        log_softmax(student[mask], temperature=1.4), log_softmax(teacher[mask], temperature=1.4), beta=beta
    ).sum()
    torch.testing.assert_close(out.loss_sum, plain, rtol=1e-13, atol=1e-14)
    got = torch.autograd.grad(0.3 * out.loss - 2 * out.loss_sum, student)
    torch.testing.assert_close(got, torch.autograd.grad((0.1 - 2) * plain, student), rtol=1e-11, atol=1e-14)


def test_a_graph_that_is_kept_gives_its_gradient_again():
    student = oracle.draw(3, 5, seed=34).requires_grad_()
    out = generalized_jsd_loss(student, oracle.draw(3, 5, seed=35), torch.ones(3).bool())
    first = torch.autograd.grad(out.loss * 3, student, retain_graph=True)[0].clone()
    (second,) = torch.autograd.grad(out.loss, student)
    torch.testing.assert_close(first, 3 * second, rtol=1e-13, atol=0)


SCATTERED = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0]]).bool()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tile_rows", [1, 2, 100])
@pytest.mark.parametrize("loose_rows", [0, 2, 100])
def test_neither_scattered_masks_nor_layout_nor_tiles_change_anything(
    dtype: torch.dtype, tile_rows: int, loose_rows: int, monkeypatch: pytest.MonkeyPatch
):
    student, teacher = oracle.draw(4, 7, 5, seed=36, dtype=dtype), oracle.draw(4, 7, 5, seed=37)
    want, want_grad = loss_and_gradient(student[:, :-1][SCATTERED], teacher[:, :-1][SCATTERED], torch.ones(13).bool())
    monkeypatch.setattr(jsd_loss, "_TILE_BYTES", tile_rows * 4 * 5)
    monkeypatch.setattr(jsd_loss, "_LOOSE_BYTES", loose_rows * 4 * 5)
    leaf = student.clone().requires_grad_()
    out = generalized_jsd_loss(leaf[:, :-1], teacher[:, :-1], SCATTERED)  # not contiguous
    out.loss.backward()
    torch.testing.assert_close(out.loss, want.loss, rtol=1e-12, atol=0)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[:, :-1][SCATTERED], want_grad, rtol=1e-12, atol=0)
    assert leaf.grad[:, :-1][~SCATTERED].abs().max().item() == leaf.grad[:, -1].abs().max().item() == 0.0


def test_one_position_needs_no_axis():
    student, teacher = oracle.draw(5, seed=38), oracle.draw(5, seed=39)
    out, grad = loss_and_gradient(student, teacher, torch.tensor(True))
    want, want_grad = loss_and_gradient(student[None], teacher[None], torch.tensor([True]))
    assert torch.equal(out.loss, want.loss)
    assert torch.equal(grad, want_grad[0])


def test_a_loss_scale_lifts_float16_gradients_before_they_are_rounded():
    student, teacher = (oracle.draw(2, 40, seed=i, scale=0.01) for i in (40, 41))
    scale = 2.0**14
    _, want = loss_and_gradient(student, teacher, torch.ones(2).bool(), beta=0.5)
    leaf = student.half().requires_grad_()
    mask = torch.zeros(2).bool() | True
    (generalized_jsd_loss(leaf, teacher.half(), mask, beta=0.5).loss * scale).backward()
    assert want.abs().median().item() < torch.finfo(torch.float16).tiny  # alone they would lose their digits
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float16
    exact = loss_and_gradient(leaf.detach().double(), teacher.half().double(), mask, beta=0.5)[1]
    torch.testing.assert_close(leaf.grad.double() / scale, exact, rtol=2e-3, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"beta": 1.0}, {"teacher_top_k": 4}])
@pytest.mark.parametrize("masked", [False, True])
def test_of_the_logits_size_only_the_gradient_is_made(options: dict, masked: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jsd_loss, "_TILE_BYTES", 8 * 4 * 50)
    monkeypatch.setattr(jsd_loss, "_LOOSE_BYTES", 4 * 4 * 50)
    student, teacher = (oracle.draw(4, 60, 50, seed=i, dtype=torch.float32) for i in (42, 43))
    mask = oracle.draw(4, 60, seed=44) > 0 if masked else torch.ones(4, 60).bool()
    student.requires_grad_()
    with NewMemory(student, teacher, mask) as memory:
        generalized_jsd_loss(student, teacher, mask, **options).loss.mul(0.5).backward()
    assert student.grad is not None
    assert memory.larger_than(4 * 60 * 50) == 1
    with NewMemory(student, teacher, mask) as memory, torch.no_grad():
        generalized_jsd_loss(student, teacher, mask, **options)
    assert memory.larger_than(4 * 60 * 50) == 0


def test_without_gradient_the_value_is_the_same():
    student, teacher, mask = oracle.draw(3, 5, seed=45), oracle.draw(3, 5, seed=46), torch.ones(3).bool()
    want, _ = loss_and_gradient(student, teacher, mask)
    assert torch.equal(generalized_jsd_loss(student, teacher, mask).loss, want.loss.detach())
    with torch.no_grad():
        out = generalized_jsd_loss(student.requires_grad_(), teacher, mask)
    assert torch.equal(out.loss, want.loss.detach())
    assert not out.loss.requires_grad


def test_the_gradient_cannot_be_differentiated_again():
    student = oracle.draw(2, 5, seed=47).requires_grad_()
    loss = generalized_jsd_loss(student, oracle.draw(2, 5, seed=48), torch.ones(2).bool()).loss.square()
    (grad,) = torch.autograd.grad(loss, student, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
