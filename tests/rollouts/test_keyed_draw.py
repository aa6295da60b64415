# SPDX-License-Identifier: Apache-2.0
"""The hash against integers in plain Python, its numbers as uniform and independent, and the draw as a softmax."""

import math

import pytest
import torch

from cohobate.rollouts import keyed_draw
from cohobate.rollouts.keyed_draw import KeyedDraw, gumbel_noise, hashed_bits, sample_keys

MASK = (1 << 64) - 1


def splitmix64(seed: int, index: int) -> int:
    """Output `index` of the generator as published, on unsigned 64-bit integers."""
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


SEEDS = [0, 1, -1, 1234567, (1 << 63) - 1, -(1 << 63), 0x5DEECE66D]


def test_the_published_first_numbers_come_out():
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    got = hashed_bits(torch.tensor([1234567] * 4), torch.arange(4))
    assert [value & MASK for value in got.tolist()] == expected


def test_every_bit_equals_the_plain_python_hash():
    for counter in (0, 1, 7, 10**6, 2**40):
        got = hashed_bits(torch.tensor(SEEDS), counter).tolist()
        assert [value & MASK for value in got] == [splitmix64(seed & MASK, counter) for seed in SEEDS]
        by_tensor = hashed_bits(torch.tensor(SEEDS), torch.tensor(counter)).tolist()
        assert by_tensor == got


def test_the_noise_is_gumbel_of_the_top_bits():
    noise = gumbel_noise(torch.tensor(SEEDS), 3, 11)
    for row, seed in enumerate(SEEDS):
        state = splitmix64(seed & MASK, 3)
        for token in range(11):
            u = ((splitmix64(state, token) >> 32) + 0.5) / 2**32
            assert noise[row, token].item() == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-4, abs=1e-5)


def test_the_arguments_are_not_changed():
    seeds = torch.tensor(SEEDS)
    gumbel_noise(seeds, 3, 11)
    sample_keys(seeds, 2)
    assert seeds.tolist() == SEEDS


def uniforms(rows: int, steps: int, tokens: int) -> torch.Tensor:
    keys = sample_keys(torch.arange(rows), 1)
    noise = torch.stack([gumbel_noise(keys, step, tokens) for step in range(steps)])
    return torch.exp(-torch.exp(-noise.double()))


def test_uniform_over_rows_steps_and_tokens():
    for shape in ((4000, 1, 5), (2, 2000, 5), (2, 1, 10000)):
        u = uniforms(*shape).flatten()
        n = u.numel()
        counts = torch.histc(u, bins=64, min=0, max=1)
        chi_square = ((counts - n / 64) ** 2 / (n / 64)).sum().item()
        assert 63 - 5 * math.sqrt(126) < chi_square < 63 + 5 * math.sqrt(126)  # mean 63, variance 126
        empirical = torch.arange(1, n + 1) / n
        assert (u.sort().values - empirical).abs().max() < 2.0 / math.sqrt(n)  # Kolmogorov-Smirnov, p < 1e-3


def test_neighbours_in_every_direction_are_uncorrelated():
    u = uniforms(200, 20, 50) - 0.5
    pairs = {
        "row": (u[:, 1:], u[:, :-1]),
        "step": (u[1:], u[:-1]),
        "token": (u[..., 1:], u[..., :-1]),
        "step against token": (u[1:, :, :-1], u[:-1, :, 1:]),
        "row against token": (u[:, 1:, :-1], u[:, :-1, 1:]),
    }
    for name, (a, b) in pairs.items():
        correlation = (a * b).mean() * 12
        assert abs(correlation) < 4 / math.sqrt(a.numel()), name


def test_rows_with_neighbouring_seeds_share_no_number():
    keys = sample_keys(torch.arange(100), 3)
    assert keys.unique().numel() == 300
    bits = hashed_bits(keys[:, None], torch.arange(100))
    assert bits.unique().numel() == bits.numel()


def test_a_samples_key_depends_on_its_number_not_on_how_many_there_are():
    seeds = torch.tensor([5, 9])
    one, four = sample_keys(seeds, 1), sample_keys(seeds, 4)
    assert four.view(2, 4)[:, 0].tolist() == one.tolist()
    assert four.unique().numel() == 8


def test_the_largest_noise_reaches_far_and_the_smallest_stays_finite():
    assert gumbel_noise(torch.arange(64), 0, 50000).isfinite().all()
    noise = gumbel_noise(torch.arange(100), 0, 20000)  # 2e6 draws: the largest is near ln 2e6 = 14.5
    assert 12 < noise.max() < 23


@pytest.mark.parametrize("bits", [0, -1, (1 << 63) - 1, -(1 << 63)])
def test_no_bits_at_all_give_an_infinite_noise(bits: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keyed_draw, "hashed_bits", lambda keys, counter: torch.full((1, 3), bits))
    u = ((bits >> 32) % 2**32 + 0.5) / 2**32
    noise = gumbel_noise(torch.zeros(1, dtype=torch.int64), 0, 3)
    assert noise[0, 0].item() == pytest.approx(-math.log(-math.log1p(-min(u, 1 - 2**-24))), rel=1e-4)


def test_the_argmax_is_distributed_as_the_softmax():
    probabilities = torch.tensor([0.6, 0.25, 0.1, 0.049, 0.001])
    rows, steps = 5000, 8
    keys = sample_keys(torch.arange(rows), 1)
    draws = torch.cat([(probabilities.log() + gumbel_noise(keys, step, 5)).argmax(-1) for step in range(steps)])
    observed = torch.bincount(draws, minlength=5).double() / draws.numel()
    error = (probabilities.double() * (1 - probabilities.double()) / draws.numel()).sqrt()
    assert ((observed - probabilities).abs() < 4 * error).all()


def test_an_excluded_token_is_never_drawn_and_an_only_candidate_always():
    keys = torch.arange(2000)
    scores = torch.full((2000, 4), -math.inf)
    scores[:, 2] = -30.0
    draw = KeyedDraw(keys, prompt_width=3)
    chosen = draw(torch.zeros(2000, 3, dtype=torch.int64), scores).argmax(-1)
    assert (chosen == 2).all()
    assert (draw.logprobs() == 0).all()


def test_the_noted_logprob_is_of_the_chosen_token_without_the_noise():
    scores = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    draw = KeyedDraw(torch.arange(50), prompt_width=2)
    for width in (2, 3):
        chosen = draw(torch.zeros(50, width, dtype=torch.int64), scores).argmax(-1)
        expected = [math.log(scores[i].double().softmax(-1)[chosen[i]]) for i in range(50)]
        torch.testing.assert_close(
            draw.logprobs()[:, width - 2].double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-5
        )
    assert (draw.logprobs()[:, 0] != draw.logprobs()[:, 1]).any()  # another step is another draw
