# SPDX-License-Identifier: Apache-2.0
"""Sampling of one process: the distribution, and exactly which tokens survive; shards are in `test_vocab_ranks.py`."""

import math
from typing import Any

import pytest
import torch
import vocab_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cohobate.parallel import vocab_parallel_sample, vocab_sample

NUM_DRAWS = 20_000


def counts_of(row: Tensor, seed: int, num_draws: int = NUM_DRAWS, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = vocab_parallel_sample(row.expand(num_draws, -1), generator=generator, **options)
    return torch.bincount(ids, minlength=len(row))


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 6}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_the_probabilities_by_chi_square(options: dict[str, Any], dtype: torch.dtype):
    row = oracle.draw(12, seed=4, dtype=dtype)
    tempered = (row.double() / options.get("temperature", 1.0)).tolist()
    kept = sorted(oracle.most_likely(tempered, top_k=options.get("top_k"), top_p=options.get("top_p")))
    mass = torch.tensor([math.exp(tempered[v]) for v in kept])
    expected = NUM_DRAWS * mass / mass.sum()
    counts = counts_of(row, seed=7, **options)
    assert int(counts[kept].sum()) == NUM_DRAWS  # nothing outside
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = len(kept) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 6  # beyond the 99.9 % point for 1 to 11


@settings(max_examples=60)
@given(data=st.data())
def test_top_k_and_top_p_keep_exactly_the_fewest_most_likely_tokens(data: st.DataObject):
    # Few levels make ties likely, also at the threshold. All kept tokens are at least a hundredth of the mass.
    row = data.draw(st.lists(st.sampled_from([-math.inf, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0]), min_size=1, max_size=9))
    row[data.draw(st.integers(0, len(row) - 1))] = 0.25
    top_k = data.draw(st.none() | st.integers(1, 12))
    top_p = data.draw(st.none() | st.floats(0.001, 1.0))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    counts = counts_of(torch.tensor(row, dtype=dtype), seed=1, num_draws=1500, top_k=top_k, top_p=top_p)
    assert set(counts.nonzero()[:, 0].tolist()) == oracle.most_likely(row, top_k=top_k, top_p=top_p)


def test_a_generator_repeats_itself_and_each_row_has_its_own_draw():
    logits = torch.zeros(50, 40)
    first, again = (vocab_parallel_sample(logits, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert len(first.unique()) > 20


def test_the_draw_is_the_inverse_of_the_distribution_function():
    probabilities = torch.tensor([0.1, 0.0, 0.4, 0.5], dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    uniform = torch.rand(1000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ids = vocab_parallel_sample(probabilities.log().expand(1000, 4), generator=generator)
    want = [0 if u < 0.1 else 2 if u < 0.5 else 3 for u in uniform.tolist()]
    assert ids.tolist() == want


def test_the_ends_of_the_unit_interval_fall_on_allowed_tokens(monkeypatch: pytest.MonkeyPatch):
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: ends)
    row = torch.tensor([-math.inf, 0.1, 0.2, 0.3, -math.inf])
    assert vocab_parallel_sample(row.expand(2, 5)).tolist() == [1, 3]
    assert vocab_parallel_sample(row.expand(2, 5), top_k=2).tolist() == [2, 3]


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch):
    logits = oracle.draw(7, 3, 30, seed=1, dtype=torch.float32)
    options: dict[str, Any] = {"top_k": 9, "top_p": 0.8}
    want = vocab_parallel_sample(logits, generator=torch.Generator().manual_seed(1), **options)
    monkeypatch.setattr(vocab_sample, "_CHUNK_BYTES", 48 * 30 * 4)  # four rows at a time
    got = vocab_parallel_sample(logits, generator=torch.Generator().manual_seed(1), **options)
    assert torch.equal(got, want)
    assert got.shape == (7, 3)


def test_huge_logits_are_sampled_without_overflow():
    logits = torch.tensor([[-3e38, 3e38, 2e38]], dtype=torch.float32)
    assert vocab_parallel_sample(logits, top_p=0.9, top_k=2, temperature=1e-3).tolist() == [1]


def test_no_rows_give_no_ids():
    assert vocab_parallel_sample(torch.zeros(0, 3, 5), top_p=0.5).shape == (0, 3)


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
def test_a_row_that_is_no_distribution_is_named(bad: float):
    logits = torch.zeros(4, 5)
    logits[2] = bad
    with pytest.raises(ValueError, match="cannot sample row 2"):
        vocab_parallel_sample(logits)
    logits[2, 1:] = 0.0
    if bad == -math.inf:
        assert vocab_parallel_sample(logits)[2] != 0
    else:
        with pytest.raises(ValueError, match="cannot sample row 2"):
            vocab_parallel_sample(logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be"),
        ({"top_k": 0}, "top_k must be >= 1 or None, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\] or None, got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\]"),
    ],
)
def test_numbers_outside_their_range_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        vocab_parallel_sample(torch.zeros(2, 3), **options)
