# SPDX-License-Identifier: Apache-2.0
"""The top-k divergence from hidden states against its plain twin and plain floats, for every tail and option."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cohobate.functional import fused_topk
from cohobate.functional.divergences import divergence
from cohobate.functional.fused_linear import FusedDivergence, fused_linear_divergence
from cohobate.functional.fused_topk import fused_linear_topk
from cohobate.functional.logprobs import entropy, head_logits, log_softmax
from cohobate.functional.topk import topk_divergence

from . import oracle
from .heads import N, Problem, V, gradients, problem, products_of
from .memory import NewMemory
from .oracle import BETAS

TAILS = ("bucket", "renormalize", "drop")
OPTIONS = {"temperature": 0.7, "scale": 0.8, "softcap": 2.0}


def support(k: int, *, seed: int = 50, rows: int = N, vocab: int = V, temperature: float = 1.0) -> dict[str, Tensor]:
    """A teacher's k largest in no particular order, with true log-probabilities."""
    logprobs = log_softmax(oracle.draw(rows, vocab, seed=seed), temperature=temperature)
    ids = logprobs.topk(k, dim=-1).indices.flip(-1)
    return {"teacher_ids": ids, "teacher_logprobs": logprobs.gather(-1, ids)}


def fused(p: Problem, beta: float, teacher: dict[str, Tensor], **more: Any) -> FusedDivergence:
    return fused_linear_topk(p.hidden, p.weight, **teacher, beta=beta, weights=p.weights, bias=p.bias, **more)


def plain(p: Problem, beta: float, teacher: dict[str, Tensor], **options: Any) -> FusedDivergence:
    """The same through [N, V] and autograd, the bucketed view from probabilities."""
    tail, temperature = options.pop("tail", "bucket"), options.pop("temperature", 1.0)
    logits = head_logits(p.hidden, p.weight, bias=p.bias, **options)
    value = topk_divergence(logits, **teacher, beta=beta, tail=tail, temperature=temperature)
    s, ids, t = log_softmax(logits.detach(), temperature=temperature), *teacher.values()
    coarse_s, coarse_t = s.gather(-1, ids), t
    if ids.shape[1] < V:
        outside = torch.ones_like(s).scatter(-1, ids, 0.0)
        coarse_s = torch.cat([coarse_s, (s.exp() * outside).sum(-1, keepdim=True).log()], -1)
        coarse_t = torch.cat([t, (1 - t.exp().sum(-1, keepdim=True)).log()], -1)
    best = ids.gather(-1, t.argmax(-1, keepdim=True)).squeeze(-1)
    return FusedDivergence(
        loss_sum=(value if p.weights is None else value * p.weights).sum(),
        divergence=value.detach(),
        student_entropy=entropy(s),
        teacher_entropy=entropy(coarse_t),
        top1_agreement=(s.argmax(-1) == best).to(s.dtype),
        forward_kl=divergence(coarse_s, coarse_t, beta=0.0),
        reverse_kl=divergence(coarse_s, coarse_t, beta=1.0),
    )


def assert_equal(got: FusedDivergence, want: FusedDivergence, p: Problem) -> None:
    for name in (f.name for f in fields(FusedDivergence)):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradients(got, p), gradients(want, p), rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------ equality with the plain twin


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("tail", "k"), [(tail, k) for tail in TAILS for k in (1, 3, V) if (tail, k) != (TAILS[1], 1)])
@pytest.mark.parametrize("full", [False, True])
def test_value_statistics_and_every_gradient_equal_the_plain_twin(beta: float, tail: str, k: int, full: bool):
    p, options = problem(51, full=full), OPTIONS if full else {}
    teacher = support(k, temperature=options.get("temperature", 1.0))
    assert_equal(
        fused(p, beta, teacher, tail=tail, chunk_size=3, **options), plain(p, beta, teacher, tail=tail, **options), p
    )


@pytest.mark.parametrize("option", [*OPTIONS, "bias", "weights"])
@pytest.mark.parametrize("chunk_size", [1, N, 100])
def test_each_option_alone_equals_the_plain_twin_and_matters(option: str, chunk_size: int):
    p, everything, teacher = problem(52, full=False), problem(52), support(4)
    options: dict[str, float] = {}
    if option in OPTIONS:
        options = {option: OPTIONS[option]}
    else:
        p = replace(p, **{option: getattr(everything, option)})
    got = fused(p, 0.3, teacher, chunk_size=chunk_size, **options)
    assert_equal(got, plain(p, 0.3, teacher, **options), p)
    bare = fused(problem(52, full=False), 0.3, teacher)
    assert abs(got.loss_sum.item() - bare.loss_sum.item()) > 1e-3


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", TAILS)
def test_gradcheck_in_float64(beta: float, tail: str):
    p, teacher = problem(53, rows=2), support(4, rows=2)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = replace(p, hidden=hidden, weight=weight, bias=bias)
        return fused(own, beta, teacher, tail=tail, chunk_size=1, softcap=2.0).loss_sum

    assert torch.autograd.gradcheck(loss, p.student, fast_mode=True)


