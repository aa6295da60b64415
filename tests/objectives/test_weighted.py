# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import pytest
import torch

from cohobate.errors import ConfigError
from cohobate.functional.scores import DenseScores, HiddenScores, SampledScores, TopKScores
from cohobate.objectives import (
    CrossEntropyObjective,
    DivergenceObjective,
    ObjectiveOutput,
    PolicyGradientObjective,
    SumObjective,
    TokenSelectionObjective,
    for_step,
)

from .cases import (
    batch_of,
    check_empty,
    cut,
    dense_scores,
    entropy_of,
    hidden_scores,
    kl,
    metric_value,
    near,
    part,
    rows_of,
)

KD = DivergenceObjective(beta=0.2)

# ------------------------------------------------------------------ sums


def test_a_sum_keeps_each_parts_own_term_count_and_metrics():
    batch = batch_of([2, 3], sampled=[True, False])
    student, teacher = hidden_scores(5, 1), hidden_scores(5, 2)
    hard = CrossEntropyObjective(rows="recorded")
    both = SumObjective({"soft": (0.9, KD), "hard": (0.1, hard)})
    assert both.counts(batch) == {"pairs": 5.0, "ce_tokens": 3.0}
    out, kd, ce = both(student, teacher, batch), KD(student, teacher, batch), hard(student, None, batch)
    assert {name: term.count for name, term in out.terms.items()} == {"soft": "pairs", "hard": "ce_tokens"}
    assert near(out.terms["soft"].sum, 0.9 * float(kd.terms["kd"].sum))
    assert near(out.terms["hard"].sum, 0.1 * float(ce.terms["ce"].sum))
    assert near(metric_value(out, "entropy/student"), metric_value(kd, "entropy/student"))
    assert near(metric_value(out, "hard/entropy/student"), metric_value(ce, "entropy/student"))
    assert near(metric_value(out, "nll"), metric_value(ce, "nll"))
    assert kd.pair_loss is not None
    assert ce.pair_loss is not None
    torch.testing.assert_close(out.pair_loss, 0.9 * kd.pair_loss + 0.1 * ce.pair_loss)


