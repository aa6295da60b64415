# SPDX-License-Identifier: Apache-2.0
"""What a teacher says about N pairs: kept logits with an exact normaliser, and a head that can be cut."""

import math
from typing import Any

import pytest
import torch

from cohobate.functional.logprobs import log_softmax
from cohobate.functional.scores import DenseScores, HiddenScores, OutputHead, top_k_scores
from cohobate.functional.topk import topk_divergence

from . import oracle
from .memory import NewMemory


def test_top_k_keeps_true_log_probabilities_sorted_by_id():
    logits, targets = oracle.draw(3, 7, seed=1), torch.tensor([6, 0, 3])
    got = top_k_scores(logits, targets, 3, temperature=0.7, rows="pairs")
    for n in range(3):
        row = logits[n].tolist()
        kept = sorted(sorted(range(7), key=lambda v: -row[v])[:3])
        p = oracle.softmax(row, 0.7)
        assert got.ids[n].tolist() == kept
        assert got.logits[n].tolist() == [row[v] for v in kept]
        assert got.logprobs()[n].tolist() == pytest.approx([math.log(p[v]) for v in kept], abs=1e-12)
        assert got.log_normalizer_t1[n].item() == pytest.approx(math.log(sum(math.exp(x) for x in row)), abs=1e-12)
        assert got.realized_logit[n].item() == row[int(targets[n])]


def test_the_realized_token_of_a_texts_row_is_the_next_one_and_of_a_pairs_row_its_own():
    logits, ids = oracle.draw(3, 7, seed=1), torch.tensor([6, 0, 3])
    of_text, of_pairs = top_k_scores(logits, ids, 2), top_k_scores(logits, ids, 2, rows="pairs")
    assert of_text.realized_logit[:2].tolist() == [logits[0, 0].item(), logits[1, 3].item()]
    assert of_pairs.realized_logit.tolist() == [logits[0, 6].item(), logits[1, 0].item(), logits[2, 3].item()]
    rows: Any = "pair"
    with pytest.raises(ValueError, match=r"rows must be 'text' .* or 'pairs' .*, got 'pair'"):
        top_k_scores(logits, ids, 2, rows=rows)


def test_log_probabilities_are_known_at_the_scores_own_temperature_and_at_one():
    logits = oracle.draw(2, 5, seed=8)
    got = top_k_scores(logits, torch.tensor([0, 1]), 2, temperature=0.7)
    torch.testing.assert_close(got.logprobs(1.0), log_softmax(logits).gather(-1, got.ids))
    torch.testing.assert_close(got.logprobs(0.7), got.logprobs(), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"at temperature 0\.7 and 1, not at 2\.0"):
        got.logprobs(2.0)


def test_targets_that_are_not_one_for_each_row_are_refused():
    with pytest.raises(ValueError, match=r"teacher_ids must be \[N\] = \[2\], got \[3\]"):
        top_k_scores(torch.zeros(2, 5), torch.zeros(3).long(), 2)


def test_a_tie_goes_to_the_lower_id():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]])
    assert top_k_scores(logits, torch.tensor([0]), 3).ids.tolist() == [[0, 1, 3]]


def test_top_k_of_everything_carries_the_full_divergence():
    student, teacher = oracle.draw(4, 6, seed=2), oracle.draw(4, 6, seed=3)
    kept = top_k_scores(teacher, torch.zeros(4).long(), 6, temperature=1.4)
    got = topk_divergence(student, kept.ids, kept.logprobs(), beta=0.5, temperature=1.4)
    want = [
        oracle.divergence(oracle.softmax(s, 1.4), oracle.softmax(t, 1.4), 0.5)
        for s, t in zip(student.tolist(), teacher.tolist(), strict=True)
    ]
    assert got.tolist() == pytest.approx(want, abs=1e-12)


def test_half_precision_logits_are_widened_before_the_normaliser():
    logits = oracle.draw(2, 9, seed=4, dtype=torch.bfloat16)
    got = top_k_scores(logits, torch.zeros(2).long(), 9)
    torch.testing.assert_close(got.logprobs(), log_softmax(logits.float()), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("k", "temperature"), [(0, 1.0), (4, 1.0), (2, 0.0)])
def test_top_k_refuses_an_empty_support_and_a_temperature_of_zero(k: int, temperature: float):
    with pytest.raises(ValueError, match=r"k must be in \[1, 3\]|temperature must be"):
        top_k_scores(torch.zeros(1, 3), torch.tensor([0]), k, temperature=temperature)


def test_a_cut_head_gives_the_first_columns_and_no_gradient_to_the_rest():
    weight, bias = oracle.draw(6, 3, seed=5).requires_grad_(), oracle.draw(6, seed=6).requires_grad_()
    hidden = oracle.draw(4, 3, seed=7)
    head = OutputHead(weight=weight, bias=bias, scale=0.5, softcap=3.0)
    whole = HiddenScores(hidden=hidden, head=head).logits()
    cut = HiddenScores(hidden=hidden, head=head.cut(4))
    assert cut.vocab_size == 4
    torch.testing.assert_close(cut.logits(), whole[:, :4])
    cut.logits().logsumexp(-1).sum().backward()
    assert weight.grad is not None
    assert bias.grad is not None
    assert weight.grad[4:].abs().max().item() == bias.grad[4:].abs().max().item() == 0.0
    assert weight.grad[:4].abs().min().item() > 0
    assert head.cut(6) is head
    with pytest.raises(ValueError, match="cannot cut a head of 6 ids to 0"):
        OutputHead(weight=weight).cut(0)
    with pytest.raises(ValueError, match="cannot cut a head of 6 ids to 7"):
        head.cut(7)


def test_dense_scores_are_the_logits_they_hold():
    logits = oracle.draw(2, 5, seed=8)
    assert DenseScores(dense=logits).logits() is logits
    assert DenseScores(dense=logits).vocab_size == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_top_k_of_a_wide_vocabulary_makes_no_second_tensor_of_its_size(dtype: torch.dtype):
    logits = oracle.draw(200, 4099, seed=9, scale=4.0, dtype=dtype)
    targets = torch.arange(200)
    with NewMemory(logits, targets) as memory:
        got = top_k_scores(logits, targets, 5, temperature=0.5)
    assert memory.larger_than(200 * 4099 * dtype.itemsize - 1) == 0
    wide = logits.double()
    torch.testing.assert_close(got.log_normalizer.double(), (wide * 2).logsumexp(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(got.log_normalizer_t1.double(), wide.logsumexp(-1), rtol=1e-6, atol=0)
    order = torch.sort(wide, dim=-1, descending=True, stable=True).indices[:, :5].sort(-1).values
    assert torch.equal(got.ids, order)
