# SPDX-License-Identifier: Apache-2.0
"""ULD and the hybrid against their definitions written out one probability at a time, and what ULD cannot see."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cohobate.align import Chunks, align_bytes
from cohobate.functional.ranked import RankedOutput, ranked_divergence, sorted_distance

STUDENT = [b"d", b"ab", b"c", b"da", b"b", b"c"]  # what the tokens of the text spell; the first has no predictor
TEACHER = [b"d", b"a", b"b", b"cd", b"a", b"bc"]
COMMON = ([4, 0, 2], [1, 5, 3])  # any pairs of ids will do: what they spell is not the losses' business


def chunks() -> Chunks:
    return align_bytes(STUDENT, TEACHER)


def case(seed: int, *, student_vocab: int = 7, teacher_vocab: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def logits(rows: int, vocab: int) -> Tensor:
        return 2 * torch.randn(rows, vocab, dtype=torch.float64, generator=generator)

    def ids(rows: int, vocab: int) -> Tensor:
        return torch.randint(vocab, (rows,), generator=generator)

    return (
        logits(len(STUDENT), student_vocab),
        ids(len(STUDENT), student_vocab),
        logits(len(TEACHER), teacher_vocab),
        ids(len(TEACHER), teacher_vocab),
    )


def joint(logits: Tensor, ids: Tensor, start: int, end: int, temperature: float) -> list[float]:
    """Probability of the chunk's tokens but the last, followed by each token of the vocabulary."""
    rows = []
    for row in (logits / temperature).tolist():
        largest = max(row)
        weights = [math.exp(x - largest) for x in row]
        rows.append([w / sum(weights) for w in weights])
    prefix = 1.0
    for token in range(start, end - 1):
        prefix *= rows[token - 1][int(ids[token])]
    return [prefix * p for p in rows[end - 2]]


def by_definition(
    student: Tensor,
    student_ids: Tensor,
    teacher: Tensor,
    teacher_ids: Tensor,
    *,
    common: tuple[Any, Any] | None = None,
    beta: float = 0.5,
    common_weight: float = 1.0,
    sorted_weight: float = 1.0,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> list[float]:
    values = []
    for s0, s1, t0, t1 in chunks():
        if s0 == 0 or t0 == 0:
            values.append(0.0)
            continue
        p = joint(student, student_ids, s0, s1, temperature)
        q = joint(teacher, teacher_ids, t0, t1, temperature)
        ours, theirs = common if common is not None else ([], [])
        total = 0.0
        for a, b in zip(ours, theirs, strict=True):
            m = (1 - beta) * p[a] + beta * q[b]
            total += common_weight * (beta * q[b] * math.log(q[b] / m) + (1 - beta) * p[a] * math.log(p[a] / m))
        rest_p = sorted((x for i, x in enumerate(p) if i not in ours), reverse=True)
        rest_q = sorted((x for i, x in enumerate(q) if i not in theirs), reverse=True)
        width = max(len(rest_p), len(rest_q))
        padded = (rest + [0.0] * (width - len(rest)) for rest in (rest_p, rest_q))
        differences = [abs(x - y) for x, y in zip(*padded, strict=True)]
        values.append(total + sorted_weight * sum(differences[:top_k]))
    return values


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.7},
        {"top_k": 2},
        {"top_k": 99},
        {"common": COMMON},
        {"common": COMMON, "beta": 0.1, "common_weight": 0.3, "sorted_weight": 2.0, "temperature": 0.8, "top_k": 3},
        {"common": tuple(np.array(ids, dtype=np.int32) for ids in COMMON), "beta": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_each_chunk_is_the_definition(seed: int, options: dict[str, Any]):
    given = case(seed)
    found = ranked_divergence(*given, chunks(), **options)
    assert found.valid.tolist() == [False, True, True, True]  # c da | cd a is one chunk
    torch.testing.assert_close(found.divergence.tolist(), by_definition(*given, **options), rtol=1e-12, atol=1e-12)


def test_the_chunks_of_the_case_are_of_every_kind():
    assert list(chunks()) == [(0, 1, 0, 1), (1, 2, 1, 3), (2, 4, 3, 5), (4, 6, 5, 6)]


def in_pair_form(given: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Any, ...]:
    """The same predictions as rows that stand beside what they predict; the chunk that nothing predicts left out."""
    student, student_ids, teacher, teacher_ids = given
    moved = Chunks(**{name: getattr(chunks(), name)[1:] - 1 for name in Chunks.__dataclass_fields__})
    return student[:-1], student_ids[1:], teacher[:-1], teacher_ids[1:], moved


@pytest.mark.parametrize("options", [{}, {"common": COMMON}])
def test_pairs_give_what_the_text_gives(options: dict[str, Any]):
    given = case(5)
    text = ranked_divergence(*given, chunks(), **options)
    pairs = ranked_divergence(*in_pair_form(given), rows="pairs", **options)
    assert pairs.valid.all()
    torch.testing.assert_close(pairs.divergence, text.divergence[1:], rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"temperature": 1.3}, {"common": COMMON, "beta": 0.3}])
def test_the_gradient_is_that_of_the_value(options: dict[str, Any]):
    student, *rest = case(1)

    def value(z: Tensor) -> Tensor:
        return ranked_divergence(z, *rest, chunks(), **options).divergence

    assert torch.autograd.gradcheck(value, student.requires_grad_())


