# SPDX-License-Identifier: Apache-2.0
"""Several ranks, one server: the run of one process, failures all learn of, and split weights that arrive whole."""

import contextlib
from pathlib import Path

import pytest
from launch import run_ranks
from vllm_ranks import trained

import tiny
from fake_engine import FakeEngine
from fake_server import serve


@pytest.mark.distributed
def test_two_ranks_share_a_server_and_learn_of_each_others_failures(tmp_path: Path):
    engines = [FakeEngine(tiny.llama(9, layers=2)) for _ in range(4)]
    with contextlib.ExitStack() as opened:
        urls = [opened.enter_context(serve(engine.handle)) for engine in engines]
        script = Path(__file__).with_name("vllm_ranks.py")
        first, second = run_ranks(script, [*urls[:3], str(tmp_path)], world=2, timeout=200)
        alone = trained(urls[3], str(tmp_path / "alone"), 1)
    assert first["trained"]["weights"] == pytest.approx(alone["weights"], rel=1e-6)
    assert second["trained"]["weights"] == first["trained"]["weights"]
    for ours, wanted in zip(first["trained"]["logs"], alone["logs"], strict=True):
        assert ours["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert ours["completion/mean_length"] == wanted["completion/mean_length"]
        assert ours["rollouts/canary_gap"] < 1e-5
        assert ours["rollouts/policy_lag"] == ours["rollouts/stale_rows"] == 0
    assert len(engines[0].loaded) == 2  # by rank 0 alone
    assert "DataError: prompt 0 has 125 tokens" in second["failing"]
    assert "another rank could not go on" in first["failing"]
    assert first["sharded"]["equal"] == [True, True]
    assert first["sharded"]["split"] == second["sharded"]["split"] == [True, True]
    assert first["sharded"]["gap"][0] < 1e-5
    assert first["sharded"]["completions 0"] != first["sharded"]["completions 1"]
    assert second["sharded"]["completions 0"] == []
    assert len(engines[2].loaded) == 2