@pytest.mark.parametrize("beta", BETAS)
def test_one_row_equals_plain_floats(beta: float):
    p = problem(54, full=False, rows=1)
    teacher = support(3, rows=1)
    ids, p_t = teacher["teacher_ids"][0].tolist(), teacher["teacher_logprobs"][0].exp().tolist()
    row = [math.fsum(a * b for a, b in zip(w, p.hidden[0].tolist(), strict=True)) for w in p.weight.tolist()]
    p_s = oracle.softmax(row)
    coarse = [p_s[v] for v in ids] + [math.fsum(x for v, x in enumerate(p_s) if v not in ids)]
    coarse_t = [*p_t, 1 - math.fsum(p_t)]
    out = fused(p, beta, teacher)
    assert out.divergence.item() == pytest.approx(oracle.divergence(coarse, coarse_t, beta), abs=1e-12)
    assert out.student_entropy.item() == pytest.approx(oracle.entropy(p_s), abs=1e-12)
    assert out.teacher_entropy.item() == pytest.approx(oracle.entropy(coarse_t), abs=1e-12)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", TAILS)
def test_the_whole_vocabulary_equals_the_full_divergence(beta: float, tail: str):
    p = problem(55, full=False)
    logits = head_logits(p.teacher_hidden, p.teacher_weight)
    ids = torch.arange(V).flip(0).expand(N, V)
    got = fused(p, beta, {"teacher_ids": ids, "teacher_logprobs": log_softmax(logits).gather(-1, ids)}, tail=tail)
    want = fused_linear_divergence(p.hidden, p.weight, p.teacher_hidden, p.teacher_weight, beta=beta)
    assert_equal(got, want, p)


# ------------------------------------------------------------------ ends, NaN, precision


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_row_of_weight_zero_may_be_anything(beta: float, softcap: float | None):
    p, teacher = problem(56), support(3)
    hidden = p.hidden.detach().clone()
    hidden[2] = math.nan
    teacher["teacher_logprobs"][2] = math.nan
    weights = torch.ones(N, dtype=torch.float64)
    weights[2] = 0.0
    out = fused(
        replace(p, hidden=hidden.requires_grad_(), weights=weights), beta, teacher, softcap=softcap, chunk_size=4
    )
    out.loss_sum.backward()
    assert out.loss_sum.isfinite()
    for x in (hidden, p.weight, p.bias):
        assert x is not None
        assert x.grad is not None
        assert x.grad.isfinite().all()
    assert hidden.grad is not None
    assert [bool(row.any()) for row in hidden.grad] == [n != 2 for n in range(N)]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", TAILS)
def test_a_rest_that_the_student_forbids_has_a_finite_gradient(beta: float, tail: str):
    p = problem(57)
    bias = torch.full((V,), -math.inf, dtype=torch.float64)
    bias[:3] = 0.0
    ids = torch.arange(3).expand(N, 3)
    teacher = {"teacher_ids": ids, "teacher_logprobs": oracle.log_of(0.5, 0.2, 0.1).expand(N, 3)}
    out = fused(replace(p, bias=bias.requires_grad_()), beta, teacher, tail=tail)
    out.loss_sum.backward()
    for x in (p.hidden, p.weight, bias):
        assert x.grad is not None
        assert x.grad.isfinite().all()
    assert p.weight.grad is not None
    assert p.weight.grad[3:].abs().max().item() == 0.0


def test_a_sure_student_still_learns_about_the_tail():
    weight = torch.tensor([[20.0], [0.0], [0.0]], requires_grad=True)
    out = fused_linear_topk(torch.ones(1, 1), weight, torch.tensor([[0]]), torch.tensor([[0.5]]).log(), beta=0.0)
    out.loss_sum.backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == pytest.approx([0.5, -0.25, -0.25], abs=1e-6)


