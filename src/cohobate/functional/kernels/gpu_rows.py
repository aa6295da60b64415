# SPDX-License-Identifier: Apache-2.0
"""What runs on the GPU for `gpu.py`: Triton programs, one a row, each a loop over blocks of the vocabulary.

A row stays with one program, because numbers of the whole row are needed before its next sweep. The maximum is found
on the way, and what was summed under a lower one is scaled. Each thread adds up its own columns to the end of the
row, since adding across threads is what is slow.

Row offsets are int64: a tile may have more than 2^31 numbers. Numbers from Python are declared float64, since Triton
would make them float32. ACC is the dtype in which all is computed, BLOCK the number of ids read at a time.

The only module that imports Triton, which is optional. Its language looks like Python and is another: capitals name
what is settled when a program is compiled, and a checker of types cannot follow.
"""
# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import math

import triton
import triton.language as tl

SINGLE, DOUBLE = tl.float32, tl.float64
_FORBIDDEN = tl.constexpr(-math.inf)
_INFINITE = tl.constexpr(math.inf)
_TAYLOR = tl.constexpr(tuple(1 / math.factorial(k) for k in range(1, 13)))  # of expm1(x) / x
# (log1p(f) - f) / f^2 of -1/4 <= f <= 1/2: the polynomial with the least largest relative error in log1p, 3e-8.
_LOG1P = tl.constexpr(
    (-0.5000006, 0.33333549, -0.24993442, 0.19977078, -0.16822812, 0.14983916, -0.12067368, 0.05413248)
)
_LOG_2_OF_BITS = tl.constexpr(math.log(2) * 2.0**-23)  # for an exponent left in its bits
_FORWARD, _REVERSE = tl.constexpr(0), tl.constexpr(1)  # KIND; 2 is between


@triton.jit
def _row(tile, stride):
    return tile + tl.program_id(0).to(tl.int64) * stride


@triton.jit
def _read(row, columns, num_ids, scale, ACC: tl.constexpr):
    """Scaled logits of one block, -inf past the last id."""
    factor = tl.full((), scale, ACC)
    past = tl.where(factor < 0.0, _INFINITE, _FORBIDDEN)  # before scaling
    return tl.load(row + columns, mask=columns < num_ids, other=past).to(ACC) * factor


@triton.jit
def _raised(maximum, top):
    """What numbers summed under `maximum` are multiplied by under the higher `top`, and how far they lie below it."""
    shift = tl.where(maximum == _FORBIDDEN, 0.0, maximum - top)
    return tl.where(maximum == _FORBIDDEN, 0.0, tl.exp(shift)), shift


@triton.jit
def _expm1(x, exp_x):
    """exp(x) - 1 of x <= 0, to a few units in the last place: near 0 by Taylor's series."""
    TERMS: tl.constexpr = 12 if x.dtype == tl.float64 else 6
    near = tl.maximum(x, -0.25)
    series = tl.full(x.shape, _TAYLOR[TERMS - 1], x.dtype)
    for i in tl.static_range(TERMS - 1):
        series = tl.fma(series, near, tl.full(x.shape, _TAYLOR[TERMS - 2 - i], x.dtype))
    return tl.where(x > -0.25, near * series, exp_x - 1.0)


@triton.jit
def _log1p(x):
    """log(1 + x) of -1 < x <= 0, to a few units in the last place.

    With 1 + x = 2^k (1 + f) it is k log 2 + log(1 + f), where f in [-1/4, 1/2) is made of x, not of the rounded 1 + x.
    In float64: log(u) / (u - 1) hardly feels that u is 1 + x only when rounded, and x is exact.
    """
    u = 1.0 + x
    if x.dtype == tl.float64:
        rounded = u - 1.0
        return tl.where(rounded == 0.0, x, tl.log(u) * (x / tl.where(rounded == 0.0, 1.0, rounded)))
    else:
        exponent = (u.to(tl.int32, bitcast=True) - 0x3F400000) & -0x800000  # k, in the bits where a float has it
        power = (0x3F800000 - exponent).to(tl.float32, bitcast=True)  # 2^-k
        f = tl.fma(x, power, power - 1.0)
        series = tl.full(x.shape, _LOG1P[7], x.dtype)
        for i in tl.static_range(7):
            series = tl.fma(series, f, tl.full(x.shape, _LOG1P[6 - i], x.dtype))
        log_2 = tl.full(x.shape, _LOG_2_OF_BITS, x.dtype)
        return tl.fma(exponent.to(tl.float32), log_2, tl.fma(f * f, series, f))


