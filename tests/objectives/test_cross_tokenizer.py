# SPDX-License-Identifier: Apache-2.0
"""CSD and X-Token as objectives: the published example, the definition on random rows, transports, NaN, refusals."""

import itertools
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cohobate.align import AlignedBatch, AlignedSide, Chunks, TeacherSide
from cohobate.errors import ConfigError, VocabularyMismatch
from cohobate.functional.projection import projected_kl
from cohobate.functional.scores import (
    DenseScores,
    HiddenScores,
    OutputHead,
    SampledScores,
    SeveralScores,
    top_k_scores,
)
from cohobate.objectives import (
    CommonSupportObjective,
    DivergenceObjective,
    ProjectedObjective,
    check_accepts,
    teacher_options,
)
from cohobate.objectives import runs as runs_module
from cohobate.vocab import Projection, SubtokenTables
from functional.memory import NewMemory
from functional.test_common_support import EXAMPLE, STUDENT_ROWS, TEACHER_ROWS, example_chunks, ids, logs, tables_of
from functional.test_projection import example_projection

from . import chunk_cases as cases
from .chunk_cases import SAME, heads, loss_of, metric, rows_of_text, student_of, teacher_of, teachers_of

LENGTHS = [14, 0, 9, 20, 5]

# ------------------------------------------------------------------ the published example


def example_batch(*, same: bool = False) -> AlignedBatch:
    """Its six predictions on either side; nothing predicts the pair of specials in front, so that is no chunk."""
    text, row = example_chunks(), torch.zeros(6, dtype=torch.int64)
    names = ("student_start", "student_end", "teacher_start", "teacher_end")
    chunks = Chunks(**{name: (getattr(text, name)[1:] - 1).astype(np.int32) for name in names})
    student_ids, teacher_ids = ids(EXAMPLE.student_ids)[1:], ids(EXAMPLE.teacher_ids)[1:]
    index = torch.arange(6)
    sides = [TeacherSide(model_inputs={}, pair_index=index, target_ids=teacher_ids, row=row, chunks=chunks)]
    if same:
        sides.append(TeacherSide(model_inputs={}, pair_index=index, target_ids=student_ids, row=row))
    return AlignedBatch(
        student=AlignedSide(model_inputs={}, pair_index=index),
        teacher=sides[0],
        teachers=tuple(sides),
        target_ids=student_ids,
        weights=torch.ones(6),
        row=row,
        is_sampled=torch.tensor([False]),
        sample_ids=("example",),
    )


def example_student() -> HiddenScores:
    """Hidden states that are the logits, under a head that changes nothing."""
    hidden = logs(STUDENT_ROWS)[:6].requires_grad_()
    return HiddenScores(hidden=hidden, head=OutputHead(weight=torch.eye(8, dtype=torch.float64)))


def example_teacher(k: int | None = None, temperature: float = 1.0) -> Any:
    logits = logs(TEACHER_ROWS)[:6]
    if k is None:
        return DenseScores(dense=logits)
    return top_k_scores(logits, ids(EXAMPLE.teacher_ids)[1:], k, temperature=temperature, rows="pairs")


def values_of(objective: Any, teacher: Any, batch: AlignedBatch) -> dict[str, float]:
    """Each term as the trainer divides it."""
    out, counts = objective(example_student(), teacher, batch), objective.counts(batch)
    return {name: term.sum.item() / counts[term.count] for name, term in out.terms.items()}


