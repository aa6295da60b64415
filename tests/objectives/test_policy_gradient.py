# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch import Tensor

from cohobate.errors import ConfigError
from cohobate.functional.scores import DenseScores, HiddenScores, SampledScores, TopKScores, top_k_scores
from cohobate.objectives import PolicyGradientObjective

from .cases import (
    VOCAB,
    batch_of,
    check_empty,
    check_split_invariance,
    dense_of,
    dense_scores,
    entropy_of,
    hidden_scores,
    metric_value,
    near,
    part,
    rows_of,
)


def drawn_under(scores: HiddenScores, target_ids: Tensor) -> Tensor:
    """Log-probabilities of the targets, by the oracle."""
    return torch.tensor(
        [math.log(p[y]) for p, y in zip(rows_of(scores), target_ids.tolist(), strict=True)], dtype=torch.float64
    )


def iw_weights(advantages: list[float], gamma: float) -> list[float]:
    """2606.22600, one row: `1 + gamma (1 - sum_{i<t} |a_i| / max(sum |a_i|, 1e-8))`."""
    total = max(sum(map(abs, advantages)), 1e-8)
    return [1 + gamma * (1 - sum(map(abs, advantages[:t])) / total) for t in range(len(advantages))]


# ------------------------------------------------------------------ the gradient, by enumeration


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("clip_epsilon", [None, 0.2])
def test_the_expected_gradient_is_that_of_the_reverse_kl(temperature: float, clip_epsilon: float | None):
    """Every token once, weighted by the student's probability of it; the oracle differentiates the definition."""
    student, teacher = hidden_scores(1, 1, grad=True), hidden_scores(1, 2)
    (p,), (q,) = rows_of(student, temperature), rows_of(teacher, temperature)
    every = HiddenScores(hidden=student.hidden.expand(VOCAB, -1), head=student.head)
    batch = batch_of(
        [VOCAB],
        target_ids=torch.arange(VOCAB),
        weights=torch.tensor(p, dtype=torch.float64),
        sampler_logprobs=torch.tensor(p, dtype=torch.float64).log(),
    )
    objective = PolicyGradientObjective(temperature=temperature, clip_epsilon=clip_epsilon)
    targets = HiddenScores(hidden=teacher.hidden.expand(VOCAB, -1), head=teacher.head)
    out = objective(every, targets, batch)
    leaves = [student.hidden, student.head.weight]
    got = torch.autograd.grad(out.terms["pg"].sum, leaves)
    logits = student.logits()
    logp = logits[0] / temperature - (logits[0] / temperature).exp().sum().log()
    expected = torch.autograd.grad((logp.exp() * (logp - torch.tensor(q, dtype=torch.float64).log())).sum(), leaves)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)
    assert near(out.terms["pg"].sum.detach(), sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))


def test_the_expected_gradient_at_equal_logits_is_the_one_worked_out_by_hand():
    student = DenseScores(dense=torch.zeros(2, 2, dtype=torch.float64, requires_grad=True))
    batch = batch_of([2], target_ids=torch.tensor([0, 1]), weights=torch.tensor([0.5, 0.5]))
    out = PolicyGradientObjective()(student, dense_scores([[0.9, 0.1]] * 2), batch)
    out.terms["pg"].sum.backward()
    assert student.dense.grad is not None
    torch.testing.assert_close(
        student.dense.grad.sum(0), torch.tensor([-0.5493, 0.5493], dtype=torch.float64), atol=5e-5, rtol=0
    )


def test_advantages_are_not_normalised_over_the_batch():
    """A teacher one nat below the student everywhere: the advantage is -1 for each token, not 0 after centring."""
    student = dense_scores([[0.6, 0.4]] * 3)
    draws = torch.tensor([0, 0, 0])
    teacher = SampledScores(logprobs=torch.full((3,), math.log(0.6) - 1, dtype=torch.float64))
    out = PolicyGradientObjective()(student, teacher, batch_of([3], target_ids=draws, weights=torch.ones(3)))
    assert near(metric_value(out, "advantage/mean"), -1.0)
    assert out.pair_loss is not None
    assert all(near(x, 1.0) for x in out.pair_loss)


# ------------------------------------------------------------------ values and metrics


