# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import pytest
import torch

from cohobate import objectives
from cohobate.errors import ConfigError
from cohobate.functional.scores import DenseScores, HiddenScores, SampledScores, TopKScores
from cohobate.objectives import (
    CrossEntropyObjective,
    DivergenceObjective,
    ImportanceWeightedObjective,
    Objective,
    PolicyGradientObjective,
    StepObjective,
    SumObjective,
    TokenSelectionObjective,
    check_accepts,
    for_step,
)

from .cases import batch_of, hidden_scores

EVERY = [
    DivergenceObjective(),
    PolicyGradientObjective(),
    CrossEntropyObjective(),
    SumObjective({"kd": (1.0, DivergenceObjective())}),
    TokenSelectionObjective(objective=DivergenceObjective()),
    ImportanceWeightedObjective(objective=DivergenceObjective()),
]
BY_STUDENT = DivergenceObjective(top_k=4, top_k_of="student")


@dataclass
class Speaker:
    provides: object


def test_the_public_names_are_frozen():
    assert sorted(objectives.__all__) == [
        "CE_TOKENS",
        "CommonSupportObjective",
        "CrossEntropyObjective",
        "DivergenceObjective",
        "ImportanceWeightedObjective",
        "Metric",
        "Objective",
        "ObjectiveOutput",
        "PAIRS",
        "PolicyGradientObjective",
        "ProjectedObjective",
        "StepObjective",
        "StudentScores",
        "SumObjective",
        "Term",
        "TokenSelectionObjective",
        "check_accepts",
        "check_scores",
        "for_step",
    ]


@pytest.mark.parametrize("objective", EVERY, ids=lambda o: type(o).__name__)
def test_ours_are_objectives_and_only_selection_needs_the_step(objective: Objective):
    assert isinstance(objective, Objective)
    assert isinstance(objective, StepObjective) == isinstance(objective, TokenSelectionObjective)


@pytest.mark.parametrize("kind", [HiddenScores, DenseScores, TopKScores])
def test_a_fitting_teacher_passes(kind: type):
    check_accepts(DivergenceObjective(), Speaker(kind))
    check_accepts(PolicyGradientObjective(), Speaker(kind))
    check_accepts(CrossEntropyObjective(), None)


@pytest.mark.parametrize(
    ("objective", "provides", "message"),
    [
        (DivergenceObjective(), SampledScores, "DivergenceObjective accepts .*Speaker provides SampledScores.*Policy"),
        (DivergenceObjective(top_k=4), TopKScores, "provides TopKScores.*top_k=None"),
        (BY_STUDENT, TopKScores, "provides TopKScores: top_k_of='student' asks the teacher for the ids"),
        (ImportanceWeightedObjective(objective=BY_STUDENT), TopKScores, "TopKScores: top_k_of='student' asks"),
        (TokenSelectionObjective(objective=BY_STUDENT), TopKScores, "TopKScores: top_k_of='student' asks"),
        (CrossEntropyObjective(), HiddenScores, "uses no teacher, so Speaker would be run and thrown away"),
        (DivergenceObjective(), "HiddenScores", "must be a type such as HiddenScores, got 'HiddenScores'"),
    ],
)
def test_a_mismatch_names_both_and_what_fits(objective: Objective, provides: object, message: str):
    with pytest.raises(ConfigError, match=message):
        check_accepts(objective, Speaker(provides))


def test_a_missing_teacher_is_named_with_the_objective_that_needs_none():
    with pytest.raises(ConfigError, match=r"HiddenScores or DenseScores.*no teacher was given.*CrossEntropyObjective"):
        check_accepts(DivergenceObjective(), None)


def test_the_student_must_come_as_a_distribution():
    with pytest.raises(ConfigError, match="student as HiddenScores or DenseScores, got SampledScores"):
        CrossEntropyObjective()(SampledScores(logprobs=torch.zeros(1)), None, batch_of([1]))  # pyright: ignore[reportArgumentType]


def test_an_objective_that_needs_no_step_is_used_as_it_is_and_nothing_is_scored_for_it():
    def never():
        raise AssertionError("scored for nothing")
        yield

    objective = DivergenceObjective()
    assert for_step(objective, never()) is objective


def test_one_that_has_something_to_choose_only_in_some_settings_says_so_itself():
    objective = TokenSelectionObjective(objective=DivergenceObjective())

    class Settled:
        needs_step = False
        accepts, counts, held_out = objective.accepts, objective.counts, objective.held_out
        measure, prepared, __call__ = objective.measure, objective.prepared, objective.__call__

    settled = Settled()
    assert isinstance(settled, StepObjective)
    assert for_step(settled, []) is settled


def test_a_step_without_any_micro_batch_is_refused():
    with pytest.raises(ValueError, match="at least one micro-batch"):
        for_step(TokenSelectionObjective(objective=DivergenceObjective()), [])


def test_scoring_for_the_step_keeps_no_graph():
    student, teacher, batch = hidden_scores(3, 1, grad=True), hidden_scores(3, 2), batch_of([3])
    seen = []

    def scored():
        seen.append(torch.is_grad_enabled())
        yield student, teacher, batch

    for_step(TokenSelectionObjective(objective=DivergenceObjective()), scored())
    assert seen == [False]
