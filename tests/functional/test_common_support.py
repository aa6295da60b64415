# SPDX-License-Identifier: Apache-2.0
"""CSD against its definition written out, its published example to twelve digits, and what must not change it."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cohobate.align import Chunks, align_bytes
from cohobate.functional.common_support import common_support_divergence, common_support_loss_sum
from cohobate.functional.divergences import divergence
from cohobate.functional.scores import TopKScores, top_k_scores
from cohobate.vocab import SubtokenTables

from . import csd_oracle
from .csd_oracle import World

EXAMPLE = World(
    student=[b"", b"d", b"c", b"b", b"a", b"ab", b"ad", b"aa"],
    teacher=[b"a", b"b", b"c", b"d", b"", b"cd", b"bc", b"ca", b"cab"],
    student_ids=[0, 1, 5, 2, 1, 5, 2],
    teacher_ids=[4, 3, 0, 1, 5, 0, 6],
    forward=[(4,), (3,), (2,), (1,), (0,), (0, 1), (0, 3), (0, 0)],
    reverse=[(4,), (3,), (2,), (1,), (0,), (2, 1), (3, 2), (2, 4), (2, 5)],
)
STUDENT_ROWS = """.05 .40 .10 .10 .15 .10 .05 .05
.02 .08 .10 .10 .20 .30 .12 .08
.05 .15 .50 .10 .10 .05 .03 .02
.05 .60 .05 .05 .10 .10 .03 .02
.02 .08 .05 .15 .30 .25 .10 .05
.05 .10 .45 .20 .10 .05 .03 .02
1 1 1 1 1 1 1 1"""
TEACHER_ROWS = """.30 .28 .05 .20 .02 .08 .04 .02 .01
.60 .05 .05 .10 .02 .08 .05 .03 .02
.10 .50 .10 .15 .02 .05 .05 .02 .01
.05 .10 .20 .10 .02 .40 .05 .05 .03
.55 .10 .05 .10 .02 .08 .05 .03 .02
.30 .35 .05 .05 .02 .05 .15 .02 .01
1 1 1 1 1 1 1 1 1"""


def logs(rows: str) -> Tensor:
    return torch.tensor([[float(x) for x in row.split()] for row in rows.splitlines()], dtype=torch.float64).log()


def ids(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def tables_of(made: World) -> SubtokenTables:
    return SubtokenTables.from_chains(made.forward, made.reverse)


def example_chunks() -> Chunks:
    roles = {0: "bos"}
    student = [None, *(EXAMPLE.student[i] for i in EXAMPLE.student_ids[1:])]
    teacher = [None, *(EXAMPLE.teacher[i] for i in EXAMPLE.teacher_ids[1:])]
    return align_bytes(student, teacher, student_roles=roles, teacher_roles=roles)


@pytest.mark.parametrize(
    ("options", "k", "temperature", "chunks", "kd"),
    [
        ({"keep_realized": False}, None, 1.0, "061286841386 002387301533 006276822933 001283100942", 0.027755742106),
        ({"keep_realized": False}, None, 2.0, "014215665454 043667021786 030169120673 000153353201", 0.384163143754),
        ({}, 2, 1.0, "059404727229 001264198628 005508654503 001283100942", 0.024921124398),
        ({"forced_mode": "evict"}, 2, 1.0, "030390530250 001264198628 005508654503 001283100942", 0.017667575153),
        ({"keep_realized": False}, 2, 1.0, "058524918979 001264198628 005508654503 000000000000", 0.023097296158),
        ({"realized_only_mismatch": True}, None, 1.0, "061286841386 0 005508654503 001283100942", 0.023811404652),
        ({"beta": 0.0}, None, 1.0, "261472670333 009268288025 025335621575 004913642161", 0.114765107284),
        (
            {"realized_only_mismatch": True},
            None,
            2.0,
            "014215665454 014557732437 019114339039 000153353201",
            0.183342788840,
        ),
    ],
    ids="ABCDEFGH",
)
def test_the_published_example(options: dict[str, Any], k: int | None, temperature: float, chunks: str, kd: float):
    teacher: Any = logs(TEACHER_ROWS)
    if k is not None:
        teacher = top_k_scores(teacher, ids(EXAMPLE.teacher_ids), k, temperature=temperature)
    out = common_support_divergence(
        logs(STUDENT_ROWS),
        ids(EXAMPLE.student_ids),
        teacher,
        ids(EXAMPLE.teacher_ids),
        example_chunks(),
        tables_of(EXAMPLE),
        temperature=temperature,
        **options,
    )
    assert out.kind.tolist() == [0, 0, 1, 2, 3]
    assert out.scorable.tolist() == [False, True, True, True, True]
    assert out.divergence.tolist() == pytest.approx([0, *(float(f"0.{x}") for x in chunks.split())], abs=1e-12)
    assert temperature**2 * common_support_loss_sum(out).item() / 4 == pytest.approx(kd, abs=1e-12)


def test_the_gradient_of_the_published_example_with_its_dynamic_scale():
    logits = logs(STUDENT_ROWS).requires_grad_()
    out = common_support_divergence(
        logits,
        ids(EXAMPLE.student_ids),
        logs(TEACHER_ROWS),
        ids(EXAMPLE.teacher_ids),
        example_chunks(),
        tables_of(EXAMPLE),
        keep_realized=False,
    )
    kd = common_support_loss_sum(out) / 4
    ce = -logits.log_softmax(-1)[torch.arange(6), ids(EXAMPLE.student_ids)[1:]].mean()
    scale = (ce / kd).item()
    loss = scale * kd + ce
    assert (ce.item(), scale, loss.item()) == pytest.approx(
        (0.918173066311, 33.080472603111, 1.836346132621), abs=1e-9
    )
    (grad,) = torch.autograd.grad(loss, logits)
    want = "+.073135058 +.219405175 -.731350588 +.146270118 +.146270118 +.073135058 +.043881033 +.029254023"
    assert grad[2].tolist() == pytest.approx([float(x) for x in want.split()], abs=3e-9)


def case(seed: int, made: World, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Chunks]:
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(len(made.student_ids), len(made.student), generator=generator, dtype=torch.float64) * 2
    teacher = torch.randn(len(made.teacher_ids), len(made.teacher), generator=generator, dtype=torch.float64) * 2
    chunks = align_bytes([made.student[i] for i in made.student_ids], [made.teacher[i] for i in made.teacher_ids])
    return student.to(dtype), teacher.to(dtype), chunks


def ours(
    student: Tensor, teacher: Tensor | TopKScores, made: World, chunks: Chunks, **options: Any
) -> tuple[Tensor, Tensor, Any]:
    logits = student.clone().requires_grad_()
    out = common_support_divergence(
        logits, ids(made.student_ids), teacher, ids(made.teacher_ids), chunks, tables_of(made), **options
    )
    weights = torch.linspace(0.5, 2, len(chunks), dtype=out.divergence.dtype)
    (grad,) = torch.autograd.grad((out.divergence * weights).sum(), logits)
    return out.divergence.detach(), grad, out


def wanted(student: Tensor, teacher: Tensor, made: World, chunks: Chunks, **options: Any) -> tuple[Tensor, Tensor]:
    logits = student.double().requires_grad_()
    values = torch.stack(
        [csd_oracle.common_support(logits, teacher.double(), made, chunk, **options) for chunk in chunks]
    )
    weights = torch.linspace(0.5, 2, len(chunks), dtype=torch.float64)
    (grad,) = torch.autograd.grad((values * weights).sum(), logits)
    return values.detach(), grad


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_value_and_gradient_are_the_definition(seed: int, beta: float):
    made = csd_oracle.world(seed)
    student, teacher, chunks = case(seed, made)
    rng = list(itertools.product([True, False], [True, False], [1, 2, 3], [None, 1, 4], [False, True]))
    keep, realized_only, min_support, k, evict = rng[(seed * 7 + int(beta * 10)) % len(rng)]
    scores = teacher if k is None else top_k_scores(teacher, ids(made.teacher_ids), k, temperature=1.25)
    value, grad, _ = ours(
        student,
        scores,
        made,
        chunks,
        beta=beta,
        temperature=1.25,
        keep_realized=keep,
        realized_only_mismatch=realized_only,
        min_support=min_support,
        forced_mode="evict" if evict else "union",
    )
    want, want_grad = wanted(
        student,
        teacher,
        made,
        chunks,
        beta=beta,
        temperature=1.25,
        k=k,
        keep_realized=keep,
        realized_only=realized_only,
        min_support=min_support,
        evict=evict,
    )
    torch.testing.assert_close(value, want, atol=1e-11, rtol=1e-9)
    torch.testing.assert_close(grad, want_grad, atol=1e-11, rtol=1e-9)


def test_the_random_worlds_have_every_kind_of_chunk_and_pairs_that_the_tables_lack():
    kinds, missing = set(), 0
    for seed in range(12):
        made = csd_oracle.world(seed)
        _, _, chunks = case(seed, made)
        for s0, s1, t0, t1 in chunks:
            kinds.add((min(s1 - s0, 2), min(t1 - t0, 2)))
            missing += (s1 - s0, t1 - t0) == (1, 1) and made.forward[made.student_ids[s0]] != (made.teacher_ids[t0],)
    assert kinds == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert missing > 3


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("min_support", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_keeping_every_id_is_the_dense_teacher_for_each_setting(seed: int, keep: bool, min_support: int):
    made = csd_oracle.world(seed)
    student, teacher, chunks = case(seed, made)
    options: dict[str, Any] = {"keep_realized": keep, "min_support": min_support}
    dense = ours(student, teacher, made, chunks, **options)
    kept = ours(student, top_k_scores(teacher, ids(made.teacher_ids), len(made.teacher)), made, chunks, **options)
    torch.testing.assert_close(kept[0], dense[0], atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(kept[1], dense[1], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gradcheck(beta: float):
    made = csd_oracle.world(3, length=10)
    student, teacher, chunks = case(3, made)
    scores = top_k_scores(teacher, ids(made.teacher_ids), 4)

    def value(logits: Tensor, teacher: Any) -> Tensor:
        return common_support_divergence(
            logits, ids(made.student_ids), teacher, ids(made.teacher_ids), chunks, tables_of(made), beta=beta
        ).divergence

    for of_teacher in (teacher, scores):
        assert torch.autograd.gradcheck(lambda z, t=of_teacher: value(z, t), student.clone().requires_grad_())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_one_vocabulary_on_both_sides_is_the_full_divergence(beta: float):
    words = [b"a", b"b", b"ab", b"c"]
    chain = csd_oracle.chains(words, words)
    text = [0, 2, 3, 1, 0, 2]
    made = World(words, words, text, text, chain, chain)
    student, teacher, chunks = case(0, made)
    value, _, _ = ours(student, teacher, made, chunks, beta=beta)
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    torch.testing.assert_close(value[1:], divergence(s, t, beta=beta)[:5], atol=1e-10, rtol=1e-8)
    equal, grad, _ = ours(student, student, made, chunks, beta=beta)
    assert equal.abs().max() < 1e-11
    assert grad.abs().max() < 1e-11


def test_a_chunk_that_nothing_predicts_is_not_scored_on_either_side():
    made = World([b"a", b"b"], [b"a", b"b"], [0, 1], [0, 1], [(0,), (1,)], [(0,), (1,)])
    student, teacher, _ = case(1, made)
    shifted = Chunks(
        **{
            name: ids(values).int().numpy()
            for name, values in {
                "student_start": [0, 1],
                "student_end": [1, 2],
                "teacher_start": [1, 0],
                "teacher_end": [2, 1],
            }.items()
        }
    )
    value, grad, out = ours(student, teacher, made, shifted)
    assert out.scorable.tolist() == [False, False]
    assert value.tolist() == [0.0, 0.0]
    assert not grad.any()


@pytest.mark.parametrize("k", [None, 3])
def test_rows_of_chunks_that_the_caller_drops_may_hold_anything(k: int | None):
    made = csd_oracle.world(5)
    student, teacher, chunks = case(5, made)
    dropped = len(chunks) // 2
    s0, s1 = int(chunks.student_start[dropped]), int(chunks.student_end[dropped])
    weights = torch.ones(len(chunks), dtype=torch.float64)
    weights[dropped] = 0

    def gradient(logits: Tensor) -> Tensor:
        leaf = logits.clone().requires_grad_()
        scores: Any = teacher if k is None else top_k_scores(teacher, ids(made.teacher_ids), k)
        out = common_support_divergence(
            leaf, ids(made.student_ids), scores, ids(made.teacher_ids), chunks, tables_of(made)
        )
        kept = torch.where(weights == 0, 0.0, out.divergence)
        (grad,) = torch.autograd.grad(kept.sum(), leaf)
        return grad

    poisoned = student.clone()
    poisoned[s0 - 1 : s1 - 1] = torch.nan
    torch.testing.assert_close(gradient(poisoned), gradient(student), atol=0, rtol=0)


def test_float32_and_bfloat16_logits_agree_with_float64():
    made = csd_oracle.world(7)
    student, teacher, chunks = case(7, made)
    want, want_grad, _ = ours(student, teacher, made, chunks)
    value, grad, _ = ours(student.float(), teacher.float(), made, chunks)
    assert value.dtype == grad.dtype == torch.float32
    torch.testing.assert_close(value.double(), want, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(grad.double(), want_grad, atol=2e-6, rtol=1e-4)
    rounded = student.bfloat16()
    value, grad, _ = ours(rounded, teacher.bfloat16(), made, chunks)
    want, want_grad, _ = ours(rounded.double(), teacher.bfloat16().double(), made, chunks)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(value.double(), want, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(grad.double(), want_grad, atol=2e-2, rtol=1e-2)


def test_a_sure_teacher_and_a_sure_student_stay_finite():
    made = csd_oracle.world(2)
    student, teacher, chunks = case(2, made, torch.float32)
    for beta in (0.0, 0.5, 1.0):
        value, grad, _ = ours(student * 60, teacher * 60, made, chunks, beta=beta)
        assert value.isfinite().all()
        assert grad.isfinite().all()


def test_mismatched_chunks_weigh_more_in_the_loss():
    made = csd_oracle.world(4)
    student, teacher, chunks = case(4, made)
    value, _, out = ours(student, teacher, made, chunks)
    weights = [1.0 if (s1 - s0, t1 - t0) == (1, 1) else 3.0 for s0, s1, t0, t1 in chunks]
    want = sum(w * v for w, v in zip(weights, value.tolist(), strict=True))
    assert common_support_loss_sum(out, mismatch_weight=3.0).item() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 1.5}, "beta must be in"),
        ({"min_support": 0}, "min_support must be >= 1"),
        ({"forced_mode": "drop"}, "forced_mode must be 'union' or 'evict'"),
        ({"temperature": 2.0}, "normalised at temperature 1.0, not 2.0"),
    ],
)
def test_options_that_do_not_fit_are_refused(change: dict[str, Any], message: str):
    made = csd_oracle.world(0)
    student, teacher, chunks = case(0, made)
    with pytest.raises(ValueError, match=message):
        ours(student, top_k_scores(teacher, ids(made.teacher_ids), 3), made, chunks, **change)


def test_shapes_that_do_not_fit_are_refused():
    made = csd_oracle.world(0)
    student, teacher, chunks = case(0, made)
    with pytest.raises(ValueError, match=r"the student has ids \[.*\] and \d+ rows of scores"):
        ours(student[1:], teacher, made, chunks)
    with pytest.raises(ValueError, match="the teacher's scores have 13 columns, the tables 12 ids"):
        ours(student, torch.cat([teacher, teacher[:, :1]], -1), made, chunks)
    with pytest.raises(ValueError, match="the chunks span student tokens"):
        ours(
            student,
            teacher,
            made,
            Chunks(
                student_start=chunks.student_start,
                student_end=chunks.student_end + 9,
                teacher_start=chunks.teacher_start,
                teacher_end=chunks.teacher_end,
            ),
        )


def test_no_chunks_give_an_empty_result_that_still_hangs_on_the_graph():
    made = csd_oracle.world(0)
    student, teacher, _ = case(0, made)
    value, grad, _ = ours(student, teacher, made, align_bytes([], []))
    assert value.shape == (0,)
    assert not grad.any()


@pytest.mark.parametrize("k", [None, 3])
def test_sides_of_two_dtypes_meet_in_the_wider(k: int | None):
    made = csd_oracle.world(7)
    student, teacher, chunks = case(7, made)

    def scores(values: Tensor) -> Tensor | TopKScores:
        return values if k is None else top_k_scores(values, ids(made.teacher_ids), k)

    for s, t in ((student, teacher.float()), (student.float(), teacher)):
        value, grad, _ = ours(s, scores(t), made, chunks)
        want, want_grad, _ = ours(s.double(), scores(t.double()), made, chunks)
        assert (value.dtype, grad.dtype) == (torch.float64, s.dtype)
        torch.testing.assert_close(value, want, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(grad.double(), want_grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("k", [None, 3])
def test_ids_may_be_of_any_integer_dtype_and_must_be_ids(k: int | None):
    made = csd_oracle.world(7)
    student, teacher, chunks = case(7, made)
    scores = teacher if k is None else top_k_scores(teacher, ids(made.teacher_ids), k)
    of_student, of_teacher = ids(made.student_ids), ids(made.teacher_ids)

    def value(a: Tensor, b: Tensor) -> Tensor:
        return common_support_divergence(student, a, scores, b, chunks, tables_of(made)).divergence

    for dtype in (torch.int32, torch.uint8):
        assert value(of_student.to(dtype), of_teacher.to(dtype)).equal(value(of_student, of_teacher))
    wrong = of_student.clone()
    wrong[-1] = -1
    with pytest.raises(ValueError, match=r"the student's id -1 at position \d+ is outside 0 to"):
        value(wrong, of_teacher)
    with pytest.raises(ValueError, match=r"the teacher's ids must be integers"):
        value(of_student, of_teacher.float())


# ------------------------------------------------------------------ pair form


def in_pairs(chunks: Chunks) -> Chunks:
    """Chunks of a text as ranges of predictions: one place earlier, without those whose first token has no row."""
    kept = (chunks.student_start >= 1) & (chunks.teacher_start >= 1)
    names = ("student_start", "student_end", "teacher_start", "teacher_end")
    return Chunks(**{name: getattr(chunks, name)[kept] - 1 for name in names})


PAIR_OPTIONS: list[dict[str, Any]] = [
    {},
    {"beta": 0.0, "keep_realized": False},
    {"beta": 1.0, "min_support": 2, "forced_mode": "evict"},
    {"realized_only_mismatch": True},
]


@pytest.mark.parametrize("options", PAIR_OPTIONS, ids=str)
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("seed", range(4))
def test_pairs_are_the_text_one_place_earlier(seed: int, k: int | None, options: dict[str, Any]):
    made = csd_oracle.world(seed)
    student, teacher, chunks = case(seed, made)
    assert (chunks.student_start == 0).any()  # a chunk that pairs cannot have
    scores: Any = teacher if k is None else top_k_scores(teacher, ids(made.teacher_ids), k)
    value, grad, _ = ours(student, scores, made, chunks, **options)
    leaf, of_teacher = student[:-1].clone().requires_grad_(), teacher[:-1]
    targets = ids(made.teacher_ids)[1:]
    out = common_support_divergence(
        leaf,
        ids(made.student_ids)[1:],
        of_teacher if k is None else top_k_scores(of_teacher, targets, k, rows="pairs"),
        targets,
        in_pairs(chunks),
        tables_of(made),
        rows="pairs",
        **options,
    )
    assert out.scorable.all()
    torch.testing.assert_close(out.divergence, value[1:], atol=0, rtol=0)
    weights = torch.linspace(0.5, 2, len(chunks), dtype=torch.float64)[1:]
    (pair_grad,) = torch.autograd.grad((out.divergence * weights).sum(), leaf)
    torch.testing.assert_close(pair_grad, grad[:-1], atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize("k", [None, 3])
def test_texts_end_to_end_are_texts_one_by_one(k: int | None):
    """A last row of one text stands before a first token of the next, and predicts nothing of it."""
    whole = csd_oracle.world(3, length=30)
    cases = []
    for seed, length in ((3, 9), (4, 0), (5, 14), (6, 5)):
        text = csd_oracle.world(seed, length=length)
        made = csd_oracle.retold(whole, b"".join(text.student[i] for i in text.student_ids), seed)
        cases.append((made, *case(seed, made)))

    def divergence_of(student: Tensor, made: list[World], teacher: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
        leaf = student.clone().requires_grad_()
        of_student = torch.cat([ids(m.student_ids)[1:] for m in made])
        of_teacher = torch.cat([ids(m.teacher_ids)[1:] for m in made])
        scores = teacher if k is None else top_k_scores(teacher, of_teacher, k, rows="pairs")
        out = common_support_divergence(
            leaf, of_student, scores, of_teacher, chunks, tables_of(whole), rows="pairs"
        ).divergence
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
        return out.detach(), grad

    apart = [divergence_of(s[:-1], [made], t[:-1], in_pairs(chunks)) for made, s, t, chunks in cases]
    columns, shift = [], [0, 0]
    for _, s, t, chunks in cases:
        pairs = in_pairs(chunks)
        columns.append(
            [
                pairs.student_start + shift[0],
                pairs.student_end + shift[0],
                pairs.teacher_start + shift[1],
                pairs.teacher_end + shift[1],
            ]
        )
        shift = [shift[0] + len(s[:-1]), shift[1] + len(t[:-1])]
    names = ("student_start", "student_end", "teacher_start", "teacher_end")
    joined = {name: np.concatenate(arrays) for name, arrays in zip(names, zip(*columns, strict=True), strict=True)}
    value, grad = divergence_of(
        torch.cat([s[:-1] for _, s, _, _ in cases]),
        [made for made, *_ in cases],
        torch.cat([t[:-1] for _, _, t, _ in cases]),
        Chunks(**joined),
    )
    assert len(value) > 8
    torch.testing.assert_close(value, torch.cat([v for v, _ in apart]), atol=1e-15, rtol=1e-12)
    torch.testing.assert_close(grad, torch.cat([g for _, g in apart]), atol=1e-15, rtol=1e-12)


def test_rows_are_of_a_text_or_of_pairs():
    made = csd_oracle.world(0)
    student, teacher, chunks = case(0, made)
    with pytest.raises(ValueError, match=r"rows must be 'text'.*or 'pairs'.*, got 'pair'"):
        ours(student, teacher, made, chunks, rows="pair")