def test_the_value_is_the_weighted_k1_estimate_and_the_metrics_are_means_over_pairs():
    batch = batch_of([3, 0, 2])
    student, teacher = hidden_scores(5, 1), hidden_scores(5, 2)
    out = PolicyGradientObjective(temperature=1.4)(student, teacher, batch)
    p, q, ids = rows_of(student, 1.4), rows_of(teacher, 1.4), batch.target_ids.tolist()
    gaps = [math.log(a[y] / b[y]) for a, b, y in zip(p, q, ids, strict=True)]
    expected = [g * w for g, w in zip(gaps, batch.weights.tolist(), strict=True)]
    assert out.pair_loss is not None
    assert all(near(a, b) for a, b in zip(out.pair_loss, expected, strict=True))
    assert near(out.terms["pg"].sum, sum(expected))
    assert out.terms["pg"].count == "pairs"
    assert near(metric_value(out, "kl/reverse"), sum(gaps) / 5)
    assert near(metric_value(out, "kl/reverse_k3"), sum(math.exp(-g) - 1 + g for g in gaps) / 5)
    assert near(metric_value(out, "advantage/mean"), -sum(gaps) / 5)
    assert near(metric_value(out, "entropy/student"), sum(map(entropy_of, p)) / 5)
    assert float(out.metrics["ratio/mean"].count) == 0  # nothing is known of the draw


def test_every_kind_of_teacher_scores_gives_the_same_loss():
    batch = batch_of([2, 3])
    student, teacher = hidden_scores(5, 1), hidden_scores(5, 2)
    top = top_k_scores(teacher.logits(), batch.target_ids, 2, temperature=2.0, rows="pairs")
    sampled = SampledScores(logprobs=drawn_under(teacher, batch.target_ids))
    want = float(PolicyGradientObjective()(student, teacher, batch).terms["pg"].sum)
    for scores in (dense_of(teacher), top, sampled):
        assert near(PolicyGradientObjective()(student, scores, batch).terms["pg"].sum, want), type(scores)
        assert near(PolicyGradientObjective()(dense_of(student), scores, batch).terms["pg"].sum, want)
    warm = PolicyGradientObjective(temperature=2.0)
    assert near(warm(student, top, batch).terms["pg"].sum, float(warm(student, teacher, batch).terms["pg"].sum))
    with pytest.raises(ConfigError, match="cannot be moved to another temperature"):
        warm(student, sampled, batch)
    with pytest.raises(ConfigError, match=r"temperature 2\.0 and 1, not at 3\.0"):
        PolicyGradientObjective(temperature=3.0)(student, top, batch)


@pytest.mark.parametrize("iw_gamma", [None, 0.5])
def test_micro_batches_of_whole_rows_add_up_to_the_whole(iw_gamma: float | None):
    objective = PolicyGradientObjective(iw_gamma=iw_gamma)
    check_split_invariance(objective, hidden_scores(9, 1, grad=True), hidden_scores(9, 2))


# ------------------------------------------------------------------ IW-OPD


def test_iw_weights_run_over_each_rows_own_tokens():
    lengths = [3, 0, 1, 4]
    batch = batch_of(lengths, weights=torch.ones(8))
    student, teacher = hidden_scores(8, 1, grad=True), hidden_scores(8, 2)
    out = PolicyGradientObjective(iw_gamma=0.5)(student, teacher, batch)
    log_s, log_t = drawn_under(student, batch.target_ids), drawn_under(teacher, batch.target_ids)
    advantages = (log_t - log_s).tolist()
    expected, start = [], 0
    for length in lengths:
        own = advantages[start : start + length]
        expected += [-a * w for a, w in zip(own, iw_weights(own, 0.5), strict=True)]
        start += length
    assert out.pair_loss is not None
    assert all(near(a, b) for a, b in zip(out.pair_loss, expected, strict=True))
    assert near(-expected[0] / advantages[0], 1.5)  # the first token of a row weighs 1 + gamma
    plain = PolicyGradientObjective()(student, teacher, batch)
    (weighted_grad,) = torch.autograd.grad(out.terms["pg"].sum, student.hidden)
    (plain_grad,) = torch.autograd.grad(plain.terms["pg"].sum, student.hidden)
    assert plain.pair_loss is not None
    factor = (out.pair_loss / plain.pair_loss)[:, None]
    torch.testing.assert_close(weighted_grad, plain_grad * factor, rtol=1e-9, atol=1e-12)


