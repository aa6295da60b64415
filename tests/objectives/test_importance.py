# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cohobate.errors import ConfigError
from cohobate.functional.estimators import sampled_kl_loss
from cohobate.functional.scores import DenseScores, HiddenScores, SampledScores, TopKScores
from cohobate.objectives import (
    CrossEntropyObjective,
    DivergenceObjective,
    ImportanceWeightedObjective,
    ObjectiveOutput,
    PolicyGradientObjective,
    SumObjective,
    Term,
    TokenSelectionObjective,
    for_step,
)
from cohobate.objectives.cross_entropy import target_logprobs

from .cases import (
    VOCAB,
    batch_of,
    check_split_invariance,
    cut,
    generalized,
    hidden_scores,
    metric_value,
    near,
    part,
    rows_of,
)

KD = DivergenceObjective(beta=0.3, temperature=0.8)


def drawn(scores: HiddenScores, target_ids: Tensor, temperature: float = 0.8) -> Tensor:
    """Log-probabilities of the tokens under the policy that drew them, by the oracle."""
    rows = zip(rows_of(scores, temperature), target_ids.tolist(), strict=True)
    return torch.tensor([math.log(p[y]) for p, y in rows], dtype=torch.float64)


class K2:
    """A loss that reads the drawn token only: half the squared log-ratio."""

    accepts = (HiddenScores, DenseScores)

    def counts(self, batch):
        return {"pairs": float(batch.num_pairs)}

    def __call__(self, student, teacher, batch):
        now, _ = target_logprobs(student, batch.target_ids)
        loss = sampled_kl_loss(now, target_logprobs(teacher, batch.target_ids)[0]) * batch.weights
        return ObjectiveOutput(terms={"k2": Term(sum=loss.sum(), count="pairs")}, pair_loss=loss.detach())


# ------------------------------------------------------------------ the weight


@pytest.mark.parametrize("clip", [1.0, 1.3, 2.0, math.inf])
def test_each_pair_is_weighted_by_its_ratio_up_to_the_clip(clip: float):
    student, teacher, before = hidden_scores(5, 1), hidden_scores(5, 2), hidden_scores(5, 3)
    batch = batch_of([3, 0, 2])
    batch = replace(batch, sampler_logprobs=drawn(before, batch.target_ids))
    out = ImportanceWeightedObjective(objective=KD, clip=clip)(student, teacher, batch)
    ratios, expected = [], []
    for i, (p, q, b) in enumerate(
        zip(rows_of(student, 0.8), rows_of(teacher, 0.8), rows_of(before, 0.8), strict=True)
    ):
        token = int(batch.target_ids[i])
        ratios.append(p[token] / b[token])
        expected.append(float(batch.weights[i]) * min(ratios[-1], clip) * generalized(p, q, 0.3))
    assert 0 < sum(r > 1.3 for r in ratios) < 5, "some are clipped and some are not"
    assert out.pair_loss is not None
    assert all(near(a, b) for a, b in zip(out.pair_loss, expected, strict=True))
    assert near(out.terms["kd"].sum, sum(expected))
    assert out.terms["kd"].count == "pairs"
    assert near(metric_value(out, "ratio/mean"), sum(ratios) / 5)
    assert near(metric_value(out, "ratio/clipped_share"), sum(r > clip for r in ratios) / 5)
    assert near(metric_value(out, "kl/forward"), metric_value(KD(student, teacher, batch), "kl/forward"))


def test_the_weight_is_a_constant_and_the_denominator_stays_the_count():
    student, teacher = hidden_scores(6, 1, grad=True), hidden_scores(6, 2)
    batch = batch_of([4, 2])
    batch = replace(batch, sampler_logprobs=drawn(hidden_scores(6, 3), batch.target_ids))
    objective = ImportanceWeightedObjective(objective=KD, clip=1.5)
    now = drawn(student, batch.target_ids)
    ratio = (now - batch.sampler_logprobs).exp().clamp(max=1.5)
    leaves = [student.hidden, student.head.weight]
    got = torch.autograd.grad(objective(student, teacher, batch).terms["kd"].sum, leaves)
    by_hand = replace(batch, weights=batch.weights * ratio)
    want = torch.autograd.grad(KD(student, teacher, by_hand).terms["kd"].sum, leaves)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    assert objective.counts(batch) == KD.counts(batch) == {"pairs": 6.0}


def test_at_a_ratio_of_one_nothing_changes():
    student, teacher = hidden_scores(6, 1, grad=True), hidden_scores(6, 2)
    batch = batch_of([4, 2])
    now, _ = target_logprobs(student, batch.target_ids, temperature=0.8)
    batch = replace(batch, sampler_logprobs=now.detach())
    inner = KD(student, teacher, batch)
    out = ImportanceWeightedObjective(objective=KD)(student, teacher, batch)
    assert float(out.terms["kd"].sum.detach()) == float(inner.terms["kd"].sum.detach())
    assert metric_value(out, "ratio/mean") == 1.0
    assert metric_value(out, "ratio/clipped_share") == 0.0


