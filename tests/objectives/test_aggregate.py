# SPDX-License-Identifier: Apache-2.0
"""Weights, selection and scale from numbers alone, and that both methods ask the same function for them."""

import math
from typing import Any

import pytest

from cohobate.errors import ConfigError
from cohobate.objectives import CommonSupportObjective, ProjectedObjective
from cohobate.objectives.aggregate import Aggregation, complete_values, dynamic_scale, joined_values


def test_static_weights_are_as_given_or_1():
    assert Aggregation(num_teachers=2).teacher_weights(None, (5, 7)) == (1.0, 1.0)
    assert Aggregation(num_teachers=2, weights=(0.3, 0.0)).teacher_weights(None, (5, 7)) == (0.3, 0.0)


def test_normalising_by_vocabulary_weighs_by_the_logarithm_of_its_size_and_so_do_the_scores():
    rules = Aggregation(num_teachers=2, weights=(1.0, 0.5), normalize_teacher_by_vocab=True)
    assert rules.teacher_weights(None, (100, 1000)) == pytest.approx((1.0, 0.5 * 1.5))
    rules = Aggregation(num_teachers=2, sum_weights_metric="ce", alpha=2.0, normalize_teacher_by_vocab=True)
    powers = [math.exp(2 * -1.3), math.exp(2 * 1.5 * -0.9)]
    wanted = (powers[0] / sum(powers), 1.5 * powers[1] / sum(powers))
    assert rules.teacher_weights([-1.3, -0.9], (100, 1000)) == pytest.approx(wanted)


def test_scores_become_weights_by_softmax_and_a_teacher_without_a_score_gets_none():
    rules = Aggregation(num_teachers=3, sum_weights_metric="max_prob", alpha=3.0)
    powers = [math.exp(3 * x) for x in (0.2, 0.9)]
    found = rules.teacher_weights([0.2, math.nan, 0.9], (9, 9, 9))
    assert found == pytest.approx((powers[0] / sum(powers), 0.0, powers[1] / sum(powers)))
    assert rules.teacher_weights([math.nan] * 3, (9, 9, 9)) == pytest.approx((1 / 3,) * 3)
    assert rules.teacher_weights([-900.0, -1000.0, -900.0], (9, 9, 9)) == pytest.approx((0.5, 0.0, 0.5))


@pytest.mark.parametrize(
    ("scores", "selected"),
    [([-2.0, -1.0, -3.0], 1), ([-1.0, -1.0, -1.0], 0), ([math.nan, -5.0, -4.0], 2), ([math.nan] * 3, 0)],
)
def test_the_teacher_with_the_lowest_cross_entropy_is_selected_of_equal_ones_the_first(scores: Any, selected: int):
    rules = Aggregation(num_teachers=3, kd_mode="select_teacher")
    assert rules.score == "ce"
    assert rules.teacher_weights(scores, (5, 5, 5)) == tuple(float(i == selected) for i in range(3))


def test_the_scale_makes_kd_as_large_as_ce_and_is_1_where_one_is_nothing():
    assert dynamic_scale(0.027755742106, 0.918173066311) == pytest.approx(33.080472603)
    assert dynamic_scale(-0.5, 2.0) == 4.0
    assert dynamic_scale(0.0, 2.0) == 1.0
    assert dynamic_scale(0.5, 0.0) == 1.0
    assert math.isnan(dynamic_scale(math.nan, 2.0))


def test_each_term_is_divided_by_its_own_count_and_one_without_a_count_is_0():
    sums = {"kd/0": 6.0, "kd/1": 10.0, "kd/2": 0.0, "ce": 9.0}
    counts = {"chunks/0": 2.0, "chunks/1": 5.0, "chunks/2": 0.0, "ce_tokens": 3.0}
    assert joined_values(sums, counts) == (5.0, 3.0)
    assert complete_values(sums, counts) == (5.0, 3.0)


def test_before_any_step_kd_stands_to_ce_as_the_fixed_weights_do():
    assert Aggregation(num_teachers=1).first_scale == 10.0
    assert Aggregation(num_teachers=1, kd_weight=0.5, ce_weight=2.0).first_scale == 0.25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kd_mode": "mean"}, "kd_mode must be one of 'sum', 'averaged_logits', 'select_teacher', got 'mean'"),
        ({"sum_weights_metric": "kl"}, "sum_weights_metric must be one of None, 'ce'"),
        ({"dynamic_scaling": True}, "dynamic_scaling must be one of"),
        ({"weights": (1.0,)}, "one for each of 2 teachers, got 1"),
        ({"weights": (1.0, -1.0)}, "finite numbers >= 0"),
        ({"weights": (1.0, math.inf)}, "finite numbers >= 0"),
        ({"weights": (0.0, 0.0)}, "add up to 0"),
        ({"weights": (0.3, 0.7), "kd_mode": "select_teacher"}, "no effect with kd_mode='select_teacher'"),
        ({"weights": (0.3, 0.7), "sum_weights_metric": "ce"}, "no effect with sum_weights_metric"),
        ({"sum_weights_metric": "ce", "kd_mode": "averaged_logits"}, "sum_weights_metric weighs.*averaged_logits"),
        ({"normalize_teacher_by_vocab": True, "kd_mode": "select_teacher"}, "normalize_teacher_by_vocab weighs"),
        ({"alpha": math.nan}, "alpha must be"),
        ({"kd_weight": -1.0}, "kd_weight must be"),
        ({"ce_weight": math.inf}, "ce_weight must be"),
        ({"ce_weight": 0.0}, "'previous_step' makes KD count as much as CE"),
        ({"kd_weight": 0.0, "dynamic_scaling": "call"}, "'call' makes KD count as much as CE"),
    ],
)
def test_what_cannot_go_together_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Aggregation(num_teachers=2, **options)


def test_equal_weights_may_stand_beside_a_mode_that_finds_its_own_and_0_beside_fixed_scaling():
    Aggregation(num_teachers=2, weights=(0.5, 0.5), kd_mode="select_teacher")
    Aggregation(num_teachers=2, ce_weight=0.0, dynamic_scaling="off")


def test_there_is_one_aggregator_and_neither_method_has_any_of_it():
    for name in ("__call__", "aggregation", "_weighted", "_scales", "_chosen", "after_step"):
        assert getattr(CommonSupportObjective, name) is getattr(ProjectedObjective, name)
    fields = set(Aggregation.__dataclass_fields__)
    assert not fields & {"group", "world", "scale"}  # it remembers no group and no step
