# SPDX-License-Identifier: Apache-2.0
"""The draw between sampling a row and taking it as recorded belongs to the row alone."""

import pytest

from cohobate.data import draw_on_policy

NAMES = [f"row-{i}" for i in range(4000)]


def drawn(fraction: float, *, seed: int = 0, epoch: int = 0) -> list[bool]:
    return [draw_on_policy(name, seed=seed, epoch=epoch, fraction=fraction) for name in NAMES]


def test_the_share_is_the_fraction_and_the_ends_are_exact():
    assert not any(drawn(0.0))
    assert all(drawn(1.0))
    # Five standard deviations of a binomial share of 4000 draws at 0.3.
    assert abs(sum(drawn(0.3)) / len(NAMES) - 0.3) < 5 * (0.3 * 0.7 / len(NAMES)) ** 0.5


def test_every_part_of_the_key_changes_the_draws_and_nothing_else_does():
    again = {name: draw_on_policy(name, seed=0, epoch=0, fraction=0.5) for name in reversed(NAMES)}
    assert [again[name] for name in NAMES] == drawn(0.5)
    for other in (drawn(0.5, seed=1), drawn(0.5, epoch=1)):
        same = sum(a == b for a, b in zip(drawn(0.5), other, strict=True)) / len(NAMES)
        assert 0.45 < same < 0.55  # as two fair coins: neither copied nor mirrored


def test_a_row_sampled_at_a_small_fraction_is_sampled_at_a_larger_one():
    assert all(large or not small for small, large in zip(drawn(0.3), drawn(0.7), strict=True))


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_outside_zero_to_one_is_refused(fraction: float):
    with pytest.raises(ValueError, match="on_policy_fraction must be in"):
        draw_on_policy("a", seed=0, epoch=0, fraction=fraction)
