# SPDX-License-Identifier: Apache-2.0
"""Objectives bind the functions of `functional` to what a student and a teacher say about N aligned pairs."""

from cohobate.objectives.cross_entropy import CE_TOKENS, CrossEntropyObjective
from cohobate.objectives.cross_tokenizer import CommonSupportObjective, ProjectedObjective
from cohobate.objectives.divergence import DivergenceObjective
from cohobate.objectives.importance import ImportanceWeightedObjective
from cohobate.objectives.policy_gradient import PolicyGradientObjective
from cohobate.objectives.protocol import (
    PAIRS,
    Metric,
    Objective,
    ObjectiveOutput,
    StepObjective,
    StudentScores,
    Term,
    check_accepts,
    check_scores,
    for_step,
)
from cohobate.objectives.weighted import SumObjective, TokenSelectionObjective

__all__ = [
    "CE_TOKENS",
    "PAIRS",
    "CommonSupportObjective",
    "CrossEntropyObjective",
    "DivergenceObjective",
    "ImportanceWeightedObjective",
    "Metric",
    "Objective",
    "ObjectiveOutput",
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