def test_on_a_second_pass_the_ratio_moves_and_clipped_tokens_lose_their_gradient():
    """Two optimizer steps on one rollout: draw with the first weights, score with the weights after one step."""
    lengths, epsilon, gamma = [4, 3], 0.2, 0.5
    start, teacher = hidden_scores(7, 1, plain=True), hidden_scores(7, 2, plain=True)
    ids = batch_of(lengths, seed=5).target_ids
    drawn = drawn_under(start, ids)
    batch = batch_of(lengths, target_ids=ids, sampler_logprobs=drawn)
    objective = PolicyGradientObjective(clip_epsilon=epsilon, iw_gamma=gamma)

    weight = start.head.weight.clone().requires_grad_()
    hidden = start.hidden.clone().requires_grad_()
    student = HiddenScores(hidden=hidden, head=type(start.head)(weight=weight))
    first = objective(student, teacher, batch)
    assert near(metric_value(first, "ratio/mean"), 1.0)
    assert metric_value(first, "ratio/clipped_share") == 0.0
    (step,) = torch.autograd.grad(first.terms["pg"].sum, weight)
    with torch.no_grad():
        weight -= 0.05 * step

    second = objective(student, teacher, batch)
    log_s, log_t = drawn_under(student, ids).tolist(), drawn_under(teacher, ids).tolist()
    advantages = [t - d for t, d in zip(log_t, drawn.tolist(), strict=True)]  # as at the draw
    factors = iw_weights(advantages[:4], gamma) + iw_weights(advantages[4:], gamma)
    ratios = [math.exp(s - d) for s, d in zip(log_s, drawn.tolist(), strict=True)]
    expected, held = [], []
    for ratio, a, f, w in zip(ratios, advantages, factors, batch.weights.tolist(), strict=True):
        bounded = min(max(ratio, 1 - epsilon), 1 + epsilon)
        expected.append(-min(ratio * a, bounded * a) * f * w)
        held.append(bounded * a < ratio * a)
    assert 0 < sum(held) < 7, "the case must hold some tokens and leave others"
    assert second.pair_loss is not None
    assert all(near(a, b) for a, b in zip(second.pair_loss, expected, strict=True))
    assert near(metric_value(second, "ratio/mean"), sum(ratios) / 7)
    assert abs(metric_value(second, "ratio/mean") - 1) > 1e-3
    assert near(metric_value(second, "ratio/clipped_share"), sum(held) / 7)
    (gradient,) = torch.autograd.grad(second.terms["pg"].sum, hidden)
    assert [not bool(row.any()) for row in gradient] == held


@pytest.mark.parametrize(
    "options", [{}, {"iw_gamma": 0.5}, {"clip_epsilon": 0.1}, {"clip_epsilon": 0.1, "iw_gamma": 0.5}]
)
def test_a_hidden_student_equals_the_same_student_as_logits(options: dict):
    student, teacher = hidden_scores(7, 1, grad=True), hidden_scores(7, 2)
    drawn = drawn_under(student, batch_of([4, 3], seed=5).target_ids) + 0.2
    batch = batch_of([4, 3], seed=5, sampler_logprobs=drawn)
    leaves = [student.hidden, student.head.weight, student.head.bias]
    objective = PolicyGradientObjective(temperature=1.3, **options)
    fused, plain = (objective(s, teacher, batch) for s in (student, DenseScores(dense=student.logits())))
    torch.testing.assert_close(fused.terms["pg"].sum, plain.terms["pg"].sum, rtol=1e-11, atol=0)
    torch.testing.assert_close(fused.pair_loss, plain.pair_loss, rtol=1e-11, atol=1e-13)
    assert set(fused.metrics) == set(plain.metrics)
    for name in plain.metrics:
        assert near(metric_value(fused, name), metric_value(plain, name)), name
    got, want = (torch.autograd.grad(out.terms["pg"].sum, leaves) for out in (fused, plain))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_iw_weights_do_not_change_when_other_rows_leave_the_batch():
    batch = batch_of([2, 3])
    student, teacher = hidden_scores(5, 1), hidden_scores(5, 2)
    objective = PolicyGradientObjective(iw_gamma=1.0)
    whole = objective(student, teacher, batch).pair_loss
    micro, pairs = part(batch, 1, 2)
    alone = objective(
        HiddenScores(hidden=student.hidden[pairs], head=student.head),
        HiddenScores(hidden=teacher.hidden[pairs], head=teacher.head),
        micro,
    ).pair_loss
    assert whole is not None
    torch.testing.assert_close(alone, whole[pairs], rtol=1e-12, atol=0)


# ------------------------------------------------------------------ edges


@pytest.mark.parametrize("objective", [PolicyGradientObjective(), PolicyGradientObjective(iw_gamma=0.5)])
def test_a_batch_without_pairs_gives_a_connected_zero(objective: PolicyGradientObjective):
    check_empty(objective, hidden_scores(0, 1))


def test_a_clipped_objective_also_takes_a_batch_without_pairs():
    student = hidden_scores(0, 1, grad=True)
    batch = batch_of([0], sampled=[False], sampler_logprobs=torch.zeros(0))
    out = PolicyGradientObjective(clip_epsilon=0.2, iw_gamma=0.5)(student, hidden_scores(0, 2), batch)
    out.terms["pg"].sum.backward()
    assert float(out.terms["pg"].sum.detach()) == 0.0
    assert student.head.weight.grad is not None


