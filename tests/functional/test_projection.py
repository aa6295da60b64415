# SPDX-License-Identifier: Apache-2.0
"""X-Token against its definition written out, and against its published numbers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cohobate.align import Chunks, align_bytes
from cohobate.functional.projection import projected_kl
from cohobate.vocab import Projection

from . import csd_oracle
from .csd_oracle import World
from .test_common_support import EXAMPLE, STUDENT_ROWS, TEACHER_ROWS, case, example_chunks, ids, in_pairs, logs

EPS = 1e-10


def example_projection() -> Projection:
    return Projection.from_rows(
        [[4, -1], [3, -1], [2, -1], [1, -1], [0, -1], [0, 1], [0, 3], [0, -1]],
        [[1, 0]] * 5 + [[10 / 11, 1 / 11], [10 / 11, 1 / 11], [1, 0]],
        [True] * 5 + [False] * 3,
        teacher_vocab_size=9,
    )


@pytest.mark.parametrize(
    ("options", "kept", "dropped"),
    [
        ({}, 5.171945210869, 0.079419828353),
        ({"vocab_top_k": 5}, 3.738795109107, 0.079250559867),
        ({"temperature": 2.0}, 27.210525099725, 0.319691805622),
        ({"mode": "gold"}, 0.373871193911, 0.373871193911),
        ({"mode": "hkl"}, 0.373871193911, 0.373871193911),
    ],
)
def test_the_published_numbers(options: dict[str, Any], kept: float, dropped: float):
    for drop, want in ((False, kept), (True, dropped)):
        out = projected_kl(
            logs(STUDENT_ROWS),
            ids(EXAMPLE.student_ids),
            logs(TEACHER_ROWS),
            ids(EXAMPLE.teacher_ids),
            example_chunks(),
            example_projection(),
            drop_unreachable=drop,
            **options,
        )
        assert out.valid.tolist() == [False, True, True, True, True]
        scaled = options.get("temperature", 1.0) ** 2 * out.divergence.sum().item() / 4
        assert scaled == pytest.approx(want, abs=1e-11)


def spread(made: World, k: int = 3) -> Projection:
    """Rows from the chains of a random world: what `Projection.build` does without its reverse pass."""
    indices, weights, exact = [], [], []
    for chain in made.forward:
        chain = chain if len(chain) <= k else ()
        raw = [0.1**i for i in range(len(chain))]
        merged: dict[int, float] = {}
        for token, weight in zip(chain, raw, strict=True):
            merged[token] = merged.get(token, 0) + weight / sum(raw)
        row = sorted(merged.items(), key=lambda item: (-item[1], item[0]))
        indices.append([*(token for token, _ in row), *[-1] * (k - len(row))])
        weights.append([*(weight for _, weight in row), *[0.0] * (k - len(row))])
        exact.append(len(chain) == 1)
    return Projection.from_rows(indices, weights, exact, teacher_vocab_size=len(made.teacher))


def by_definition(
    student: Tensor, teacher: Tensor, made: World, chunks: Chunks, projection: Projection, **options: Any
) -> Tensor:
    """One chunk, one column and one row at a time."""
    temperature, mode = options.get("temperature", 1.0), options.get("mode", "pkl")
    s, t = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    of_chunk = [
        ([p for p in range(s0 - 1, s1 - 1) if p >= 0], [p for p in range(t0 - 1, t1 - 1) if p >= 0])
        for s0, s1, t0, t1 in chunks
    ]
    used = sorted({p for ours, theirs in of_chunk if ours and theirs for p in theirs})
    importance = [max(float(teacher[p, v]) for p in used) for v in range(teacher.shape[1])]
    order = sorted(range(teacher.shape[1]), key=lambda v: (-importance[v], v))[: options.get("vocab_top_k", 99)]
    columns = sorted(order)
    if options.get("drop_unreachable", True):
        columns = [v for v in columns if (projection.indices == v).any()]
    q_rows = (teacher / temperature)[:, columns].log_softmax(-1)
    values = []
    for ours, theirs in of_chunk:
        if not (ours and theirs):
            values.append(student.sum() * 0)
            continue
        n_s, n_t = len(ours) + EPS, len(theirs) + EPS
        if mode == "pkl":
            r = []
            for column in columns:
                mass = student.sum() * 0
                for token in range(student.shape[1]):
                    for slot, to in enumerate(projection.indices[token]):
                        if to == column:
                            weight = float(projection.weights[token, slot])
                            mass = mass + sum(s[p, token].exp() for p in ours) / n_s * weight
                r.append(mass)
            stacked = torch.stack(r)
            r_log = (stacked / (stacked.sum() + EPS) + EPS).log()
            q = q_rows[theirs].sum(0) / n_t
            terms = r_log.exp() * (r_log - q) if options.get("reverse") else q.exp() * (q - r_log)
            values.append(terms.sum())
            continue
        pairs = dict(reversed([(int(b), int(a)) for a, b in zip(*projection.strict_pairs, strict=True)]))
        a, b = s[ours].sum(0) / n_s, t[theirs].sum(0) / n_t
        total = student.sum() * 0
        for of_teacher, of_student in pairs.items():
            x, y = a[of_student], b[of_teacher]
            total = total + (x.exp() * (x - y) if options.get("reverse") else y.exp() * (y - x))
        rest_s = sorted(
            (a[v].exp() for v in range(len(a)) if v not in pairs.values()),
            key=lambda x: x.detach().item(),
            reverse=True,
        )
        rest_t = sorted(
            (b[v].exp() for v in range(len(b)) if v not in pairs), key=lambda x: x.detach().item(), reverse=True
        )
        top = options.get("uncommon_top_k", 99)
        for x, y in list(zip(rest_s, rest_t, strict=False))[:top]:
            total = total + (x - y).abs()
        values.append(total)
    return torch.stack(values)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reverse": True, "temperature": 1.5},
        {"vocab_top_k": 4, "drop_unreachable": False},
        {"vocab_top_k": 5},
        {"mode": "gold"},
        {"mode": "gold", "reverse": True, "uncommon_top_k": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_are_the_definition(seed: int, options: dict[str, Any]):
    made = csd_oracle.world(seed, length=16)
    student, teacher, chunks = case(seed, made)
    projection = spread(made)
    leaf, twin = student.clone().requires_grad_(), student.clone().requires_grad_()
    out = projected_kl(leaf, ids(made.student_ids), teacher, ids(made.teacher_ids), chunks, projection, **options)
    want = by_definition(twin, teacher, made, chunks, projection, **options)
    torch.testing.assert_close(out.divergence, want, atol=1e-11, rtol=1e-9)
    weights = torch.linspace(0.5, 2, len(chunks), dtype=torch.float64)
    (grad,) = torch.autograd.grad((out.divergence * weights).sum(), leaf)
    (want_grad,) = torch.autograd.grad((want * weights).sum(), twin)
    torch.testing.assert_close(grad, want_grad, atol=1e-11, rtol=1e-9)


def test_a_column_that_nothing_projects_to_costs_23_nats_times_its_mass_unless_dropped():
    teacher = logs(TEACHER_ROWS)
    out = [
        projected_kl(
            logs(STUDENT_ROWS),
            ids(EXAMPLE.student_ids),
            teacher,
            ids(EXAMPLE.teacher_ids),
            example_chunks(),
            example_projection(),
            drop_unreachable=drop,
        ).divergence
        for drop in (False, True)
    ]
    unreachable = teacher.exp()[0, 5:].sum().item()
    assert out[0][1].item() > 0.8 * unreachable * -math.log(EPS)
    assert out[1][1] < 0.3


def test_only_exact_chunks_are_valid_if_asked():
    out = projected_kl(
        logs(STUDENT_ROWS),
        ids(EXAMPLE.student_ids),
        logs(TEACHER_ROWS),
        ids(EXAMPLE.teacher_ids),
        example_chunks(),
        example_projection(),
        exact_only=True,
    )
    assert out.valid.tolist() == [False, True, False, False, False]


def test_columns_chosen_by_the_caller_are_used_and_one_vocabulary_is_the_full_divergence():
    words = [b"a", b"b", b"c"]
    made = World(words, words, [0, 2, 1], [0, 2, 1], [(0,), (1,), (2,)], [(0,), (1,), (2,)])
    student, teacher, chunks = case(0, made)
    projection = spread(made)
    arguments: Any = (student, ids([0, 2, 1]), teacher, ids([0, 2, 1]), chunks, projection)
    full = projected_kl(*arguments).divergence
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    torch.testing.assert_close(full[1:], (t.exp() * (t - s)).sum(-1)[:2], atol=1e-8, rtol=1e-7)
    two = projected_kl(*arguments, columns=torch.tensor([0, 2])).divergence
    s2, t2 = student[:, [0, 2]].log_softmax(-1), teacher[:, [0, 2]].log_softmax(-1)
    torch.testing.assert_close(two[1:], (t2.exp() * (t2 - s2)).sum(-1)[:2], atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "kl"}, "mode must be"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"vocab_top_k": 0}, "vocab_top_k must be >= 1"),
        ({"uncommon_top_k": -1}, "uncommon_top_k must be >= 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        projected_kl(
            logs(STUDENT_ROWS),
            ids(EXAMPLE.student_ids),
            logs(TEACHER_ROWS),
            ids(EXAMPLE.teacher_ids),
            example_chunks(),
            example_projection(),
            **change,
        )


def test_padded_or_swapped_logits_are_refused():
    with pytest.raises(ValueError, match="the student's logits have 9 columns, the projection 8 ids"):
        projected_kl(
            logs(TEACHER_ROWS),
            ids(EXAMPLE.teacher_ids),
            logs(STUDENT_ROWS),
            ids(EXAMPLE.student_ids),
            example_chunks(),
            example_projection(),
        )


@pytest.mark.parametrize("options", [{"mode": "pkl"}, {"mode": "gold"}, {"mode": "hkl"}])
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_that_no_valid_chunk_reads_may_hold_anything(options: dict[str, Any], reverse: bool):
    """Among them the last row of a text, which predicts nothing."""

    def value_and_gradient(bad: float) -> tuple[Tensor, Tensor]:
        student, teacher = logs(STUDENT_ROWS), logs(TEACHER_ROWS)
        for side in (student, teacher):
            side[2:] = bad if math.isnan(bad) else side[2:]
        student.requires_grad_()
        out = projected_kl(
            student,
            ids(EXAMPLE.student_ids),
            teacher,
            ids(EXAMPLE.teacher_ids),
            example_chunks(),
            example_projection(),
            exact_only=True,
            reverse=reverse,
            columns=torch.arange(5) if options["mode"] == "pkl" else None,
            **options,
        )
        out.divergence.sum().backward()
        assert student.grad is not None
        return out.divergence.detach(), student.grad

    for got, want in zip(value_and_gradient(math.nan), value_and_gradient(0.0), strict=True):
        torch.testing.assert_close(got, want, atol=0, rtol=0)


@pytest.mark.parametrize("mode", ["pkl", "gold", "hkl"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_token_that_both_sides_forbid_adds_nothing(mode: Any, reverse: bool):
    words = [b"a", b"b", b"c", b"d"]
    chains = [(i,) for i in range(4)]
    made = World(words, words, [0, 2, 1], [0, 2, 1], chains, chains)
    student, teacher, chunks = case(0, made)
    if mode == "pkl" and reverse:
        teacher[:, 3] = -1e4  # an event that the student cannot avoid: its mass has a floor
    else:
        teacher[:, 3] = -torch.inf
    student[:, 3] = -torch.inf
    student.requires_grad_()
    arguments: Any = (student, ids([0, 2, 1]), teacher, ids([0, 2, 1]), chunks, spread(made))
    out = projected_kl(*arguments, mode=mode, reverse=reverse)
    out.divergence.sum().backward()
    s, t = student.detach()[:, :3].log_softmax(-1), teacher[:, :3].log_softmax(-1)
    want = (s.exp() * (s - t) if reverse else t.exp() * (t - s)).sum(-1)[:2]
    torch.testing.assert_close(out.divergence.detach()[1:], want, atol=2e-6, rtol=1e-6)
    assert student.grad is not None
    assert student.grad.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": torch.tensor([9])}, "columns must be distinct teacher ids of 0 to 8"),
        ({"columns": torch.tensor([-1])}, "columns must be distinct"),
        ({"columns": torch.tensor([1, 1])}, "columns must be distinct"),
        ({"columns": torch.tensor([True])}, "columns must be .* signed integers"),
        ({"student_ids": ids([0, 1, -1, 2, 1, 5, 2])}, "the student's id -1 at position 2 is outside 0 to 7"),
        ({"teacher_ids": ids([4, 3, 0, 9, 5, 0, 6])}, "the teacher's id 9 at position 3 is outside 0 to 8"),
        ({"chunks": align_bytes([b"a"] * 9, [b"a"] * 9)}, "the chunks span student tokens 0 to 9, but there are 7"),
    ],
)
def test_ids_and_chunks_of_something_else_are_refused(change: dict[str, Any], message: str):
    arguments: dict[str, Any] = {
        "student_logits": logs(STUDENT_ROWS),
        "student_ids": ids(EXAMPLE.student_ids),
        "teacher_logits": logs(TEACHER_ROWS),
        "teacher_ids": ids(EXAMPLE.teacher_ids),
        "chunks": example_chunks(),
        "projection": example_projection(),
    }
    with pytest.raises(ValueError, match=message):
        projected_kl(**(arguments | change))


PAIR_OPTIONS: list[dict[str, Any]] = [
    {},
    {"vocab_top_k": 4, "reverse": True},
    {"exact_only": True, "temperature": 1.5},
    {"mode": "gold"},
    {"mode": "hkl", "reverse": True},
]


@pytest.mark.parametrize("options", PAIR_OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_pairs_are_the_text_one_place_earlier(seed: int, options: dict[str, Any]):
    """But for a chunk at position 0, of which a text keeps the rows that exist: it is left out of both."""
    made = csd_oracle.world(seed, length=16)
    student, teacher, chunks = case(seed, made)
    first, pairs = next(iter(chunks)), in_pairs(chunks)
    assert first[0] == first[2] == 0
    names = ("student_start", "student_end", "teacher_start", "teacher_end")
    later = Chunks(**{name: getattr(chunks, name)[1:] for name in names})
    whole, cut = student.clone().requires_grad_(), student[:-1].clone().requires_grad_()
    of_student, of_teacher = ids(made.student_ids), ids(made.teacher_ids)
    text = projected_kl(whole, of_student, teacher, of_teacher, later, spread(made), **options)
    out = projected_kl(cut, of_student[1:], teacher[:-1], of_teacher[1:], pairs, spread(made), rows="pairs", **options)
    assert out.valid.equal(text.valid)
    assert out.valid.any()
    torch.testing.assert_close(out.divergence, text.divergence, atol=0, rtol=0)
    weights = torch.linspace(0.5, 2, len(later), dtype=torch.float64)
    (grad,) = torch.autograd.grad((text.divergence * weights).sum(), whole)
    (pair_grad,) = torch.autograd.grad((out.divergence * weights).sum(), cut)
    torch.testing.assert_close(pair_grad, grad[:-1], atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"mode": "gold"}], ids=str)
def test_texts_end_to_end_are_texts_one_by_one(options: dict[str, Any]):
    made = csd_oracle.world(1, length=20)
    student, teacher, chunks = case(1, made)
    pairs, (s, t) = in_pairs(chunks), (ids(made.student_ids)[1:], ids(made.teacher_ids)[1:])
    shift = {"student": len(s), "teacher": len(t)}
    twice = Chunks(
        **{
            name: np.concatenate([getattr(pairs, name), getattr(pairs, name) + shift[name.split("_")[0]]])
            for name in ("student_start", "student_end", "teacher_start", "teacher_end")
        }
    )
    columns = torch.tensor([1, 3, 4, 7, 9]) if options.get("mode") is None else None
    projection = spread(made)
    other = (student.flip(0) * 0.7, teacher.flip(0) * 1.3)

    def value(x: Tensor, a: Tensor, y: Tensor, b: Tensor, of: Chunks) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        out = projected_kl(leaf, a, y, b, of, projection, columns=columns, rows="pairs", **options).divergence
        return out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0]

    apart = [value(x[:-1], s, y[:-1], t, pairs) for x, y in ((student, teacher), other)]
    joined = value(
        torch.cat([student[:-1], other[0][:-1]]),
        torch.cat([s, s]),
        torch.cat([teacher[:-1], other[1][:-1]]),
        torch.cat([t, t]),
        twice,
    )
    for got, *parts in zip(joined, *apart, strict=True):
        torch.testing.assert_close(got, torch.cat(parts), atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize("mode", ["pkl", "gold"])
def test_chunks_that_share_a_row_add_up_their_gradients(mode: Any):
    """None that an aligner gives do; a row's gradient is a sum all the same."""
    made = csd_oracle.world(2, length=12)
    student, teacher, chunks = case(2, made)
    names = ("student_start", "student_end", "teacher_start", "teacher_end")
    twice = Chunks(**{name: np.repeat(getattr(chunks, name), 2) for name in names})

    def gradient(of: Chunks) -> Tensor:
        leaf = student.clone().requires_grad_()
        out = projected_kl(leaf, ids(made.student_ids), teacher, ids(made.teacher_ids), of, spread(made), mode=mode)
        return torch.autograd.grad(out.divergence.sum(), leaf)[0]

    torch.testing.assert_close(gradient(twice), 2 * gradient(chunks), atol=1e-13, rtol=1e-10)


