# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies of given tokens from hidden states, against the plain twin and plain floats."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cohobate.functional.estimators import clipped_surrogate, sampled_kl_loss
from cohobate.functional.fused_logprobs import FusedTokenLoss, fused_linear_logprobs, fused_linear_token_loss
from cohobate.functional.logprobs import entropy, head_logits, log_softmax, token_logprobs

from . import oracle
from .heads import N, V, Watch, big, problem, products_of
from .memory import NewMemory


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
    with Watch() as watch, NewMemory(*p.student, ids) as memory:
        logprobs, _ = fused_linear_logprobs(p.hidden, p.weight, ids, bias=p.bias, chunk_size=20)
        logprobs.sum().backward()
    assert memory.larger_than(4 * 400 * 4) == 0  # a tile is smaller
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
        fast, _ = fused_linear_logprobs(p.hidden, p.weight, ids, logits="fast")
        exact = token_logprobs(head_logits(p.hidden.float(), p.weight.float()), ids)
    assert not logprobs.requires_grad
    assert logprobs.dtype == ent.dtype == fast.dtype == torch.float32
    torch.testing.assert_close(logprobs, exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast, token_logprobs(head_logits(p.hidden, p.weight), ids).detach())


# ------------------------------------------------------------------ a loss that is known beforehand

IDS = torch.tensor([0, 10, 3, 3, 7, 1, 9])
WEIGHTS = oracle.draw(N, seed=80).abs()
TEACHER, DRAWN = -oracle.draw(N, seed=81).abs(), -oracle.draw(N, seed=82).abs()


def cross_entropy(logprobs: Tensor, rows: slice) -> Tensor:
    return -WEIGHTS[rows] * logprobs


def policy_gradient(logprobs: Tensor, rows: slice) -> Tensor:
    return sampled_kl_loss(logprobs, TEACHER[rows], estimator="policy_gradient")


def half_square(logprobs: Tensor, rows: slice) -> Tensor:
    return WEIGHTS[rows] * sampled_kl_loss(logprobs, TEACHER[rows], estimator="k2")


def clipped(logprobs: Tensor, rows: slice) -> Tensor:
    return clipped_surrogate(logprobs, DRAWN[rows], TEACHER[rows] - DRAWN[rows], clip_epsilon=0.3)[0]


LOSSES = (cross_entropy, policy_gradient, half_square, clipped)


@pytest.mark.parametrize("token_loss", LOSSES)
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_token_loss_equals_its_plain_twin_in_value_and_gradient(
    token_loss: Callable[[Tensor, slice], Tensor], chunk_size: int, softcap: float | None
):
    p = problem(83)
    options = {"bias": p.bias, "scale": 0.8, "softcap": softcap}
    got = fused_linear_token_loss(
        p.hidden, p.weight, IDS, token_loss, temperature=0.7, chunk_size=chunk_size, **options
    )
    logits = head_logits(p.hidden, p.weight, **options)
    logprobs = token_logprobs(logits, IDS, temperature=0.7)
    loss = token_loss(logprobs, slice(None))
    ent = entropy(log_softmax(logits, temperature=0.7))
    want = FusedTokenLoss(loss_sum=loss.sum(), loss=loss.detach(), logprobs=logprobs.detach(), entropy=ent.detach())
    for name in ("loss_sum", "loss", "logprobs", "entropy"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-11, atol=1e-13)
        assert getattr(got, name).requires_grad == (name == "loss_sum")
    got_grads = torch.autograd.grad(got.loss_sum * 0.37, p.student)
    want_grads = torch.autograd.grad(want.loss_sum * 0.37, p.student)
    torch.testing.assert_close(got_grads, want_grads, rtol=1e-10, atol=1e-12)


def test_cross_entropy_has_the_gradient_of_its_definition():
    p = problem(84, full=False, rows=1)
    fused_linear_token_loss(p.hidden, p.weight, torch.tensor([4]), lambda logp, _: -logp).loss_sum.backward()
    row = [math.fsum(a * b for a, b in zip(w, p.hidden[0].tolist(), strict=True)) for w in p.weight.tolist()]
    by_logits = [x - (v == 4) for v, x in enumerate(oracle.softmax(row))]
    assert p.weight.grad is not None
    for v in range(V):
        assert p.weight.grad[v].tolist() == pytest.approx([by_logits[v] * h for h in p.hidden[0].tolist()], abs=1e-12)


@pytest.mark.parametrize("token_loss", [cross_entropy, half_square])
def test_a_token_loss_passes_gradcheck(token_loss: Callable[[Tensor, slice], Tensor]):
    p = problem(85)

    def loss(*student: Tensor) -> Tensor:
        hidden, weight, bias = student
        return fused_linear_token_loss(hidden, weight, IDS, token_loss, bias=bias, softcap=2.0, chunk_size=4).loss_sum

    assert torch.autograd.gradcheck(loss, p.student, fast_mode=True)


