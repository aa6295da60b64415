# SPDX-License-Identifier: Apache-2.0
"""Estimators by enumeration: every token, weighted by its probability, so an expectation is a sum, not a mean."""

import math

import pytest
import torch
from torch import Tensor

from cohobate.functional.estimators import (
    clipped_surrogate,
    iw_opd_weights,
    k1,
    k2,
    k3,
    min_max,
    sampled_kl_loss,
    select_top_share,
    tip_scores,
)

from . import oracle
from .oracle import log_of


def expected_gradient(loss: Tensor, logprobs: Tensor, logits: Tensor) -> list[float]:
    """Gradient by `logits` of a per-token loss, averaged over the student's own draws."""
    return torch.autograd.grad(logprobs.detach().exp() @ loss, logits)[0].tolist()


def reverse_kl_gradient(logits: Tensor, teacher: Tensor) -> list[float]:
    p_t = teacher.exp().tolist()
    return oracle.numeric_gradient(lambda z: oracle.kl(oracle.softmax(z), p_t), logits.tolist())


@pytest.mark.parametrize("estimator", ["k2", "policy_gradient"])
def test_the_expected_gradient_is_exactly_that_of_the_reverse_kl(estimator: str):
    logits, teacher = oracle.draw(6, seed=1).requires_grad_(), oracle.draw(6, seed=2).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    loss = sampled_kl_loss(logprobs, teacher, estimator=estimator)  # pyright: ignore[reportArgumentType]
    got = expected_gradient(loss, logprobs, logits)
    assert got == pytest.approx(reverse_kl_gradient(logits.detach(), teacher), abs=1e-9)


@pytest.mark.parametrize("estimator", ["k2", "policy_gradient"])
def test_the_worked_example_of_two_tokens(estimator: str):
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    loss = sampled_kl_loss(logprobs, log_of(0.9, 0.1), estimator=estimator)  # pyright: ignore[reportArgumentType]
    assert expected_gradient(loss, logprobs, logits) == pytest.approx([-0.5493, 0.5493], abs=5e-5)


def test_k1_and_k3_would_have_trained_something_else():
    """The reason of the refusal: their gradients, had they been allowed, from the formulas in plain torch."""
    logits, teacher = torch.zeros(2, dtype=torch.float64, requires_grad=True), log_of(0.9, 0.1)
    s = logits.log_softmax(-1)
    assert expected_gradient(s - teacher, s, logits) == pytest.approx([0.0, 0.0], abs=1e-12)
    s = logits.log_softmax(-1)
    k3_gradient = expected_gradient((teacher - s).exp() - 1 - (teacher - s), s, logits)
    assert k3_gradient == pytest.approx([-0.4, 0.4], abs=1e-12)
    forward = oracle.numeric_gradient(lambda z: oracle.kl([0.9, 0.1], oracle.softmax(z)), [0.0, 0.0])
    assert k3_gradient == pytest.approx(forward, abs=1e-9)


@pytest.mark.parametrize(("estimate", "reason"), [(k1, "expected gradient is zero"), (k3, "that of the forward KL")])
def test_back_propagating_k1_or_k3_is_refused_with_the_reason(estimate, reason: str):
    s = log_of(0.3, 0.7).requires_grad_()
    value = estimate(s, log_of(0.5, 0.5))
    with pytest.raises(ValueError, match=reason):
        value.sum().backward()
    assert not estimate(s, log_of(0.5, 0.5)).detach().requires_grad  # as a reward or a metric it is free


@pytest.mark.parametrize(("estimator", "reason"), [("k1", "Use it as a reward"), ("k3", "It is a metric")])
def test_the_loss_refuses_k1_and_k3_with_the_reason(estimator: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        sampled_kl_loss(torch.zeros(1), torch.zeros(1), estimator=estimator)  # pyright: ignore[reportArgumentType]


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="'k2' or 'policy_gradient', got 'k4'"):
        sampled_kl_loss(torch.zeros(1), torch.zeros(1), estimator="k4")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("estimate", [k1, k3])
def test_k1_and_k3_are_unbiased_in_value(estimate):
    s, t = oracle.draw(6, seed=3).log_softmax(-1), oracle.draw(6, seed=4).log_softmax(-1)
    mean = (s.exp() @ estimate(s, t)).item()
    assert mean == pytest.approx(oracle.kl(s.exp().tolist(), t.exp().tolist()), abs=1e-12)