def test_bfloat16_logits_keep_their_dtype_and_agree_with_float64():
    made = csd_oracle.world(4)
    student, teacher, chunks = case(4, made)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaf = student.bfloat16().to(dtype).requires_grad_()
        arguments: Any = (leaf, ids(made.student_ids), teacher.bfloat16().to(dtype), ids(made.teacher_ids), chunks)
        value = projected_kl(*arguments, spread(made), columns=torch.arange(6)).divergence
        (grad,) = torch.autograd.grad(value.sum(), leaf)
        assert grad.dtype == dtype
        results.append((value.detach().double(), grad.double()))
    torch.testing.assert_close(results[0][0], results[1][0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(results[0][1], results[1][1], atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("mode", ["pkl", "gold", "hkl"])
def test_no_valid_chunk_gives_zeros_that_still_hang_on_the_graph(mode: Any):
    student = logs(STUDENT_ROWS).requires_grad_()
    nothing = align_bytes([], [])
    first = Chunks(
        **{
            name: np.array([i])
            for i, name in ((0, "student_start"), (1, "student_end"), (0, "teacher_start"), (1, "teacher_end"))
        }
    )
    for chunks in (nothing, first):
        out = projected_kl(
            student,
            ids(EXAMPLE.student_ids),
            logs(TEACHER_ROWS),
            ids(EXAMPLE.teacher_ids),
            chunks,
            example_projection(),
            mode=mode,
        )
        assert not out.valid.any()
        assert out.divergence.tolist() == [0.0] * len(chunks)
        (grad,) = torch.autograd.grad(out.divergence.sum(), student)
        assert not grad.any()
