# SPDX-License-Identifier: Apache-2.0
"""CSD and X-Token of logits in shards, seen from one process; over ranks: `test_cross_tokenizer_ranks.py`."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from cohobate.functional.common_support import SupportOptions, common_support_divergence
from cohobate.functional.projection import ProjectedOptions, projected_kl
from cohobate.functional.scores import top_k_scores
from cohobate.parallel.cross_tokenizer import vocab_parallel_common_support, vocab_parallel_projected_kl
from functional import csd_oracle
from functional.test_common_support import case, ids, tables_of
from functional.test_projection import spread

PAIRS: dict[str, tuple[Any, Any]] = {
    "csd": (common_support_divergence, vocab_parallel_common_support),
    "pkl": (projected_kl, vocab_parallel_projected_kl),
}


def problem(name: str, seed: int, *, k: int | None = None) -> tuple[Tensor, dict[str, Any]]:
    made = csd_oracle.world(seed)
    student, teacher, chunks = case(seed, made)
    of_teacher = ids(made.teacher_ids)
    shared: dict[str, Any] = {"student_ids": ids(made.student_ids), "teacher_ids": of_teacher, "chunks": chunks}
    if name == "csd":
        scores = teacher if k is None else top_k_scores(teacher, of_teacher, k)
        return student, {**shared, "teacher_scores": scores, "tables": tables_of(made)}
    return student, {**shared, "teacher_logits": teacher, "projection": spread(made)}


def value_and_gradient(function: Any, logits: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    out = function(student_logits=leaf, **arguments).divergence
    weights = torch.linspace(0.5, 2, len(out), dtype=out.dtype)
    return out.detach(), torch.autograd.grad((out * weights).sum(), leaf)[0]


@pytest.mark.parametrize("name", PAIRS)
def test_without_groups_it_is_the_function_of_whole_logits(name: str):
    whole, parts = PAIRS[name]
    logits, arguments = problem(name, 0)
    for evaluation in ("owner", "replicated"):
        got = value_and_gradient(parts, logits, {**arguments, "evaluation": evaluation})
        for x, y in zip(got, value_and_gradient(whole, logits, arguments), strict=True):
            assert x.equal(y)


@pytest.mark.parametrize("options", [{}, {"mode": "gold"}], ids=["", "gold"])
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_rows_in_any_order_and_padding_of_rows_and_columns_change_nothing(
    name: str, k: int | None, options: dict[str, Any]
):
    if name == "csd" and options:
        return
    whole, parts = PAIRS[name]
    for seed in range(3):
        logits, arguments = problem(name, seed, k=k)
        order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
        positions = torch.cat([order[:4], torch.tensor([-1, len(logits) + 3]), order[4:]])
        kept = (positions >= 0) & (positions < len(logits))
        padded = torch.full((len(positions), logits.shape[1] + 3), torch.nan, dtype=logits.dtype)
        padded[kept, : logits.shape[1]] = logits[positions[kept]]
        value, grad = value_and_gradient(parts, padded, {**arguments, **options, "positions": positions})
        want, want_grad = value_and_gradient(whole, logits, {**arguments, **options})
        torch.testing.assert_close(value, want, atol=1e-14, rtol=1e-12)
        torch.testing.assert_close(grad[kept, : logits.shape[1]], want_grad[order], atol=1e-14, rtol=1e-12)
        assert not grad[~kept].any()
        assert not grad[:, logits.shape[1] :].any()


@pytest.mark.parametrize("name", PAIRS)
def test_what_does_not_fit_is_refused(name: str):
    _, parts = PAIRS[name]
    logits, arguments = problem(name, 0)
    rows = torch.arange(len(logits))
    for changes, message in (
        ({"evaluation": "all"}, "evaluation must be 'owner' or 'replicated', got 'all'"),
        ({"positions": rows[1:]}, r"positions \[\d+\] must name each of the \d+ rows"),
        ({"positions": rows.clamp(min=1)}, "positions name row 1 twice"),
        ({"positions": rows + 1}, r"of the \d+ student rows that chunks read, the ranks of cp_group have \d+"),
        ({"positions": rows.double()}, "positions must be signed integers, got torch.float64"),
        ({"student_logits": logits[:, 1:]}, "the student's logits have 11 columns, its vocabulary 12 ids"),
        ({"vocab_start_index": 3}, "one of them begins at 3"),
        ({"student_logits": logits[None]}, "student"),
        ({"rows": "token"}, "rows must be 'text'"),
    ):
        with pytest.raises(ValueError, match=message):
            parts(**({"student_logits": logits, **arguments} | changes))
    with pytest.raises(TypeError, match="temprature"):
        parts(logits, **arguments, temprature=2.0)


def test_the_options_are_those_of_one_process():
    """Of CSD and X-Token each knows its own; the sharded functions hand them on by name."""
    own = {"tp_group", "vocab_start_index", "cp_group", "positions", "evaluation", "options"}
    for whole, parts in PAIRS.values():
        names, passed = inspect.signature(whole).parameters, inspect.signature(parts).parameters
        assert set(passed) - own < set(names)
        assert list(passed)[:6] == list(names)[:6]
    support = set(inspect.signature(common_support_divergence).parameters)
    assert set(SupportOptions.__dataclass_fields__) < support
    projected = set(inspect.signature(projected_kl).parameters)
    assert set(ProjectedOptions.__dataclass_fields__) < projected
