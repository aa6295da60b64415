# SPDX-License-Identifier: Apache-2.0
"""Padding: where it goes, that it is told by the mask, and that nothing else moves."""

import pytest
import torch

from cohobate.data import PromptRow, rollout_request, teacher_context
from cohobate.errors import DataError

PAD = 9


def row(prompt: tuple[int, ...], completion: tuple[int, ...] | None = None, name: str = "r") -> PromptRow:
    return PromptRow(sample_id=name, prompt_ids=prompt, completion_ids=completion, row={})


def test_prompts_are_padded_on_the_left_also_where_they_hold_the_pad_id():
    request = rollout_request([row((1, PAD)), row((PAD, 2, 3))], PAD, seeds=torch.tensor([7, 8]))
    assert request.prompt_ids.tolist() == [[PAD, 1, PAD], [PAD, 2, 3]]
    assert request.prompt_attention_mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert request.prompt_ids.dtype == torch.int64
    assert request.seeds is not None
    assert request.seeds.tolist() == [7, 8]


def test_teacher_prefixes_are_padded_on_the_right():
    context = teacher_context([(1, 2, 3), (4,)], PAD)
    assert context.input_ids.tolist() == [[1, 2, 3], [4, PAD, PAD]]
    assert context.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_no_rows_make_an_empty_batch_with_one_column():
    assert rollout_request([], PAD).prompt_ids.shape == (0, 1)
    assert teacher_context([], PAD).input_ids.shape == (0, 1)


def test_rows_that_cannot_be_collated_are_named():
    with pytest.raises(DataError, match="row 'b' has an empty prompt"):
        rollout_request([row((1,)), row((), name="b")], PAD)
    with pytest.raises(DataError, match="pad_token_id is None"):
        rollout_request([row((1,))], None)
    with pytest.raises(DataError, match=r"each of the 1 rows, got shape \(2,\)"):
        rollout_request([row((1,))], PAD, seeds=torch.tensor([1, 2]))
