# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from cohobate.functional.token_nll import token_nll

from . import oracle
from .memory import NewMemory


@pytest.mark.parametrize("width", [5, 3000])
def test_value_and_gradient_are_the_definition(width: int):
    logits, ids = oracle.draw(4, width, seed=1, scale=3.0).requires_grad_(), torch.tensor([0, 3, 3, width - 1])
    value = token_nll(logits, ids)
    for i, (row, y) in enumerate(zip(logits.tolist(), ids.tolist(), strict=True)):
        assert math.isclose(value[i].detach(), math.log(sum(math.exp(z) for z in row)) - row[y], rel_tol=1e-9)
    upstream = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad(value, logits, upstream)
    onehot = torch.nn.functional.one_hot(ids, width)
    torch.testing.assert_close(grad, upstream[:, None] * (logits.detach().softmax(-1) - onehot), rtol=1e-8, atol=1e-12)


def test_gradcheck():
    logits = oracle.draw(3, 6, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: token_nll(z, torch.tensor([5, 0, 2])), [logits])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_float32_and_gradients_of_the_logits_dtype(dtype: torch.dtype):
    logits, ids = oracle.draw(4, 7, seed=3).to(dtype).requires_grad_(), torch.tensor([0, 1, 2, 3])
    value = token_nll(logits, ids)
    assert value.dtype == torch.float32
    (grad,) = torch.autograd.grad(value.sum(), logits)
    wide = logits.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(token_nll(wide, ids).sum(), wide)
    torch.testing.assert_close(grad.double(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def test_a_row_without_upstream_may_hold_anything_and_no_rows_are_fine():
    logits = oracle.draw(3, 6, seed=2)
    logits[1] = float("nan")
    logits.requires_grad_()
    value = token_nll(logits, torch.tensor([5, 0, 2]))
    (grad,) = torch.autograd.grad(value[[0, 2]].sum(), logits)
    assert not grad[1].any()
    assert grad.isfinite().all()
    assert token_nll(logits[:0], torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_one_tensor_of_the_logits_size_is_made_in_both_passes_together():
    logits = torch.randn(64, 5000, requires_grad=True)
    with NewMemory(logits) as memory:
        torch.autograd.grad(token_nll(logits, torch.arange(64)).sum(), logits)
    assert memory.larger_than(logits.numel() * 4 - 1) == 1
