# SPDX-License-Identifier: Apache-2.0
"""Each row is one teacher's: every token counts once, whoever answers it, and nothing else of the split shows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cohobate.errors import ConfigError
from cohobate.functional.scores import SeveralScores
from cohobate.objectives import CommonSupportObjective, ProjectedObjective, check_accepts, for_step

from . import chunk_cases as cases
from .chunk_cases import SAME, metric

LENGTHS = [14, 9, 0, 11, 6, 8]
ROWS, HEADS = cases.rows_of_text(LENGTHS), cases.heads()
NAMES = [row.name for row in ROWS]
WHOLE = [list(range(len(ROWS)))]
CUTS = [[[0], [1, 2, 3, 4, 5]], [[0, 1], [2, 3], [], [4, 5]], [[5, 3, 1], [4, 2, 0]]]


def routes_of(places: Sequence[int]) -> dict[str, int]:
    return dict(zip(NAMES, places, strict=True))


def objective_of(method: str, teachers: Sequence[int], **options: Any) -> Any:
    options = {"same_vocab_top_k": None} | options
    if method == "xtoken":
        parts = (*cases.projections(), None)
        return ProjectedObjective(parts=tuple(parts[i] for i in teachers), **{"vocab_top_k": None} | options)
    parts = (*cases.tables(), None)
    return CommonSupportObjective(parts=tuple(parts[i] for i in teachers), **options)


def steps(
    objective: Any,
    teachers: Sequence[int],
    routes: dict[str, int] | None,
    micro_batches: Sequence[Sequence[int]] = WHOLE,
    number: int = 2,
) -> list[tuple[Tensor, Tensor, dict[str, float]]]:
    """Loss, gradient and metrics of so many steps on the same rows, in these micro-batches."""
    found = []
    for _ in range(number):
        batches = [[ROWS[i] for i in some] for some in micro_batches]
        own = [objective.counts(cases.batch_of(some, teachers, routes)) for some in batches]
        counts = {name: sum(c[name] for c in own) for name in own[0]}

        def scored(some: Any) -> tuple[Any, Any, Any]:
            known = cases.teachers_of(some, HEADS, teachers, routes=routes)
            return cases.student_of(some, HEADS), known, cases.batch_of(some, teachers, routes)

        ready = for_step(objective.with_counts(counts), (scored(some) for some in batches))
        outs = [ready(*scored(some)) for some in batches]
        loss = torch.stack([cases.loss_of(out, counts) for out in outs]).sum()
        leaves = [*HEADS.leaves, *(row.hidden for row in ROWS)]
        grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
        values = [out.step_values for out in outs]
        objective = objective.after_step({n: sum(float(v[n]) for v in values) for n in values[0]}, counts)
        logged = {}
        for name in outs[0].metrics:
            total, count = (sum(float(getattr(out.metrics[name], x)) for out in outs) for x in ("sum", "count"))
            logged |= {name: total / count} if count else {}
        found.append((loss.detach(), torch.cat([g.flatten() for g in grads]), logged))
    return found


def assert_same(found: list[Any], wanted: list[Any], *, but_for: str = "-") -> None:
    """`but_for`: how the names of metrics begin that are allowed to differ."""
    for (loss, grad, logged), (wanted_loss, wanted_grad, wanted_logged) in zip(found, wanted, strict=True):
        torch.testing.assert_close(loss, wanted_loss, rtol=1e-10, atol=0.0)
        torch.testing.assert_close(grad, wanted_grad, rtol=1e-9, atol=1e-12)
        shared = {name for name in wanted_logged if not name.startswith(but_for)}
        assert shared
        assert {n: logged[n] for n in shared} == pytest.approx({n: wanted_logged[n] for n in shared}, rel=1e-9)


def test_every_chunk_counts_once_and_the_weights_are_in_the_sums_alone():
    """Against sums by definition: a row's chunks with the teacher that it is routed to, over all chunks of all."""
    teachers, weights, routes = (0, 1, SAME), (0.3, 1.0, 2.0), routes_of([0, 1, 1, 2, 2, 0])
    objective = objective_of("csd", teachers, routed=True, weights=weights, dynamic_scaling="off", ce_weight=0.25)
    ((loss, grad, logged),) = steps(objective, teachers, routes, number=1)
    read = [[row for row in ROWS if routes[row.name] == i] for i in range(3)]
    sums = [cases.csd_sum(read[i], HEADS, i, beta=0.5) for i in (0, 1)] + [cases.same_sum(read[2], HEADS)]
    chunks = [cases.num_chunks(read[i], teacher) for i, teacher in enumerate(teachers)]
    wanted = sum(w * s for w, s in zip(weights, sums, strict=True)) / sum(chunks)
    wanted = wanted + 0.25 * cases.ce_sum(ROWS, HEADS) / cases.num_labels(ROWS)
    torch.testing.assert_close(loss, wanted.detach())
    leaves = [*HEADS.leaves, *(row.hidden for row in ROWS)]
    grads = torch.autograd.grad(wanted, leaves, materialize_grads=True)
    torch.testing.assert_close(grad, torch.cat([g.flatten() for g in grads]))
    batch = cases.batch_of(ROWS, teachers, routes)
    assert objective.counts(batch) == {"chunks": sum(chunks), "ce_tokens": cases.num_labels(ROWS)}
    # What is logged of a teacher is its own mean, without weights, over the runs that take part.
    live = sum(int((row.weights != 0).sum()) for row in read[2])
    unweighted = sum(pair_kl(row) for row in read[2]) / live
    assert logged["kd/teacher2"] == pytest.approx(unweighted)
    assert [logged[f"teacher{i}/row_share"] for i in range(3)] == pytest.approx([2 / 6] * 3)


