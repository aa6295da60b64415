# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohobate.trainer.aligners import without_pairs
from cohobate.trainer.step import plan_micro_batches, spread


def test_without_a_budget_rows_stay_in_order() -> None:
    assert plan_micro_batches([5, 9, 1, 7, 3], max_rows=2) == ((0, 1), (2, 3), (4,))


def test_a_budget_puts_rows_of_like_width_together() -> None:
    assert plan_micro_batches([5, 9, 1, 7, 3], max_rows=2, token_budget=18) == ((1, 3), (0, 4, 2))


def test_a_row_wider_than_the_budget_goes_alone() -> None:
    assert plan_micro_batches([50, 3, 3], max_rows=2, token_budget=10) == ((0,), (1, 2))


@given(widths=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 120))
def test_a_plan_has_every_row_once_and_keeps_to_its_budget(widths: list[int], budget: int) -> None:
    plan = plan_micro_batches(widths, max_rows=3, token_budget=budget)
    assert sorted(row for rows in plan for row in rows) == list(range(len(widths)))
    for rows in plan:
        assert len(rows) == 1 or len(rows) * max(widths[row] for row in rows) <= budget


@pytest.mark.parametrize(("number", "groups"), [(5, 2), (4, 4), (9, 4), (3, 1)])
def test_groups_keep_the_order_and_none_is_empty(number: int, groups: int) -> None:
    batches = [without_pairs(i) for i in range(number)]
    found = spread(batches, groups)
    assert len(found) == groups
    assert all(found)
    assert [b for group in found for b in group] == batches


def test_a_batch_without_pairs_still_has_something_to_run() -> None:
    batch = without_pairs(7)
    assert batch.num_pairs == 0
    assert batch.student.model_inputs["input_ids"].tolist() == [[7]]
