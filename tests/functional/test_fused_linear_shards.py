# SPDX-License-Identifier: Apache-2.0
"""The fused divergence over shards of a vocabulary equals the whole one, exchanges little, and all shards agree."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cohobate.functional import fused_linear
from cohobate.functional.fused_linear import FusedDivergence
from cohobate.functional.kernels import cpu
from cohobate.functional.moments import WHOLE

from .heads import N, Problem, V, assert_same, fused, gradients, problem
from .oracle import BETAS
from .thread_shards import ThreadShards, on_shards

CUTS = pytest.mark.parametrize("cuts", [[0, 5, V], [0, 0, V], [0, 1, 1, V]], ids=["uneven", "empty", "three"])


def shard(p: Problem, ids: slice) -> Problem:
    """Leaves of this shard alone, with hidden states that all shards share."""
    return replace(
        p,
        hidden=p.hidden.detach().clone().requires_grad_(),
        weight=p.weight.detach()[ids].clone().requires_grad_(),
        bias=None if p.bias is None else p.bias.detach()[ids].clone().requires_grad_(),
        teacher_weight=p.teacher_weight[ids],
        teacher_bias=None if p.teacher_bias is None else p.teacher_bias[ids],
    )


def on_all(p: Problem, cuts: list[int], beta: float, **options: Any) -> list[tuple[FusedDivergence, Any, list[str]]]:
    def run(ids: slice, shards: ThreadShards) -> tuple[FusedDivergence, Any, list[str]]:
        mine = shard(p, ids)
        out = fused(mine, beta, shards=shards, **options)
        return out, gradients(out, mine) if out.loss_sum.requires_grad else None, shards.exchanged

    return on_shards(cuts, run)


@CUTS
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shards_equal_the_whole(cuts: list[int], beta: float, full: bool, dtype: torch.dtype):
    p = problem(1, dtype, full=full)
    want = fused(p, beta)
    whole = gradients(want, p)
    rtol, atol = (1e-10, 1e-12) if dtype == torch.float64 else (2e-5, 2e-6)
    results = on_all(p, cuts, beta, chunk_size=3)
    for (out, grads, _), start, stop in zip(results, cuts[:-1], cuts[1:], strict=True):
        assert_same(out, want, rtol=rtol, atol=atol)
        mine = [whole[0], *(x[start:stop] for x in whole[1:])]  # dX of all shards, the shard's own dW and db
        for got, wanted in zip(grads, mine, strict=True):
            torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)
    first, *others = (out for out, _, _ in results)
    for field in fields(FusedDivergence):
        assert all(torch.equal(getattr(first, field.name), getattr(other, field.name)) for other in others)


@pytest.mark.parametrize("beta", BETAS)
def test_each_chunk_exchanges_three_or_four_tensors(beta: float):
    p = problem(2)
    chunk = ["largest", "max", "sum"] + ["sum"] * (0 < beta < 1)
    for _, _, exchanged in on_all(p, [0, 5, V], beta, chunk_size=3):
        assert exchanged == ["max", *chunk * 3, "sum"]  # first the facts, last dX; nothing in the backward pass
    with torch.no_grad():
        frozen = replace(p, hidden=p.hidden.detach())
    forward = on_shards(
        [0, 5, V],
        lambda ids, shards: _forward_alone(shard(frozen, ids), beta, shards),
    )
    assert forward == [["max", *chunk * 3]] * 2


def _forward_alone(p: Problem, beta: float, shards: ThreadShards) -> list[str]:
    with torch.no_grad():
        fused(p, beta, shards=shards, chunk_size=3)
    return shards.exchanged


def test_a_budget_gives_every_shard_the_chunks_of_the_widest(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    rows_per_chunk = fused_linear.rows_per_chunk

    def watched(hidden: Tensor, vocab_size: int, *args: Any) -> int:
        seen.append(rows_per_chunk(hidden, vocab_size, *args))
        return seen[-1]

    monkeypatch.setattr(fused_linear, "rows_per_chunk", watched)
    results = on_all(problem(3), [0, 2, V], 0.5, chunk_bytes=2 * 9 * 8 * 4)
    assert seen == [4, 4]
    assert results[0][2] == results[1][2]


def test_shards_that_see_different_rows_are_all_told():
    p = problem(4)

    def run(ids: slice, shards: ThreadShards) -> str:
        mine = shard(p, ids)
        if ids.start:
            mine = replace(mine, hidden=mine.hidden[:5], teacher_hidden=mine.teacher_hidden[:5], weights=None)
        with pytest.raises(ValueError, match="one has 5 and another 7") as raised:
            fused(mine, 0.5, shards=shards)
        return str(raised.value)

    first, second = on_shards([0, 5, V], run)
    assert first == second


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_shards_on_the_kernels_for_wide_rows_equal_the_whole(beta: float, monkeypatch: pytest.MonkeyPatch):
    p = problem(5, torch.float32)
    want = fused(p, beta)
    monkeypatch.setattr(fused_linear, "kernels_for", lambda _: cpu)
    for out, grads, _ in on_all(p, [0, 5, 5, V], beta, chunk_size=4):
        assert_same(out, want, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(grads[0], gradients(fused(p, beta), p)[0], rtol=2e-5, atol=2e-6)


def test_no_rows_and_one_shard_exchange_what_they_must():
    for out, grads, _ in on_all(problem(6, rows=0), [0, 5, V], 0.5):
        assert out.loss_sum.item() == 0
        assert all(x.abs().sum() == 0 for x in grads)
    p = problem(7)
    assert_same(fused(p, 0.5, shards=WHOLE), fused(p, 0.5), rtol=0, atol=0)
    ((out, _, exchanged),) = on_all(p, [0, V], 0.5)
    assert_same(out, fused(p, 0.5), rtol=1e-12, atol=1e-14)
    assert exchanged.count("largest") == 1
    assert out.divergence.shape[0] == N
