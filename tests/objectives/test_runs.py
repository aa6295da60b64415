# SPDX-License-Identifier: Apache-2.0
"""Blocks cover every run, cut none in two, and change no value."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cohobate.objectives import runs as runs_module
from cohobate.objectives.runs import Runs, label_runs, plan_blocks, read_runs

from .cases import dense_of, hidden_scores


def runs_of(pieces: list[tuple[int, int]]) -> Runs:
    """A value of each run: the first logit of its pairs, added up."""
    start, end = (np.array([piece[side] for piece in pieces], dtype=np.int64) for side in (0, 1))

    def values(logits: Tensor, first: int, units: slice) -> Tensor:
        found = [logits[a - first : b - first, 0].sum() for a, b in pieces[units]]
        return torch.stack(found)

    return Runs(start=start, end=end, values=values)


@st.composite
def disjoint_runs(draw: st.DrawFn) -> list[tuple[int, int]]:
    edges = sorted(draw(st.sets(st.integers(0, 30), max_size=12)))
    return [piece for piece in pairwise(edges) if draw(st.booleans())]


@given(st.lists(disjoint_runs(), min_size=1, max_size=3), st.integers(1, 40))
def test_blocks_cover_every_run_cut_none_and_are_no_longer_than_they_must(
    pieces: list[list[tuple[int, int]]], rows: int
):
    blocks = plan_blocks([runs_of(some) for some in pieces], 30, rows)
    every = [run for some in pieces for run in some]
    assert all(a.stop <= b.start for a, b in pairwise(blocks))
    for start, end in every:
        assert sum(block.start <= start and end <= block.stop for block in blocks) == 1
    read = {p for start, end in every for p in range(start, end)}
    for block in blocks:
        if block.stop - block.start > rows:  # one run after another reaches into the next, all the way
            for cut in range(block.start + 1, block.stop):
                assert any(start < cut < end for start, end in every) or cut > block.start + rows
        if block.stop > block.start:
            assert {block.start, block.stop - 1} <= read
    assert len(blocks) == 1 or all(block.stop > block.start for block in blocks)


def test_a_block_holds_what_fits_and_is_cut_where_nothing_goes_on():
    first, second = runs_of([(0, 2), (2, 3), (5, 9), (9, 10)]), runs_of([(1, 3), (9, 10)])
    assert plan_blocks([first, second], 12, 4) == [slice(0, 3), slice(5, 9), slice(9, 10)]
    assert plan_blocks([first, second], 12, 2) == [slice(0, 3), slice(5, 9), slice(9, 10)]
    assert plan_blocks([first, second], 12, 99) == [slice(0, 10)]
    assert plan_blocks([runs_of([])], 12, 4) == [slice(0, 0)]


def test_values_come_back_in_the_order_of_their_runs_whatever_the_blocks(monkeypatch):
    student = hidden_scores(12, 1, grad=True)
    sets = [runs_of([(0, 2), (2, 3), (5, 9)]), runs_of([]), runs_of([(1, 3), (4, 5), (9, 12)])]
    labels = label_runs(torch.arange(12) % 7, torch.tensor([1, 4, 10]))
    logits = student.logits()
    wanted = [
        torch.stack([logits[0:2, 0].sum(), logits[2:3, 0].sum(), logits[5:9, 0].sum()]),
        logits[:0, 0],
        torch.stack([logits[1:3, 0].sum(), logits[4, 0], logits[9:12, 0].sum()]),
        -logits.log_softmax(-1)[[1, 4, 10], [1, 4, 3]],
    ]
    want = torch.autograd.grad(torch.stack([w.square().sum() for w in wanted]).sum(), student.head.weight)
    for rows, scores in ((1, student), (4, student), (99, student), (4, dense_of(student)), (99, dense_of(student))):
        monkeypatch.setattr(runs_module, "rows_per_block", lambda *_, rows=rows: rows)
        found = read_runs(scores, [*sets, labels])
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
        loss = torch.stack([x.square().sum() for x in found]).sum()
        if scores is student:
            torch.testing.assert_close(torch.autograd.grad(loss, student.head.weight), want, rtol=1e-9, atol=1e-11)
        else:
            assert torch.autograd.grad(loss, scores.dense)[0].isfinite().all()  # pyright: ignore


def test_rows_that_no_run_needs_are_never_projected(monkeypatch):
    monkeypatch.setattr(runs_module, "rows_per_block", lambda *_: 3)
    seen = []

    def values(logits: Tensor, first: int, units: slice) -> Tensor:
        seen.append((first, logits.shape[0]))
        return logits[:, 0]

    runs = Runs(start=np.array([7, 8]), end=np.array([8, 9]), values=values)
    read_runs(hidden_scores(12, 1), [runs])
    assert seen == [(7, 2)]