def test_a_known_loss_costs_three_products_and_without_gradient_one():
    p = problem(86)

    def run() -> Tensor:
        return fused_linear_token_loss(p.hidden, p.weight, IDS, cross_entropy, bias=p.bias, chunk_size=3).loss_sum

    assert products_of(lambda: run().backward()) == 3 * 3
    with torch.no_grad():
        assert products_of(run) == 3
        assert not run().requires_grad


def test_a_token_loss_without_a_slope_gives_zero_gradients_whatever_stands_there():
    p = problem(87)
    hidden = p.hidden.detach().clone()
    hidden[1] = math.nan
    p = replace(p, hidden=hidden.requires_grad_())
    keep = torch.arange(N) != 1

    def masked(logprobs: Tensor, rows: slice) -> Tensor:
        return torch.where(keep[rows], -logprobs, 0.0)

    out = fused_linear_token_loss(p.hidden, p.weight, IDS, masked, bias=p.bias, softcap=2.0, chunk_size=3)
    out.loss_sum.backward()
    assert out.loss_sum.isfinite()
    for x in p.student:
        assert x.grad is not None
        assert x.grad.isfinite().all()
    assert hidden.grad is not None
    assert [bool(row.any()) for row in hidden.grad] == keep.tolist()
    constant = fused_linear_token_loss(p.hidden, p.weight, IDS, lambda logprobs, _: torch.ones_like(logprobs))
    assert constant.loss_sum.item() == N
    (grad,) = torch.autograd.grad(constant.loss_sum, p.weight)
    assert grad.abs().max().item() == 0.0


def test_no_rows_have_no_loss_and_zero_gradients():
    p = problem(88, rows=0)
    out = fused_linear_token_loss(p.hidden, p.weight, torch.zeros(0).long(), cross_entropy, bias=p.bias)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0.0
    for x in p.student:
        assert x.grad is not None
        assert x.grad.abs().sum().item() == 0.0


def test_a_nearly_certain_target_keeps_its_gradient_in_half_precision():
    weight = torch.tensor([[8.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    out = fused_linear_token_loss(hidden, weight, torch.tensor([0]), lambda logprobs, _: -logprobs)
    out.loss_sum.backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == pytest.approx([-1 / (1 + math.exp(8)), 1 / (1 + math.exp(8))], rel=1e-2)


def test_a_loss_of_another_shape_and_targets_of_another_number_are_refused():
    p = problem(89)
    with pytest.raises(ValueError, match=r"token_loss must give one loss for each of 7 rows, got \[\]"):
        fused_linear_token_loss(p.hidden, p.weight, IDS, lambda logprobs, _: logprobs.sum())
    for call in (fused_linear_logprobs, lambda *args: fused_linear_token_loss(*args, cross_entropy)):
        with pytest.raises(ValueError, match=r"target_ids must be \[N\] = \[7\]"):
            call(p.hidden, p.weight, IDS[1:])


@pytest.mark.parametrize(
    ("wrong", "message"), [(-100, r"target_ids\[2\] is -100, outside 0 to 10"), (V, "is 11, outside")]
)
def test_a_target_that_is_no_id_is_refused(wrong: int, message: str):
    p, ids = problem(90), IDS.clone()
    ids[2] = wrong
    for call in (fused_linear_logprobs, lambda *args: fused_linear_token_loss(*args, cross_entropy)):
        with pytest.raises(ValueError, match=message):
            call(p.hidden, p.weight, ids)
        with pytest.raises(ValueError, match=r"must be int64 or int32, got torch\.uint8"):
            call(p.hidden, p.weight, IDS.to(torch.uint8))
        call(p.hidden, p.weight, IDS.int())


@pytest.mark.parametrize("inner", ["logprobs", "token loss"])
def test_a_loss_may_call_fused_functions_itself(inner: str):
    """A reward from a second model: its tiles are not those that the gradient is still to be made of."""
    p, other = big(20), problem(91, torch.float32, rows=20, full=False)
    ids = torch.arange(20) % V

    def advantage(rows: slice) -> Tensor:
        hidden, weight = (x.detach().requires_grad_() for x in (other.hidden[rows], other.weight))
        if inner == "logprobs":
            return fused_linear_logprobs(hidden * 3, weight, ids[rows])[0].detach()
        out = fused_linear_token_loss(hidden * 3, weight, ids[rows], cross_entropy_of)
        out.loss_sum.backward()
        return out.logprobs

    def cross_entropy_of(logprobs: Tensor, rows: slice) -> Tensor:
        return -logprobs

    known = advantage(slice(0, 20))
    losses = [lambda x, rows: -x * advantage(rows), lambda x, rows: -x * known[rows]]
    gradients = [
        torch.autograd.grad(fused_linear_token_loss(p.hidden, p.weight, ids, f, chunk_size=7).loss_sum, p.weight)[0]
        for f in losses
    ]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