def test_the_gradient_reaches_the_student_only_and_depends_on_the_teacher():
    batch = batch_of([3])
    student = hidden_scores(3, 1, grad=True)
    gradients = []
    for seed in (2, 5):
        teacher = hidden_scores(3, seed, grad=True)
        (gradient,) = torch.autograd.grad(
            PolicyGradientObjective()(student, teacher, batch).terms["pg"].sum, student.hidden, retain_graph=True
        )
        PolicyGradientObjective()(student, teacher, batch).terms["pg"].sum.backward()
        assert teacher.hidden.grad is None
        assert teacher.head.weight.grad is None
        gradients.append(gradient)
    assert not torch.allclose(gradients[0], gradients[1])
    assert student.head.weight.grad is not None
    assert student.head.weight.grad.any()


@pytest.mark.parametrize("iw_gamma", [None, 0.5])
def test_a_nan_of_the_teacher_stays_visible_in_its_own_row(iw_gamma: float | None):
    batch = batch_of([2, 2])
    teacher = SampledScores(logprobs=torch.tensor([-1.0, -2.0, math.nan, -1.0], dtype=torch.float64))
    out = PolicyGradientObjective(iw_gamma=iw_gamma)(hidden_scores(4, 1), teacher, batch)
    assert out.pair_loss is not None
    assert set(batch.row[out.pair_loss.isnan()].tolist()) == {1}
    assert torch.isnan(out.terms["pg"].sum)


def test_a_pair_of_weight_zero_adds_nothing_even_if_it_is_nan():
    batch = batch_of([3], weights=torch.tensor([1.0, 0.0, 1.0]))
    teacher = SampledScores(logprobs=torch.tensor([-1.0, math.nan, -1.0], dtype=torch.float64))
    student = hidden_scores(3, 1, grad=True)
    out = PolicyGradientObjective()(student, teacher, batch)
    out.terms["pg"].sum.backward()
    assert math.isfinite(float(out.terms["pg"].sum.detach()))
    assert student.head.weight.grad is not None
    assert student.head.weight.grad.isfinite().all()
    assert student.hidden.grad is not None
    assert not student.hidden.grad[1].any()


def test_recorded_rows_are_refused_by_name_before_and_at_scoring():
    batch = batch_of([2, 1], sampled=[True, False])
    objective = PolicyGradientObjective()
    message = r"1 of 3 pairs are recorded \(rows 'row-1'\).*on_policy_fraction=1.*DivergenceObjective"
    with pytest.raises(ConfigError, match=message):
        objective.counts(batch)
    with pytest.raises(ConfigError, match=message):
        objective(hidden_scores(3, 1), hidden_scores(3, 2), batch)
    assert objective.counts(batch_of([2, 0], sampled=[True, False])) == {"pairs": 2.0}  # no pair, no question


@pytest.mark.parametrize("drawn", [None, torch.tensor([-1.0, -1.0, math.nan])])
def test_a_clipped_objective_says_how_to_get_the_probabilities_of_the_draw(drawn: Tensor | None):
    batch = batch_of([2, 1], sampler_logprobs=drawn)
    objective = PolicyGradientObjective(clip_epsilon=0.2)
    num, rows = (3, "'row-0', 'row-1'") if drawn is None else (1, "'row-1'")
    with pytest.raises(
        ConfigError, match=rf"{num} of 3 pairs have no sampler_logprobs \(rows {rows}\).*LocalRollouts"
    ):
        objective(hidden_scores(3, 1), hidden_scores(3, 2), batch)


def test_what_the_objective_needs_of_its_rollouts_can_be_asked_before_the_first_step():
    assert PolicyGradientObjective().needs_fresh_rollouts
    assert not PolicyGradientObjective().needs_sampler_logprobs
    assert PolicyGradientObjective(clip_epsilon=0.2).needs_sampler_logprobs
    assert not PolicyGradientObjective(clip_epsilon=0.2).needs_fresh_rollouts
    assert set(PolicyGradientObjective().accepts) == {SampledScores, HiddenScores, DenseScores, TopKScores}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be"),
        ({"clip_epsilon": 0.0}, r"clip_epsilon must be in \(0, 1\)"),
        ({"clip_epsilon": 1.0}, "clip_epsilon must be"),
        ({"iw_gamma": -0.1}, "iw_gamma must be"),
        ({"iw_gamma": math.nan}, "iw_gamma must be"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_when_it_is_made(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        PolicyGradientObjective(**options)
