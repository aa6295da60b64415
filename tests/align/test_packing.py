# SPDX-License-Identifier: Apache-2.0
"""The lockstep plan: every row once, no bin too full for any side, as many bins on each rank, the same on all."""

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohobate.align.packing import PackRow, PackSide, fill_bins, padded_size, plan_lockstep, with_num_bins
from cohobate.errors import DataError


def rows_of(*lengths: tuple[int, ...]) -> list[PackRow]:
    return [PackRow(sample_id=f"row-{i}", lengths=each) for i, each in enumerate(lengths)]


ONE = [PackSide(name="student", capacity=10)]


SIZES = [sum, padded_size, lambda lengths: sum(lengths) + 3]
SIDE = st.tuples(st.integers(12, 40), st.sampled_from([1, 2, 4]), st.sampled_from(SIZES))


@given(
    numbers=st.lists(SIDE, min_size=1, max_size=3),
    lengths=st.lists(st.tuples(*[st.integers(0, 8)] * 3), max_size=24),
    world=st.integers(1, 9),
)
def test_every_plan_keeps_its_promises(
    numbers: list[tuple[int, int, Callable[..., int]]], lengths: list[tuple[int, int, int]], world: int
):
    sides = [
        PackSide(name=f"side {i}", capacity=capacity, row_multiple=multiple, physical_size=size)
        for i, (capacity, multiple, size) in enumerate(numbers)
    ]
    rows = rows_of(*(each[: len(sides)] for each in lengths))
    plan = plan_lockstep(rows, sides, world=world)
    assert len(plan) == world
    assert len({len(bins) for bins in plan}) == 1
    assert sorted(place for bins in plan for places in bins for place in places) == list(range(len(rows)))
    share = -(-len(rows) // world)
    for rank, bins in enumerate(plan):
        assert all(place // share == rank for places in bins for place in places)
        for places, (i, side) in itertools.product(bins, enumerate(sides)):
            rounded = [-(-rows[p].lengths[i] // side.row_multiple) * side.row_multiple for p in places]
            assert side.physical_size(rounded) <= side.capacity or not places
    assert plan_lockstep(rows, sides, world=world) == plan


def test_the_longest_rows_first_each_into_the_first_bin_that_has_room():
    assert fill_bins(rows_of((3,), (7,), (4,), (6,), (2,)), ONE) == ((1, 0), (3, 2), (4,))


def test_equal_rows_keep_their_order():
    assert fill_bins(rows_of((5,), (5,), (5,)), ONE) == ((0, 1), (2,))


def test_a_bin_is_full_as_soon_as_one_side_is():
    sides = [PackSide(name="student", capacity=100), PackSide(name="teacher", capacity=10)]
    assert fill_bins(rows_of((10, 6), (10, 5), (80, 0)), sides) == ((2, 0), (1,))  # the student had room
    assert fill_bins(rows_of((60, 1), (50, 1)), sides) == ((0,), (1,))  # the teacher had


def test_order_is_by_the_side_that_is_nearest_to_its_capacity():
    sides = [PackSide(name="student", capacity=100), PackSide(name="teacher", capacity=10)]
    assert fill_bins(rows_of((60, 1), (1, 7)), sides)[0][0] == 1


def test_padding_counts():
    assert fill_bins(rows_of((3,), (3,), (3,)), [PackSide(name="s", capacity=8, row_multiple=4)]) == ((0, 1), (2,))
    widest = [PackSide(name="s", capacity=12, physical_size=padded_size)]
    assert fill_bins(rows_of((6,), (1,), (1,)), widest) == ((0, 1), (2,))
    assert padded_size([]) == 0


def test_a_rank_with_fewer_bins_divides_its_fullest():
    rows = rows_of((9,), (9,), (9,), (5,), (4,), (3,))  # of the second rank: 5 + 4 | 3
    assert plan_lockstep(rows, ONE, world=2) == (((0,), (1,), (2,)), ((3,), (5,), (4,)))


def test_the_fullest_is_judged_by_the_side_that_is_nearest_to_its_capacity():
    sides = [PackSide(name="student", capacity=100), PackSide(name="teacher", capacity=10)]
    rows = rows_of((50, 1), (20, 1), (1, 5), (1, 4))
    assert with_num_bins([(0, 1), (2, 3)], 3, rows, sides) == ((0, 1), (2,), (3,))


def test_eight_ranks_with_three_rows_have_one_bin_each_five_of_them_empty():
    plan = plan_lockstep(rows_of((3,), (4,), (5,)), ONE, world=8)
    assert plan == (((0,),), ((1,),), ((2,),), *[((),)] * 5)


def test_a_rank_whose_rows_all_stand_alone_gets_empty_bins():
    assert with_num_bins(((0,),), 3, rows_of((3,)), ONE) == ((0,), (), ())


def test_no_rows_are_no_bins():
    assert plan_lockstep([], ONE, world=4) == ((), (), (), ())


@pytest.mark.parametrize(
    ("length", "side", "message"),
    [
        (11, ONE[0], "row 'row-1' has 11 tokens for the student, more than the 10 that"),
        (9, PackSide(name="teacher", capacity=10, row_multiple=8), "has 9 tokens for the teacher, 16 with padding, m"),
    ],
)
def test_a_row_too_long_for_one_side_is_named_with_side_length_and_capacity(length: int, side: PackSide, message: str):
    roomy = PackSide(name="other", capacity=1000)
    with pytest.raises(DataError, match=message):
        plan_lockstep(rows_of((1, 1), (1, length)), [roomy, side])


def test_bad_numbers_are_refused():
    with pytest.raises(
        DataError, match=r"row 'row-0' must tell its length on each of 1 sides \(student\), got \[1, 2\]"
    ):
        plan_lockstep(rows_of((1, 2)), ONE)
    with pytest.raises(DataError, match=r"got \[-1\]"):
        plan_lockstep(rows_of((-1,)), ONE)
    with pytest.raises(ValueError, match="world must be >= 1"):
        plan_lockstep([], ONE, world=0)
    with pytest.raises(ValueError, match="at least one side"):
        plan_lockstep([], [])
    with pytest.raises(ValueError, match="PackSide 's' needs capacity"):
        PackSide(name="s", capacity=0)


def test_a_plan_of_a_thousand_rows_is_made_in_a_moment_and_wastes_little():
    rng = random.Random(0)
    rows = rows_of(*((rng.randint(20, 900), rng.randint(20, 900)) for _ in range(1000)))
    sides = [PackSide(name="student", capacity=4096), PackSide(name="teacher", capacity=4096)]
    (bins,) = plan_lockstep(rows, sides)
    at_least = max(sum(row.lengths[i] for row in rows) for i in (0, 1)) / 4096
    assert len(bins) <= 1.1 * at_least + 1