def test_k2_and_k3_are_never_negative_and_k3_keeps_small_gaps():
    s = oracle.draw(50, seed=5)
    t = s + oracle.draw(50, seed=6, scale=1e-5)
    assert (k2(s, t) >= 0).all()
    # e^x - 1 - x written naively loses half of the digits here; the series x^2/2 + x^3/6 is exact to 1e-5 relative.
    gap = t - s
    torch.testing.assert_close(k3(s, t), gap.square() / 2 + gap**3 / 6, rtol=1e-4, atol=0)


def test_the_policy_gradient_logs_k1_as_its_value():
    s, t = oracle.draw(4, seed=7), oracle.draw(4, seed=8)
    torch.testing.assert_close(sampled_kl_loss(s, t, estimator="policy_gradient"), s - t)


def test_the_advantage_is_a_constant_and_so_is_the_teacher():
    s, t = oracle.draw(3, seed=9).requires_grad_(), oracle.draw(3, seed=10).requires_grad_()
    sampled_kl_loss(s, t, estimator="policy_gradient").sum().backward()
    assert s.grad is not None
    torch.testing.assert_close(s.grad, (s - t).detach())  # -advantage, and nothing from inside the advantage
    assert t.grad is None


def test_importance_weights_correct_for_an_older_sampler():
    logits, teacher = oracle.draw(6, seed=11).requires_grad_(), oracle.draw(6, seed=12).log_softmax(-1)
    sampler = oracle.draw(6, seed=13).log_softmax(-1)
    loss = sampled_kl_loss(logits.log_softmax(-1), teacher, estimator="policy_gradient", sampler_logprobs=sampler)
    got = torch.autograd.grad(sampler.exp() @ loss, logits)[0].tolist()  # drawn by the sampler, not by the student
    assert got == pytest.approx(reverse_kl_gradient(logits.detach(), teacher), abs=1e-9)


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must have one shape"):
        sampled_kl_loss(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match="k2 takes none"):
        sampled_kl_loss(torch.zeros(2), torch.zeros(2), sampler_logprobs=torch.zeros(2))


# ------------------------------------------------------------------ IW-OPD


def test_weights_fall_from_one_plus_gamma_by_the_share_of_advantage_already_spent():
    advantages = torch.tensor([[1.0, -2.0, 0.0, 1.0], [3.0, 5.0, 7.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]])
    got = iw_opd_weights(advantages, mask, gamma=0.5)
    want = [
        [1.5, 1 + 0.5 * (1 - 1 / 4), 1 + 0.5 * (1 - 3 / 4), 1 + 0.5 * (1 - 3 / 4)],
        [0.0, 1.5, 1 + 0.5 * (1 - 5 / 12), 0.0],
    ]
    torch.testing.assert_close(got, torch.tensor(want))


def test_a_row_without_advantage_is_weighted_evenly():
    got = iw_opd_weights(torch.zeros(1, 3), torch.ones(1, 3).bool(), gamma=0.3)
    assert got.tolist() == [pytest.approx([1.3, 1.3, 1.3])]


def test_the_normaliser_has_a_floor():
    advantages = torch.tensor([[1e-9, 1e-9]], dtype=torch.float64)
    got = iw_opd_weights(advantages, torch.ones(1, 2).bool())  # Q = 1e-8, not 2e-9
    assert got.tolist() == [pytest.approx([1.5, 1 + 0.5 * 0.9], abs=1e-12)]


def test_what_stands_in_a_masked_slot_does_not_reach_the_weights():
    advantages, mask = torch.tensor([[2.0, math.nan, 2.0]]), torch.tensor([[True, False, True]])
    assert iw_opd_weights(advantages, mask).tolist() == [pytest.approx([1.5, 0.0, 1.25])]


def test_padding_does_not_change_the_weights_and_no_gradient_reaches_the_advantages():
    advantages = oracle.draw(2, 5, seed=14).requires_grad_()
    plain = iw_opd_weights(advantages, torch.ones(2, 5).bool())
    padded = iw_opd_weights(
        torch.cat([advantages, torch.full((2, 3), 9.0)], 1), torch.tensor([[1] * 5 + [0] * 3] * 2).bool()
    )
    torch.testing.assert_close(padded[:, :5], plain)
    assert not plain.requires_grad


