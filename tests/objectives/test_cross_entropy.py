# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from cohobate.errors import ConfigError
from cohobate.functional.scores import DenseScores
from cohobate.objectives import CrossEntropyObjective

from .cases import (
    batch_of,
    check_empty,
    check_split_invariance,
    dense_of,
    entropy_of,
    hidden_scores,
    metric_value,
    near,
    rows_of,
)


@pytest.mark.parametrize("dense", [False, True])
def test_the_loss_is_the_weighted_negative_log_likelihood_of_the_targets(dense: bool):
    batch = batch_of([2, 3])
    student = hidden_scores(5, 1)
    out = CrossEntropyObjective()(dense_of(student) if dense else student, None, batch)
    p = rows_of(student)
    nll = [-math.log(row[y]) for row, y in zip(p, batch.target_ids.tolist(), strict=True)]
    expected = [x * w for x, w in zip(nll, batch.weights.tolist(), strict=True)]
    assert near(out.terms["ce"].sum, sum(expected))
    assert out.pair_loss is not None
    assert all(near(a, b) for a, b in zip(out.pair_loss, expected, strict=True))
    assert near(metric_value(out, "nll"), sum(nll) / 5)
    assert near(metric_value(out, "entropy/student"), sum(map(entropy_of, p)) / 5)


def test_the_gradient_by_the_logits_is_probability_minus_the_target():
    batch = batch_of([2], target_ids=torch.tensor([1, 4]), weights=torch.tensor([1.0, 2.0]))
    student = dense_of(hidden_scores(2, 1, grad=True))
    CrossEntropyObjective()(student, None, batch).terms["ce"].sum.backward()
    expected = torch.tensor(rows_of(student), dtype=torch.float64)
    expected[0, 1] -= 1
    expected[1, 4] -= 1
    torch.testing.assert_close(student.dense.grad, expected * torch.tensor([[1.0], [2.0]]), rtol=1e-9, atol=1e-12)


def test_only_recorded_rows_teach_and_count_when_asked_so():
    batch = batch_of([2, 3], sampled=[True, False], weights=torch.ones(5))
    student = hidden_scores(5, 1, grad=True)
    objective = CrossEntropyObjective(rows="recorded")
    assert objective.counts(batch) == {"ce_tokens": 3.0}
    assert CrossEntropyObjective().counts(batch) == {"pairs": 5.0}
    out = objective(student, None, batch)
    assert out.terms["ce"].count == "ce_tokens"
    nll = [-math.log(row[y]) for row, y in zip(rows_of(student), batch.target_ids.tolist(), strict=True)]
    assert near(out.terms["ce"].sum.detach(), sum(nll[2:]))
    assert near(metric_value(out, "nll"), sum(nll[2:]) / 3)
    (gradient,) = torch.autograd.grad(out.terms["ce"].sum, student.hidden)
    assert [bool(row.any()) for row in gradient] == [False, False, True, True, True]


@pytest.mark.parametrize("rows", ["all", "recorded"])
def test_a_hidden_student_equals_the_same_student_as_logits(rows):
    batch = batch_of([2, 3], sampled=[True, False])
    student = hidden_scores(5, 1, grad=True)
    leaves = [student.hidden, student.head.weight, student.head.bias]
    objective = CrossEntropyObjective(rows=rows)
    fused, plain = (objective(s, None, batch) for s in (student, DenseScores(dense=student.logits())))
    torch.testing.assert_close(fused.pair_loss, plain.pair_loss, rtol=1e-11, atol=0)
    for name in plain.metrics:
        assert near(metric_value(fused, name), metric_value(plain, name)), name
    got, want = (torch.autograd.grad(out.terms["ce"].sum, leaves) for out in (fused, plain))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_pair_without_weight_or_row_may_be_nan():
    batch = batch_of([2, 2], sampled=[True, False], weights=torch.tensor([1.0, 1.0, 1.0, 0.0]))
    student = hidden_scores(4, 1)
    student.hidden[[0, 3]] = math.nan
    student.hidden.requires_grad_()
    out = CrossEntropyObjective(rows="recorded")(student, None, batch)
    (grad,) = torch.autograd.grad(out.terms["ce"].sum, student.hidden)
    assert out.terms["ce"].sum.isfinite()
    assert [bool(row.any()) for row in grad] == [False, False, True, False]
    assert grad.isfinite().all()


def test_micro_batches_add_up_to_the_whole():
    check_split_invariance(CrossEntropyObjective(), hidden_scores(9, 1, grad=True), None)


@pytest.mark.parametrize("rows", ["all", "recorded"])
def test_a_batch_without_pairs_gives_a_connected_zero(rows):
    check_empty(CrossEntropyObjective(rows=rows), None)


def test_rows_must_be_one_of_two_words():
    with pytest.raises(ConfigError, match="'sampled'"):
        CrossEntropyObjective(rows="sampled")  # pyright: ignore[reportArgumentType]
