# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels, interpreted on a CPU (`make test`) and compiled on a GPU (`make test-gpu`): the same cases.

Each pass is held to its plain twin on tiles whose rows are the patterns that break such code, and the composition to
the definition in probability space, in float64. The interpreter accepts what no compiler would, so one test compiles
everything for a GPU that need not be there.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from cohobate.functional.kernels import kernels_for, plain
from cohobate.functional.moments import pair_moments, side_moments

from .. import oracle
from ..oracle import BETAS, draw

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from cohobate.functional.kernels import gpu  # noqa: E402
from cohobate.functional.kernels import gpu_rows as rows  # noqa: E402

# The interpreter computes with numpy, which warns of the infinities that a row may hold.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
CASES = pytest.mark.parametrize(
    ("dtype", "spread"),
    [
        (torch.float32, 1.0),
        (torch.float32, 60.0),
        (torch.bfloat16, 60.0),
        (torch.float16, 1.0),
        (torch.float64, 60.0),
    ],
    ids=str,
)
SCALES = (1 / 0.7, 0.9)


@pytest.fixture(autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Several blocks even in a short row, and the right way of running."""
    monkeypatch.setattr(gpu, "BLOCK", 64)
    interpreting = triton.knobs.runtime.interpret
    if request.node.get_closest_marker("gpu"):
        assert not interpreting, "TRITON_INTERPRET is set: the GPU would not be used. Run `make test-gpu`."
    elif "device" in request.fixturenames and not interpreting:
        pytest.skip("TRITON_INTERPRET is 0: kernels on CPU tensors need the interpreter")


def tiles(dtype: torch.dtype, spread: float, device: str) -> tuple[Tensor, Tensor]:
    """Student's and teacher's logits `[8, 90]`, one row a pattern."""
    student, teacher = draw(8, 90, seed=1, scale=spread), draw(8, 90, seed=2, scale=spread)
    student[0, 80], teacher[0, 75] = student[0].max() + 1, teacher[0].max() + 1  # maxima that rise a little
    student[1, 3::7] = teacher[1, 3::7] = -math.inf  # both forbid
    student[2, 5::11] = -math.inf  # the student alone
    teacher[3, 4::9] = -math.inf  # the teacher alone
    student[4] = teacher[4] = -math.inf  # nothing allowed
    student[5] = -math.inf  # nothing allowed to the student
    student[6, :70] = teacher[6, :70] = teacher[6, 85:] = -math.inf  # a whole block, and the end
    # Maxima that rise by far more than exp holds, after an infinite gap on either side.
    student[7], teacher[7] = torch.linspace(-900, 0, 90), torch.linspace(-800, 5, 90)
    student[7, 64:] += 300
    teacher[7, 64:] += 300
    student[7, 0] = teacher[7, 1] = -math.inf
    return student.to(device, dtype), teacher.to(device, dtype)


def numbers(*values: float, like: Tensor) -> Tensor:
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.tensor(values, dtype=wide, device=like.device)


def assert_equal_twins(ours: Tensor, twin: Tensor, tolerance: float = 2e-5) -> None:
    """Equal up to rounding, relative to the row's scale where terms cancel; -inf, inf and NaN at the same places."""
    assert ours.dtype == twin.dtype
    assert ours.shape == twin.shape
    tolerance = 1e-12 if ours.dtype == torch.float64 else tolerance
    torch.testing.assert_close(ours, twin, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_rounded(narrow: Tensor, wide: Tensor) -> None:
    """`narrow` is `wide` rounded once; the interpreter cuts the digits that bfloat16 lacks instead."""
    cut = narrow.dtype == torch.bfloat16 and not narrow.is_cuda
    rounded = wide.to(narrow.dtype)
    torch.testing.assert_close(narrow, rounded, rtol=2**-7 if cut else 0, atol=0, equal_nan=True)


# ------------------------------------------------------------------ every pass against its twin


@BOTH
@CASES
def test_sums_over_a_pair_equal_the_plain_twin(device: str, dtype: torch.dtype, spread: float):
    student, teacher = tiles(dtype, spread, device)
    ours, twins = gpu.pair_sums(student, teacher, SCALES), plain.pair_sums(student, teacher, SCALES)
    for one, twin in zip(ours, twins, strict=True):
        assert_equal_twins(one, twin)
    log_z = pair_moments(*twins).log_z
    for beta in (0.1, 0.5, 0.9):
        ours = gpu.mixture_sums(student, teacher, log_z, beta, SCALES)
        assert_equal_twins(ours, plain.mixture_sums(student, teacher, log_z, beta, SCALES))


@BOTH
@CASES
def test_the_gradient_of_a_pair_equals_the_plain_twin(device: str, dtype: torch.dtype, spread: float):
    student, teacher = tiles(dtype, spread, device)
    read = pair_moments(*plain.pair_sums(student, teacher, SCALES))
    coefficient = numbers(1, 0.25, -2, 1, 0, 0, 3, 1, like=student)
    for beta in BETAS:
        center = read.reverse_kl
        if 0 < beta < 1:
            center = plain.mixture_sums(student, teacher, read.log_z, beta, SCALES)[0]
        arguments = (student, teacher, read.log_z, center, coefficient, beta)
        ours, twin = (torch.empty(student.shape, dtype=center.dtype, device=device) for _ in range(2))
        assert gpu.pair_gradient(*arguments, out=ours, scales=SCALES) is ours
        assert_equal_twins(ours, plain.pair_gradient(*arguments, out=twin, scales=SCALES), tolerance=1e-4)


@BOTH
@CASES
def test_one_side_equals_the_plain_twin(device: str, dtype: torch.dtype, spread: float):
    logits, _ = tiles(dtype, spread, device)
    ours, twins = gpu.side_sums(logits, SCALES[0]), plain.side_sums(logits, SCALES[0])
    for one, twin in zip(ours, twins, strict=True):
        assert_equal_twins(one, twin)
    assert torch.equal(gpu.argmax(logits), plain.argmax(logits))
    log_z, _ = side_moments(*twins)
    constant = numbers(1, -0.5, 2, 0, 0, 0, 1, 0, like=logits)
    slope = numbers(0, 1.5, -1, 2, 0, 0, 1, 0, like=logits)
    for factor in (slope, None):
        grad, twin = (torch.empty(logits.shape, dtype=log_z.dtype, device=device) for _ in range(2))
        assert gpu.softmax_gradient(logits, log_z, constant, factor, grad, SCALES[0]) is grad
        assert_equal_twins(grad, plain.softmax_gradient(logits, log_z, constant, factor, twin, SCALES[0]))


@BOTH
@CASES
@pytest.mark.parametrize("beta", BETAS)
def test_all_passes_in_one_kernel_equal_the_plain_twin_and_the_definition(
    device: str, dtype: torch.dtype, spread: float, beta: float
):
    student, teacher = tiles(dtype, spread, device)
    coefficient = numbers(1, 0.25, -2, 1, 0, 0, 3, 1, like=student)
    ours, twin = (torch.empty(student.shape, dtype=coefficient.dtype, device=device) for _ in range(2))
    six = gpu.divergence_rows(student, teacher, beta, coefficient, ours, SCALES)
    assert_equal_twins(six, plain.divergence_rows(student, teacher, beta, coefficient, twin, SCALES))
    assert_equal_twins(ours, twin, tolerance=1e-4)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for row in (0, 1, 2, 3, 6):
        raw_s, raw_t = student[row].tolist(), teacher[row].tolist()
        p_s, p_t = oracle.softmax(raw_s, 1 / SCALES[0]), oracle.softmax(raw_t, 1 / SCALES[1])
        agree = float(raw_s.index(max(raw_s)) == raw_t.index(max(raw_t)))
        wanted = [oracle.divergence(p_s, p_t, beta), oracle.entropy(p_s), oracle.entropy(p_t), agree]
        wanted += [oracle.kl(p_t, p_s), oracle.kl(p_s, p_t)]
        assert six[:, row].tolist() == pytest.approx(wanted, rel=tolerance, abs=tolerance), row
    assert six[0, 4:6].isnan().all()  # no distribution, no divergence


# ------------------------------------------------------------------ the definition


@BOTH
@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_is_the_slope_of_the_definition(device: str, beta: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "BLOCK", 16)
    student, teacher = draw(2, 21, seed=3), draw(2, 21, seed=4)
    grad = torch.empty(2, 21, dtype=torch.float64, device=device)
    coefficient = torch.tensor([1.0, -0.3], dtype=torch.float64, device=device)
    gpu.divergence_rows(student.to(device), teacher.to(device), beta, coefficient, grad)
    for row, factor in enumerate(coefficient.tolist()):
        p_t = oracle.softmax(teacher[row].tolist())

        def value(logits: list[float], p_t: list[float] = p_t) -> float:
            return oracle.divergence(oracle.softmax(logits), p_t, beta)

        slopes = oracle.numeric_gradient(value, student[row].tolist())
        assert grad[row].tolist() == pytest.approx([factor * x for x in slopes], abs=1e-8)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", BETAS)
def test_identical_logits_give_exactly_zero_at_any_temperature(device: str, dtype: torch.dtype, beta: float):
    logits = draw(2, 90, seed=5, scale=9, dtype=dtype).to(device)
    grad = torch.full(logits.shape, torch.nan, device=device)
    ones = torch.ones(2, device=device)
    six = gpu.divergence_rows(logits, logits.clone(), beta, ones, grad, (1 / 0.7, 1 / 0.7))
    assert six[[0, 4, 5]].abs().max() == 0
    assert grad.abs().max() == 0
    assert six[3].min() == 1


@BOTH
@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-4])
def test_a_small_divergence_keeps_its_digits(device: str, gap: float):
    student = draw(2, 90, seed=6, dtype=torch.float32)
    teacher = student + gap * draw(2, 90, seed=7, dtype=torch.float32)
    grad = torch.empty(2, 90, device=device)
    gpu.divergence_rows(student.to(device), teacher.to(device), 0.5, torch.ones(2, device=device), grad)
    exact = torch.empty(2, 90, dtype=torch.float64)
    plain.divergence_rows(student.double(), teacher.double(), 0.5, torch.ones(2), exact)
    # What float32 logits leave of a gap is about 1e-7 / gap.
    assert (grad.cpu() - exact).norm() <= 1e-6 / gap * exact.norm()