def test_iw_opd_refuses_other_shapes_and_a_negative_gamma():
    with pytest.raises(ValueError, match=r"must both be \[B, R\]"):
        iw_opd_weights(torch.zeros(2, 3), torch.ones(2, 2).bool())
    with pytest.raises(ValueError, match="gamma must be >= 0"):
        iw_opd_weights(torch.zeros(2, 3), torch.ones(2, 3).bool(), gamma=-0.1)


# ------------------------------------------------------------------ clipped surrogate


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "held"),
    [
        (1.1, 2.0, -2.2, -2.2, False),
        (1.5, 2.0, -2.4, 0.0, True),  # already far enough up
        (0.5, 2.0, -1.0, -1.0, False),  # fell although it should rise: never held
        (1.5, -2.0, 3.0, 3.0, False),
        (0.5, -2.0, 1.6, 0.0, True),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_the_clip_holds_a_token_that_has_moved_far_enough(
    ratio: float, advantage: float, loss: float, slope: float, held: bool
):
    sampler = torch.tensor([-1.3], dtype=torch.float64)
    logprobs = (sampler + math.log(ratio)).requires_grad_()
    value, clipped = clipped_surrogate(logprobs, sampler, torch.tensor([advantage]), clip_epsilon=0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-12)
    assert clipped.tolist() == [held]


def test_at_the_first_pass_the_surrogate_has_the_policy_gradient():
    s, t = oracle.draw(5, seed=15).requires_grad_(), oracle.draw(5, seed=16)
    advantages = (t - s).detach()
    value, clipped = clipped_surrogate(s, s.detach(), advantages, clip_epsilon=0.2)
    value.sum().backward()
    torch.testing.assert_close(s.grad, -advantages)
    assert not clipped.any()


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_ratio_that_overflows_gives_no_nan(advantage: float):
    logprobs = torch.tensor([0.0], requires_grad=True)
    value, _ = clipped_surrogate(logprobs, torch.tensor([-200.0]), torch.tensor([advantage]), clip_epsilon=0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(-1.2 * advantage)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


@pytest.mark.parametrize("clip_epsilon", [0.0, 1.0, math.nan])
def test_a_clip_outside_the_unit_interval_is_refused(clip_epsilon: float):
    with pytest.raises(ValueError, match=r"clip_epsilon must be in \(0, 1\)"):
        clipped_surrogate(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip_epsilon=clip_epsilon)


# ------------------------------------------------------------------ token selection


def test_a_token_is_important_if_the_student_is_unsure_or_far_from_the_teacher():
    entropy, divergence = torch.tensor([0.0, 2.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 4.0, 1.0])
    want = [0.0, 1.0, 1.0, 1 - (1 - 0.5) * (1 - 0.25)]
    assert tip_scores(entropy, divergence).tolist() == pytest.approx(want)


def test_a_constant_quantity_tells_no_token_from_another():
    got = tip_scores(torch.full((3,), 0.7), torch.tensor([0.0, 1.0, 4.0]))
    assert got.tolist() == pytest.approx([0.0, 0.25, 1.0])
    assert tip_scores(torch.full((2,), 0.7), torch.full((2,), 0.1)).tolist() == [0.0, 0.0]


def test_scores_scaled_by_the_range_of_the_step_do_not_depend_on_the_split():
    entropy, divergence = oracle.draw(8, seed=17).abs(), oracle.draw(8, seed=18).abs()
    whole = tip_scores(entropy, divergence)
    ranges = {"entropy_range": min_max(entropy), "divergence_range": min_max(divergence)}
    parts = [tip_scores(entropy[i], divergence[i], **ranges) for i in (slice(0, 3), slice(3, 3), slice(3, 8))]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_the_range_of_nothing_is_neutral():
    low, high = min_max(torch.zeros(0))
    assert (low.item(), high.item()) == (math.inf, -math.inf)
    assert [x.item() for x in min_max(torch.tensor([3.0, -1.0, 2.0]))] == [-1.0, 3.0]
    assert tip_scores(torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_tip_refuses_two_lengths():
    with pytest.raises(ValueError, match="must have one shape"):
        tip_scores(torch.zeros(2), torch.zeros(1))


def test_the_top_share_rounds_up_and_takes_the_lower_index_of_a_tie():
    scores = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.2])
    assert select_top_share(scores, 0.4).tolist() == [False, True, True, False, False]
    assert select_top_share(scores, 0.41).tolist() == [False, True, True, True, False]
    assert select_top_share(scores, 1.0).all()
    assert select_top_share(torch.zeros(0), 0.5).tolist() == []
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\]"):
        select_top_share(scores, 0.0)
