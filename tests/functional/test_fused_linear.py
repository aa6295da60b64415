# SPDX-License-Identifier: Apache-2.0
"""The fused functions against their plain twins in value and every gradient, for any chunk, and without an [N, V]."""

import math
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cohobate.functional import fused_linear, workspace
from cohobate.functional.fused_linear import fused_linear_divergence
from cohobate.functional.fused_logprobs import fused_linear_logprobs
from cohobate.functional.kernels import cpu
from cohobate.functional.workspace import release_workspace

from . import oracle
from .heads import HS, HT, N, Problem, V, Watch, assert_same, big, fused, gradients, plain, problem, products_of
from .memory import NewMemory
from .oracle import BETAS, draw

# ------------------------------------------------------------------ equality with the plain twin


@pytest.mark.parametrize("beta", [*BETAS, 0.3])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, N, 100])
def test_value_statistics_and_every_gradient_equal_the_plain_twin(beta: float, full: bool, chunk_size: int):
    p = problem(1, full=full)
    got, want = fused(p, beta, chunk_size=chunk_size), plain(p, beta)
    assert_same(got, want, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(gradients(got, p), gradients(want, p), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    "option",
    ["temperature", "student_scale", "teacher_scale", "student_softcap", "teacher_softcap", "bias", "weights"],
)
def test_each_option_alone_equals_the_plain_twin_and_matters(beta: float, option: str):
    bare, everything = problem(2, full=False), problem(2)
    p = problem(2, full=False)
    if option == "bias":
        p = replace(p, bias=everything.bias, teacher_bias=everything.teacher_bias)
    elif option == "weights":
        p = replace(p, weights=everything.weights)
    else:
        p = replace(p, options={option: 1.7})
    got, want = fused(p, beta, chunk_size=2), plain(p, beta)
    assert_same(got, want, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(gradients(got, p), gradients(want, p), rtol=1e-10, atol=1e-12)
    assert abs(got.loss_sum.item() - fused(bare, beta).loss_sum.item()) > 1e-3


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck_in_float64(beta: float):
    p = problem(3)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fused(replace(p, hidden=hidden, weight=weight, bias=bias), beta, chunk_size=3).loss_sum

    assert torch.autograd.gradcheck(loss, p.student)


@pytest.mark.parametrize("beta", BETAS)
def test_rows_equal_the_probability_space_definition(beta: float):
    p = problem(4, full=False)
    out = fused(p, beta)
    for n in range(N):
        s, t = (
            oracle.softmax([math.fsum(a * b for a, b in zip(row, h, strict=True)) for row in w.tolist()])
            for w, h in (
                (p.weight, p.hidden[n].tolist()),
                (p.teacher_weight, p.teacher_hidden[n].tolist()),
            )
        )
        assert out.divergence[n].item() == pytest.approx(oracle.divergence(s, t, beta), abs=1e-12)
        assert out.forward_kl[n].item() == pytest.approx(oracle.kl(t, s), abs=1e-12)
        assert out.reverse_kl[n].item() == pytest.approx(oracle.kl(s, t), abs=1e-12)
        assert out.student_entropy[n].item() == pytest.approx(oracle.entropy(s), abs=1e-12)
        assert out.teacher_entropy[n].item() == pytest.approx(oracle.entropy(t), abs=1e-12)
        assert out.top1_agreement[n].item() == float(s.index(max(s)) == t.index(max(t)))


def widened(p: Problem) -> Problem:
    """The same numbers in float32: what exact products of them are."""
    hidden, weight = p.hidden.detach().float().requires_grad_(), p.weight.detach().float().requires_grad_()
    teacher_hidden, teacher_weight = p.teacher_hidden.float(), p.teacher_weight.float()
    changed = replace(p, hidden=hidden, weight=weight, teacher_hidden=teacher_hidden, teacher_weight=teacher_weight)
    return changed if p.bias is None else replace(changed, bias=p.bias.detach().float().requires_grad_())


def worst(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """Of the gradients, the largest difference relative to the largest entry."""
    pairs = zip(got, want, strict=True)
    return max((a.double() - b.double()).abs().max().item() / b.double().abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accurate_logits_are_those_of_exact_products_in_any_dtype(beta: float, full: bool, dtype: torch.dtype):
    p = problem(5, dtype, full=full)
    exact = widened(p)
    got, want = fused(p, beta, chunk_size=3), plain(exact, beta)
    assert got.loss_sum.dtype == torch.float32
    assert_same(got, want, rtol=2e-4 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    grads = gradients(got, p)
    assert [x.dtype for x in grads] == [dtype] * len(grads)
    assert worst(grads, gradients(want, exact)) < 2 * torch.finfo(dtype).eps + 1e-5


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fast_logits_are_rounded_as_the_products_are(beta: float, full: bool, dtype: torch.dtype):
    p = problem(5, dtype, full=full)
    got, want = fused(p, beta, chunk_size=3, logits="fast"), plain(p, beta)
    assert got.loss_sum.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    tolerance = {"rtol": 8 * eps, "atol": 8 * eps} if full else {"rtol": 1e-5, "atol": 1e-6}  # bias, cap: rounded too
    assert_same(got, want, **tolerance)
    assert worst(gradients(got, p), gradients(want, p)) < 16 * eps


def test_accurate_logits_keep_the_gradient_within_3e_3_and_fast_ones_do_not():
    """The gradient of a large bfloat16 head: 3e-3 off at most with accurate logits, 2 % with fast ones."""
    hidden, weight, teacher_hidden, teacher_weight = (
        draw(*shape, seed=k, scale=scale, dtype=torch.bfloat16)
        for k, (shape, scale) in enumerate([((24, 64), 1.0), ((2500, 64), 0.4), ((24, 64), 1.0), ((2500, 64), 0.4)])
    )
    p = Problem(hidden.requires_grad_(), weight.requires_grad_(), None, teacher_hidden, teacher_weight, None, None)
    for beta in (0.0, 0.5, 1.0):
        wide = widened(p)
        exact = gradients(plain(wide, beta), wide)
        off = {}
        for logits in ("accurate", "fast"):
            got = gradients(fused(p, beta, chunk_size=10, logits=logits), p)
            off[logits] = max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True))
        assert off["accurate"] < 3.1e-3
        assert off["accurate"] < off["fast"] / 2


def test_float64_stays_float64_even_if_only_one_side_is():
    p = problem(6, torch.float32)
    wide = replace(p, teacher_hidden=p.teacher_hidden.double(), teacher_weight=p.teacher_weight.double())
    out = fused(wide, 0.5)
    assert out.loss_sum.dtype == out.divergence.dtype == torch.float64
    assert gradients(out, wide)[1].dtype == torch.float32
    in_float32 = fused(p, 0.5)  # the student's products stay float32, so the two agree to its precision and not beyond
    torch.testing.assert_close(out.divergence, in_float32.divergence.double(), rtol=1e-4, atol=1e-6)
    assert not torch.equal(out.divergence, in_float32.divergence.double())


def test_the_weight_gradient_is_accumulated_in_float32_over_bfloat16_chunks():
    """512 rows in chunks of one: a bf16 accumulator stops growing at 256 times the addend."""
    rows = 512
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    teacher = torch.tensor([[30.0], [-30.0]], dtype=torch.bfloat16)
    out = fused_linear_divergence(hidden, weight, hidden, teacher, beta=0.0, chunk_size=1)
    out.loss_sum.backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [-rows / 2, rows / 2]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("dtype", "logits"), [(torch.float64, "accurate"), (torch.bfloat16, "fast")])
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_the_kernels_for_wide_rows_give_what_the_plain_ones_do(
    beta: float, full: bool, dtype: torch.dtype, logits: Any, spread: float, monkeypatch: pytest.MonkeyPatch
):
    p = problem(23, dtype, full=full)
    p = replace(p, hidden=(p.hidden.detach() * spread).requires_grad_(), teacher_hidden=p.teacher_hidden * spread)
    want = fused(p, beta, chunk_size=3, logits=logits)
    monkeypatch.setattr(fused_linear, "kernels_for", lambda _: cpu)
    got = fused(p, beta, chunk_size=3, logits=logits)
    exact = dtype == torch.float64
    assert_same(got, want, **({"rtol": 1e-9, "atol": 1e-11} if exact else {"rtol": 2e-5, "atol": 2e-5 * spread}))
    for a, b in zip(gradients(got, p), gradients(want, p), strict=True):
        off = (a.double() - b.double()).abs().max().item()
        assert off <= (1e-12 if exact else 4 * torch.finfo(dtype).eps) * spread * max(1.0, b.abs().max().item())


# ------------------------------------------------------------------ identities and invariances


@pytest.mark.parametrize("beta", [*BETAS, 0.001, 0.999])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_student_equal_to_its_teacher_has_exactly_no_loss_and_no_gradient(beta: float, dtype: torch.dtype):
    p = problem(7, dtype)
    same = replace(
        p,
        teacher_hidden=p.hidden,
        teacher_weight=p.weight,
        teacher_bias=p.bias,
        options={"temperature": 0.6, "student_softcap": 3.0, "teacher_softcap": 3.0},
    )
    out = fused(same, beta, chunk_size=2)
    assert out.loss_sum.item() == 0.0
    assert out.forward_kl.abs().max().item() == out.reverse_kl.abs().max().item() == 0.0
    assert out.top1_agreement.tolist() == [1.0] * N
    for grad in gradients(out, same):
        assert grad.abs().max().item() == 0.0


@pytest.mark.parametrize("beta", BETAS)
def test_the_size_of_a_chunk_changes_nothing(beta: float):
    p = problem(8, torch.float32)
    whole = fused(p, beta)
    whole_gradients = gradients(whole, p)
    for options in ({"chunk_size": 1}, {"chunk_size": 2}, {"chunk_bytes": 1}, {"chunk_bytes": 3 * 2 * V * 4}):
        part = fused(p, beta, **options)
        assert_same(part, whole, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(gradients(part, p), whole_gradients, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ weights, masks, forbidden tokens


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_of_weight_zero_adds_nothing_whatever_it_holds(beta: float, poison: float):
    p = problem(9)
    assert p.weights is not None
    weights = p.weights.clone()
    weights[[0, 4]] = 0.0
    clean = replace(p, weights=weights)
    hidden, teacher_hidden = p.hidden.detach().clone(), p.teacher_hidden.clone()
    hidden[0], teacher_hidden[4] = poison, poison
    dirty = replace(clean, hidden=hidden.requires_grad_(), teacher_hidden=teacher_hidden)
    a, b = fused(clean, beta, chunk_size=3), fused(dirty, beta, chunk_size=3)
    assert a.loss_sum.item() == b.loss_sum.item()
    for x, y in zip(gradients(a, clean), gradients(b, dirty), strict=True):
        assert torch.equal(x, y)


def test_weights_may_have_any_float_dtype():
    p = problem(10, torch.float32)
    assert p.weights is not None
    halves = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.5, 0.25, 3.0])
    want = fused(replace(p, weights=halves), 0.5).loss_sum.item()
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert fused(replace(p, weights=halves.to(dtype)), 0.5).loss_sum.item() == want


def test_a_nan_in_a_counted_row_is_not_hidden():
    p = problem(11)
    hidden = p.hidden.detach().clone()
    hidden[2, 0] = math.nan
    for beta in BETAS:
        assert fused(replace(p, hidden=hidden), beta).loss_sum.isnan()


@pytest.mark.parametrize("beta", BETAS)
def test_a_token_that_both_biases_forbid_adds_nothing(beta: float):
    p = problem(12)
    assert p.bias is not None
    assert p.teacher_bias is not None
    bias, teacher_bias = p.bias.detach().clone(), p.teacher_bias.clone()
    bias[3], teacher_bias[3] = -math.inf, -math.inf
    options = {"temperature": 0.7, "student_scale": 0.8}
    barred = replace(p, bias=bias.requires_grad_(), teacher_bias=teacher_bias, options=options)
    keep = [v for v in range(V) if v != 3]
    less = replace(
        p,
        weight=p.weight.detach()[keep].requires_grad_(),
        bias=bias.detach()[keep].requires_grad_(),
        teacher_weight=p.teacher_weight[keep],
        teacher_bias=teacher_bias[keep],
        options=options,
    )
    a, b = fused(barred, beta, chunk_size=2), fused(less, beta, chunk_size=2)
    assert_same(a, b, rtol=1e-11, atol=1e-13)
    (dx, dw, db), (dx_less, dw_less, db_less) = gradients(a, barred), gradients(b, less)
    torch.testing.assert_close((dx, dw[keep], db[keep]), (dx_less, dw_less, db_less), rtol=1e-10, atol=1e-12)
    assert dw[3].abs().max().item() == db[3].item() == 0.0


def test_a_token_that_only_one_bias_forbids_costs_what_the_plain_functions_say():
    p = problem(13)
    assert p.bias is not None
    bias = p.bias.detach().clone()
    bias[3] = -math.inf
    barred = replace(p, bias=bias, options={})
    for beta in BETAS:
        assert_same(fused(barred, beta), plain(barred, beta), rtol=1e-11, atol=1e-13)
    assert fused(barred, 0.0).divergence.tolist() == [math.inf] * N
    assert fused(barred, 0.5).divergence.isfinite().all()


# ------------------------------------------------------------------ autograd


def test_no_rows_give_zero_and_not_none_gradients():
    p = problem(14, rows=0)
    out = fused(p, 0.5)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0.0
    for x in p.student:
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert x.grad.abs().sum().item() == 0.0
    assert out.divergence.shape == (0,)


@pytest.mark.parametrize("wanted", list(product([False, True], repeat=3)))
def test_gradients_go_only_where_they_are_asked_for(wanted: tuple[bool, bool, bool]):
    p = problem(15)
    want = gradients(plain(p, 0.5), p)
    hidden, weight, bias = (x.detach().requires_grad_(ask) for x, ask in zip(p.student, wanted, strict=True))
    out = fused(replace(p, hidden=hidden, weight=weight, bias=bias), 0.5, chunk_size=3)
    assert out.loss_sum.requires_grad == any(wanted)
    if not any(wanted):
        return
    (out.loss_sum * 0.37).backward()
    for x, ask, g in zip((hidden, weight, bias), wanted, want, strict=True):
        assert (x.grad is not None) == ask
        if ask:
            torch.testing.assert_close(x.grad, g, rtol=1e-10, atol=1e-12)


def test_everything_but_the_loss_is_detached_and_the_teacher_gets_nothing():
    p = problem(16)
    teacher = [x.clone().requires_grad_() for x in (p.teacher_hidden, p.teacher_weight)]
    out = fused(replace(p, teacher_hidden=teacher[0], teacher_weight=teacher[1]), 0.5)
    assert [f.name for f in fields(out) if getattr(out, f.name).requires_grad] == ["loss_sum"]
    out.loss_sum.backward()
    assert teacher[0].grad is None
    assert teacher[1].grad is None


def test_a_head_tied_to_the_embedding_collects_both_gradients():
    p = problem(17, full=False)
    ids = torch.arange(N) % V
    grads = []
    for call in (lambda q: fused(q, 0.5, chunk_size=2), lambda q: plain(q, 0.5)):
        embedding = p.weight.detach().clone().requires_grad_()
        hidden = torch.tanh(embedding[ids])
        call(replace(p, hidden=hidden, weight=embedding)).loss_sum.backward()
        grads.append(embedding.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)


def test_the_loss_may_be_scaled_upstream_and_back_propagated_twice():
    p = problem(18)
    out = fused(p, 0.5)
    once = torch.autograd.grad(out.loss_sum, p.student, retain_graph=True)
    again = torch.autograd.grad(out.loss_sum / 4 * -3, p.student)
    for a, b in zip(once, again, strict=True):
        torch.testing.assert_close(b, a * -0.75)


def test_a_second_derivative_is_an_error_and_not_a_wrong_number():
    p = problem(19)
    (grad, *_) = torch.autograd.grad(fused(p, 0.5).loss_sum ** 2, p.student, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_no_argument_is_changed():
    p = problem(20)
    tensors = [x for x in (*p.student, p.teacher_hidden, p.teacher_weight, p.teacher_bias, p.weights) if x is not None]
    before = [x.detach().clone() for x in tensors]
    fused(p, 0.3, chunk_size=2).loss_sum.backward()
    assert all(torch.equal(a, b) for a, b in zip(before, (x.detach() for x in tensors), strict=True))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("logits", ["accurate", "fast"])
def test_under_autocast_the_products_are_bfloat16_and_the_rest_float32(beta: float, logits: str):
    p = problem(21, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = fused(p, beta, chunk_size=3, logits=logits), plain(p, beta)
    exact = plain(p, beta)
    assert got.loss_sum.dtype == torch.float32
    assert_same(got, want, rtol=0.05, atol=0.03)
    assert abs(got.loss_sum.item() - exact.loss_sum.item()) > 1e-6, "the operands must have been rounded"
    grads = gradients(got, p)
    assert [x.dtype for x in grads] == [torch.float32] * len(grads)
    assert worst(grads, gradients(want, p)) < 0.06


def test_a_backward_pass_inside_autocast_is_the_same():
    p = problem(22, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = gradients(fused(p, 0.5), p)
        out = fused(p, 0.5)
        logprobs, _ = fused_linear_logprobs(p.hidden, p.weight, torch.arange(N))
        inside_logprobs = torch.autograd.grad(logprobs.sum(), (p.hidden, p.weight), retain_graph=True)
    for a, b in zip(inside, gradients(out, p), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(inside_logprobs, torch.autograd.grad(logprobs.sum(), (p.hidden, p.weight)), strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------ work and memory


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_as_large_as_the_logits_is_made(beta: float, dtype: torch.dtype):
    rows, chunk = 400, 20
    p = big(rows, dtype=dtype)
    with Watch() as watch:
        out = fused(p, beta, chunk_size=chunk)
        out.loss_sum.backward()
    allowed = max(chunk * 50, rows * 6)  # one tile, or the hidden states and the six statistics
    assert watch.largest <= allowed < rows * 50 / 8
    with Watch() as watch:
        plain(p, beta).loss_sum.backward()
    assert watch.largest >= rows * 50, "the watch must see the plain twin's logits"


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    ("dtype", "logits", "each"),
    [(torch.float32, "accurate", 1), (torch.bfloat16, "accurate", 2), (torch.bfloat16, "fast", 1)],
)
def test_training_costs_four_products_a_chunk_and_evaluation_two(
    beta: float, dtype: torch.dtype, logits: str, each: int
):
    """Accurate logits of a low precision take two products on each side."""
    p = replace(big(40, dtype=dtype), options={"student_softcap": 5.0})
    options: dict[str, Any] = {"chunk_size": 10, "logits": logits}
    assert products_of(lambda: fused(p, beta, **options).loss_sum.backward()) == 4 * (2 * each + 2)
    frozen_head = replace(p, weight=p.weight.detach(), bias=None)
    assert products_of(lambda: fused(frozen_head, beta, **options).loss_sum.backward()) == 4 * (2 * each + 1)
    with torch.no_grad():
        assert products_of(lambda: fused(p, beta, **options)) == 4 * 2 * each


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("rows", [10, 400])
def test_memory_is_two_tiles_and_the_gradients_however_many_rows(
    beta: float, rows: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fused_linear, "kernels_for", lambda _: cpu)  # a few rows of its own
    release_workspace()
    p = replace(big(rows), weights=None, bias=None, options={"temperature": 0.7})
    known = (p.hidden, p.weight, p.teacher_hidden, p.teacher_weight)
    with NewMemory(*known) as memory:
        out = fused(p, beta, chunk_size=10)
        out.loss_sum.backward()
    line, tile, grads = 64, 10 * 50 * 4, (rows * 4 + 50 * 4) * 4
    per_row = 6 * 4 * 4  # six numbers, a few times over
    assert sum(memory.sizes.values()) <= 2 * tile + grads + 4 * line + per_row * rows + 1000


def test_the_heads_gradient_becomes_the_leafs_without_a_copy_unless_the_graph_is_kept():
    p = replace(big(40), bias=None, weights=None)
    (fused(p, 0.5, chunk_size=10).loss_sum * 0.5).backward()
    assert p.weight.grad is not None
    lent = workspace._kept.lent() if workspace._kept.lent else None
    assert lent is not None
    assert p.weight.grad.data_ptr() == lent.ctypes.data
    first = p.weight.grad.clone()
    p.weight.grad = None
    out = fused(p, 0.5, chunk_size=10)
    out.loss_sum.backward(retain_graph=True)
    kept = p.weight.grad
    assert kept is not None
    p.weight.grad = None
    out.loss_sum.backward(retain_graph=True)
    assert p.weight.grad is not None
    assert p.weight.grad.data_ptr() != kept.data_ptr()
    torch.testing.assert_close(kept, 2 * first)
    torch.testing.assert_close(p.weight.grad, kept)


def test_gradients_that_are_kept_survive_the_next_call():
    p, other = (replace(big(40), bias=None, weights=None) for _ in range(2))
    fused(p, 0.5, chunk_size=10).loss_sum.backward()
    assert p.weight.grad is not None
    before = p.weight.grad.clone()
    for beta in (0.0, 1.0):
        fused(other, beta, chunk_size=7).loss_sum.backward()
    assert torch.equal(p.weight.grad, before)


def test_the_backward_pass_does_no_product():
    out = fused(big(40), 0.5, chunk_size=10)
    assert products_of(lambda: out.loss_sum.backward()) == 0


# ------------------------------------------------------------------ refusals


def test_heads_of_different_width_are_refused_with_the_cure():
    p = problem(30)
    with pytest.raises(ValueError, match=r"11 ids and teacher's 9.*OutputHead\.cut"):
        fused(replace(p, teacher_weight=p.teacher_weight[:9], teacher_bias=None), 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_hidden": torch.zeros(3, HT)}, "student has 7 rows and teacher 3"),
        ({"hidden": torch.zeros(N, HS + 1)}, r"wanted student_hidden \[N, H\].*got \[7, 6\] and \[11, 5\]"),
        ({"teacher_weight": torch.zeros(V, HT + 1)}, "wanted teacher_hidden"),
        ({"weights": torch.ones(N, 1)}, r"weights must be \[N\] = \[7\], got \[7, 1\]"),
        ({"bias": torch.zeros(3)}, r"student_bias must be \[V\] = \[11\], got \[3\]"),
        ({"options": {"temperature": 0.0}}, "temperature"),
        ({"options": {"student_softcap": -1.0}}, "softcap"),
        ({"options": {"chunk_size": 0}}, "chunk_size >= 1"),
        ({"options": {"chunk_size": 1, "chunk_bytes": 1}}, "not both"),
        ({"options": {"chunk_bytes": 0}}, "chunk_bytes must be >= 1"),
        ({"options": {"logits": "bf16"}}, "logits must be 'accurate' or 'fast', got 'bf16'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        fused(replace(problem(31), **change), 0.5)


def test_a_beta_outside_the_unit_interval_and_integers_are_refused():
    with pytest.raises(ValueError, match="beta"):
        fused(problem(32), 1.5)
    with pytest.raises(TypeError, match="must be floating"):
        fused(replace(problem(32), teacher_hidden=torch.zeros(N, HT).long()), 0.5)
    with pytest.raises(ValueError, match=r"target_ids must be \[N\] = \[7\], got \[6\]"):
        fused_linear_logprobs(problem(32).hidden, problem(32).weight, torch.zeros(6).long())


def test_float16_logits_beyond_its_range_are_as_float32s():
    """A product of 1e5 is no float16; the divergence between such rows is a number all the same."""
    hidden, weight = torch.full((2, 4), 200.0).half(), torch.zeros(5, 4).half()
    weight[1] = 200.0
    student = hidden.clone().requires_grad_()
    out = fused_linear_divergence(student, weight, -hidden, weight, beta=0.5)
    assert out.loss_sum.isfinite()
    wide = fused_linear_divergence(hidden.float(), weight.float(), -hidden.float(), weight.float(), beta=0.5)
    torch.testing.assert_close(out.divergence, wide.divergence)
