# SPDX-License-Identifier: Apache-2.0
from cohobate.trainer.sampler import WindowSampler


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    first, again = WindowSampler(20, seed=1, window=4), WindowSampler(20, seed=1, window=4)
    list(first)
    assert list(first) == list(again)
    first.set_epoch(3)
    again.set_epoch(3)
    assert list(first) == list(again)
    assert list(first) != list(WindowSampler(20, seed=1, window=4))
    assert list(WindowSampler(20, seed=2, window=4)) != list(WindowSampler(20, seed=1, window=4))


def test_every_row_comes_once_in_an_epoch() -> None:
    sampler = WindowSampler(21, seed=1, window=4)
    assert sorted(sampler) == list(range(21))
    assert len(sampler) == 21


def test_repeats_give_each_full_window_that_often_in_a_row() -> None:
    sampler = WindowSampler(10, seed=1, window=4, repeats=2)
    order = list(sampler)
    assert len(order) == len(sampler) == 16
    assert order[0:4] == order[4:8]
    assert order[8:12] == order[12:16]
    assert not set(order[:4]) & set(order[8:12])


def test_sequential_order_is_the_order_of_the_data() -> None:
    assert list(WindowSampler(5, seed=1, window=2, shuffle=False)) == [0, 1, 2, 3, 4]
