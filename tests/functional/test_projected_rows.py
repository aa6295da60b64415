# SPDX-License-Identifier: Apache-2.0
"""A row's distribution pushed through a projection, and its log-softmax, against plain autograd; also in shards."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cohobate.functional import projected_rows
from cohobate.functional.projected_rows import Entries, ProjectedRows, RowLogprobs
from cohobate.functional.student_shards import StudentShards

from .thread_shards import ThreadShards, on_shards

V, COLUMNS, SCALE = 11, 5, 0.8
ROWS = torch.tensor([4, 0, 4, 2])  # one of them twice


def logits_of(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (2 * torch.randn(6, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def entries(seed: int = 0) -> tuple[Entries, Tensor]:
    """Some entries, with students that have several and columns that have none; and the matrix that they are."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.rand(V, COLUMNS, generator=generator, dtype=torch.float64)
    matrix *= torch.rand(V, COLUMNS, generator=generator) < 0.4
    matrix[:, 3] = 0
    student, column = matrix.nonzero(as_tuple=True)
    found = Entries(student=student, column=column, weight=matrix[student, column], columns=torch.arange(COLUMNS))
    return found, matrix


def pushed(logits: Tensor, shards: StudentShards) -> Tensor:
    found: Any = ProjectedRows.apply(logits, ROWS, entries()[0], SCALE, shards)
    return found


def logprobs(logits: Tensor, shards: StudentShards) -> Tensor:
    found: Any = RowLogprobs.apply(logits, ROWS, SCALE, shards)
    return found


def plainly_pushed(logits: Tensor) -> Tensor:
    return (logits[ROWS] * SCALE).softmax(-1) @ entries()[1]


def plain_logprobs(logits: Tensor) -> Tensor:
    return (logits[ROWS] * SCALE).log_softmax(-1)


def value_and_gradient(function: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = function(leaf)
    weights = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return value.detach(), torch.autograd.grad((value.square() * weights).sum(), leaf)[0]


@pytest.mark.parametrize("tile", [1, 1 << 21])
def test_value_and_gradient_are_those_of_a_softmax_and_a_matrix(tile: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(projected_rows, "_TILE_ENTRIES", tile)
    whole = StudentShards(width=V)
    for ours, plain in ((pushed, plainly_pushed), (logprobs, plain_logprobs)):
        got, want = (value_and_gradient(f, logits_of(1)) for f in (lambda z, f=ours: f(z, whole), plain))
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, atol=1e-13, rtol=1e-11)


def test_gradcheck():
    whole = StudentShards(width=V)
    for function in (pushed, logprobs):
        assert torch.autograd.gradcheck(lambda z, f=function: f(z, whole), logits_of(2).requires_grad_())


@pytest.mark.parametrize("bounds", [[0, 4, 11], [0, 0, 7, 11]], ids=str)
@pytest.mark.parametrize(("function", "plain"), [(pushed, plainly_pushed), (logprobs, plain_logprobs)])
def test_shards_give_the_whole_projection_and_their_own_columns_of_all_else(
    function: Any, plain: Any, bounds: list[int]
):
    want, want_grad = value_and_gradient(plain, logits_of(3))
    every = torch.linspace(0.5, 2, want.numel(), dtype=want.dtype).view(want.shape)  # as above
    split = function is logprobs

    def part(ids: slice, exchange: ThreadShards) -> tuple[Tensor, Tensor]:
        shards = StudentShards(width=ids.stop - ids.start, first_id=ids.start, vocabulary=exchange)
        leaf = torch.nn.functional.pad(logits_of(3)[:, ids], (0, 1), value=torch.nan).requires_grad_()
        value = function(leaf, shards)
        weights = every[:, ids] if split else every
        return value.detach(), torch.autograd.grad((value.square() * weights).sum(), leaf)[0]

    for ids, (value, grad) in zip(itertools.pairwise(bounds), on_shards(bounds, part), strict=True):
        here = slice(*ids)
        torch.testing.assert_close(value, want[:, here] if split else want, atol=1e-13, rtol=1e-11)
        torch.testing.assert_close(grad[:, :-1], want_grad[:, here], atol=1e-13, rtol=1e-11)
        assert not grad[:, -1].any()


def test_nothing_of_the_logits_size_is_kept_for_the_projection():
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        pushed(logits_of(4).requires_grad_(), StudentShards(width=V))
    assert sorted(saved) == [6, len(ROWS) * COLUMNS, 6 * V]  # normalisers, result, and the logits, which are there


def test_rows_that_are_not_read_may_hold_anything():
    poisoned = logits_of(5)
    poisoned[[1, 3, 5]] = torch.nan
    whole = StudentShards(width=V)
    for function in (pushed, logprobs):
        value, grad = value_and_gradient(lambda z, f=function: f(z, whole), poisoned)
        want, want_grad = value_and_gradient(lambda z, f=function: f(z, whole), logits_of(5))
        assert value.equal(want)
        assert grad.equal(want_grad)