def test_a_sum_accepts_what_all_its_parts_accept():
    assert set(SumObjective({"a": (1.0, KD), "b": (1.0, PolicyGradientObjective())}).accepts) == {
        HiddenScores,
        DenseScores,
        TopKScores,
    }
    assert SumObjective({"ce": (1.0, CrossEntropyObjective())}).accepts == ()
    with pytest.raises(ConfigError, match="no kind of teacher scores serves every part"):
        SumObjective({"a": (1.0, DivergenceObjective(top_k=3)), "b": (1.0, DivergenceObjective(tail="drop"))})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "at least one part"),
        ({"kd": (math.nan, KD)}, "weight of part 'kd' must be a finite number"),
        (
            {"tip": (1.0, TokenSelectionObjective(objective=KD))},
            r"cannot stand inside a sum\. A selection goes around it",
        ),
    ],
)
def test_a_sum_that_cannot_work_is_refused(parts: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        SumObjective(parts)


def test_wrappers_pass_on_what_their_parts_need_of_the_rollouts():
    ratio = PolicyGradientObjective(clip_epsilon=0.2, temperature=0.7)
    for wrapped in (
        SumObjective({"pg": (1.0, ratio), "again": (1.0, ratio)}),
        TokenSelectionObjective(objective=ratio, signal="entropy"),
    ):
        assert wrapped.needs_sampler_logprobs
        assert not wrapped.needs_fresh_rollouts
        assert wrapped.temperature == 0.7
    mixed = SumObjective({"kd": (1.0, DivergenceObjective(temperature=2.0)), "pg": (1.0, ratio)})
    assert mixed.needs_fresh_rollouts
    assert mixed.temperature == 0.7  # the part that reads the draw decides
    assert SumObjective({"kd": (1.0, KD)}).temperature == 1.0
    assert not SumObjective({"kd": (1.0, KD)}).needs_sampler_logprobs


def test_a_sum_takes_a_batch_without_pairs():
    check_empty(SumObjective({"kd": (1.0, KD), "ce": (1.0, CrossEntropyObjective())}), hidden_scores(0, 1))


def test_one_count_name_must_have_one_meaning():
    class Other(CrossEntropyObjective):
        def counts(self, batch):
            return {"pairs": 1.0}

    both = SumObjective({"kd": (1.0, KD), "other": (1.0, Other())})
    with pytest.raises(ConfigError, match=r"part 'other' counts 1\.0 'pairs', an earlier part 3\.0"):
        both.counts(batch_of([3]))


# ------------------------------------------------------------------ token selection


def scores_by_hand(entropies: list[float], divergences: list[float]) -> list[float]:
    def scale(values: list[float]) -> list[float]:
        low, high = min(values), max(values)
        return [0.0 if high == low else (v - low) / (high - low) for v in values]

    return [1 - (1 - h) * (1 - d) for h, d in zip(scale(entropies), scale(divergences), strict=True)]


def step_of(objective: TokenSelectionObjective, splits: tuple[tuple[int, int], ...]) -> list[ObjectiveOutput]:
    """Outputs of one step over rows [3, 0, 2, 4], cut into micro-batches of rows."""
    student, teacher, batch = hidden_scores(9, 1, grad=True), hidden_scores(9, 2), batch_of([3, 0, 2, 4])
    micro = [(cut(student, p), cut(teacher, p), b) for b, p in (part(batch, *s) for s in splits)]
    ready = for_step(objective, micro)
    assert ready.counts(batch) == {"pairs": 9.0}
    return [ready(*m) for m in micro]


@pytest.mark.parametrize("signal", ["soft_or", "entropy", "divergence"])
@pytest.mark.parametrize("keep", [0.4, 1.0, None])
def test_selection_scores_the_pairs_of_the_whole_step(signal, keep: float | None):
    student, teacher, batch = hidden_scores(9, 1), hidden_scores(9, 2), batch_of([3, 0, 2, 4])
    p, q = rows_of(student), rows_of(teacher)
    unsure = [entropy_of(a) for a in p]
    far = [kl(a, b) for a, b in zip(p, q, strict=True)]
    nothing = [0.0] * 9
    scores = scores_by_hand(nothing if signal == "divergence" else unsure, nothing if signal == "entropy" else far)
    if keep is None:
        chosen = scores
    else:
        best = sorted(range(9), key=lambda i: -scores[i])[: math.ceil(keep * 9)]
        chosen = [1.0 if i in best else 0.0 for i in range(9)]
    plain = KD(student, teacher, batch)
    assert plain.pair_loss is not None
    expected = [x * c for x, c in zip(plain.pair_loss.tolist(), chosen, strict=True)]
    (out,) = step_of(TokenSelectionObjective(objective=KD, signal=signal, keep=keep), ((0, 4),))
    assert out.pair_loss is not None
    assert all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6) for a, b in zip(out.pair_loss, expected, strict=True))
    assert math.isclose(float(out.terms["kd"].sum.detach()), sum(expected), rel_tol=1e-5)
    assert math.isclose(metric_value(out, "selection/mean_weight"), sum(chosen) / 9, rel_tol=1e-5)
    assert near(metric_value(out, "kl/forward"), metric_value(plain, "kl/forward"))  # metrics are of all pairs


@pytest.mark.parametrize("keep", [0.4, None])
def test_how_a_step_is_cut_into_micro_batches_does_not_change_what_is_selected(keep: float | None):
    objective = TokenSelectionObjective(objective=KD, keep=keep)
    (whole,) = step_of(objective, ((0, 4),))
    parts = step_of(objective, ((0, 1), (1, 2), (2, 4)))
    losses = [out.pair_loss for out in parts if out.pair_loss is not None]
    torch.testing.assert_close(torch.cat(losses), whole.pair_loss, rtol=1e-9, atol=1e-12)


def test_the_order_in_which_ranks_are_joined_does_not_change_what_is_selected():
    objective = TokenSelectionObjective(objective=KD, keep=0.4)
    student, teacher, batch = hidden_scores(9, 1), hidden_scores(9, 2), batch_of([9])
    here = for_step(objective, [(student, teacher, batch)])
    there = for_step(objective, [(student, teacher, batch)], join_ranks=lambda measures: measures.flip(0))
    torch.testing.assert_close(here(student, teacher, batch).pair_loss, there(student, teacher, batch).pair_loss)