@triton.jit
def _mixture_below(gap, beta):
    """Of `gap = t - s`: whether t is the larger, the smaller over the larger in logs (no less than -1e4) and as a
    ratio, and log m over the larger. Twin: `divergences.over_mixture`; exactly 0 where both are equal.
    """
    teacher_leads = gap > 0.0
    below = tl.maximum(-tl.abs(gap), -1e4)  # what is weighted by exp(-1e4) is 0 however large, but for infinity
    ratio = tl.exp(below)
    return teacher_leads, below, ratio, _log1p(tl.where(teacher_leads, 1.0 - beta, beta) * _expm1(below, ratio))


@triton.jit
def _statistics(student, teacher, num_ids, scale_s, scale_t, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """Maxima, the six sums of `plain.pair_sums`, and the ids of the maxima.

    A maximum is raised a few times a row (about the logarithm of the number of blocks): only then are sums scaled.
    """
    max_s = tl.full((), _FORBIDDEN, ACC)
    max_t = tl.full((), _FORBIDDEN, ACC)
    id_s = tl.full((), 0, tl.int32)
    id_t = tl.full((), 0, tl.int32)
    z_s = tl.zeros((BLOCK,), ACC)
    z_t = tl.zeros((BLOCK,), ACC)
    above_s = tl.zeros((BLOCK,), ACC)
    above_t = tl.zeros((BLOCK,), ACC)
    gap_s = tl.zeros((BLOCK,), ACC)
    gap_t = tl.zeros((BLOCK,), ACC)
    for start in range(0, num_ids, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        s = _read(student, columns, num_ids, scale_s, ACC)
        t = _read(teacher, columns, num_ids, scale_t, ACC)
        top_s = tl.max(s, 0)
        top_t = tl.max(t, 0)
        if top_s > max_s:
            factor, shift = _raised(max_s, top_s)
            above_s = factor * (above_s + shift * z_s)
            z_s = factor * z_s
            gap_s = tl.where(gap_s == _FORBIDDEN, gap_s, factor * gap_s)
            id_s = tl.min(tl.where(s == top_s, columns, num_ids), 0)
            max_s = top_s
        if top_t > max_t:
            factor, shift = _raised(max_t, top_t)
            above_t = factor * (above_t + shift * z_t)
            z_t = factor * z_t
            gap_t = tl.where(gap_t == _INFINITE, gap_t, factor * gap_t)
            id_t = tl.min(tl.where(t == top_t, columns, num_ids), 0)
            max_t = top_t
        no_s = s == _FORBIDDEN
        no_t = t == _FORBIDDEN
        over_s = s - tl.where(max_s == _FORBIDDEN, 0.0, max_s)
        over_t = t - tl.where(max_t == _FORBIDDEN, 0.0, max_t)
        e_s = tl.exp(over_s)
        e_t = tl.exp(over_t)
        z_s += e_s
        z_t += e_t
        above_s = tl.fma(e_s, tl.where(no_s, 0.0, over_s), above_s)
        above_t = tl.fma(e_t, tl.where(no_t, 0.0, over_t), above_t)
        gap = tl.where(no_s | no_t, 0.0, t - s)
        gap_s = tl.where(no_t & (s != _FORBIDDEN), _FORBIDDEN, tl.fma(e_s, gap, gap_s))
        gap_t = tl.where(no_s & (t != _FORBIDDEN), _INFINITE, tl.fma(e_t, gap, gap_t))
    return (
        max_s,
        max_t,
        tl.sum(z_s, 0),
        tl.sum(z_t, 0),
        tl.sum(above_s, 0),
        tl.sum(above_t, 0),
        tl.sum(gap_s, 0),
        tl.sum(gap_t, 0),
        id_s,
        id_t,
    )


@triton.jit
def _mixture(
    student, teacher, log_z_s, log_z_t, num_ids, scale_s, scale_t, beta, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    """The two sums of `plain.mixture_sums`."""
    sum_s = tl.zeros((BLOCK,), ACC)
    sum_t = tl.zeros((BLOCK,), ACC)
    for start in range(0, num_ids, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        s = _read(student, columns, num_ids, scale_s, ACC) - log_z_s
        t = _read(teacher, columns, num_ids, scale_t, ACC) - log_z_t
        larger = tl.maximum(s, t, propagate_nan=tl.PropagateNan.ALL)
        gap = tl.where(larger == _FORBIDDEN, 0.0, t - s)
        teacher_leads, below, ratio, mixture = _mixture_below(gap, beta)
        p_larger = tl.exp(larger)
        by_larger = -p_larger * mixture
        by_smaller = p_larger * ratio * (below - mixture)
        sum_s += tl.where(teacher_leads, by_smaller, by_larger)
        sum_t += tl.where(teacher_leads, by_larger, by_smaller)
    return tl.sum(sum_s, 0), tl.sum(sum_t, 0)


@triton.jit
def _write_zeros(out, num_ids, BLOCK: tl.constexpr):
    for start in range(0, num_ids, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(out + columns, tl.zeros((BLOCK,), out.dtype.element_ty), mask=columns < num_ids)


@triton.jit
def _write_gradient(
    student, teacher, out, log_z_s, log_z_t, center, coefficient, num_ids, scale_s, scale_t, beta,
    KIND: tl.constexpr, NARROWS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of `plain.pair_gradient`.

    NARROWS: it goes, in a narrower dtype, into the first part of a row that is read, and no thread may write there
    before all have read that far.
    """
    if coefficient == 0.0:
        _write_zeros(out, num_ids, BLOCK)
    else:
        for start in range(0, num_ids, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            s = _read(student, columns, num_ids, scale_s, ACC) - log_z_s
            t = _read(teacher, columns, num_ids, scale_t, ACC) - log_z_t
            if KIND == _FORWARD:
                grad = tl.exp(s) - tl.exp(t)
            elif KIND == _REVERSE:
                grad = tl.where(s == _FORBIDDEN, 0.0, tl.exp(s) * (s - t - center))
            else:
                gap = tl.where(s == _FORBIDDEN, 0.0, t - s)
                teacher_leads, below, _, mixture = _mixture_below(gap, beta)
                student_over_m = tl.where(teacher_leads, below, 0.0) - mixture
                grad = (1.0 - beta) * tl.exp(s) * (student_over_m - center)
            if NARROWS:
                tl.debug_barrier()
            tl.store(out + columns, (coefficient * grad).to(out.dtype.element_ty), mask=columns < num_ids)


@triton.jit
def pair_sums(
    student, teacher, maxima, sums, num_ids, stride_s, stride_t, scale_s: tl.float64, scale_t: tl.float64,
    ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0), tl.num_programs(0)
    max_s, max_t, z_s, z_t, above_s, above_t, gap_s, gap_t, _, _ = _statistics(
        _row(student, stride_s), _row(teacher, stride_t), num_ids, scale_s, scale_t, ACC, BLOCK
    )
    tl.store(maxima + row, max_s)
    tl.store(maxima + n + row, max_t)
    tl.store(sums + row, z_s)
    tl.store(sums + n + row, z_t)
    tl.store(sums + 2 * n + row, above_s)
    tl.store(sums + 3 * n + row, above_t)
    tl.store(sums + 4 * n + row, gap_s)
    tl.store(sums + 5 * n + row, gap_t)


@triton.jit
def mixture_sums(
    student, teacher, log_z, sums, num_ids, stride_s, stride_t, scale_s: tl.float64, scale_t: tl.float64,
    beta: tl.float64, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0), tl.num_programs(0)
    log_z_s, log_z_t = tl.load(log_z + row).to(ACC), tl.load(log_z + n + row).to(ACC)
    sum_s, sum_t = _mixture(
        _row(student, stride_s), _row(teacher, stride_t), log_z_s, log_z_t, num_ids, scale_s, scale_t,
        tl.full((), beta, ACC), ACC, BLOCK,
    )  # fmt: skip
    tl.store(sums + row, sum_s)
    tl.store(sums + n + row, sum_t)


@triton.jit
def pair_gradient(
    student, teacher, log_z, center, coefficient, out, num_ids, stride_s, stride_t, stride_out,
    scale_s: tl.float64, scale_t: tl.float64, beta: tl.float64,
    KIND: tl.constexpr, NARROWS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0), tl.num_programs(0)
    _write_gradient(
        _row(student, stride_s), _row(teacher, stride_t), _row(out, stride_out),
        tl.load(log_z + row).to(ACC), tl.load(log_z + n + row).to(ACC),
        tl.load(center + row).to(ACC), tl.load(coefficient + row).to(ACC),
        num_ids, scale_s, scale_t, tl.full((), beta, ACC), KIND, NARROWS, ACC, BLOCK,
    )  # fmt: skip


@triton.jit
def divergence_rows(
    student, teacher, coefficient, numbers, out, num_ids, stride_s, stride_t, stride_out,
    scale_s: tl.float64, scale_t: tl.float64, beta: tl.float64,
    KIND: tl.constexpr, WRITES: tl.constexpr, NARROWS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0), tl.num_programs(0)
    row_s, row_t = _row(student, stride_s), _row(teacher, stride_t)
    max_s, max_t, z_s, z_t, above_s, above_t, gap_s, gap_t, id_s, id_t = _statistics(
        row_s, row_t, num_ids, scale_s, scale_t, ACC, BLOCK
    )
    log_s, log_t = tl.log(z_s), tl.log(z_t)
    log_z_s, log_z_t = max_s + log_s, max_t + log_t
    forward = gap_t / z_t - (log_z_t - log_z_s)
    reverse = (log_z_t - log_z_s) - gap_s / z_s
    share = tl.full((), beta, ACC)
    if KIND == _FORWARD:
        value = forward
        center = forward
    elif KIND == _REVERSE:
        value = reverse
        center = reverse
    else:
        center, other = _mixture(row_s, row_t, log_z_s, log_z_t, num_ids, scale_s, scale_t, share, ACC, BLOCK)
        value = (1.0 - share) * center + share * other
    tl.store(numbers + row, value)
    tl.store(numbers + n + row, log_s - above_s / z_s)
    tl.store(numbers + 2 * n + row, log_t - above_t / z_t)
    tl.store(numbers + 3 * n + row, (id_s == id_t).to(ACC))
    tl.store(numbers + 4 * n + row, forward)
    tl.store(numbers + 5 * n + row, reverse)
    if WRITES:
        _write_gradient(
            row_s, row_t, _row(out, stride_out), log_z_s, log_z_t, center, tl.load(coefficient + row).to(ACC),
            num_ids, scale_s, scale_t, share, KIND, NARROWS, ACC, BLOCK,
        )  # fmt: skip


@triton.jit
def side_sums(
    logits, maximum, sums, num_ids, stride, scale: tl.float64, ACC: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, n = tl.program_id(0), tl.num_programs(0)
    tile = _row(logits, stride)
    highest = tl.full((), _FORBIDDEN, ACC)
    z = tl.zeros((BLOCK,), ACC)
    above = tl.zeros((BLOCK,), ACC)
    for start in range(0, num_ids, BLOCK):
        x = _read(tile, start + tl.arange(0, BLOCK), num_ids, scale, ACC)
        top = tl.max(x, 0)
        if top > highest:
            factor, shift = _raised(highest, top)
            above = factor * (above + shift * z)
            z = factor * z
            highest = top
        over = x - tl.where(highest == _FORBIDDEN, 0.0, highest)
        e = tl.exp(over)
        z += e
        above = tl.fma(e, tl.where(x == _FORBIDDEN, 0.0, over), above)
    tl.store(maximum + row, highest)
    tl.store(sums + row, tl.sum(z, 0))
    tl.store(sums + n + row, tl.sum(above, 0))


@triton.jit
def softmax_gradient(
    logits, log_z, constant, slope, out, num_ids, stride, stride_out, scale: tl.float64,
    SLOPED: tl.constexpr, NARROWS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    tile, target = _row(logits, stride), _row(out, stride_out)
    fixed = tl.load(constant + row).to(ACC)
    growing = tl.load(slope + row).to(ACC) if SLOPED else fixed
    if (fixed == 0.0) & (growing == 0.0):
        _write_zeros(target, num_ids, BLOCK)
    else:
        normaliser = tl.load(log_z + row).to(ACC)
        for start in range(0, num_ids, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            logp = _read(tile, columns, num_ids, scale, ACC) - normaliser
            factor = tl.fma(growing, logp, fixed) if SLOPED else fixed
            grad = tl.where(logp == _FORBIDDEN, 0.0, tl.exp(logp) * factor)
            if NARROWS:
                tl.debug_barrier()
            tl.store(target + columns, grad.to(target.dtype.element_ty), mask=columns < num_ids)


@triton.jit
def argmax(logits, ids, num_ids, stride, ACC: tl.constexpr, BLOCK: tl.constexpr):
    tile = _row(logits, stride)
    highest = tl.full((), _FORBIDDEN, ACC)
    best = tl.full((), 0, tl.int32)
    for start in range(0, num_ids, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _read(tile, columns, num_ids, 1.0, ACC)
        top = tl.max(x, 0)
        if top > highest:
            best = tl.min(tl.where(x == top, columns, num_ids), 0)
            highest = top
    tl.store(ids + tl.program_id(0), best.to(tl.int64))
