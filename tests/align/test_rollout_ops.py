# SPDX-License-Identifier: Apache-2.0
"""Cutting and joining rollouts by hand: columns of padding come and go, tokens stay with their log-probs."""

import pytest
import torch

from cohobate.align import RolloutBatch, completion_mask, concat_rollouts, select_rows


def three_rows(make_rollout, **fields) -> RolloutBatch:
    rows = [([1], [20, 21]), ([2, 3, 4], []), ([5, 6], [22])]
    return make_rollout(rows, offsets=[3, 1, 2], width=8, **fields)


def test_a_completion_is_what_is_attended_from_the_boundary_on(make_rollout):
    mask = completion_mask(three_rows(make_rollout))
    assert mask.dtype == torch.bool
    assert [row.nonzero()[:, 0].tolist() for row in mask] == [[4, 5], [], [4]]


def test_selected_rows_lose_the_columns_that_are_padding_in_all_of_them(make_rollout):
    logprobs = torch.arange(24.0).reshape(3, 8)
    cut = select_rows(
        three_rows(make_rollout, sampler_logprobs=logprobs, policy_version=torch.tensor([7, 8, 9])), [2, 0]
    )
    assert cut.input_ids.tolist() == [[5, 6, 22, 99], [99, 1, 20, 21]]
    assert cut.attention_mask.tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert cut.response_start_idx.tolist() == [2, 2]
    assert cut.sampler_logprobs is not None
    assert cut.sampler_logprobs.tolist() == [[18.0, 19.0, 20.0, 21.0], [2.0, 3.0, 4.0, 5.0]]
    assert cut.policy_version is not None
    assert cut.policy_version.tolist() == [9, 7]


def test_a_boundary_behind_the_cut_buffer_moves_to_its_end(make_rollout):
    rollout = RolloutBatch(  # an empty completion that names the end of a wide buffer
        input_ids=torch.tensor([[1, 2, 9, 9, 9]]),
        attention_mask=torch.tensor([[1, 1, 0, 0, 0]]),
        response_start_idx=torch.tensor([5]),
    )
    cut = select_rows(rollout, [0])
    assert cut.input_ids.tolist() == [[1, 2]]
    assert cut.response_start_idx.tolist() == [2]


def test_rows_without_any_token_keep_one_column():
    rollout = RolloutBatch(
        input_ids=torch.full((2, 4), 9),
        attention_mask=torch.zeros(2, 4, dtype=torch.int64),
        response_start_idx=torch.tensor([1, 4]),
    )
    cut = select_rows(rollout, [0, 1])
    assert cut.input_ids.tolist() == [[9], [9]]
    assert cut.response_start_idx.tolist() == [1, 1]


def test_an_unattended_row_beside_a_trimmed_one_keeps_a_legal_boundary():
    rollout = RolloutBatch(
        input_ids=torch.tensor([[9, 9, 9, 9, 9], [9, 9, 9, 1, 2]]),
        attention_mask=torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]),
        response_start_idx=torch.tensor([1, 4]),
    )
    cut = select_rows(rollout, [0, 1])
    assert cut.response_start_idx.tolist() == [1, 1]
    assert cut.input_ids.tolist() == [[9, 9], [1, 2]]


def test_a_row_may_be_selected_twice_and_none_may_be_selected(make_rollout):
    rollout = three_rows(make_rollout)
    assert select_rows(rollout, torch.tensor([1, 1])).input_ids.tolist() == [[2, 3, 4], [2, 3, 4]]
    assert select_rows(rollout, []).input_ids.shape[0] == 0


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([0, 3], ValueError, "names row 3, but the rollout has rows 0 to 2"),
        ([-1], ValueError, "names row -1"),
        (torch.tensor([True, False, True]), TypeError, "torch.nonzero"),
        ([0.0], TypeError, "float32"),
        (torch.tensor([[0]]), TypeError, r"shape \[1, 1\]"),
    ],
)
def test_rows_that_are_not_row_numbers_are_refused(make_rollout, rows, error, message):
    with pytest.raises(error, match=message):
        select_rows(three_rows(make_rollout), rows)


def test_joined_rollouts_begin_their_completions_in_one_column(make_rollout):
    a = make_rollout([([1], [20, 21, 22]), ([2, 3], [23])], offsets=[1, 0], width=5)  # starts in column 2
    b = make_rollout([([4, 5, 6, 7], [24])])  # starts in column 4
    joined = concat_rollouts([a, b], pad_token_id=0)
    assert joined.input_ids.tolist() == [
        [0, 0, 99, 1, 20, 21, 22],
        [0, 0, 2, 3, 23, 99, 99],
        [4, 5, 6, 7, 24, 0, 0],
    ]
    assert joined.attention_mask.tolist() == [[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0]]
    assert joined.response_start_idx.tolist() == [4, 4, 4]


def test_joined_rollouts_keep_logprobs_in_the_tokens_columns_and_mark_rows_that_have_none(make_rollout):
    a = make_rollout([([1], [20])], sampler_logprobs=torch.tensor([[0.0, -1.5]]), policy_version=torch.tensor([3]))
    b = make_rollout([([2, 3], [21])])
    joined = concat_rollouts([a, b], pad_token_id=0)
    assert joined.sampler_logprobs is not None
    assert joined.sampler_logprobs[0].tolist() == [0.0, 0.0, -1.5]
    assert joined.sampler_logprobs[1].isnan().all()
    assert joined.policy_version is not None
    assert joined.policy_version.tolist() == [3, -1]


def test_joined_rollouts_of_two_policies_keep_each_rows_version_and_without_logprobs_none_are_made(make_rollout):
    a = make_rollout([([1], [20])], policy_version=torch.tensor([3]))
    b = make_rollout([([1], [20])], policy_version=torch.tensor([4]))
    joined = concat_rollouts([a, b], pad_token_id=0)
    assert joined.policy_version is not None
    assert joined.policy_version.tolist() == [3, 4]
    assert joined.sampler_logprobs is None
    assert concat_rollouts([make_rollout([([1], [20])])] * 2, pad_token_id=0).policy_version is None


def test_joining_bool_and_integer_masks_keeps_a_mask(make_rollout):
    a = make_rollout([([1], [20])])
    b = RolloutBatch(
        input_ids=a.input_ids, attention_mask=a.attention_mask.bool(), response_start_idx=a.response_start_idx
    )
    assert concat_rollouts([b, b], pad_token_id=0).attention_mask.dtype == torch.bool
    assert concat_rollouts([a, b], pad_token_id=0).attention_mask.tolist() == [[1, 1], [1, 1]]


def test_joining_nothing_or_without_a_pad_id_is_refused(make_rollout):
    with pytest.raises(ValueError, match="at least one rollout"):
        concat_rollouts([], pad_token_id=0)
    with pytest.raises(TypeError, match="pad_token_id"):
        concat_rollouts([make_rollout([([1], [2])])], pad_token_id=None)  # pyright: ignore[reportArgumentType]