@pytest.mark.parametrize(
    ("options", "k", "temperature", "kd"),
    [
        ({"keep_realized": False}, None, 1.0, 0.027755742106),
        ({"keep_realized": False}, None, 2.0, 0.384163143754),
        ({}, 2, 1.0, 0.024921124398),
        ({"forced_mode": "evict"}, 2, 1.0, 0.017667575153),
        ({"keep_realized": False}, 2, 1.0, 0.023097296158),
        ({"realized_only_mismatch": True}, None, 1.0, 0.023811404652),
        ({"beta": 0.0}, None, 1.0, 0.114765107284),
        ({"realized_only_mismatch": True}, None, 2.0, 0.183342788840),
    ],
    ids="ABCDEFGH",
)
@pytest.mark.parametrize("rows_of_a_block", [1, 512])
def test_the_published_cases(
    options: dict[str, Any],
    k: int | None,
    temperature: float,
    kd: float,
    rows_of_a_block: int,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(runs_module, "rows_per_block", lambda *_: rows_of_a_block)
    objective = CommonSupportObjective(
        parts=(tables_of(EXAMPLE),), temperature=temperature, dynamic_scaling="off", ce_weight=1.0, **options
    )
    batch = example_batch()
    assert objective.counts(batch) == {"chunks/0": 4.0, "ce_tokens": 6.0}
    found = values_of(objective, example_teacher(k, temperature), batch)
    assert found == pytest.approx({"kd/0": kd, "ce": 0.918173066311}, abs=1e-11)


@pytest.mark.parametrize(
    ("options", "loss", "scale"),
    [
        ({"dynamic_scaling": "call"}, 1.836346132621, 33.080472603111),
        ({"dynamic_scaling": "off"}, 0.119573048737, 1.0),
        ({"dynamic_scaling": "previous_step"}, 10 * 0.027755742106 + 0.918173066311, 10.0),
        ({"dynamic_scaling": "previous_step", "scale": 33.080472603111}, 1.836346132621, 33.080472603111),
    ],
    ids=str,
)
def test_the_published_loss_and_its_gradient(options: dict[str, Any], loss: float, scale: float):
    objective = CommonSupportObjective(parts=(tables_of(EXAMPLE),), keep_realized=False, **options)
    batch, student = example_batch(), example_student()
    out = objective(student, example_teacher(), batch)
    found = loss_of(out, objective.counts(batch))
    assert found.item() == pytest.approx(loss, abs=1e-11)
    assert metric(out, "kd/scale") == pytest.approx(scale, abs=1e-9)
    assert metric(out, "ce") == pytest.approx(0.918173066311, abs=1e-11)
    assert metric(out, "kd/teacher0") == pytest.approx(
        (0.061286841386 + 0.002387301533 + 0.006276822933 + 0.001283100942) / 4, abs=1e-11
    )
    assert metric(out, "chunks/mismatch_share") == 0.75
    if scale > 30:
        (grad,) = torch.autograd.grad(found, student.hidden)
        want = "+.073135058 +.219405175 -.731350588 +.146270118 +.146270118 +.073135058 +.043881033 +.029254023"
        assert grad[2].tolist() == pytest.approx([float(x) for x in want.split()], abs=3e-9)


def test_the_published_two_teachers():
    objective = CommonSupportObjective(
        parts=(tables_of(EXAMPLE), None),
        weights=(0.3, 0.5),
        keep_realized=False,
        dynamic_scaling="off",
        ce_weight=1.0,
    )
    same = DenseScores(dense=0.8 * logs(STUDENT_ROWS)[:6])
    batch = example_batch(same=True)
    assert objective.counts(batch) == {"chunks/0": 4.0, "chunks/1": 6.0, "ce_tokens": 6.0}
    found = values_of(objective, SeveralScores(scores=(example_teacher(), same)), batch)
    assert found["kd/0"] + found["kd/1"] == pytest.approx(0.016141167676, abs=1e-11)
    assert found["kd/1"] / 0.5 == pytest.approx(0.015628890089, abs=1e-11)


@pytest.mark.parametrize(
    ("options", "kept", "dropped"),
    [
        ({}, 5.171945210869, 0.079419828353),
        ({"vocab_top_k": 5}, 3.738795109107, 0.079250559867),
        ({"temperature": 2.0}, 27.210525099725, 0.319691805622),
        ({"mode": "gold"}, 0.373871193911, 0.373871193911),
        ({"mode": "hkl"}, 0.373871193911, 0.373871193911),
        ({"modes": ("gold",)}, 0.373871193911, 0.373871193911),
    ],
    ids=str,
)
def test_the_published_numbers_of_x_token(options: dict[str, Any], kept: float, dropped: float):
    for drop, want in ((False, kept), (True, dropped)):
        objective = ProjectedObjective(
            parts=(example_projection(),), dynamic_scaling="off", drop_unreachable=drop, **options
        )
        assert values_of(objective, example_teacher(), example_batch())["kd/0"] == pytest.approx(want, abs=1e-10)


# ------------------------------------------------------------------ the definition


@pytest.mark.parametrize("seed", [3, 4, 5])
@pytest.mark.parametrize("how", ["hidden", "dense", 3])
def test_csd_is_the_definition_in_value_and_gradient(how: str | int, seed: int, monkeypatch: pytest.MonkeyPatch):
    """Three teachers, weights of pairs, a row without tokens, rows that are the student's own; blocks of five rows."""
    monkeypatch.setattr(runs_module, "rows_per_block", lambda *_: 5)
    rows, made = rows_of_text(LENGTHS, seed=seed), heads(seed)
    options = {"beta": 0.3, "keep_realized": seed != 4, "min_support": seed - 2}
    objective = CommonSupportObjective(
        parts=(*cases.tables(seed), None),
        weights=(0.4, 1.5, 0.7),
        mismatch_weight=3.0,
        dynamic_scaling="off",
        kd_weight=0.6,
        ce_weight=0.3,
        same_vocab_top_k=4,
        **options,
    )
    batch = cases.batch_of(rows, (0, 1, SAME))
    out = objective(student_of(rows, made), teachers_of(rows, made, (0, 1, SAME), how), batch)
    k = how if isinstance(how, int) else None
    kd = [cases.csd_sum(rows, made, i, mismatch_weight=3.0, k=k, **options) for i in (0, 1)]
    kd.append(cases.same_sum(rows, made, columns=cases.most_important(rows, made, SAME, 4)))
    ce = cases.ce_sum(rows, made)
    counts = {f"chunks/{i}": float(cases.num_chunks(rows, i)) for i in (0, 1, SAME)}
    counts["ce_tokens"] = float(cases.num_labels(rows))
    assert objective.counts(batch) == counts
    for i, (weight, want) in enumerate(zip((0.4, 1.5, 0.7), kd, strict=True)):
        torch.testing.assert_close(out.terms[f"kd/{i}"].sum, 0.6 * weight * want, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(out.terms["ce"].sum, 0.3 * ce, rtol=1e-9, atol=1e-11)
    wanted = sum(0.6 * w * x / counts[f"chunks/{i}"] for i, (w, x) in enumerate(zip((0.4, 1.5, 0.7), kd, strict=True)))
    wanted = wanted + 0.3 * ce / counts["ce_tokens"]
    leaves = [*made.leaves, *(row.hidden for row in rows if row.ids)]
    got, want = (torch.autograd.grad(x, leaves) for x in (loss_of(out, counts), wanted))
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
    assert out.pair_loss is not None
    total = torch.stack([term.sum for term in out.terms.values()]).sum()
    assert out.pair_loss.sum().item() == pytest.approx(float(total.detach()), rel=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_top_k": None},
        {"vocab_top_k": 5, "reverse": True, "temperature": 1.5},
        {"mode": "gold", "uncommon_top_k": 2},
        {"mode": "hkl"},
        {"modes": ("gold", "pkl", None), "exact_only": True},
    ],
    ids=str,
)
def test_x_token_is_its_function_text_by_text_on_columns_of_the_whole_call(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Blocks and chunks numbered through rows against `projected_kl` of each text alone, whose oracle is elsewhere."""
    monkeypatch.setattr(runs_module, "rows_per_block", lambda *_: 4)
    rows, made, projections = rows_of_text(LENGTHS), heads(), cases.projections()
    rows = [replace(row, weights=row.weights.double()) for row in rows]
    objective = ProjectedObjective(
        parts=(*projections, None), same_vocab_top_k=3, dynamic_scaling="off", ce_weight=1.0, **options
    )
    batch = cases.batch_of(rows, (0, 1, SAME))
    out = objective(student_of(rows, made), teachers_of(rows, made, (0, 1, SAME)), batch)
    temperature = options.get("temperature", 1.0)
    for i in (0, 1):
        want, number = torch.zeros((), dtype=torch.float64), 0
        mode = (options.get("modes") or [options.get("mode", "pkl")] * 2)[i]
        k = options.get("vocab_top_k") or len(cases.vocabularies()[i].teacher)
        for row in rows:
            if not row.ids:
                continue
            world = row.worlds[i]
            pad = torch.zeros(1, len(world.student), dtype=torch.float64)
            student = torch.cat([cases.logits_of(row.hidden, made.student), pad])
            known = cases.logits_of(row.known[i], made.teachers[i])
            text = projected_kl(
                student,
                ids([0, *world.student_ids]),
                torch.cat([known, pad.new_zeros(1, known.shape[1])]),
                ids([0, *world.teacher_ids]),
                moved(row.chunks[i], 1),
                projections[i],
                columns=ids(cases.most_important(rows, made, i, k)),
                mode=mode,
                temperature=temperature,
                **{n: v for n, v in options.items() if n in ("reverse", "exact_only", "uncommon_top_k")},
            )
            weights = torch.tensor([cases.least_weight(row, s0, s1) for s0, s1, *_ in row.chunks[i]])
            want = want + (text.divergence * weights).sum()
            number += int(text.valid.sum())
        torch.testing.assert_close(out.terms[f"kd/{i}"].sum, temperature**2 * want, rtol=1e-7, atol=1e-10)
        assert objective.counts(batch)[f"chunks/{i}"] == number
    columns = cases.most_important(rows, made, SAME, 3)
    same = cases.same_sum(rows, made, columns=columns, temperature=temperature, reverse=options.get("reverse", False))
    torch.testing.assert_close(out.terms["kd/2"].sum, temperature**2 * same, rtol=1e-9, atol=1e-11)


def moved(chunks: Chunks, by: int) -> Chunks:
    names = ("student_start", "student_end", "teacher_start", "teacher_end")
    return Chunks(**{name: getattr(chunks, name) + np.int32(by) for name in names})


@pytest.mark.parametrize("method", ["csd", "xtoken"])
def test_the_gradient_is_that_of_the_value(method: str):
    rows, made = rows_of_text([6, 4]), heads()
    rows = [replace(row, weights=torch.ones(len(row.ids))) for row in rows]
    objective = objective_of(method, (0, SAME), dynamic_scaling="previous_step", scale=3.0)
    batch, known = cases.batch_of(rows, (0, SAME)), teachers_of(rows, made, (0, SAME))

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        student = HiddenScores(hidden=hidden, head=replace(made.student, weight=weight, bias=bias))
        return loss_of(objective(student, known, batch), objective.counts(batch))

    hidden = torch.cat([row.hidden for row in rows]).detach().requires_grad_()
    assert torch.autograd.gradcheck(loss, [hidden, *made.leaves])


def objective_of(method: str, teachers: tuple[int, ...], seed: int = 3, **options: Any) -> Any:
    kind, of_each = {
        "csd": (CommonSupportObjective, cases.tables(seed)),
        "xtoken": (ProjectedObjective, cases.projections(seed)),
    }[method]
    return kind(parts=tuple(None if i == SAME else of_each[i] for i in teachers), **options)


# ------------------------------------------------------------------ what must not matter


FLAGS = list(itertools.product([True, False], [True, False], [1, 2, 3], ["union", "evict"]))


@pytest.mark.parametrize(("keep", "realized_only", "min_support", "forced"), FLAGS)
def test_all_ids_kept_is_the_same_loss_as_whole_rows(keep: bool, realized_only: bool, min_support: int, forced: Any):
    rows, made = rows_of_text(LENGTHS), heads()
    objective = objective_of(
        "csd",
        (0,),
        keep_realized=keep,
        realized_only_mismatch=realized_only,
        min_support=min_support,
        forced_mode=forced,
    )
    batch, student = cases.batch_of(rows), student_of(rows, made)
    everything = len(cases.vocabularies()[0].teacher)
    found = [objective(student, teacher_of(rows, made, 0, how), batch) for how in ("hidden", "dense", everything)]
    grads = [torch.autograd.grad(loss_of(out, objective.counts(batch)), made.leaves) for out in found]
    for out, grad in zip(found[1:], grads[1:], strict=True):
        torch.testing.assert_close(out.terms["kd/0"].sum, found[0].terms["kd/0"].sum, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(grad, grads[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["csd", "xtoken"])
@pytest.mark.parametrize("rows_of_a_block", [1, 7])
def test_blocks_and_dense_logits_change_nothing(method: str, rows_of_a_block: int, monkeypatch: pytest.MonkeyPatch):
    rows, made = rows_of_text(LENGTHS), heads()
    objective = objective_of(method, (0, 1, SAME), dynamic_scaling="call")
    batch, known = cases.batch_of(rows, (0, 1, SAME)), teachers_of(rows, made, (0, 1, SAME))
    counts = objective.counts(batch)
    whole = objective(student_of(rows, made), known, batch)
    want = torch.autograd.grad(loss_of(whole, counts), made.leaves)
    for dense, size in ((True, 512), (False, rows_of_a_block), (True, rows_of_a_block)):
        monkeypatch.setattr(runs_module, "rows_per_block", lambda *_, size=size: size)
        out = objective(student_of(rows, made, dense=dense), known, batch)
        got = torch.autograd.grad(loss_of(out, counts), made.leaves)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
        assert {n: metric(out, n) for n in out.metrics} == pytest.approx({n: metric(whole, n) for n in whole.metrics})


@pytest.mark.parametrize("how", ["hidden", 8])
def test_no_logits_of_all_pairs_are_made_of_either_side(how: str | int, monkeypatch: pytest.MonkeyPatch):
    """400 pairs, 1000 ids, blocks of 20 pairs: nothing is as large as a quarter of the logits."""
    monkeypatch.setattr(runs_module, "rows_per_block", lambda *_: 20)
    pairs, width = 400, 1000
    index, every = torch.arange(pairs), np.arange(pairs, dtype=np.int32)
    chunks = Chunks(student_start=every, student_end=every + 1, teacher_start=every, teacher_end=every + 1)
    row, same = torch.zeros(pairs, dtype=torch.int64), [(i,) for i in range(width)]
    side = TeacherSide(model_inputs={}, pair_index=index, target_ids=index, row=row, chunks=chunks)
    batch = AlignedBatch(
        student=AlignedSide(model_inputs={}, pair_index=index),
        teacher=side,
        teachers=(side,),
        target_ids=index,
        weights=torch.ones(pairs),
        row=row,
        is_sampled=torch.tensor([False]),
        sample_ids=("long",),
    )
    generator = torch.Generator().manual_seed(0)
    hidden, weight, known = (torch.randn(n, 4, generator=generator) for n in (pairs, width, width))
    student = HiddenScores(hidden=hidden.requires_grad_(), head=OutputHead(weight=weight.requires_grad_()))
    teacher: Any = HiddenScores(hidden=hidden.detach(), head=OutputHead(weight=known))
    if isinstance(how, int):
        teacher = top_k_scores(teacher.logits(), index, how, rows="pairs")
    objective = CommonSupportObjective(parts=(SubtokenTables.from_chains(same, same),))
    with NewMemory(hidden, weight, known) as memory:
        out = objective(student, teacher, batch)
        torch.autograd.grad(loss_of(out, objective.counts(batch)), [hidden, weight])
    assert memory.larger_than(pairs * width) == 0


@pytest.mark.parametrize("method", ["csd", "xtoken"])
def test_what_a_pair_of_weight_0_holds_reaches_nothing(method: str):
    """NaN in the student's and the teachers' rows of a masked row, and of the chunks around single masked pairs."""
    rows, made = rows_of_text([12, 10, 8]), heads()
    rows[1] = replace(rows[1], weights=torch.zeros_like(rows[1].weights))
    objective = objective_of(method, (0, 1, SAME), dynamic_scaling="call", sum_weights_metric="ce")
    objective = replace(objective, **({"vocab_top_k": 5} if method == "xtoken" else {}), same_vocab_top_k=4)
    batch = cases.batch_of(rows, (0, 1, SAME))
    known = teachers_of(rows, made, (0, 1, SAME))
    clean = objective(student_of(rows, made), known, batch)
    want = torch.autograd.grad(loss_of(clean, objective.counts(batch)), made.leaves)

    dead = batch.weights == 0
    hidden = torch.cat([row.hidden for row in rows]).detach()
    hidden[dead] = float("nan")
    poisoned = []
    for i, scores in enumerate(known.scores):
        states = scores.hidden.clone()
        states[(batch.teachers[i].row == 1) if i != SAME else dead] = float("nan")
        poisoned.append(replace(scores, hidden=states))
    student = HiddenScores(hidden=hidden.requires_grad_(), head=made.student)
    out = objective(student, SeveralScores(scores=tuple(poisoned)), batch)
    got = torch.autograd.grad(loss_of(out, objective.counts(batch)), [*made.leaves, hidden])
    torch.testing.assert_close(got[:2], want, rtol=1e-9, atol=1e-11)
    assert not got[2][dead].any()
    assert out.pair_loss is not None
    assert out.pair_loss.isfinite().all()
    assert {n: metric(out, n) for n in out.metrics} == pytest.approx({n: metric(clean, n) for n in clean.metrics})


def test_a_nan_that_counts_is_seen_and_its_row_can_be_named():
    rows, made = rows_of_text([12, 10]), heads()
    rows = [replace(row, weights=torch.ones(len(row.ids))) for row in rows]
    with torch.no_grad():
        rows[1].hidden[2] = float("nan")
    batch = cases.batch_of(rows)
    out = objective_of("csd", (0,))(student_of(rows, made), teacher_of(rows, made, 0), batch)
    assert out.terms["kd/0"].sum.isnan()
    assert out.pair_loss is not None
    assert set(batch.row[~out.pair_loss.isfinite()].tolist()) == {1}


@pytest.mark.parametrize("method", ["csd", "xtoken"])
@pytest.mark.parametrize("scaling", ["call", "previous_step", "off"])
@pytest.mark.parametrize("extra", [{}, {"kd_mode": "select_teacher"}, {"sum_weights_metric": "max_prob"}], ids=str)
def test_no_row_gives_zeros_that_hang_on_the_graph_under_the_same_names(method: str, scaling: Any, extra: Any):
    objective = objective_of(method, (0, 1, SAME), dynamic_scaling=scaling, same_vocab_top_k=3, **extra)
    made, some, none = heads(), rows_of_text([8]), rows_of_text([0, 0])
    full = objective(student_of(some, made), teachers_of(some, made, (0, 1, SAME)), cases.batch_of(some, (0, 1, SAME)))
    batch = cases.batch_of(none, (0, 1, SAME))
    assert not any(objective.counts(batch).values())
    for dense in (False, True):
        out = objective(student_of(none, made, dense=dense), teachers_of(none, made, (0, 1, SAME)), batch)
        assert set(out.terms) == set(full.terms)
        assert set(out.metrics) == set(full.metrics)
        assert set(out.step_values) == set(full.step_values)
        for term in out.terms.values():
            assert term.sum.item() == 0.0
            grads = torch.autograd.grad(term.sum, made.leaves, retain_graph=True, allow_unused=dense)
            assert not any(g is not None and g.any() for g in grads)
    assert set(full.terms) == {"kd/0", "kd/1", "kd/2", "ce"}


# ------------------------------------------------------------------ refusals


def test_temperatures_but_1_are_warned_of_once(caplog: pytest.LogCaptureFixture):
    teacher_options.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            replace(objective_of("csd", (0,), temperature=2.5), alpha=1.0)
        objective_of("csd", (SAME,), temperature=2.5)  # no chain, no product
        objective_of("xtoken", (0,), temperature=2.5)
    assert [r.message for r in caplog.records] == [m for m in (r.message for r in caplog.records) if "2.5" in m]
    assert len(caplog.records) == 1
    assert "no tempered probability" in caplog.text


def test_averaging_with_another_tokenizer_is_said_to_be_a_sum(caplog: pytest.LogCaptureFixture):
    teacher_options.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        objective = objective_of("csd", (0, SAME), kd_mode="averaged_logits", weights=(0.3, 0.5))
    assert "here it is kd_mode='sum'" in caplog.text
    rows, made = rows_of_text([9]), heads()
    batch, known = cases.batch_of(rows, (0, SAME)), teachers_of(rows, made, (0, SAME))
    summed = replace(objective, kd_mode="sum")(student_of(rows, made), known, batch)
    out = objective(student_of(rows, made), known, batch)
    assert {n: t.sum.item() for n, t in out.terms.items()} == {n: t.sum.item() for n, t in summed.terms.items()}


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("csd", {"parts": ()}, r"parts must be a tuple.*got \(\)"),
        (
            "csd",
            {"parts": cases.projections()[:1]},
            r"parts\[0\] must be the sub-token tables of teachers\[0\].*got Proj",
        ),
        (
            "xtoken",
            {"parts": cases.tables()[:1]},
            r"parts\[0\] must be the projection of teachers\[0\].*got SubtokenT",
        ),
        (
            "csd",
            {"parts": (cases.tables()[0], SubtokenTables.from_chains([(0,)], [(0,)]))},
            r"students of \[1, 12\] ids",
        ),
        ("csd", {"beta": 1.5}, "beta must be in"),
        ("csd", {"temperature": 0.0}, "temperature must be"),
        ("csd", {"mismatch_weight": -1.0}, "mismatch_weight must be"),
        ("csd", {"min_support": 0}, "min_support must be"),
        ("csd", {"forced_mode": "x"}, "forced_mode must be"),
        ("csd", {"ce_rows": "some"}, "ce_rows must be one of 'recorded', 'all'"),
        ("csd", {"chosen_over": "epoch"}, "chosen_over must be one of"),
        ("csd", {"same_vocab_top_k": 0}, "same_vocab_top_k must be at least 1"),
        ("csd", {"parts": (None,), "same_vocab_top_k": 1}, "identically zero"),
        (
            "csd",
            {"parts": (None, None), "same_vocab_top_k": 5, "kd_mode": "averaged_logits"},
            "same_vocab_top_k=5 has no effect",
        ),
        ("csd", {"weights": (0.0,)}, "weights add up to 0"),
        ("csd", {"weights": (1.0, 1.0)}, "one for each of 1 teachers, got 2"),
        (
            "csd",
            {"kd_mode": "select_teacher", "sum_weights_metric": "ce"},
            "sum_weights_metric weighs.*select_teacher",
        ),
        ("csd", {"dynamic_scaling": "call", "ce_weight": 0.0}, "neither can have weight 0"),
        ("xtoken", {"mode": "kl"}, "mode must be"),
        ("xtoken", {"modes": ("gold", "gold")}, "one .or None. for each of 1 teachers"),
        ("xtoken", {"modes": ("gold",), "kd_mode": "select_teacher"}, "only kd_mode='sum' can add up"),
        ("xtoken", {"parts": (None,), "modes": ("gold",)}, r"modes\[0\]='gold'.*no projection"),
        ("xtoken", {"vocab_top_k": 0}, "vocab_top_k must be at least 1"),
        ("xtoken", {"uncommon_top_k": -1}, "uncommon_top_k must be"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_it_is_made(method: str, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        replace(objective_of(method, (0,)), **options)


def test_vocabularies_that_share_nothing_are_refused_when_it_is_made():
    chains = SubtokenTables(
        student_to_teacher=SubtokenTables.from_chains([(0,)], [(0,)]).student_to_teacher.from_chains([(0, 0)]),
        teacher_to_student=SubtokenTables.from_chains([(0,)], [(0,)]).student_to_teacher.from_chains([(0, 0)]),
    )
    with pytest.raises(ConfigError, match=r"sub-token tables of teachers\[1\] pair no student token"):
        CommonSupportObjective(parts=(None, chains))
    nothing = Projection(
        indices=np.zeros((2, 1), np.int32),
        weights=np.ones((2, 1)),
        exact=np.zeros(2, np.bool_),
        teacher_vocab_size=1,
    )
    with pytest.raises(ConfigError, match=r"projection of teachers\[0\] has no token that both"):
        ProjectedObjective(parts=(nothing,))


def refused(objective: Any, known: Any, batch: AlignedBatch, student: Any = None) -> str:
    rows, made = rows_of_text([9]), heads()
    with pytest.raises((ConfigError, VocabularyMismatch, ValueError)) as error:
        objective(student_of(rows, made) if student is None else student, known, batch)
    return str(error.value)


def test_scores_that_do_not_belong_are_refused_by_teacher_side_and_what_to_repair():
    rows, made = rows_of_text([9]), heads()
    csd, xtoken = objective_of("csd", (0,)), objective_of("xtoken", (0,))
    batch, known = cases.batch_of(rows), teacher_of(rows, made, 0)
    width = len(cases.vocabularies()[0].teacher)
    wider = HiddenScores(hidden=known.hidden, head=OutputHead(weight=torch.zeros(width + 1, 4, dtype=torch.float64)))
    message = refused(csd, wider, batch)
    assert f"teachers[0] have {width + 1} columns, the sub-token tables of teachers[0] {width}" in message
    assert "cohobate subtokens validate" in message
    assert "projection" not in message
    message = refused(xtoken, wider, batch)
    assert f"the projection of teachers[0] {width} ids" in message
    assert "cohobate projection validate" in message
    assert "table" not in message
    narrow = HiddenScores(hidden=student_of(rows, made).hidden, head=made.student.cut(5))  # pyright: ignore
    assert "the scores of student have 5 columns" in refused(csd, known, batch, narrow)
    assert "got SampledScores" in refused(csd, SampledScores(logprobs=torch.zeros(3)), batch)
    assert "got no scores" in refused(csd, None, batch)
    assert "compares whole rows: leave top_k out for this teacher, or use csd" in refused(
        xtoken, teacher_of(rows, made, 0, 3), batch
    )
    assert "normalised at temperature 2.0" in refused(csd, teacher_of(rows, made, 0, 3, temperature=2.0), batch)
    few = replace(known, hidden=known.hidden[1:])
    assert "`batch.teachers[0].pair_index`" in refused(csd, few, batch)
    assert "for 1 teachers and got the scores of 2" in refused(csd, SeveralScores(scores=(known, known)), batch)


def test_a_teacher_taken_for_one_of_the_other_kind_is_refused():
    rows, made = rows_of_text([9]), heads()
    known = teacher_of(rows, made, 0)
    same, own = objective_of("csd", (SAME,)), objective_of("csd", (0,))
    assert "with the student's tokenizer (no part), the batch for one with a tokenizer of its own" in refused(
        same, known, cases.batch_of(rows)
    )
    assert "with a tokenizer of its own (a part), the batch for one with the student's" in refused(
        own, known, cases.batch_of(rows, (SAME,))
    )
    assert "compares with teachers[1], but the batch was aligned for 1" in refused(
        objective_of("csd", (0, 1)), SeveralScores(scores=(known, known)), cases.batch_of(rows)
    )
    scores = top_k_scores(teacher_of(rows, made, SAME).logits(), cases.batch_of(rows).target_ids, 3, rows="pairs")
    assert "columns that all rows share: leave top_k out" in refused(same, scores, cases.batch_of(rows, (SAME,)))


@pytest.mark.parametrize(
    ("teachers", "provides", "texts", "message"),
    [
        ((0,), HiddenScores, None, r"a part for teachers\[0\], but that teacher reads the student's tokens"),
        ((SAME,), HiddenScores, ("text",), r"teachers\[0\] has a tokenizer of its own, but Common"),
        ((0, SAME), SeveralScores, ("text", "text"), r"teachers\[1\] has a tokenizer of its own"),
        ((0, SAME), SeveralScores, ("text",), r"made for 2 teachers, but Speaker is 1"),
        ((0, SAME), HiddenScores, ("text",), "accepts SeveralScores, but the teacher Speaker provides Hidden"),
    ],
)
def test_teachers_and_parts_are_held_together_before_anything_is_scored(
    teachers: tuple[int, ...], provides: type, texts: Any, message: str
):
    class Speaker:
        pass

    speaker: Any = Speaker()
    speaker.provides, speaker.texts = provides, texts
    with pytest.raises(ConfigError, match=message):
        check_accepts(objective_of("csd", teachers), speaker)


def test_teachers_and_parts_that_fit_pass_and_other_objectives_refuse_another_tokenizer():
    class Speaker:
        provides: type = SeveralScores
        texts: Any = ("text", None)

    check_accepts(objective_of("csd", (0, SAME)), Speaker())
    Speaker.provides, Speaker.texts = HiddenScores, ("text",)
    check_accepts(objective_of("xtoken", (0,)), Speaker())
    with pytest.raises(ConfigError, match=r"compares the tokens.*one by one, but Speaker has a tokenizer of its own"):
        check_accepts(DivergenceObjective(), Speaker())
    Speaker.texts = None
    check_accepts(objective_of("csd", (SAME,)), Speaker())


def test_chunks_that_overlap_or_reach_beyond_the_predictions_are_refused():
    rows, made = rows_of_text([9]), heads()
    batch = cases.batch_of(rows)
    side = batch.teachers[0]
    assert side.chunks is not None
    for changed in (
        replace(side.chunks, student_end=side.chunks.student_end + np.int32(1)),
        replace(side.chunks, teacher_start=side.chunks.teacher_start - np.int32(1)),
    ):
        other = replace(batch, teachers=(replace(side, chunks=changed),))
        assert "ascending ranges" in refused(objective_of("csd", (0,)), teacher_of(rows, made, 0), other)


def test_what_each_accepts_is_known_before_anything_is_scored():
    def names(objective: Any) -> list[str]:
        return [kind.__name__ for kind in objective.accepts]

    assert names(objective_of("csd", (0,))) == ["HiddenScores", "DenseScores", "TopKScores", "SeveralScores"]
    assert names(objective_of("xtoken", (0,))) == ["HiddenScores", "DenseScores", "SeveralScores"]
    assert names(objective_of("csd", (SAME,))) == ["HiddenScores", "DenseScores", "SeveralScores"]
    assert names(objective_of("csd", (0, SAME))) == ["SeveralScores"]