def pair_kl(row: Any) -> float:
    """Sum of a row's KLs by the same-tokenizer teacher, of pairs with a weight, each once."""
    ones = replace(row, weights=(row.weights != 0).to(row.weights.dtype))
    return cases.same_sum([ones], HEADS).item()


@pytest.mark.parametrize("places", [(0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1), (0, 1, 0, 1, 0, 1), (1, 0, 0, 0, 0, 0)])
@pytest.mark.parametrize(
    ("method", "teacher"), [("csd", 0), ("csd", SAME), ("xtoken", 1), ("xtoken", SAME)], ids=lambda x: str(x)
)
def test_two_teachers_that_are_one_are_that_one_however_rows_are_split(
    method: str, teacher: int, places: tuple[int, ...]
):
    for options in ({"dynamic_scaling": "off"}, {}, {"dynamic_scaling": "call"}):
        wanted = steps(objective_of(method, (teacher,), **options), (teacher,), None)
        objective = objective_of(method, (teacher, teacher), routed=True, **options)
        assert_same(steps(objective, (teacher, teacher), routes_of(places)), wanted, but_for="kd/teacher")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("options", [{}, {"dynamic_scaling": "off"}, {"same_vocab_top_k": 4, "temperature": 1.5}])
def test_micro_batches_change_nothing_also_those_without_a_row_for_some_teacher(cut: Any, options: dict[str, Any]):
    teachers, routes = (0, SAME, 1, SAME), routes_of([0, 1, 1, 2, 3, 0])
    objective = objective_of("csd", teachers, routed=True, **options)
    wanted = steps(objective, teachers, routes)
    found = steps(objective, teachers, routes, cut)
    assert_same(found, wanted)
    assert found[0][2].keys() == wanted[0][2].keys()


def test_the_order_of_the_teachers_does_not_matter():
    places = [0, 1, 2, 2, 1, 0]
    one = objective_of("csd", (0, 1, SAME), routed=True, weights=(0.5, 1.0, 2.0))
    other = objective_of("csd", (SAME, 0, 1), routed=True, weights=(2.0, 0.5, 1.0))
    wanted = steps(one, (0, 1, SAME), routes_of(places))
    found = steps(other, (SAME, 0, 1), routes_of([(p + 1) % 3 for p in places]))
    for (loss, grad, _), (wanted_loss, wanted_grad, _) in zip(found, wanted, strict=True):
        torch.testing.assert_close(loss, wanted_loss)
        torch.testing.assert_close(grad, wanted_grad)


def test_without_routes_each_teacher_keeps_its_own_count():
    objective = objective_of("csd", (0, SAME))
    batch = cases.batch_of(ROWS, (0, SAME))
    counts = {"chunks/0": cases.num_chunks(ROWS, 0), "chunks/1": cases.num_chunks(ROWS, SAME)}
    assert objective.counts(batch) == counts | {"ce_tokens": cases.num_labels(ROWS)}
    assert not [name for name in steps(objective, (0, SAME), None, number=1)[0][2] if "row_share" in name]


@pytest.mark.parametrize(
    "options",
    [{"kd_mode": "averaged_logits"}, {"kd_mode": "select_teacher"}, {"sum_weights_metric": "ce"}],
    ids=lambda options: next(iter(options)),
)
def test_what_holds_teachers_against_each_other_is_refused_with_the_reason(options: dict[str, Any]):
    with pytest.raises(ConfigError, match="what several teachers say of the same rows, but with routing each row is"):
        objective_of("csd", (SAME, SAME), routed=True, **options)


def test_a_batch_and_an_objective_that_differ_about_routes_are_refused():
    routes = routes_of([0, 1, 0, 1, 0, 1])
    routed, plain = (objective_of("csd", (0, SAME), routed=routed) for routed in (True, False))
    with pytest.raises(ValueError, match=r"aligned with routes .* routed=False: make it with routed=True"):
        plain.counts(cases.batch_of(ROWS, (0, SAME), routes))
    with pytest.raises(ValueError, match=r"aligned without routes .* routed=True"):
        routed.counts(cases.batch_of(ROWS, (0, SAME)))


class Says:
    """A teacher of which only this is asked."""

    provides = SeveralScores

    def __init__(self, routing: Any) -> None:
        self.routing, self.texts = routing, (None, None)


def test_teachers_that_do_not_fit_are_refused_before_anything_is_trained():
    for routed in (True, False):
        objective = objective_of("csd", (SAME, SAME), routed=routed)
        check_accepts(objective, Says(object() if routed else None))
        with pytest.raises(ConfigError, match=f"with routed={routed}.*Make it with routed={not routed}"):
            check_accepts(objective, Says(None if routed else object()))


def test_a_teacher_that_reads_no_row_of_a_call_has_a_term_of_0_that_is_on_the_graph():
    routes = routes_of([0] * len(ROWS))
    objective = objective_of("csd", (0, SAME), routed=True)
    known = cases.teachers_of(ROWS, HEADS, (0, SAME), routes=routes)
    out = objective(cases.student_of(ROWS, HEADS), known, cases.batch_of(ROWS, (0, SAME), routes))
    assert out.terms["kd/1"].sum.item() == 0.0
    assert out.terms["kd/1"].sum.requires_grad
    assert out.metrics["kd/teacher1"].count == 0.0
    assert metric(out, "teacher1/row_share") == 0.0
