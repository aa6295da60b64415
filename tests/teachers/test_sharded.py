# SPDX-License-Identifier: Apache-2.0
"""Weights sharded over ranks: a head that is whole only while it is called is scored by the model itself."""

from pathlib import Path

import pytest
import torch
from launch import run_ranks

import tiny


@pytest.mark.distributed
def test_a_sharded_model_gives_its_own_logits_and_gradients_also_beside_a_rank_without_pairs():
    ranks = run_ranks(Path(__file__).parent / "ranks.py", [], world=2)
    model = tiny.llama(1, tie=False)
    ids = torch.arange(2, 14).reshape(2, 6)
    logits = model(input_ids=ids).logits.reshape(12, -1)[[1, 4, 9]]
    logits.square().sum().backward()
    for result in ranks:
        assert result["readable"] is False
        assert "sharded over ranks" in result["frozen"]
        for name, parameter in model.named_parameters():  # the mean over ranks, one of which adds nothing
            expected = parameter.grad / 2
            torch.testing.assert_close(torch.tensor(result["gradients"][name]), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(ranks[0]["logits"]), logits, rtol=1e-4, atol=1e-5)
    assert ranks[1]["logits"] == []
