# SPDX-License-Identifier: Apache-2.0
"""Recorded completions laid beside their prompts."""

import pytest
import torch

from cohobate.align import ResponseTokenBatch, RolloutRequest, SamplingConfig
from cohobate.errors import DataError
from cohobate.rollouts import RecordedRollouts

REQUEST = RolloutRequest(
    prompt_ids=torch.tensor([[9, 9, 5], [0, 0, 6], [0, 0, 0]]),
    prompt_attention_mask=torch.tensor([[1, 1, 1], [0, 0, 1], [0, 0, 0]]),
)


def test_prompts_keep_their_columns_and_completions_follow():
    batch = RecordedRollouts([[7, 9], [], [3, 4, 9]], pad_token_id=9).sample(REQUEST, SamplingConfig())
    assert batch.input_ids.tolist() == [[9, 9, 5, 7, 9, 9], [0, 0, 6, 9, 9, 9], [0, 0, 0, 3, 4, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]
    # Row 2 is plain text: its first token has no predictor, so it stands as the prompt.
    assert batch.response_start_idx.tolist() == [3, 3, 4]
    assert batch.sampler_logprobs is None
    # Two targets and the end token; none; two of three.
    assert ResponseTokenBatch.from_rollout(batch).response_mask.sum(1).tolist() == [2, 0, 2]


def test_every_prompt_gives_as_many_rows_as_a_sampler_would():
    batch = RecordedRollouts([[7], [8], [3]], pad_token_id=0).sample(REQUEST, SamplingConfig(n_samples_per_prompt=2))
    assert batch.input_ids[:, 3].tolist() == [7, 7, 8, 8, 3, 3]
    assert batch.response_start_idx.tolist() == [3, 3, 3, 3, 4, 4]


def test_all_completions_empty_is_legal():
    request = RolloutRequest(prompt_ids=torch.tensor([[4, 5]]), prompt_attention_mask=torch.tensor([[1, 1]]))
    batch = RecordedRollouts([[]], pad_token_id=0).sample(request, SamplingConfig())
    assert batch.input_ids.tolist() == [[4, 5]]
    assert batch.response_start_idx.tolist() == [2]
    assert ResponseTokenBatch.from_rollout(batch).response_mask.sum() == 0


def test_another_number_of_completions_than_prompts_is_refused():
    with pytest.raises(DataError, match="2 rows, but the request has 3 prompts"):
        RecordedRollouts([[1], [2]], pad_token_id=0).sample(REQUEST, SamplingConfig())