# ------------------------------------------------------------------ unbiasedness, by enumeration


def every_token(before: HiddenScores) -> tuple:
    """One position with each token once, weighted by its probability under the policy that drew: the expectation."""
    (p0,) = rows_of(before)
    probabilities = torch.tensor(p0, dtype=torch.float64)
    return batch_of(
        [VOCAB], target_ids=torch.arange(VOCAB), weights=probabilities, sampler_logprobs=probabilities.log()
    ), p0


def repeated(scores: HiddenScores) -> HiddenScores:
    return HiddenScores(hidden=scores.hidden.expand(VOCAB, -1), head=scores.head)


def test_a_loss_of_the_drawn_token_becomes_in_expectation_the_one_under_the_policy_of_now():
    student, teacher = hidden_scores(1, 1), hidden_scores(1, 2)
    batch, p0 = every_token(hidden_scores(1, 3))
    (p,), (q,) = rows_of(student), rows_of(teacher)
    out = ImportanceWeightedObjective(objective=K2(), clip=math.inf)(repeated(student), repeated(teacher), batch)
    under_now = sum(a * 0.5 * math.log(a / b) ** 2 for a, b in zip(p, q, strict=True))
    under_draw = sum(c * 0.5 * math.log(a / b) ** 2 for a, b, c in zip(p, q, p0, strict=True))
    assert near(out.terms["k2"].sum, under_now)
    assert abs(under_now - under_draw) > 1e-3


def test_two_tokens_with_full_distributions_are_weighted_by_one_in_expectation():
    """All pairs (a, b) of a tiny vocabulary: the second position's distributions depend on a, its loss not on b.

    So what the weights of a divergence leave in expectation is the loss on the prefixes of the older policy.
    """
    before, student, teacher = ([hidden_scores(1, s + r) for r in range(VOCAB + 1)] for s in (30, 50, 70))
    first, after = ([rows_of(x)[0] for x in side] for side in (before, student))
    total, expected = 0.0, 0.0
    objective = DivergenceObjective(beta=0.5)
    weighted = ImportanceWeightedObjective(objective=objective, clip=math.inf)
    for a in range(VOCAB):
        for b in range(VOCAB):
            chance = first[VOCAB][a] * first[a][b]
            batch = batch_of(
                [1],
                target_ids=torch.tensor([b]),
                weights=torch.tensor([chance], dtype=torch.float64),
                sampler_logprobs=torch.tensor([math.log(first[a][b])], dtype=torch.float64),
            )
            total += float(weighted(student[a], teacher[a], batch).terms["kd"].sum)
        expected += first[VOCAB][a] * generalized(after[a], rows_of(teacher[a])[0], 0.5)
    assert near(total, expected)


def test_a_clip_makes_the_expected_weight_less_than_one():
    student, teacher = hidden_scores(1, 1), hidden_scores(1, 2)
    batch, p0 = every_token(hidden_scores(1, 3))
    (p,), (q,) = rows_of(student), rows_of(teacher)
    out = ImportanceWeightedObjective(objective=DivergenceObjective(), clip=1.2)(
        repeated(student), repeated(teacher), batch
    )
    weight = sum(c * min(a / c, 1.2) for a, c in zip(p, p0, strict=True))
    assert weight < 0.95
    assert near(out.terms["kd"].sum, weight * generalized(p, q, 0.5))


# ------------------------------------------------------------------ as an objective


def test_micro_batches_add_up_to_the_whole():
    class Drawn(ImportanceWeightedObjective):
        """With draws that follow from the tokens, since the case has none."""

        def __call__(self, student, teacher, batch):
            draws = -1.0 - batch.target_ids.double() / 4
            return ImportanceWeightedObjective.__call__(self, student, teacher, replace(batch, sampler_logprobs=draws))

    check_split_invariance(Drawn(objective=KD), hidden_scores(9, 1, grad=True), hidden_scores(9, 2))


def test_an_empty_batch_gives_a_connected_zero_and_every_metric():
    student, teacher = hidden_scores(0, 0, grad=True), hidden_scores(0, 1)
    batch = batch_of([0, 0], sampler_logprobs=torch.zeros(0))
    objective = ImportanceWeightedObjective(objective=KD)
    out = objective(student, teacher, batch)
    assert float(out.terms["kd"].sum.detach()) == 0.0
    assert out.terms["kd"].sum.requires_grad
    assert {"ratio/mean", "ratio/clipped_share", "kl/forward"} <= set(out.metrics)
    assert all(float(metric.count) == 0 for metric in out.metrics.values())
    assert objective.counts(batch) == {"pairs": 0.0}
    assert objective(student, teacher, batch_of([0])).metrics.keys() == out.metrics.keys()


