# SPDX-License-Identifier: Apache-2.0
"""The fused losses on the Triton kernels: interpreted against the plain twin, and on a GPU against float64 on a CPU.

What only a GPU can show stands here too: that nothing waits for it, and how much memory a large head takes.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cohobate.functional import fused_linear
from cohobate.functional.fused_linear import fused_linear_divergence

from .heads import Problem, assert_same, fused, gradients, plain, problem
from .oracle import BETAS, draw

triton = pytest.importorskip("triton")
from cohobate.functional.kernels import gpu  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter


@pytest.fixture(autouse=True)
def right_way_of_running(request: pytest.FixtureRequest):
    interpreting = triton.knobs.runtime.interpret
    if request.node.get_closest_marker("gpu"):
        assert not interpreting, "TRITON_INTERPRET is set: the GPU would not be used. Run `make test-gpu`."
    elif not interpreting:
        pytest.skip("TRITON_INTERPRET is 0: kernels on CPU tensors need the interpreter")


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm()).item()


# ------------------------------------------------------------------ interpreted


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("full", [False, True])
def test_the_fused_loss_on_the_gpu_kernels_equals_the_plain_twin(
    beta: float, full: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fused_linear, "kernels_for", lambda logits: gpu)
    p = problem(1, full=full)
    got, want = fused(p, beta, chunk_size=4), plain(p, beta)
    assert_same(got, want, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(gradients(got, p), gradients(want, p), rtol=1e-10, atol=1e-12)


def test_the_fused_loss_in_bfloat16_on_the_gpu_kernels_is_close_to_the_plain_twin(monkeypatch: pytest.MonkeyPatch):
    p = problem(2, torch.bfloat16, full=False)
    want = gradients(plain(p, 0.5), p)
    monkeypatch.setattr(fused_linear, "kernels_for", lambda logits: gpu)
    for a, b in zip(gradients(fused(p, 0.5, chunk_size=4), p), want, strict=True):
        assert relative(a, b) < 2e-2  # the interpreter cuts digits where a GPU rounds


# ------------------------------------------------------------------ on a GPU


def large(dtype: torch.dtype, device: str, *, full: bool) -> Problem:
    """300 rows, 5,003 ids; the numbers are bfloat16's in every dtype."""

    def make(seed: int, *shape: int, scale: float) -> Tensor:
        return draw(*shape, seed=seed, scale=scale).bfloat16().to(device, dtype)

    options = {"temperature": 0.7, "student_scale": 0.8, "student_softcap": 30.0, "teacher_softcap": 20.0}
    return Problem(
        hidden=make(1, 300, 64, scale=1.0).requires_grad_(),
        weight=make(2, 5003, 64, scale=0.4).requires_grad_(),
        bias=make(3, 5003, scale=0.3).requires_grad_() if full else None,
        teacher_hidden=make(4, 300, 96, scale=1.0),
        teacher_weight=make(5, 5003, 96, scale=0.3),
        teacher_bias=make(6, 5003, scale=0.3) if full else None,
        weights=make(7, 300, scale=1.0).abs() if full else None,
        options=options if full else {},
    )


@pytest.mark.gpu
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("dtype", "gradient_error", "value_error"),
    [
        (torch.bfloat16, 3e-3, 1e-4),
        (torch.float16, 3e-3, 1e-4),
        (torch.float32, 1e-4, 1e-4),
        (torch.float64, 1e-9, 1e-11),
    ],
    ids=str,
)
def test_the_fused_loss_on_a_gpu_equals_float64(
    beta: float, full: bool, dtype: torch.dtype, gradient_error: float, value_error: float
):
    exact, p = large(torch.float64, "cpu", full=full), large(dtype, "cuda", full=full)
    want, got = plain(exact, beta), fused(p, beta, chunk_size=128)
    assert relative(got.divergence, want.divergence) < value_error
    assert relative(got.student_entropy, want.student_entropy) < value_error
    assert relative(got.teacher_entropy, want.teacher_entropy) < value_error
    assert got.loss_sum.item() == pytest.approx(want.loss_sum.item(), rel=value_error)
    for name, a, b in zip(("dX", "dW", "db"), gradients(got, p), gradients(want, exact), strict=False):
        assert relative(a, b) < gradient_error, name


@pytest.mark.gpu
@pytest.mark.parametrize("beta", BETAS)
def test_on_a_gpu_a_student_equal_to_its_teacher_has_exactly_no_loss(beta: float):
    p = large(torch.bfloat16, "cuda", full=False)
    same = replace(p, teacher_hidden=p.hidden.detach(), teacher_weight=p.weight.detach(), options={"temperature": 0.7})
    out = fused(same, beta)
    assert out.divergence.abs().max() == 0
    assert all(grad.abs().max() == 0 for grad in gradients(out, same))


@pytest.mark.gpu
@pytest.mark.parametrize("full", [False, True])
def test_neither_pass_waits_for_the_gpu(full: bool):
    p = large(torch.bfloat16, "cuda", full=full)
    gradients(fused(p, 0.5, chunk_size=128), p)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused(p, 0.5, chunk_size=128).loss_sum.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_large_head_takes_512_mb_above_its_gradients(beta: float):
    """Beside inputs and gradients; dW is float32 until the backward pass, which gives it back in bfloat16."""
    rows, hidden_size, vocab_size = 8192, 4096, 151936
    generator = torch.Generator("cuda").manual_seed(0)

    def make(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(scale)

    hidden = make(rows, hidden_size, scale=1.0).requires_grad_()
    weight = make(vocab_size, hidden_size, scale=0.02).requires_grad_()
    teacher = (make(rows, hidden_size, scale=1.0), make(vocab_size, hidden_size, scale=0.02))
    wide_weight = 4 * weight.numel()
    small = 2 * hidden.numel() + 2**20  # dX and numbers per row
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = fused_linear_divergence(hidden, weight, *teacher, beta=beta)
    assert torch.cuda.max_memory_allocated() - before - wide_weight - small <= 512 * 2**20
    out.loss_sum.backward()
    narrow_weight = 2 * weight.numel()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak - wide_weight - narrow_weight - 2 * small <= 512 * 2**20
