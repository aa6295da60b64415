# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies of given tokens from hidden states, against the plain twin and plain floats."""

import math

import pytest
import torch

from cohobate.functional.fused_logprobs import fused_linear_logprobs
from cohobate.functional.logprobs import entropy, head_logits, log_softmax, token_logprobs

from . import oracle
from .heads import N, V, Watch, big, problem


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_logprobs_and_entropy_equal_the_plain_twin_in_value_and_gradient(chunk_size: int, softcap: float | None):
    p, ids = problem(23), torch.tensor([0, 10, 3, 3, 7, 1, 9])
    upstream = oracle.draw(N, seed=24)
    logprobs, ent = fused_linear_logprobs(
        p.hidden, p.weight, ids, temperature=0.7, bias=p.bias, scale=0.8, softcap=softcap, chunk_size=chunk_size
    )
    logits = head_logits(p.hidden, p.weight, bias=p.bias, scale=0.8, softcap=softcap)
    want = token_logprobs(logits, ids, temperature=0.7)
    torch.testing.assert_close(logprobs, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ent, entropy(log_softmax(logits, temperature=0.7)).detach(), rtol=1e-12, atol=1e-13)
    assert not ent.requires_grad
    got_grads = torch.autograd.grad(logprobs, p.student, upstream)
    torch.testing.assert_close(got_grads, torch.autograd.grad(want, p.student, upstream), rtol=1e-10, atol=1e-12)


def test_logprobs_equal_plain_floats():
    p, ids = problem(25, full=False), torch.tensor([5, 0, 1, 2, 10, 4, 4])
    logprobs, ent = fused_linear_logprobs(p.hidden, p.weight, ids)
    for n in range(N):
        row = [math.fsum(a * b for a, b in zip(w, p.hidden[n].tolist(), strict=True)) for w in p.weight.tolist()]
        assert logprobs[n].item() == pytest.approx(math.log(oracle.softmax(row)[int(ids[n])]), abs=1e-12)
        assert ent[n].item() == pytest.approx(oracle.entropy(oracle.softmax(row)), abs=1e-12)


def test_logprobs_hold_no_logits_for_the_backward_pass():
    p, ids = big(400), torch.arange(400) % 50
    with Watch() as watch:
        logprobs, _ = fused_linear_logprobs(p.hidden, p.weight, ids, bias=p.bias, chunk_size=20)
        logprobs.sum().backward()
    assert watch.largest <= 400 * 4
    assert watch.products == 20 * 4  # forward, and in the backward pass once more, dX and dW


def test_logprobs_of_a_row_without_upstream_gradient_may_be_anything():
    p, ids = problem(26), torch.arange(N)
    hidden = p.hidden.detach().clone()
    hidden[1] = math.nan
    hidden.requires_grad_()
    logprobs, _ = fused_linear_logprobs(hidden, p.weight, ids, chunk_size=3)
    keep = torch.arange(N) != 1
    logprobs[keep].sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert p.weight.grad is not None
    assert p.weight.grad.isfinite().all()
    assert hidden.grad[1].abs().max().item() == 0.0


def test_logprobs_of_no_rows_have_zero_gradients():
    p = problem(27, rows=0)
    logprobs, ent = fused_linear_logprobs(p.hidden, p.weight, torch.zeros(0).long(), bias=p.bias)
    logprobs.sum().backward()
    assert logprobs.shape == ent.shape == (0,)
    for x in p.student:
        assert x.grad is not None
        assert x.grad.abs().sum().item() == 0.0


def test_logprobs_with_a_forbidden_token():
    p = problem(28)
    assert p.bias is not None
    bias = p.bias.detach().clone()
    bias[3] = -math.inf
    bias.requires_grad_()
    logprobs, ent = fused_linear_logprobs(p.hidden, p.weight, torch.zeros(N).long(), bias=bias)
    keep = [v for v in range(V) if v != 3]
    want, want_ent = fused_linear_logprobs(
        p.hidden, p.weight.detach()[keep], torch.zeros(N).long(), bias=bias.detach()[keep]
    )
    torch.testing.assert_close((logprobs, ent), (want, want_ent), rtol=1e-12, atol=1e-13)
    (grad,) = torch.autograd.grad(logprobs.sum(), bias)
    assert grad.isfinite().all()
    assert grad[3].item() == 0.0


def test_logprobs_under_no_grad_and_in_half_precision():
    p, ids = problem(29, torch.bfloat16), torch.arange(N)
    with torch.no_grad():
        logprobs, ent = fused_linear_logprobs(p.hidden, p.weight, ids)
    assert not logprobs.requires_grad
    assert logprobs.dtype == ent.dtype == torch.float32
    torch.testing.assert_close(logprobs, token_logprobs(head_logits(p.hidden, p.weight), ids).detach())