def test_a_pair_of_weight_zero_adds_nothing_and_a_nan_stays_visible():
    student, teacher = hidden_scores(3, 1), hidden_scores(3, 2)
    student.hidden[1] = math.nan
    draws = torch.full((3,), -1.0)
    objective = ImportanceWeightedObjective(objective=KD)
    seen = objective(student, teacher, batch_of([3], sampler_logprobs=draws))
    dead = objective(student, teacher, batch_of([3], sampler_logprobs=draws, weights=torch.tensor([1.0, 0.0, 1.0])))
    assert seen.pair_loss is not None
    assert seen.pair_loss.isnan().tolist() == [False, True, False]
    assert dead.pair_loss is not None
    assert dead.pair_loss[1] == 0


def test_what_it_asks_of_rollouts_and_teachers():
    objective = ImportanceWeightedObjective(objective=DivergenceObjective(top_k=3, temperature=0.7))
    assert objective.needs_sampler_logprobs
    assert not objective.needs_fresh_rollouts
    assert objective.temperature == 0.7
    assert set(objective.accepts) == {HiddenScores, DenseScores}
    assert objective.held_out is objective.objective
    assert TopKScores in ImportanceWeightedObjective(objective=KD).accepts


def test_a_selection_goes_around_it_and_both_weights_multiply():
    student, teacher = hidden_scores(9, 1), hidden_scores(9, 2)
    batch = batch_of([3, 0, 2, 4])
    batch = replace(batch, sampler_logprobs=drawn(hidden_scores(9, 3), batch.target_ids))
    weighted = ImportanceWeightedObjective(objective=KD, clip=1.5)
    around = TokenSelectionObjective(objective=weighted, keep=None)
    assert around.needs_sampler_logprobs
    assert not around.needs_fresh_rollouts
    assert around.temperature == 0.8
    micro = [(cut(student, p), cut(teacher, p), b) for b, p in (part(batch, *s) for s in ((0, 2), (2, 4)))]
    ready, alone = (for_step(TokenSelectionObjective(objective=o, keep=None), micro) for o in (weighted, KD))
    ratio = (drawn(student, batch.target_ids) - batch.sampler_logprobs).exp().clamp(max=1.5)
    got, without = ready(student, teacher, batch), alone(student, teacher, batch)
    assert got.pair_loss is not None
    torch.testing.assert_close(got.pair_loss, without.pair_loss * ratio, rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("draws", [None, torch.tensor([-1.0, -1.0, math.nan, math.nan, -1.0])])
def test_tokens_that_no_known_policy_drew_are_refused_by_the_names_of_their_rows(draws: Tensor | None):
    objective = ImportanceWeightedObjective(objective=KD)
    rows = "row-0', 'row-2" if draws is None else "row-2"
    with pytest.raises(ConfigError, match=f"have no sampler_logprobs .*'{rows}'.*importance_clip: null"):
        objective(hidden_scores(5, 1), hidden_scores(5, 2), batch_of([2, 0, 3], sampler_logprobs=draws))


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (PolicyGradientObjective(), "has a ratio of its own: set its clip_epsilon"),
        (PolicyGradientObjective(clip_epsilon=0.2), "has a ratio of its own"),
        (
            SumObjective({"kd": (1.0, KD), "pg": (0.5, PolicyGradientObjective())}),
            "PolicyGradientObjective has a ratio",
        ),
        (ImportanceWeightedObjective(objective=KD), "ImportanceWeightedObjective has a ratio of its own"),
        (TokenSelectionObjective(objective=KD), "goes around an ImportanceWeightedObjective, not inside"),
        (CrossEntropyObjective(), "CrossEntropyObjective has none"),
    ],
)
def test_an_objective_that_it_cannot_weight_is_refused(inner, message: str):
    with pytest.raises(ConfigError, match=message):
        ImportanceWeightedObjective(objective=inner)


@pytest.mark.parametrize("clip", [0.5, 0.0, -1.0, math.nan])
def test_a_clip_below_one_is_refused(clip: float):
    with pytest.raises(ConfigError, match="clip must be at least 1"):
        ImportanceWeightedObjective(objective=KD, clip=clip)


def test_the_kinds_of_scores_are_checked_by_the_objective_inside():
    batch = batch_of([2], sampler_logprobs=torch.full((2,), -1.0))
    with pytest.raises(ConfigError, match="DivergenceObjective accepts"):
        ImportanceWeightedObjective(objective=KD)(hidden_scores(2, 1), SampledScores(logprobs=torch.zeros(2)), batch)
