# SPDX-License-Identifier: Apache-2.0
"""Sharded weights: every forward pass is a collective, so ranks decode in step; rows stay those of one process."""

import json
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from torch import nn

import tiny
from cohobate.align import RolloutRequest, SamplingConfig
from cohobate.parallel.modules import is_sharded
from cohobate.rollouts import LocalRollouts

RANKS = Path(__file__).parent / "ranks.py"
# The rows of each rank (a row is a prompt of one token), and the bound on rows decoded together.
CASES = [([[5], [8, 9, 10]], None), ([[5, 6, 7], [8]], 1), ([[], [8]], None)]


def on_one_process(rows: list[int]) -> list[list[int]]:
    ids = torch.tensor(rows, dtype=torch.int64).reshape(-1, 1)
    request = RolloutRequest(prompt_ids=ids, prompt_attention_mask=torch.ones_like(ids), seeds=ids[:, 0])
    source = LocalRollouts(tiny.llama(1), eos_token_ids=[1, 4, 15, 20], pad_token_id=0)
    batch = source.sample(request, SamplingConfig(max_new_tokens=20))
    return [i[m.bool()][1:].tolist() for i, m in zip(batch.input_ids, batch.attention_mask, strict=True)]


@pytest.mark.distributed
def test_every_rank_makes_as_many_forward_passes_and_every_row_is_that_of_one_process():
    ranks = run_ranks(RANKS, [json.dumps(CASES)], world=2)
    for case, (rows, _) in enumerate(CASES):
        assert ranks[0][case]["forwards"] == ranks[1][case]["forwards"] > 0
        assert [rank[case]["completions"] for rank in ranks] == [on_one_process(r) for r in rows]


def test_the_rows_of_this_test_end_at_different_steps():
    assert len({len(row) for row in on_one_process([5, 6, 7, 8, 9, 10])}) > 2


def test_plain_weights_are_not_sharded_and_marked_ones_are():
    model = nn.Linear(2, 2)
    assert not is_sharded(model)
    model.weight.ds_id = 3  # as ZeRO-3 marks its parts
    assert is_sharded(model)