def test_pairs_of_other_ranks_take_part_in_the_scale_and_the_ranking():
    """One of two pairs is kept alone, none when another rank holds two pairs that matter more."""
    student, teacher = dense_scores([[0.6, 0.4], [0.9, 0.1]]), dense_scores([[0.5, 0.5], [0.9, 0.1]])
    batch = batch_of([2], target_ids=torch.zeros(2, dtype=torch.int64), weights=torch.ones(2))
    objective = TokenSelectionObjective(objective=KD, keep=0.5)
    alone = for_step(objective, [(student, teacher, batch)])
    busy = torch.tensor([[0.69, 3.0], [0.69, 4.0]])
    together = for_step(objective, [(student, teacher, batch)], join_ranks=lambda m: torch.cat([m, busy]))
    assert metric_value(alone(student, teacher, batch), "selection/mean_weight") == 0.5
    assert metric_value(together(student, teacher, batch), "selection/mean_weight") == 0.0


@pytest.mark.parametrize("keep", [0.5, None])
def test_a_constant_entropy_leaves_the_choice_to_the_divergence(keep: float | None):
    student = dense_scores([[0.7, 0.3], [0.3, 0.7], [0.7, 0.3], [0.3, 0.7]])
    teacher = dense_scores([[0.7, 0.3], [0.7, 0.3], [0.5, 0.5], [0.5, 0.5]])
    student = DenseScores(dense=student.dense.float())
    batch = batch_of([4], target_ids=torch.zeros(4, dtype=torch.int64), weights=torch.ones(4))
    ready = for_step(TokenSelectionObjective(objective=KD, keep=keep), [(student, teacher, batch)])
    out = ready(student, teacher, batch)
    assert out.pair_loss is not None
    assert out.pair_loss[0] == 0
    assert out.pair_loss[1] > 0
    far = [kl(a, b) for a, b in zip(rows_of(student), rows_of(teacher), strict=True)]
    share = 0.75 if keep else sum(d / max(far) for d in far) / 4  # the last two tie and are both kept
    assert math.isclose(metric_value(out, "selection/mean_weight"), share, rel_tol=1e-5)


@pytest.mark.parametrize("keep", [0.5, None])
def test_if_nothing_tells_the_pairs_apart_all_are_kept(keep: float | None):
    student, teacher = dense_scores([[0.7, 0.3]] * 4), dense_scores([[0.4, 0.6]] * 4)
    batch = batch_of([4], target_ids=torch.zeros(4, dtype=torch.int64))
    ready = for_step(TokenSelectionObjective(objective=KD, keep=keep), [(student, teacher, batch)])
    assert metric_value(ready(student, teacher, batch), "selection/mean_weight") == 1.0


def test_entropy_and_divergence_are_taken_at_the_temperature_of_the_loss():
    student, teacher, batch = hidden_scores(3, 1), hidden_scores(3, 2), batch_of([3])
    warm = TokenSelectionObjective(objective=DivergenceObjective(temperature=2.0))
    p, q = rows_of(student, 2.0), rows_of(teacher, 2.0)
    expected = torch.tensor([[entropy_of(a), kl(a, b)] for a, b in zip(p, q, strict=True)])
    torch.testing.assert_close(warm.measure(student, teacher, batch), expected)


def test_held_out_rows_are_not_selected():
    assert TokenSelectionObjective(objective=KD).held_out is KD


def test_left_out_pairs_get_no_gradient():
    student, teacher, batch = hidden_scores(6, 1, grad=True), hidden_scores(6, 2), batch_of([6])
    ready = for_step(TokenSelectionObjective(objective=KD, keep=0.5), [(student, teacher, batch)])
    out = ready(student, teacher, batch)
    (gradient,) = torch.autograd.grad(out.terms["kd"].sum, student.hidden)
    assert out.pair_loss is not None
    assert [bool(row.any()) for row in gradient] == (out.pair_loss != 0).tolist()
    assert int((out.pair_loss != 0).sum()) == 3