def test_the_teacher_gets_no_gradient_and_rows_that_no_chunk_reads_get_none():
    student, student_ids, teacher, teacher_ids = case(2)
    student.requires_grad_()
    teacher.requires_grad_()
    ranked_divergence(student, student_ids, teacher, teacher_ids, chunks()).divergence.sum().backward()
    assert teacher.grad is None
    assert student.grad is not None
    assert not student.grad[-1].any()  # predicts what stands after the text
    assert student.grad[:-1].any(1).all()


def same_on_both_sides(options: dict[str, Any]) -> RankedOutput:
    logits, ids, _, _ = case(3)
    return ranked_divergence(logits, ids, logits, ids, align_bytes(STUDENT, STUDENT), **options)


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"common": ([0, 3], [0, 3])}])
def test_equal_sides_are_at_distance_zero(options: dict[str, Any]):
    assert not same_on_both_sides(options).divergence.any()


def test_uld_does_not_see_which_token_has_which_probability():
    student, student_ids, teacher, teacher_ids = case(4)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    place = order.argsort()  # where each id went
    wanted = ranked_divergence(student, student_ids, teacher, teacher_ids, chunks())
    found = ranked_divergence(student[:, order], place[student_ids], teacher, teacher_ids, chunks())
    torch.testing.assert_close(found.divergence, wanted.divergence, rtol=1e-12, atol=1e-14)
    hybrid = ranked_divergence(student, student_ids, teacher, teacher_ids, chunks(), common=COMMON)
    moved = ranked_divergence(student[:, order], place[student_ids], teacher, teacher_ids, chunks(), common=COMMON)
    assert (hybrid.divergence[1:] - moved.divergence[1:]).abs().max() > 0.1


def test_a_student_sure_of_the_wrong_token_is_perfect_for_uld_and_as_bad_as_can_be_for_the_hybrid():
    right, wrong = torch.full((2, 3), -60.0), torch.full((2, 3), -60.0)
    right[:, 0], wrong[:, 1] = 0.0, 0.0
    wrong.requires_grad_()
    ids, one = torch.zeros(2, dtype=torch.int64), align_bytes([b"x", b"y"], [b"x", b"y"])
    uld = ranked_divergence(wrong, ids, right, ids, one).divergence[1]
    assert uld.item() < 1e-20
    uld.backward()
    assert wrong.grad is not None
    assert wrong.grad.abs().max() < 1e-20
    every = torch.arange(3)
    hybrid = ranked_divergence(wrong, ids, right, ids, one, common=(every, every)).divergence[1]
    assert hybrid.item() == pytest.approx(math.log(2), abs=1e-6)


def test_a_token_at_minus_infinity_is_a_probability_of_zero():
    student, student_ids, teacher, teacher_ids = case(6)
    student[:, 6], teacher[:, 0] = -math.inf, -math.inf
    student_ids[student_ids == 6], teacher_ids[teacher_ids == 0] = 1, 2
    student.requires_grad_()
    for common in (None, COMMON, ([6, 0], [1, 0])):
        value = ranked_divergence(student, student_ids, teacher, teacher_ids, chunks(), common=common).divergence
        (gradient,) = torch.autograd.grad(value.sum(), student)
        assert value.isfinite().all()
        assert gradient.isfinite().all()


def test_half_precision_is_computed_in_float32():
    student, student_ids, teacher, teacher_ids = case(7)
    half, other = student.bfloat16(), teacher.bfloat16()
    found = ranked_divergence(half, student_ids, other, teacher_ids, chunks()).divergence
    wanted = ranked_divergence(half.double(), student_ids, other.double(), teacher_ids, chunks()).divergence
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_no_chunk_gives_no_number():
    student, student_ids, teacher, teacher_ids = case(8)
    student.requires_grad_()
    found = ranked_divergence(student, student_ids, teacher, teacher_ids, align_bytes([], []))
    assert found.divergence.shape == (0,)
    found.divergence.sum().backward()
    assert student.grad is not None
    assert not student.grad.any()


def test_sorted_distance_is_at_most_the_two_sums_and_counts_every_rank():
    p, q = torch.tensor([0.5, 0.2, 0.3]), torch.tensor([0.9, 0.1])
    assert sorted_distance(p, q).item() == pytest.approx(0.4 + 0.2 + 0.2)
    assert sorted_distance(p, q, top_k=1).item() == pytest.approx(0.4)
    assert sorted_distance(p, torch.zeros(2)).item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k must be >= 1"),
        ({"beta": 0.0, "common": COMMON}, "0 < beta < 1"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"rows": "other"}, "rows must be 'text'"),
        ({"common": ([0, 1], [1])}, "common must pair ids: got 2 of the student and 1"),
        ({"common": ([0, 0], [1, 2])}, "common must hold student ids"),
        ({"common": ([0], [6])}, "the teacher's id 6 at position 0 is outside 0 to 5"),
        ({"chunks": align_bytes([b"a"] * 7, [b"a"] * 7)}, "the chunks span student tokens 0 to 7"),
        ({"student_ids": torch.zeros(3, dtype=torch.int64)}, "the student has ids"),
        ({"teacher_ids": torch.full((6,), 9)}, "the teacher's id 9 at position 0"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str):
    names = ("student_logits", "student_ids", "teacher_logits", "teacher_ids")
    given = dict(zip(names, case(0), strict=True)) | {"chunks": chunks()} | change
    with pytest.raises(ValueError, match=message):
        ranked_divergence(**given)
