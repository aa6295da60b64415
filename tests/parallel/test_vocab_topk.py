# SPDX-License-Identifier: Apache-2.0
"""Top-k and argmax of one process; shards are in `test_vocab_ranks.py`."""

import pytest
import torch
import vocab_oracle as oracle

from cohobate.parallel import vocab_parallel_argmax, vocab_parallel_topk

V = oracle.V


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 5, V])
def test_values_descend_and_the_lower_of_equals_comes_first(dtype: torch.dtype, k: int):
    logits = oracle.draw(20, V, seed=1, dtype=dtype, scale=2.0)
    logits[10:] = logits[10:].round()
    values, ids = vocab_parallel_topk(logits.view(4, 5, V), k)
    want_values, want_ids = oracle.largest(logits, k)
    assert ids.view(20, k).tolist() == want_ids
    assert values.view(20, k).tolist() == want_values
    assert values.dtype == torch.promote_types(torch.float32, dtype)
    assert vocab_parallel_argmax(logits).tolist() == [row[0] for row in want_ids]


def test_values_pass_gradcheck_and_ids_have_no_gradient():
    logits = oracle.draw(2, 3, V, seed=1, dtype=torch.float64).requires_grad_()
    values, ids = vocab_parallel_topk(logits, 4)
    assert values.requires_grad
    assert not ids.requires_grad
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_topk(x, 4)[0], logits)


def test_logits_that_are_no_matrix_are_not_a_special_case():
    logits = oracle.draw(3, 5, V, seed=1, dtype=torch.float32).requires_grad_()
    cut = logits[:, :-1]
    values, ids = vocab_parallel_topk(cut, 3)
    assert torch.equal(ids, cut.topk(3).indices)
    values.sum().backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad[:, :-1].sum(-1), torch.full((3, 4), 3.0))
    assert logits.grad[:, -1].abs().max() == 0


def test_no_rows_give_no_candidates():
    values, ids = vocab_parallel_topk(torch.zeros(0, 4, V), 3)
    assert values.shape == ids.shape == (0, 4, 3)


@pytest.mark.parametrize("k", [0, -1, V + 1])
def test_k_outside_the_vocabulary_is_refused(k: int):
    with pytest.raises(ValueError, match="k must be"):
        vocab_parallel_topk(torch.zeros(2, V), k)


def test_integers_are_no_logits():
    with pytest.raises(TypeError, match="must be floating"):
        vocab_parallel_argmax(torch.zeros(2, V, dtype=torch.int64))
