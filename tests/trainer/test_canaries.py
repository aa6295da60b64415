# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import pytest
import torch

from cohobate.errors import NonFiniteError
from cohobate.objectives import ObjectiveOutput
from cohobate.trainer.aligners import without_pairs
from cohobate.trainer.canaries import FiniteCheck, lessons_notice, teacher_notice


def three_rows():
    three = torch.tensor([0, 0, 0])
    batch = without_pairs(1)
    side = replace(batch.student, pair_index=three)
    return replace(
        batch,
        student=side,
        teacher=side,
        row=torch.tensor([0, 0, 2]),
        sample_ids=("a", "b", "c"),
        is_sampled=torch.ones(3, dtype=torch.bool),
        target_ids=three,
        weights=torch.ones(3),
        sampler_logprobs=None,
    )


def test_a_non_finite_loss_names_its_rows_and_what_to_do() -> None:
    check = FiniteCheck()
    pair_loss = torch.tensor([1.0, 2.0, float("nan")])
    check.see(three_rows(), ObjectiveOutput(terms={}, pair_loss=pair_loss), pair_loss.sum())
    assert not check.loss_is_finite()
    with pytest.raises(NonFiniteError, match=r"step 7: .*'c'\. The optimizer step was not taken.*resume") as caught:
        check.refuse(step=7, grad_norm=1.0)
    assert "'a'" not in str(caught.value)


def test_a_finite_step_is_forgotten() -> None:
    check = FiniteCheck()
    pair_loss = torch.ones(3)
    check.see(three_rows(), ObjectiveOutput(terms={}, pair_loss=pair_loss), pair_loss.sum())
    assert check.loss_is_finite()
    check.clear()
    assert check.bad_rows() == []
    assert check.loss_sum == 0.0


def test_a_uniform_teacher_is_noticed() -> None:
    """A teacher without its weights: ln V of entropy, and a loss near ln 2 that looks normal (V = 1000)."""
    notice = teacher_notice({"entropy/teacher": 6.9078, "kl/forward": 3.0}, vocab_size=1000)
    assert notice is not None
    assert "without its weights" in notice
    assert teacher_notice({"entropy/teacher": 6.9}, vocab_size=1000) is None
    assert math.log(1000) == pytest.approx(6.9078, abs=1e-4)


def test_a_teacher_that_equals_the_student_is_reported() -> None:
    metrics = {"kl/forward": 0.0, "kl/reverse": 1e-8, "entropy/teacher": 1.0}  # some processors leave a rounding error
    notice = teacher_notice(metrics, vocab_size=10)
    assert notice is not None
    assert "teacher equals student" in notice
    assert teacher_notice(metrics | {"kl/forward": 1e-5}, vocab_size=10) is None


def test_steps_without_any_lesson_are_said_to_teach_nothing():
    assert lessons_notice({"lessons/without_share": 0.9}) is None
    assert lessons_notice({}) is None
    assert "nothing was learnt" in str(lessons_notice({"lessons/without_share": 1.0}))
