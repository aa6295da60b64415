# SPDX-License-Identifier: Apache-2.0
"""A step is its rows: neither micro-batches nor ranks change it; and what one step tells the next."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks

from cohobate.errors import ConfigError
from cohobate.functional.scores import DenseScores, SeveralScores
from cohobate.objectives import CommonSupportObjective, SumObjective, TokenSelectionObjective, for_step

from . import chunk_cases as cases
from . import steps as steps_module
from .chunk_cases import SAME, metric
from .steps import ARRANGEMENTS, LENGTHS, MODES, RANKS, objective_of, steps

WHOLE = [list(range(len(LENGTHS)))]
CUT = [[0], [1, 2], [], [3, 4]]


def assert_same(found: dict[str, Any], wanted: dict[str, Any], rel: float = 1e-9) -> None:
    assert found.keys() == wanted.keys()
    for step, want in wanted.items():
        got = found[step]
        assert got["loss"] == pytest.approx(want["loss"], rel=rel)
        assert got["gradient"] == pytest.approx(want["gradient"], rel=rel, abs=rel)
        assert got["metrics"] == pytest.approx(want["metrics"], rel=rel, abs=rel)
        assert got["state"] == pytest.approx(want["state"], rel=rel)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scaling", ["previous_step", "off"])
def test_micro_batches_change_nothing(mode: str, scaling: str):
    wanted = steps(mode, WHOLE, dynamic_scaling=scaling)
    assert_same(steps(mode, CUT, dynamic_scaling=scaling), wanted)
    assert any(wanted["step 0"]["gradient"])


def test_what_is_decided_in_each_call_depends_on_the_calls_as_published():
    """The exemptions that the documentation names: the ratio of a call, and choices of a call."""
    for mode, options in (
        ("csd one teacher", {"dynamic_scaling": "call"}),
        ("csd by ce", {"dynamic_scaling": "off", "chosen_over": "call"}),
        ("xtoken few columns", {"dynamic_scaling": "off", "chosen_over": "call"}),
    ):
        whole, cut = (steps(mode, micro, number=1, **options)["step 0"]["gradient"] for micro in (WHOLE, CUT))
        assert whole != pytest.approx(cut, rel=1e-3), mode


def test_the_loss_of_a_call_is_twice_its_cross_entropy():
    found = steps("csd static", WHOLE, number=1, dynamic_scaling="call")["step 0"]
    rows, made = cases.rows_of_text(LENGTHS), cases.heads()
    ce = cases.ce_sum(rows, made).item() / cases.num_labels(rows)
    assert found["loss"] == pytest.approx(2 * ce)


def test_the_ratio_of_a_step_is_the_scale_of_the_next():
    found = steps("csd static", CUT, number=3, dynamic_scaling="previous_step", kd_weight=0.5, ce_weight=0.25)
    rows, made = cases.rows_of_text(LENGTHS), cases.heads()
    weights = MODES["csd static"][2]["weights"]
    kd = [weights[i] * cases.csd_sum(rows, made, i, beta=0.5).item() / cases.num_chunks(rows, i) for i in (0, 1)]
    kd.append(weights[2] * cases.same_sum(rows, made).item() / cases.num_chunks(rows, SAME))
    ce = cases.ce_sum(rows, made).item() / cases.num_labels(rows)
    assert found["step 0"]["metrics"]["kd/scale"] == 2.0
    assert found["step 0"]["loss"] == pytest.approx(2 * sum(kd) + ce)
    for step in ("step 1", "step 2"):  # the weights have not moved
        assert found[step]["metrics"]["kd/scale"] == pytest.approx(ce / sum(kd))
        assert found[step]["loss"] == pytest.approx(2 * ce)
    assert found["step 2"]["state"] == {"kd_scale": pytest.approx(ce / sum(kd))}


def test_a_call_outside_a_step_is_a_step_of_its_own():
    rows, made = cases.rows_of_text(LENGTHS), cases.heads()
    objective = objective_of("csd selected", dynamic_scaling="call")
    teachers = MODES["csd selected"][1]
    batch = cases.batch_of(rows, teachers)
    out = objective(cases.student_of(rows, made), cases.teachers_of(rows, made, teachers), batch)
    want = steps("csd selected", WHOLE, number=1, dynamic_scaling="call")["step 0"]
    assert cases.loss_of(out, objective.counts(batch)).item() == pytest.approx(want["loss"], rel=1e-12)
    assert {n: metric(out, n) for n, m in out.metrics.items() if float(m.count)} == pytest.approx(want["metrics"])


@pytest.mark.parametrize("measured", ["ce", "entropy", "max_prob"])
def test_scores_of_the_whole_step_set_the_weights(measured: Any):
    rows, made = cases.rows_of_text(LENGTHS), cases.heads()
    scores = torch.tensor([1.5 * cases.own_text_scores(rows, made, i, measured) for i in (0, 1, SAME)])
    objective = replace(objective_of("csd static"), weights=(), sum_weights_metric=measured, alpha=1.5)
    parts = [rows[:2], rows[2:]]
    ready = for_step(objective, [scored(some, made, (0, 1, SAME)) for some in parts])
    out = ready(*scored(parts[0], made, (0, 1, SAME)))
    for i, want in enumerate(scores.softmax(-1).tolist()):
        assert metric(out, f"teacher{i}/weight") == pytest.approx(want)


def scored(rows: Any, made: Any, teachers: tuple[int, ...]) -> tuple[Any, Any, Any]:
    batch = cases.batch_of(rows, teachers)
    return cases.student_of(rows, made), cases.teachers_of(rows, made, teachers), batch


def test_only_the_selected_teacher_is_compared_and_it_is_the_best_of_the_step():
    rows, made = cases.rows_of_text(LENGTHS), cases.heads()
    teachers = MODES["csd selected"][1]
    scores = [cases.own_text_scores(rows, made, i, "ce") for i in teachers]
    best = scores.index(max(scores))
    single = [[cases.own_text_scores([row], made, i, "ce") for i in teachers] for row in rows if row.ids]
    assert any(s.index(max(s)) != best for s in single)  # one row alone would choose another
    objective = objective_of("csd selected", dynamic_scaling="off")
    ready = for_step(objective, [scored([row], made, teachers) for row in rows])
    for row in rows:
        out = ready(*scored([row], made, teachers))
        for i in range(3):
            assert metric(out, f"teacher{i}/weight") == float(i == best)
            assert float(out.metrics[f"kd/teacher{i}"].count) == (num_runs(row, teachers[i]) if i == best else 0)
            if i != best:
                assert out.terms[f"kd/{i}"].sum.item() == 0.0


def num_runs(row: Any, teacher: int) -> int:
    """Runs of one row that take part."""
    if teacher == SAME:
        return int((row.weights != 0).sum())
    return sum(cases.least_weight(row, s0, s1) != 0 for s0, s1, *_ in row.chunks[teacher])


def test_averaged_logits_are_one_divergence_from_the_mean_teacher():
    rows, made = cases.rows_of_text(LENGTHS), cases.heads()
    batch = cases.batch_of(rows, (SAME, SAME))
    objective = CommonSupportObjective(
        parts=(None, None), kd_mode="averaged_logits", weights=(1.0, 3.0), dynamic_scaling="off", temperature=2.0
    )
    assert not objective.needs_step
    first = cases.teacher_of(rows, made, SAME, "dense")
    second = DenseScores(dense=torch.randn(first.dense.shape, dtype=torch.float64))
    out = objective(cases.student_of(rows, made), SeveralScores(scores=(first, second)), batch)
    mean = 0.25 * first.dense + 0.75 * second.dense
    student = cases.student_of(rows, made, dense=True)
    t, s = ((x / 2.0).log_softmax(-1) for x in (mean, student.dense))  # pyright: ignore
    kl = (t.exp() * (t - s)).sum(-1)
    wanted = 4.0 * torch.where(batch.weights == 0, 0.0, kl * batch.weights).sum()
    torch.testing.assert_close(out.terms["kd/0"].sum, wanted)
    assert out.terms["kd/1"].sum.item() == 0.0
    live = batch.weights != 0
    assert metric(out, "kd/average") == pytest.approx(kl[live].mean().item())


def test_nothing_is_scored_for_a_step_that_has_nothing_to_choose():
    def never():
        raise AssertionError("scored for nothing")
        yield

    width = len(cases.vocabularies()[0].teacher)
    for mode, options in (
        ("csd one teacher", {}),
        ("csd static", {}),
        ("csd columns", {"same_vocab_top_k": 99}),
        ("xtoken few columns", {"vocab_top_k": width}),
        ("xtoken few columns", {"vocab_top_k": None}),
        ("xtoken few columns", {"chosen_over": "call"}),
        ("xtoken gold", {}),
        ("csd averaged", {}),
    ):
        objective = replace(objective_of(mode), **options)
        assert for_step(objective, never()) is objective, (mode, options)
    for mode in ("csd columns", "csd selected", "xtoken by ce", "xtoken few columns"):
        assert objective_of(mode).needs_step, mode


# ------------------------------------------------------------------ from step to step


def test_a_step_without_a_ratio_leaves_the_scale_and_no_step_leaves_the_objective():
    objective = objective_of("csd one teacher")
    counts = {"chunks/0": 2.0, "ce_tokens": 4.0}
    after = objective.after_step({"kd/0": 1.0, "ce": 8.0}, counts)
    assert after.scale == 4.0
    assert objective.scale is None
    for values in ({"kd/0": 0.0, "ce": 8.0}, {"kd/0": 1.0, "ce": 0.0}, {"kd/0": float("inf"), "ce": 8.0}):
        assert after.after_step(values, counts).scale == 4.0
    assert after.after_step({"kd/0": 0.0, "ce": 0.0}, {"chunks/0": 0.0, "ce_tokens": 0.0}).scale == 4.0
    for scaling in ("call", "off"):
        other = replace(objective, dynamic_scaling=scaling)
        assert other.after_step({"kd/0": 1.0, "ce": 8.0}, counts) is other
        assert other.state_dict() == {}


def test_a_resumed_objective_has_the_same_scale():
    counts = {"chunks/0": 2.0, "ce_tokens": 4.0}
    before = objective_of("csd one teacher").after_step({"kd/0": 0.3, "ce": 8.0}, counts)
    resumed = objective_of("csd one teacher").with_state_dict(before.state_dict())
    assert resumed.scale == before.scale
    fresh = objective_of("csd one teacher", kd_weight=3.0, ce_weight=0.5)
    assert fresh.with_state_dict(fresh.state_dict()).scale == 6.0


def test_held_out_rows_are_compared_on_all_columns_at_fixed_weights_whatever_the_step_was():
    rows, made = cases.rows_of_text(LENGTHS), cases.heads()
    trained = replace(objective_of("xtoken few columns"), scale=123.0)
    for objective in (trained, replace(trained, dynamic_scaling="call")):
        held = objective.held_out
        assert not held.needs_step
        whole, first, rest = (
            held(*scored(some, made, (0, 1))).terms["kd/0"].sum.item() for some in (rows, rows[:1], rows[1:])
        )
        assert whole == pytest.approx(first + rest)
        fixed = replace(objective, vocab_top_k=None, dynamic_scaling="off", scale=None)
        assert whole == fixed(*scored(rows, made, (0, 1))).terms["kd/0"].sum.item()


def test_it_stands_alone():
    with pytest.raises(ConfigError, match="cannot stand inside a sum"):
        SumObjective({"kd": (1.0, objective_of("csd one teacher"))})
    with pytest.raises(ConfigError, match="do not wrap it again"):
        TokenSelectionObjective(objective=objective_of("csd one teacher"), signal="entropy")


# ------------------------------------------------------------------ ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(Path(steps_module.__file__), [], world=len(RANKS), timeout=300)


@pytest.mark.distributed
@pytest.mark.xdist_group("several_teachers")
def test_three_ranks_of_which_one_has_no_row_are_one_process_in_every_mode(ranks: list[dict[str, Any]]):
    """Loss, gradient, scale and every metric, on every rank; every rank reaches every collective."""
    for name, (mode, options) in ARRANGEMENTS.items():
        want = steps(mode, WHOLE, ce_rows="all", **options)
        for rank in ranks:
            assert_same(rank[name], want)
            if name == "csd by ce":
                assert_same(rank["two calls"], want)


@pytest.mark.distributed
@pytest.mark.xdist_group("several_teachers")
def test_the_group_is_the_one_that_is_passed_in(ranks: list[dict[str, Any]]):
    """E-3: the ratio is that of the complete values of the group, equal on its ranks; others are not asked."""
    rows, made = cases.rows_of_text(LENGTHS), cases.heads()
    objective = objective_of("csd selected", dynamic_scaling="call", chosen_over="call")
    teachers = MODES["csd selected"][1]
    for some, members in (([*range(len(rows))], (0, 1)), ([0], (2,))):
        out = objective(*scored([rows[i] for i in some], made, teachers))
        for rank in members:
            assert ranks[rank]["group"]["scale"] == pytest.approx(metric(out, "kd/scale"), rel=1e-12)
    for rank in (0, 1):
        assert ranks[rank]["group"]["of shares"] == pytest.approx(33.0804726, abs=1e-6)
