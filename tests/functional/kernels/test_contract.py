# SPDX-License-Identifier: Apache-2.0
"""One contract, every backend that runs on a CPU without help: against probability space in float64, and their twin.

The reference is written from the definitions and knows no logarithm of a sum: probabilities, their logarithms, sums.
(The Triton kernels, which want an interpreter here, meet the same demands in `test_gpu.py`.)
"""

import math
import threading
from types import ModuleType

import pytest
import torch
from torch import Tensor

from cohobate.functional.kernels import compose, cpu, kernels_for, plain
from cohobate.functional.moments import pair_moments, side_moments

from .. import oracle
from ..oracle import BETAS, draw

backend = pytest.mark.parametrize("kernels", [plain, cpu], ids=["plain", "cpu"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
spreads = pytest.mark.parametrize("spread", [1.0, 60.0])
N, V = 4, 37
SCALES = (0.7, 1.3)


def tiles(dtype: torch.dtype = torch.float32, spread: float = 1.0, width: int = V) -> tuple[Tensor, Tensor]:
    s, t = (draw(N, width, seed=k, scale=spread) for k in (1, 2))
    return s.clamp(-6e4, 6e4).to(dtype), t.clamp(-6e4, 6e4).to(dtype)


def definition(student: Tensor, teacher: Tensor, beta: float, scales: tuple[float, float] = SCALES) -> Tensor:
    """`divergence_rows`' six numbers, float64 [6, n]."""
    s, t = student.double() * scales[0], teacher.double() * scales[1]
    p, q = s.softmax(-1), t.softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a > 0, a * (a / b).log(), 0.0).sum(-1)

    def plogp(a: Tensor) -> Tensor:
        return torch.where(a > 0, a * a.log(), 0.0).sum(-1)

    m = beta * q + (1 - beta) * p
    value = kl(q, p) if beta == 0 else kl(p, q) if beta == 1 else beta * kl(q, m) + (1 - beta) * kl(p, m)
    agree = (s.argmax(-1) == t.argmax(-1)).double()
    return torch.stack([value, -plogp(p), -plogp(q), agree, kl(q, p), kl(p, q)])


def slope(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The gradient by the student's scaled logits, float64, by autograd through probability space."""
    s = (student.double() * SCALES[0]).requires_grad_()
    (grad,) = torch.autograd.grad(definition(s, teacher, beta, (1.0, SCALES[1]))[0].sum(), s)
    return grad


def close(got: Tensor, want: Tensor, dtype: torch.dtype, spread: float = 1.0) -> None:
    exact = dtype == torch.float64
    rtol, atol = (1e-9, 1e-11) if exact else (2e-5, 2e-6 * spread)
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol)


@backend
@dtypes
@spreads
@pytest.mark.parametrize("beta", BETAS)
def test_rows_and_gradient_equal_the_definition(kernels: ModuleType, dtype: torch.dtype, spread: float, beta: float):
    s, t = tiles(dtype, spread)
    coefficient = torch.tensor([1.0, 0.0, -2.5, 0.5])
    out = torch.full((N, V), 9.0, dtype=plain.upcast(s).dtype)
    six = kernels.divergence_rows(s, t, beta, coefficient, out, SCALES)
    assert six.dtype == out.dtype
    if spread == 1.0 or dtype == torch.float64:  # at 60 a probability of float64 may be 0 where a logit is not
        close(six, definition(s, t, beta), dtype)
        close(out, coefficient.double()[:, None] * slope(s, t, beta), dtype)
    twin = torch.empty_like(out)
    close(six, plain.divergence_rows(s, t, beta, coefficient, twin, SCALES), dtype, spread)
    close(out, twin, dtype, spread)
    assert out[1].abs().max() == 0
    assert torch.equal(kernels.divergence_rows(s, t, beta, scales=SCALES), six)


@backend
@dtypes
@spreads
@pytest.mark.parametrize("beta", BETAS)
def test_the_passes_compose_to_the_rows(kernels: ModuleType, dtype: torch.dtype, spread: float, beta: float):
    s, t = tiles(dtype, spread)
    coefficient = torch.tensor([1.0, 0.0, -2.5, 0.5])
    want, got = (torch.empty(N, V, dtype=plain.upcast(s).dtype) for _ in range(2))
    six = plain.divergence_rows(s, t, beta, coefficient, want, SCALES)
    close(compose.divergence_of_passes(kernels, s, t, beta, coefficient, got, SCALES), six, dtype, spread)
    close(got, want, dtype, spread)


@backend
@dtypes
@spreads
def test_sums_equal_the_twins(kernels: ModuleType, dtype: torch.dtype, spread: float):
    s, t = tiles(dtype, spread)
    maxima, sums = kernels.pair_sums(s, t, SCALES)
    want_maxima, want = plain.pair_sums(s, t, SCALES)
    assert maxima.dtype == sums.dtype == want.dtype
    close(maxima, want_maxima, dtype)
    close(sums, want, dtype, spread)
    log_z = pair_moments(maxima, sums).log_z
    for beta in (0.1, 0.5, 0.9):
        want = plain.mixture_sums(s, t, log_z, beta, SCALES)
        close(kernels.mixture_sums(s, t, log_z, beta, SCALES), want, dtype, spread)


@backend
@dtypes
@spreads
def test_one_side_equals_the_definition(kernels: ModuleType, dtype: torch.dtype, spread: float):
    x, _ = tiles(dtype, spread)
    log_z, entropy = side_moments(*kernels.side_sums(x, 0.7))
    logp = (x.double() * 0.7).log_softmax(-1)
    close(log_z, (x.double() * 0.7).logsumexp(-1), dtype, spread)
    close(entropy, -(logp.exp() * logp).sum(-1), dtype, spread)
    constant, rising = torch.tensor([1.0, 0.0, -2.0, 0.3]), torch.tensor([0.5, 0.0, 0.0, -1.0])
    for by_logp in (None, rising):
        out = torch.full((N, V), 9.0, dtype=log_z.dtype)
        kernels.softmax_gradient(x, log_z, constant, by_logp, out, 0.7)
        factor = constant.double()[:, None] + (0.0 if by_logp is None else by_logp.double()[:, None] * logp)
        close(out, logp.exp() * factor, dtype, spread)
    assert torch.equal(kernels.argmax(x), x.argmax(-1))


@backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("beta", [*BETAS, 0.001, 0.999])
def test_identical_sides_give_exactly_nothing(kernels: ModuleType, dtype: torch.dtype, beta: float):
    s, _ = tiles(dtype, 8.0, width=3000)
    s[1] += 50  # beyond the level from which the maximum is taken off
    out = torch.ones(s.shape)
    six = kernels.divergence_rows(s, s.clone(), beta, torch.ones(N), out, (0.7, 0.7))
    assert six[[0, 4, 5]].abs().max() == 0
    assert six[3].tolist() == [1.0] * N
    assert out.abs().max() == 0


@pytest.mark.parametrize("beta", [0.001, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_nearly_identical_sides_keep_their_digits(beta: float):
    s, noise = tiles(torch.float32, 3.0, width=3000)
    t = s + 1e-3 * noise
    got, want = torch.empty_like(s), torch.empty(s.shape, dtype=torch.float64)
    ones = torch.ones(N)
    six = cpu.divergence_rows(s, t, beta, ones, got)
    exact = plain.divergence_rows(s.double(), t.double(), beta, ones.double(), want)
    assert (got - want).norm() < 1e-6 * want.norm()
    if beta in (0.1, 0.5, 0.9):
        torch.testing.assert_close(six[0].double(), exact[0], rtol=5e-3, atol=1e-10)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("width", [49_152, 50_257])
def test_sums_over_a_real_vocabulary_keep_their_digits(beta: float, width: int):
    """A float32 sum over the whole row is wrong in the fifth digit."""
    s, t = tiles(torch.float32, 3.0, width=width)
    got, want = torch.empty_like(s), torch.empty(s.shape, dtype=torch.float64)
    ones = torch.ones(N)
    six = cpu.divergence_rows(s, t, beta, ones, got)
    exact = plain.divergence_rows(s.double(), t.double(), beta, ones.double(), want)
    torch.testing.assert_close(six.double(), exact, rtol=4e-6, atol=0)
    assert (got - want).norm() < 8e-6 * want.norm()


@backend
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("offset", [-12.0, -1.5, 0.9, 12.0])
def test_a_constant_added_to_one_sides_logits_changes_nothing(kernels: ModuleType, beta: float, offset: float):
    s, t = tiles()
    t = t + offset
    out = torch.empty_like(s)
    six = kernels.divergence_rows(s, t, beta, torch.ones(N), out)
    torch.testing.assert_close(six.double(), definition(s, t, beta, (1.0, 1.0)), rtol=1e-4, atol=1e-5)
    moved = torch.empty_like(s)
    kernels.divergence_rows(s, t - offset, beta, torch.ones(N), moved)
    torch.testing.assert_close(out, moved, rtol=1e-4, atol=1e-6)


@backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", BETAS)
def test_forbidden_tokens_and_rows_without_weight(kernels: ModuleType, dtype: torch.dtype, beta: float):
    """Row 0 forbids a token on both sides, 1 on the student's, 2 on the teacher's; 3 is poison without weight."""
    s, t = tiles(dtype)
    s[0, 5] = t[0, 5] = s[1, 6] = t[2, 7] = -math.inf
    s[3, 0], t[3, 1] = math.nan, math.inf
    out = torch.empty_like(s)
    six = kernels.divergence_rows(s, t, beta, torch.tensor([1.0, 1.0, 1.0, 0.0]), out, SCALES)
    want = definition(s[:3], t[:3], beta)
    close(six[:, :3], want, dtype)
    assert six[4, 1] == math.inf
    assert six[5, 2] == math.inf
    keep = [v for v in range(V) if v != 5]
    close(out[:1, keep], slope(s[:1, keep], t[:1, keep], beta), dtype)
    assert out[0, 5] == 0
    pull = -(t[1].double() * SCALES[1]).softmax(-1)[6] if beta == 0 else torch.tensor(0.0)  # the teacher's, at beta 0
    close(out[1, 6], pull, dtype)
    assert out[3].abs().max() == 0
    # pass by pass
    again = torch.empty_like(s)
    compose.divergence_of_passes(kernels, s, t, beta, torch.tensor([1.0, 1.0, 1.0, 0.0]), again, SCALES)
    torch.testing.assert_close(again, out, rtol=2e-5, atol=2e-6, equal_nan=True)
    log_z, entropy = side_moments(*kernels.side_sums(s[:3], 1.0))
    close(entropy[:2], definition(s[:2], t[:2], 0.0, (1.0, 1.0))[1], dtype)
    grad = kernels.softmax_gradient(s[:3], log_z, torch.ones(3), torch.ones(3), torch.empty_like(s[:3]))
    assert grad[0, 5] == grad[1, 6] == 0
    assert grad.isfinite().all()


@backend
def test_a_row_that_forbids_everything(kernels: ModuleType):
    s, t = tiles()
    s[2] = -math.inf
    maxima, sums = kernels.pair_sums(s, t)
    assert maxima[0, 2] == -math.inf
    assert sums[0, 2] == 0
    assert pair_moments(maxima, sums).reverse_kl[2].isnan()
    out = torch.ones_like(s)
    kernels.divergence_rows(s, t, 0.5, torch.tensor([1.0, 1.0, 0.0, 1.0]), out)
    assert out[2].abs().max() == 0
    assert out.isfinite().all()


@backend
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("over", ["student", "teacher"])
def test_the_gradient_may_take_the_place_of_a_side(kernels: ModuleType, beta: float, dtype: torch.dtype, over: str):
    s, t = tiles(dtype)
    want = torch.empty_like(s)
    six = kernels.divergence_rows(s, t, beta, torch.ones(N), want)
    a, b = s.clone(), t.clone()
    assert torch.equal(kernels.divergence_rows(a, b, beta, torch.ones(N), a if over == "student" else b), six)
    assert torch.equal(a if over == "student" else b, want)
    assert torch.equal(b if over == "student" else a, t if over == "student" else s)


@backend
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_narrower_gradient_may_begin_where_the_students_rows_do(kernels: ModuleType, beta: float):
    s, t = tiles()
    s[1, 3] = t[1, 3] = -math.inf  # a row that is done again
    want, ones = torch.empty(N, V, dtype=torch.bfloat16), torch.ones(N)
    six = kernels.divergence_rows(s, t, beta, ones, want)
    for by_passes in (False, True):
        a = s.clone()
        out = a.view(torch.bfloat16)[:, :V]
        if by_passes:
            compose.divergence_of_passes(kernels, a, t, beta, ones, out)
            torch.testing.assert_close(out, want)
        else:
            assert torch.equal(kernels.divergence_rows(a, t, beta, ones, out), six)
            assert torch.equal(out, want)


@backend
@pytest.mark.parametrize(("rows", "width"), [(0, 5), (3, 0), (1, 1), (2, 1)])
def test_tiles_may_be_empty_or_one_id_wide(kernels: ModuleType, rows: int, width: int):
    s, t = torch.randn(rows, width), torch.randn(rows, width)
    maxima, sums = kernels.pair_sums(s, t)
    assert maxima.shape == (2, rows)
    assert sums.shape == (6, rows)
    assert kernels.mixture_sums(s, t, torch.zeros(2, rows), 0.5).shape == (2, rows)
    assert kernels.side_sums(s)[1].shape == (2, rows)
    numbers = torch.zeros(2, rows), torch.zeros(rows), torch.ones(rows)
    assert kernels.pair_gradient(s, t, *numbers, 0.5, torch.empty_like(s)).shape == (rows, width)
    assert kernels.softmax_gradient(s, *numbers[0], numbers[2], torch.empty_like(s)).shape == (rows, width)
    if width:
        out = torch.ones_like(s)
        assert kernels.divergence_rows(s, t, 0.5, torch.ones(rows), out).shape == (6, rows)
        assert (out.abs() < 1e-6).all()  # but for rounding: one id is certain
        assert kernels.argmax(s).tolist() == [0] * rows
    else:
        assert maxima.eq(-math.inf).all()
        assert not sums.any()


@backend
def test_rows_may_lie_apart_and_ids_too(kernels: ModuleType):
    wide_s, wide_t = tiles(width=2 * V)
    for s, t in ((wide_s[:, :V], wide_t[:, V:]), (wide_s[:, ::2], wide_t[:, 1::2]), (wide_s.T[:V], wide_t.T[:V])):
        got, want = torch.empty_like(s), torch.empty_like(s)
        ones = torch.ones(len(s))
        a = kernels.divergence_rows(s, t, 0.3, ones, got)
        close(a, plain.divergence_rows(s.contiguous(), t.contiguous(), 0.3, ones, want), torch.float32)
        close(got, want, torch.float32)


@backend
def test_sides_may_differ_in_dtype(kernels: ModuleType):
    s, t = tiles(torch.float64)
    for a, b in ((s.float(), t), (s.bfloat16(), t.float()), (s.bfloat16(), t)):
        six = kernels.divergence_rows(a, b, 0.5, torch.ones(N), torch.empty(N, V), SCALES)
        assert six.dtype == (torch.float64 if b.dtype == torch.float64 else torch.float32)
        close(six, definition(a, b, 0.5), torch.float32)


@backend
def test_of_equal_largest_logits_the_first_wins(kernels: ModuleType):
    s = torch.zeros(2, V)
    s[1, 4] = s[1, 9] = 3.0
    assert kernels.argmax(s).tolist() == [0, 4]
    other = torch.zeros(2, V)
    other[1, 9] = 1.0
    assert kernels.divergence_rows(s, other, 0.0)[3].tolist() == [1.0, 0.0]


def test_a_pair_is_symmetric_in_its_sides_with_beta_mirrored():
    s, t = tiles(torch.float64)
    for beta in BETAS:
        a = cpu.divergence_rows(s, t, beta)
        torch.testing.assert_close(a[0], cpu.divergence_rows(t, s, 1 - beta)[0], rtol=1e-12, atol=1e-14)


def test_the_oracle_in_plain_floats_agrees():
    s, t = tiles(torch.float64)
    for beta in BETAS:
        value = cpu.divergence_rows(s, t, beta)[0]
        for n in range(N):
            p, q = oracle.softmax(s[n].tolist()), oracle.softmax(t[n].tolist())
            assert value[n].item() == pytest.approx(oracle.divergence(p, q, beta), abs=1e-12)


def test_threads_share_the_rows_and_change_nothing(monkeypatch: pytest.MonkeyPatch):
    s, t = tiles(width=500)
    s, t = s.repeat(20, 1), t.repeat(20, 1)
    coefficient = torch.linspace(-1, 1, len(s))
    alone, together = torch.empty_like(s), torch.empty_like(s)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    six = cpu.divergence_rows(s, t, 0.5, coefficient, alone)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(cpu, "_ALONE", 0)
    seen, run = set(), cpu._six

    def watched(*args: object) -> object:
        seen.add(threading.get_ident())
        return run(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(cpu, "_six", watched)
    assert torch.equal(cpu.divergence_rows(s, t, 0.5, coefficient, together), six)
    assert torch.equal(alone, together)
    assert len(seen) <= 3


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu, "_ALONE", 0)
    s, t = tiles()
    with pytest.raises(IndexError):
        cpu.divergence_rows(s, t, 0.5, torch.ones(1), torch.empty_like(s))


def test_wide_tiles_on_a_cpu_take_the_rows_one_at_a_time():
    assert kernels_for(torch.empty(1, 50_000)) is cpu
    assert kernels_for(torch.empty(1, 50)) is plain
    assert kernels_for(torch.empty(1, 50_000, device="meta")) is plain