@pytest.mark.parametrize("logits", ["accurate", "fast"])
def test_half_precision_is_near_and_accurate_logits_are_nearer(logits: str):
    p, teacher = problem(58, torch.bfloat16), support(4)
    exact = problem(58, torch.bfloat16)
    wide = Problem(
        hidden=exact.hidden.detach().double().requires_grad_(),
        weight=exact.weight.detach().double().requires_grad_(),
        bias=None if exact.bias is None else exact.bias.detach().double().requires_grad_(),
        teacher_hidden=p.teacher_hidden,
        teacher_weight=p.teacher_weight,
        teacher_bias=None,
        weights=None if exact.weights is None else exact.weights.double(),
    )
    teacher32 = {**teacher, "teacher_logprobs": teacher["teacher_logprobs"].float()}
    got, want = fused(p, 0.5, teacher32, logits=logits), fused(wide, 0.5, teacher)
    tolerance = 1e-4 if logits == "accurate" else 3e-2
    assert got.loss_sum.dtype == torch.float32
    torch.testing.assert_close(got.divergence.double(), want.divergence, rtol=tolerance, atol=tolerance)
    for a, b in zip(gradients(got, p), gradients(want, wide), strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() < 3e-2 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("tail", TAILS)
def test_a_wide_vocabulary_equals_the_twin_in_float64(dtype: torch.dtype, softcap: float | None, tail: str):
    vocab, rows = 2500, 5  # wide enough for the kernels that work row by row
    leaves = [oracle.draw(*shape, seed=i, scale=1.0, dtype=dtype) for i, shape in ((65, (rows, 4)), (66, (vocab, 4)))]
    teacher = support(6, rows=rows, vocab=vocab)
    h, w = (x.clone().requires_grad_() for x in leaves)
    ids, logprobs = teacher["teacher_ids"], teacher["teacher_logprobs"].float()
    out = fused_linear_topk(h, w, ids, logprobs, beta=0.3, tail=tail, softcap=softcap, chunk_size=2)  # pyright: ignore[reportArgumentType]
    out.loss_sum.backward()
    exact_h, exact_w = (x.double().requires_grad_() for x in leaves)
    logits = head_logits(exact_h, exact_w, softcap=softcap)
    want = topk_divergence(logits, **teacher, beta=0.3, tail=tail)  # pyright: ignore[reportArgumentType]
    want.sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.divergence.double(), want.detach(), rtol=1e-4, atol=1e-6)
    for got, exact in ((h.grad, exact_h.grad), (w.grad, exact_w.grad)):
        assert got is not None
        assert exact is not None
        assert (got.double() - exact).norm() < tolerance * exact.norm()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter
def test_the_interpreted_gpu_kernels_give_the_same(monkeypatch: pytest.MonkeyPatch):
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is 0: kernels on CPU tensors need the interpreter")
    from cohobate.functional.kernels import gpu

    monkeypatch.setattr(fused_topk, "kernels_for", lambda logits: gpu)
    p, teacher = problem(68), support(4)
    assert_equal(fused(p, 0.3, teacher, softcap=2.0, chunk_size=4), plain(p, 0.3, teacher, softcap=2.0), p)


def test_no_rows_give_zeros_with_a_gradient_path():
    p = problem(59, rows=0)
    out = fused(p, 0.5, support(3, rows=0))
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0.0
    assert out.divergence.shape == (0,)
    for x in p.student:
        assert x.grad is not None
        assert x.grad.abs().sum().item() == 0.0


# ------------------------------------------------------------------ work and memory


def test_three_products_with_gradient_and_one_without():
    p, teacher = problem(60, torch.float32), support(3)
    teacher["teacher_logprobs"] = teacher["teacher_logprobs"].float()
    chunks = 3

    def run() -> None:
        fused(p, 0.5, teacher, chunk_size=3).loss_sum.backward()

    assert products_of(run) == 3 * chunks
    with torch.no_grad():
        assert products_of(lambda: fused(p, 0.5, teacher, chunk_size=3)) == chunks


def test_memory_is_gradients_and_tiles_whatever_the_number_of_rows():
    vocab, hidden = 97, 4

    def largest(rows: int) -> int:
        h, w = (
            oracle.draw(rows, hidden, seed=61).requires_grad_(),
            oracle.draw(vocab, hidden, seed=62).requires_grad_(),
        )
        teacher = support(5, rows=rows, vocab=vocab)
        with NewMemory(h, w, *teacher.values()) as memory:
            fused_linear_topk(h, w, **teacher, beta=0.5, chunk_size=8).loss_sum.backward()
        return memory.larger_than(8 * vocab * 8 + 64)  # one tile of float64, which begins where a cache line does

    assert largest(40) == 0
    assert largest(300) == largest(600) == 2  # six numbers a row, and dX


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_ids": torch.zeros(N - 1, 2).long()}, rf"teacher_ids must be \[N, K\] with N = {N}"),
        ({"teacher_logprobs": torch.zeros(N, 1)}, "must have one shape"),
        ({"weights": torch.ones(N + 1)}, rf"weights must be \[N\] = \[{N}\]"),
        ({"beta": 1.5}, "beta must be in"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"tail": "clamp"}, "tail must be"),
        ({"logits": "exact"}, "logits must be 'accurate' or 'fast'"),
        ({"chunk_size": 1, "chunk_bytes": 1}, "not both"),
        ({"softcap": -1.0}, "softcap"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str):
    p = problem(63)
    with pytest.raises(ValueError, match=message):
        fused_linear_topk(p.hidden, p.weight, **{**support(2), "beta": 0.5, **change})


def test_a_support_whose_loss_is_identically_zero_is_refused():
    p = problem(64)
    with pytest.raises(ValueError, match="identically zero"):
        fused_linear_topk(p.hidden, p.weight, **support(1), beta=0.5, tail="renormalize")
