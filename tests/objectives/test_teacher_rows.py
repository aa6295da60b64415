# SPDX-License-Identifier: Apache-2.0
"""What is chosen from the teachers' rows is what a look at all rows at once would choose."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cohobate.errors import ConfigError
from cohobate.functional.scores import DenseScores
from cohobate.objectives import teacher_rows
from cohobate.objectives.teacher_rows import chosen_columns, column_rows, mean_logits, score_row, teacher_scores

from . import chunk_cases as cases
from .chunk_cases import SAME, heads, rows_of_text, teacher_of


@pytest.mark.parametrize(
    ("metric", "how"),
    [(metric, how) for metric in ("ce", "entropy", "max_prob") for how in ("hidden", "dense")]
    + [("ce", 5), ("max_prob", 5)],
)
def test_scores_are_means_over_the_teachers_own_text_whatever_it_was_cut_into(metric: Any, how: Any, monkeypatch):
    monkeypatch.setattr(teacher_rows, "rows_per_block", lambda *_: 3)
    rows, made = rows_of_text([14, 0, 9, 12]), heads()
    said = []
    for part in (rows[:1], rows[1:2], rows[2:]):
        scores, ids = teacher_of(part, made, 1, how), cases.batch_of(part, (1,)).teachers[0].target_ids
        said.append(score_row(1, scores, ids, torch.arange(len(ids)), metric))
    zeros = [replace(row, weights=torch.ones(len(row.ids))) for row in rows]
    other, wanted = teacher_scores(torch.cat(said), 2)
    assert math.isnan(other)
    assert wanted == pytest.approx(cases.own_text_scores(zeros, made, 1, metric), rel=1e-9)


def test_rows_that_do_not_take_part_are_not_read():
    scores = DenseScores(dense=torch.tensor([[0.0, 1.0], [math.nan, math.nan]], dtype=torch.float64))
    row = score_row(0, scores, torch.tensor([1, 0]), torch.tensor([0]), "ce")
    assert row.tolist() == [[-1.0, pytest.approx(math.log(math.e / (1 + math.e))), 1.0]]
    assert column_rows(0, scores, torch.tensor([0]), 1).tolist() == [[0.0, 1.0, 1.0]]


def test_the_columns_of_parts_are_those_of_the_whole(monkeypatch):
    monkeypatch.setattr(teacher_rows, "rows_per_block", lambda *_: 2)
    generator = torch.Generator().manual_seed(0)
    for trial in range(20):
        logits = torch.randint(0, 6, (9, 12), generator=generator).double()  # many ties
        parts = [slice(0, 4), slice(4, 4), slice(4, 9)]
        rows = [column_rows(2, DenseScores(dense=logits[p]), torch.arange(p.stop - p.start), 5) for p in parts]
        largest = logits.amax(0).tolist()
        wanted = sorted(sorted(range(12), key=lambda v: (-largest[v], v))[:5])
        order = rows if trial % 2 else rows[::-1]
        assert chosen_columns(torch.cat(order), 2, 5).tolist() == wanted
        assert chosen_columns(torch.cat(order), 1, 5).tolist() == []


def test_top_k_scores_that_cannot_say_it_are_refused_with_side_field_and_cure():
    rows, made = rows_of_text([9]), heads()
    scores = teacher_of(rows, made, 0, 3, temperature=2.0)
    ids = cases.batch_of(rows).teachers[0].target_ids
    live = torch.arange(len(ids))
    with pytest.raises(ConfigError, match=r"sum_weights_metric='entropy'.*teachers\[1\]'s top-k.*leave top_k out"):
        score_row(1, scores, ids, live, "entropy")
    lacking = replace(scores, log_normalizer_t1=None)  # pyright: ignore
    for metric in ("ce", "max_prob"):
        with pytest.raises(ConfigError, match=r"teachers\[0\]'s top-k scores lack log_normalizer_t1.*Score again"):
            score_row(0, lacking, ids, live, metric)
    whole = score_row(0, teacher_of(rows, made, 0), ids, live, "ce")
    torch.testing.assert_close(score_row(0, scores, ids, live, "ce"), whole)  # at temperature 1, not 2


def test_averaged_logits_are_the_weighted_mean():
    rows, made = rows_of_text([9]), heads()
    first = teacher_of(rows, made, SAME, "dense")
    second = DenseScores(dense=first.dense + 1.0)
    some = torch.tensor([0, 2])
    torch.testing.assert_close(mean_logits((first, second), (1.0, 3.0))(some), first.dense[some] + 0.75)
    torch.testing.assert_close(mean_logits((first, second), ())(some), first.dense[some] + 0.5)
