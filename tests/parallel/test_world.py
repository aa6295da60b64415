# SPDX-License-Identifier: Apache-2.0
"""Seeds that depend on nothing else, and sums that are the same on one rank and on many."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import run_ranks

from cohobate.parallel import World, all_reduce_max, all_reduce_sum, any_rank, current_world, keyed_seed

RANKS = Path(__file__).parent / "ranks.py"


def test_a_seed_is_the_first_63_bits_of_the_sha256_of_its_parts():
    digest = hashlib.sha256(b"(7, 2, 'row-3')").hexdigest()
    assert keyed_seed(7, 2, "row-3") == int(digest[:16], 16) // 2
    assert 0 <= keyed_seed() < 2**63


def test_a_seed_does_not_depend_on_the_process():
    script = "from cohobate.parallel.world import keyed_seed; print(keyed_seed(1, 'a', (2.5, None, b'x', True)))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(out) == keyed_seed(1, "a", (2.5, None, b"x", True))


def test_unlike_parts_give_unlike_seeds():
    keys = [(1,), (1.0,), ("1",), (True,), (b"1",), ((1,),), (1, None), (None, 1), ("a", "b"), ("ab",), ("a, b",), ()]
    assert len({keyed_seed(*parts) for parts in keys}) == len(keys)


@pytest.mark.parametrize("part", [np.int64(1), np.float64(1.0), torch.tensor(1), [1], (1, np.int64(2))])
def test_parts_whose_text_is_not_theirs_to_keep_are_refused(part):
    with pytest.raises(TypeError, match="plain int"):
        keyed_seed(0, part)


def test_one_process_is_rank_zero_of_one():
    assert current_world() == World(rank=0, size=1)


def test_one_process_sums_to_its_own_values():
    parameter = torch.tensor([2.5], requires_grad=True)
    values = {"b": 3, "a": parameter, "c": torch.tensor(7, dtype=torch.int64), "d": torch.tensor(0.1), "e": True}
    total = all_reduce_sum(values)
    assert total == {"a": 2.5, "b": 3.0, "c": 7.0, "d": float(torch.tensor(0.1)), "e": 1.0}
    assert list(total) == ["a", "b", "c", "d", "e"]
    assert all(type(value) is float for value in total.values())
    assert all_reduce_max(-4) == -4
    assert (any_rank(True), any_rank(False)) == (True, False)


@pytest.mark.parametrize("count", [0, 61, 62, 63, 64, 200])
def test_any_number_of_keys_fits(count: int):
    values = {f"k{i}": float(i) for i in range(count)}
    assert all_reduce_sum(values) == values


def test_integers_are_exact_beyond_float32():
    assert all_reduce_sum({"n": torch.tensor(2**53 - 1)}) == {"n": float(2**53 - 1)}


def test_a_vector_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'loss' has shape \(2,\)"):
        all_reduce_sum({"loss": torch.zeros(2)})


@pytest.mark.distributed
def test_ranks_agree_on_sums_maxima_and_flags_and_notice_unlike_keys():
    results = run_ranks(RANKS, [], world=3)
    for rank, result in enumerate(results):
        assert result["world"] == [rank, 3]
        assert result["sum"] == {"count": 6.0, "loss": pytest.approx(0.1 + 0.2 + 0.3), "nothing": 0.0}
        assert result["sum"] == results[0]["sum"]  # to the last bit
        assert result["max"] == 12
        assert result["any"] == [True, False]
        assert result["seed"] == results[0]["seed"]
        assert "same keys on every rank" in result["unlike keys"]
        assert "same keys on every rank" in result["more keys"]
        assert result["sub-group"] == ([0.0 + 1.0] * 2 + [2.0])[rank]