@triton.jit
def _apply(x, expm1, log1p, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0)
    tl.store(expm1 + at, rows._expm1(value, tl.exp(value)), mask=at < count)
    tl.store(log1p + at, rows._log1p(tl.maximum(value, -0.984375)), mask=at < count)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_expm1_and_log1p_are_right_to_a_few_units_in_the_last_place(device: str, dtype: torch.dtype):
    wide = torch.cat([-torch.logspace(-30, 2, 900, dtype=torch.float64), torch.tensor([0.0, -0.5, -1.0, -math.inf])])
    x = wide.to(device, dtype)
    expm1, log1p = torch.empty_like(x), torch.empty_like(x)
    _apply[(1,)](x, expm1, log1p, len(x), BLOCK=1024, enable_fp_fusion=False)
    exact = x.cpu().double()
    limit = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(expm1.cpu().double(), exact.expm1(), rtol=limit, atol=0)
    torch.testing.assert_close(log1p.cpu().double(), exact.clamp(min=-0.984375).log1p(), rtol=limit, atol=0)
    assert expm1[900] == 0
    assert log1p[900] == 0


# ------------------------------------------------------------------ where rows lie, and how many


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("over", ["student", "teacher", "neither"])
def test_the_gradient_may_be_written_over_either_side_and_is_rounded_once(device: str, dtype: torch.dtype, over: str):
    student, teacher = (x[:4] for x in tiles(dtype, 1.0, device))
    coefficient = numbers(1, 0.25, -2, 0, like=student)
    wide = torch.empty(student.shape, dtype=coefficient.dtype, device=device)
    six = gpu.divergence_rows(student, teacher, 0.5, coefficient, wide, SCALES)
    out = {"student": student, "teacher": teacher, "neither": torch.empty_like(student)}[over]
    again = gpu.divergence_rows(student, teacher, 0.5, coefficient, out, SCALES)
    assert torch.equal(again, six)
    assert_rounded(out, wide)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_narrower_gradient_may_lie_in_the_first_part_of_the_rows_that_are_read(
    device: str, dtype: torch.dtype, beta: float
):
    student, teacher = (x[:4].clone() for x in tiles(torch.float32, 1.0, device))
    coefficient = numbers(1, 0.25, -2, 0, like=student)
    wide = torch.empty_like(student)
    six = gpu.divergence_rows(student, teacher, beta, coefficient, wide, SCALES)
    log_z = pair_moments(*gpu.pair_sums(student, teacher, SCALES)).log_z
    center = gpu.mixture_sums(student, teacher, log_z, beta, SCALES)[0]

    def part(x: Tensor) -> Tensor:
        return x.view(dtype)[:, :90]

    copy = student.clone()
    gpu.pair_gradient(copy, teacher, log_z, center, coefficient, beta, part(copy), SCALES)
    assert_rounded(part(copy), wide)
    copy = teacher.clone()
    gpu.divergence_rows(student, copy, beta, coefficient, part(copy), SCALES)
    assert_rounded(part(copy), wide)
    assert torch.equal(gpu.divergence_rows(student, teacher, beta, coefficient, part(student), SCALES), six)
    assert_rounded(part(student), wide)
    gpu.softmax_gradient(teacher, log_z[1], coefficient, coefficient, wide, SCALES[1])
    gpu.softmax_gradient(teacher, log_z[1], coefficient, coefficient, part(teacher), SCALES[1])
    assert_rounded(part(teacher), wide)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_side_may_be_overwritten_by_its_gradient(device: str, dtype: torch.dtype):
    logits, _ = tiles(dtype, 1.0, device)
    log_z, _ = side_moments(*plain.side_sums(logits))
    constant = numbers(1, -0.5, 2, 0, 0, 0, 1, 0, like=logits)
    wide = gpu.softmax_gradient(logits, log_z, constant, None, torch.empty(logits.shape, device=device))
    gpu.softmax_gradient(logits, log_z, constant, None, logits)
    assert_rounded(logits, wide)