def test_a_nan_is_kept_so_that_its_row_can_be_named():
    student, teacher, batch = hidden_scores(6, 1), hidden_scores(6, 2), batch_of([6])
    teacher.hidden[4] = math.nan
    ready = for_step(TokenSelectionObjective(objective=KD, keep=0.2), [(student, teacher, batch)])
    out = ready(student, teacher, batch)
    assert out.pair_loss is not None
    assert out.pair_loss.isnan().tolist() == [False] * 4 + [True, False]
    (others, head), first = part(batch, 0, 1), slice(0, 4)  # the finite pairs are ranked as if it were not there
    assert head == slice(0, 6)
    known = TokenSelectionObjective(objective=KD, keep=0.2).measure(student, teacher, others)[[0, 1, 2, 3, 5]]
    scores = scores_by_hand(*(known[:, c].tolist() for c in (0, 1)))
    assert [x != 0 for x in out.pair_loss.tolist()][first] == [s == max(scores) for s in scores][first]


def test_selection_takes_a_step_in_which_one_micro_batch_or_all_are_empty():
    objective = TokenSelectionObjective(objective=KD, keep=0.5)
    student, teacher, batch = hidden_scores(0, 1, grad=True), hidden_scores(0, 2), batch_of([0])
    full = (hidden_scores(4, 3), hidden_scores(4, 4), batch_of([4]))
    for micro in ([(student, teacher, batch)], [(student, teacher, batch), full]):
        out = for_step(objective, micro)(student, teacher, batch)
        assert float(out.terms["kd"].sum.detach()) == 0.0
        assert out.terms["kd"].sum.requires_grad
        assert float(out.metrics["selection/mean_weight"].count) == 0


def test_one_micro_batch_alone_is_refused_and_the_way_out_named():
    student, teacher, batch = hidden_scores(3, 1), hidden_scores(3, 2), batch_of([3])
    with pytest.raises(ConfigError, match=r"whole optimizer step.*for_step"):
        TokenSelectionObjective(objective=KD)(student, teacher, batch)


def test_selection_wraps_a_sum_and_objectives_without_a_distribution():
    batch, student = batch_of([4]), hidden_scores(4, 1)
    nll = TokenSelectionObjective(objective=CrossEntropyObjective(), signal="entropy")
    assert nll.accepts == ()
    assert metric_value(for_step(nll, [(student, None, batch)])(student, None, batch), "selection/mean_weight") == 0.5
    sampled = TokenSelectionObjective(objective=PolicyGradientObjective(), signal="entropy")
    teacher = SampledScores(logprobs=torch.full((4,), -1.0))
    out = for_step(sampled, [(student, teacher, batch)])(student, teacher, batch)
    assert metric_value(out, "selection/mean_weight") == 0.5
    both = TokenSelectionObjective(objective=SumObjective({"kd": (1.0, KD), "ce": (0.5, CrossEntropyObjective())}))
    out = for_step(both, [(student, hidden_scores(4, 2), batch)])(student, hidden_scores(4, 2), batch)
    assert set(out.terms) == {"kd", "ce"}
    assert SampledScores not in TokenSelectionObjective(objective=PolicyGradientObjective()).accepts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": KD, "signal": "both"}, "'both'"),
        ({"objective": KD, "keep": 0.0}, r"share in \(0, 1\]"),
        ({"objective": CrossEntropyObjective()}, "needs a teacher's distribution.*signal='entropy'"),
        ({"objective": TokenSelectionObjective(objective=KD)}, "do not wrap it again"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_when_it_is_made(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        TokenSelectionObjective(**options)


def test_the_weights_of_the_batch_multiply_those_of_the_selection():
    student, teacher, batch = hidden_scores(5, 1), hidden_scores(5, 2), batch_of([5])
    doubled = replace(batch, weights=2 * batch.weights)
    ready = for_step(TokenSelectionObjective(objective=KD, keep=None), [(student, teacher, batch)])
    once, twice = ready(student, teacher, batch).terms["kd"].sum, ready(student, teacher, doubled).terms["kd"].sum
    assert near(twice, 2 * float(once))
