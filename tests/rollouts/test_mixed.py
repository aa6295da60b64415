# SPDX-License-Identifier: Apache-2.0
"""Sampled and recorded rows in one batch, in the order of the request."""

from itertools import product

import pytest
import torch

import tiny
from cohobate.align import RolloutRequest, SamplingConfig, select_rows
from cohobate.errors import DataError
from cohobate.rollouts import LocalRollouts, MixedRollouts

PROMPTS = [[5, 6, 7], [8], [9, 3]]
RECORDED = [[10, 1], [11, 12, 13, 1], []]
REQUEST = RolloutRequest(
    prompt_ids=torch.tensor([[5, 6, 7], [0, 0, 8], [0, 9, 3]]),
    prompt_attention_mask=torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]]),
    seeds=torch.tensor([1, 2, 3]),
)


class Sampler:
    """Answers every prompt with its first token twice for sample 0, three times for sample 1, ...; notes the seeds."""

    def __init__(self):
        self.asked = []

    def sample(self, request, sampling, /):
        self.asked.append(None if request.seeds is None else request.seeds.tolist())
        if request.prompt_ids.shape[0] == 0:
            return LocalRollouts(tiny.llama(0), eos_token_ids=[1], pad_token_id=0).sample(request, sampling)
        count = iter(range(10**6))
        n = sampling.n_samples_per_prompt
        return tiny.CannedRollouts(lambda prompt: [prompt[0]] * (2 + next(count) % n)).sample(request, sampling)


def rows(batch):
    """(prompt, completion) of each row as lists."""
    result = []
    for row in range(batch.input_ids.shape[0]):
        one = select_rows(batch, [row])
        attended, start = one.attention_mask[0].bool(), int(one.response_start_idx[0])
        ids = one.input_ids[0]
        result.append((ids[:start][attended[:start]].tolist(), ids[start:][attended[start:]].tolist()))
    return result


@pytest.mark.parametrize("decisions", list(product([True, False], repeat=3)))
@pytest.mark.parametrize("n", [1, 2])
def test_each_row_comes_from_the_source_that_was_decided_in_the_requests_order(decisions, n):
    sampler = Sampler()
    source = MixedRollouts(sampler, is_sampled=torch.tensor(decisions), completions=RECORDED, pad_token_id=0)
    batch = source.sample(REQUEST, SamplingConfig(n_samples_per_prompt=n))
    expected = [
        (prompt, [prompt[0]] * (2 + j) if sampled else recorded)
        for prompt, recorded, sampled in zip(PROMPTS, RECORDED, decisions, strict=True)
        for j in range(n)
    ]
    assert rows(batch) == expected
    assert sampler.asked == [[seed for seed, sampled in zip([1, 2, 3], decisions, strict=True) if sampled]]


def test_logprobs_stay_with_sampled_rows_and_are_nan_on_recorded_ones():
    decisions = torch.tensor([False, True, True])
    source = MixedRollouts(Sampler(), is_sampled=decisions, completions=[[10, 1], None, None], pad_token_id=0)
    batch = source.sample(REQUEST, SamplingConfig())
    attended = batch.attention_mask.bool()
    assert (batch.sampler_logprobs[1:][attended[1:]] == -1).all()
    assert batch.sampler_logprobs[0][attended[0]].isnan().all()


def test_a_real_sampler_gives_a_row_what_it_would_have_given_alone():
    sampler = LocalRollouts(tiny.llama(1), eos_token_ids=[1], pad_token_id=0)
    sampling = SamplingConfig(max_new_tokens=6)
    alone = rows(sampler.sample(REQUEST, sampling))
    source = MixedRollouts(sampler, is_sampled=torch.tensor([True, False, True]), completions=RECORDED, pad_token_id=0)
    assert rows(source.sample(REQUEST, sampling)) == [alone[0], (PROMPTS[1], RECORDED[1]), alone[2]]


def test_a_row_without_a_recording_cannot_be_taken_as_recorded():
    with pytest.raises(DataError, match="row 1 is to be taken as recorded"):
        MixedRollouts(Sampler(), is_sampled=torch.tensor([True, False]), completions=[[1], None], pad_token_id=0)


def test_decisions_must_be_one_bool_a_row():
    with pytest.raises(TypeError, match="bool"):
        MixedRollouts(Sampler(), is_sampled=torch.tensor([1, 0]), completions=[[1], [1]], pad_token_id=0)
    with pytest.raises(DataError, match="3 rows, completions of 2"):
        MixedRollouts(Sampler(), is_sampled=torch.ones(3).bool(), completions=[[1], [1]], pad_token_id=0)
    source = MixedRollouts(Sampler(), is_sampled=torch.ones(2).bool(), completions=[None, None], pad_token_id=0)
    with pytest.raises(DataError, match="2 rows, but the request has 3"):
        source.sample(REQUEST, SamplingConfig())