@BOTH
def test_rows_may_lie_apart_and_what_lies_between_is_neither_read_nor_written(device: str):
    student, teacher = tiles(torch.float32, 1.0, device)
    wide_s = torch.full((16, 103), torch.nan, device=device)
    wide_t = torch.full((8, 91), torch.nan, device=device)
    wide_out = torch.full((8, 140), 7.0, device=device)
    apart_s, apart_t, apart_out = wide_s[::2, 5:95], wide_t[:, 1:], wide_out[:, 50:]
    apart_s.copy_(student)
    apart_t.copy_(teacher)
    # Numbers per row may be apart too.
    coefficient = torch.arange(16.0, device=device)[::2]
    dense = torch.empty_like(student)
    six = gpu.divergence_rows(student, teacher, 0.5, coefficient.contiguous(), dense)
    again = gpu.divergence_rows(apart_s, apart_t, 0.5, coefficient, apart_out)
    torch.testing.assert_close(again, six, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(apart_out, dense, rtol=0, atol=0, equal_nan=True)
    assert (wide_out[:, :50] == 7).all()
    assert torch.equal(gpu.argmax(apart_s), gpu.argmax(student))
    for one, twin in zip(gpu.side_sums(apart_s), gpu.side_sums(student), strict=True):
        assert torch.equal(one, twin)


@BOTH
def test_transposed_tiles_work_too(device: str):
    student, teacher = (x[:3] for x in tiles(torch.float32, 1.0, device))
    ones, dense = torch.ones(3, device=device), torch.empty_like(student)
    six = gpu.divergence_rows(student, teacher, 0.5, ones, dense)
    across = torch.empty(90, 3, device=device).T
    for s, t, out in ((student.T.contiguous().T, teacher, dense.clone()), (student, teacher, across)):
        assert_equal_twins(gpu.divergence_rows(s, t, 0.5, ones, out), six)
        assert_equal_twins(out, dense)


@BOTH
@pytest.mark.parametrize("num_ids", [0, 1, 63, 64, 65, 128])
def test_any_number_of_ids_and_of_rows_works(device: str, num_ids: int):
    for num_rows in (0, 2):
        student = draw(num_rows, num_ids, seed=8, dtype=torch.float32).to(device)
        teacher = draw(num_rows, num_ids, seed=9, dtype=torch.float32).to(device)
        per_row = torch.ones(num_rows, device=device)
        log_z = torch.zeros(2, num_rows, device=device)
        ours, twin = torch.empty_like(student), torch.empty_like(student)
        for one, two in zip(gpu.pair_sums(student, teacher), plain.pair_sums(student, teacher), strict=True):
            assert_equal_twins(one, two)
        for one, two in zip(gpu.side_sums(student), plain.side_sums(student), strict=True):
            assert_equal_twins(one, two)
        for module, out in ((gpu, ours), (plain, twin)):
            module.pair_gradient(student, teacher, log_z, per_row, per_row, 0.5, out)
        assert_equal_twins(ours, twin)
        for module, out in ((gpu, ours), (plain, twin)):
            module.softmax_gradient(student, log_z[0], per_row, per_row, out)
        assert_equal_twins(ours, twin)
        one, two = (x.mixture_sums(student, teacher, log_z, 0.3) for x in (gpu, plain))
        assert_equal_twins(one, two)
        if num_ids:
            assert torch.equal(gpu.argmax(student), plain.argmax(student))
            one, two = (
                x.divergence_rows(student, teacher, 0.5, per_row, out) for x, out in ((gpu, ours), (plain, twin))
            )
            assert_equal_twins(one, two)


@BOTH
def test_rows_without_weight_are_zero_whatever_they_hold(device: str):
    student, teacher = tiles(torch.float32, 1.0, device)
    student[0], teacher[7], student[2, 80] = torch.nan, math.inf, torch.nan
    for beta in (0.0, 0.5, 1.0):
        weights = numbers(0, 1, 0, 1, 0, 0, 1, 0, like=student)
        out = torch.full_like(student, torch.nan)
        six = gpu.divergence_rows(student, teacher, beta, weights, out)
        assert (out[[0, 2, 4, 5, 7]] == 0).all()
        assert six[0, [0, 2]].isnan().all()
        zeros = torch.zeros_like(weights)
        log_z, center = torch.full((2, 8), torch.nan, device=device), torch.full((8,), torch.nan, device=device)
        assert (gpu.pair_gradient(student, teacher, log_z, center, zeros, beta, out.fill_(torch.nan)) == 0).all()
    for slope in (None, zeros):
        assert (gpu.softmax_gradient(student, center, zeros, slope, out.fill_(torch.nan)) == 0).all()


@BOTH
def test_of_equal_largest_logits_the_lowest_id_wins(device: str):
    logits = torch.zeros(4, 150, device=device)
    logits[0, [30, 31, 140]] = 5.0
    logits[1, [80, 140]] = 5.0
    logits[2] = -math.inf
    assert gpu.argmax(logits).tolist() == [30, 80, 0, 0]
    shifted = logits.roll(1, -1)
    assert gpu.divergence_rows(logits, shifted, 0.0)[3].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert gpu.divergence_rows(logits, logits * 2, 0.0)[3].tolist() == [1.0, 1.0, 1.0, 1.0]


@BOTH
def test_sides_may_differ_in_dtype_and_the_wider_rules(device: str):
    student, teacher = (x[:4] for x in tiles(torch.bfloat16, 1.0, device))
    for other in (torch.float32, torch.float64):
        wide = torch.float64 if other == torch.float64 else torch.float32
        exact = plain.divergence_rows(student.to(wide), teacher.to(wide), 0.5)
        assert_equal_twins(gpu.divergence_rows(student, teacher.to(other), 0.5), exact)
        assert_equal_twins(gpu.divergence_rows(student.to(other), teacher, 0.5), exact)


# ------------------------------------------------------------------ when Triton runs, and what it makes


def test_a_tile_in_ordinary_memory_is_not_given_to_triton():
    assert kernels_for(torch.zeros(2, 3)) is not gpu


@pytest.mark.gpu
def test_a_tile_on_a_gpu_is_given_to_triton():
    assert kernels_for(torch.zeros(2, 3, device="cuda")) is gpu


def test_one_module_alone_imports_triton():
    package = Path(gpu.__file__).parents[2]
    importers = [p.name for p in package.rglob("*.py") if re.search(r"^\s*(import|from) triton", p.read_text(), re.M)]
    assert importers == ["gpu_rows.py"]


COMPILE = """
import re, subprocess, sys, tempfile
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from cohobate.functional.kernels import gpu, gpu_rows as rows

def build(kernel, logits, wide, **constants):
    constants |= {"ACC": tl.float64 if wide == "fp64" else tl.float32, "BLOCK": gpu.BLOCK}
    types = {"ids": "*i64", "student": logits, "teacher": logits, "logits": logits, "out": "*bf16"}
    types |= dict.fromkeys(("scale", "scale_s", "scale_t", "beta"), "fp64")
    types |= dict.fromkeys(("num_ids", "stride", "stride_s", "stride_t", "stride_out"), "i32")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*" + wide) for name in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] in "*i"}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=gpu.OPTIONS)

def registers_and_stack(built):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        said = subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], text=True)
    return [int(x) for x in re.search(r"REG:(\\d+) STACK:(\\d+)", said).groups()]

every = [
    (rows.pair_sums, {}), (rows.mixture_sums, {}), (rows.side_sums, {}), (rows.argmax, {}),
    *((rows.pair_gradient, {"KIND": kind, "NARROWS": True}) for kind in range(3)),
    *((rows.divergence_rows, {"KIND": kind, "WRITES": True, "NARROWS": True}) for kind in range(3)),
    *((rows.softmax_gradient, {"SLOPED": sloped, "NARROWS": True}) for sloped in (False, True)),
]
widest = [(rows.divergence_rows, {"KIND": 2, "WRITES": True, "NARROWS": True})]
for logits, wide, kernels in (("*bf16", "fp32", every), ("*fp32", "fp32", widest), ("*fp64", "fp64", widest)):
    for kernel, constants in kernels:
        built = build(kernel, logits, wide, **constants)
        fused = kernel is rows.pair_gradient and constants["KIND"] == 0 and "fma.rn" in built.asm["ptx"]
        print(kernel.__name__, wide, *registers_and_stack(built), int(fused))
"""


def test_every_kernel_compiles_for_a_gpu_with_room_for_two_programs_and_nothing_spilt(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 14
    for line in lines:
        name, wide, registers, stack, fused = line.split()
        if wide == "fp32":
            assert int(stack) == 0, line
            assert int(registers) * 32 * gpu.OPTIONS["num_warps"] * 2 <= 65536, line
            assert int(fused) == 0, f"{name}: products and sums must not be fused, or equal sides differ"


# ------------------------------------------------------------------ only on a GPU


@pytest.fixture
def whole_blocks(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(gpu, "BLOCK", 2048)
    return gpu


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_ids", [151936, 49153])
@pytest.mark.parametrize("beta", BETAS)
def test_a_real_vocabulary_equals_float64(whole_blocks: ModuleType, dtype: torch.dtype, num_ids: int, beta: float):
    student = draw(6, num_ids, seed=1, scale=4).to("cuda", dtype)
    teacher = (student.double() + draw(6, num_ids, seed=2).cuda()).to(dtype)
    ones, grad = torch.ones(6, device="cuda"), torch.empty(6, num_ids, device="cuda")
    exact = torch.empty(6, num_ids, dtype=torch.float64, device="cuda")
    six = whole_blocks.divergence_rows(student, teacher, beta, ones, grad, (1 / 0.7, 1 / 0.7))
    wanted = plain.divergence_rows(student.double(), teacher.double(), beta, ones.double(), exact, (1 / 0.7, 1 / 0.7))
    torch.testing.assert_close(six.double(), wanted, rtol=1e-5, atol=1e-5)
    assert (grad - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.gpu
def test_a_tile_may_have_more_than_two_to_the_31_numbers(whole_blocks: ModuleType):
    wide = torch.empty(2, 2**31 + 64, dtype=torch.bfloat16, device="cuda")
    student, teacher = draw(2, 5000, seed=1).to("cuda", torch.bfloat16), draw(2, 5000, seed=2).cuda().bfloat16()
    far = wide[:, :5000].copy_(student)
    ones, grad = torch.ones(2, device="cuda"), torch.empty_like(student)
    six = whole_blocks.divergence_rows(student, teacher, 0.5, ones, grad)
    assert torch.equal(whole_blocks.divergence_rows(far, teacher, 0.5, ones, far), six)
    assert torch.equal(far, grad)


@pytest.mark.gpu
def test_no_pass_waits_for_the_gpu_or_allocates_a_tile(whole_blocks: ModuleType):
    student, teacher = (draw(64, 50000, seed=i).to("cuda", torch.bfloat16) for i in (1, 2))
    ones = torch.ones(64, device="cuda")
    whole_blocks.divergence_rows(student.clone(), teacher, 0.5, ones, torch.empty_like(student))  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole_blocks.divergence_rows(student, teacher, 0.5, ones, student)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 2**20
