# SPDX-License-Identifier: Apache-2.0
"""A run whose completions come from a server: each step's are by the weights of that step, and of no other."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from cohobate.errors import ConfigError, ServerResponseError
from cohobate.rollouts import VLLMRolloutsConfig
from cohobate.trainer import DistillationConfig, DistillationTrainer
from fake_engine import FakeEngine
from vllm_cases import own_logprobs

ROWS = [{"prompt": f"{i}+{i * 7}="} for i in range(8)]


def trainer(folder: Path, engine: FakeEngine, **changes: Any) -> DistillationTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "max_completion_length": 6,
        "seed": 3,
    }
    rollouts = VLLMRolloutsConfig(
        url="http://localhost:8000", sync_folder=str(folder / "sync"), surroundings=engine.surroundings
    )
    return DistillationTrainer(
        model=tiny.llama(1, layers=2),
        teacher=tiny.llama(5, hidden=12),
        args=DistillationConfig(**settings | changes),
        train_dataset=ROWS,
        processing_class=tiny.char_tokenizer(),
        rollouts=rollouts,
    )


class Watched:
    """Notes, at the moment of each draw, by how much it differs from the student's own log-probabilities."""

    def __init__(self, run: DistillationTrainer) -> None:
        self.run, self.inner, self.gaps, self.versions = run, run.rollouts.sample, [], []
        run.rollouts.sample = self.sample

    def sample(self, request: Any, sampling: Any, /) -> Any:
        batch = self.inner(request, sampling)
        student = self.run.accelerator.unwrap_model(self.run.model).eval()
        self.gaps.append(float((own_logprobs(student, batch) - batch.sampler_logprobs.double()).abs().max()))
        self.versions.append(batch.policy_version.unique().tolist())
        return batch


def test_the_rollouts_of_each_step_come_from_its_own_weights(tmp_path: Path):
    engine = FakeEngine(tiny.llama(9, layers=2))
    run = trainer(tmp_path, engine)
    watched = Watched(run)
    run.train()
    assert [path.name for path in engine.loaded] == ["policy-00000000", "policy-00000001", "policy-00000002"]
    assert watched.versions == [[0], [1], [2]]
    assert max(watched.gaps) < 1e-5
    assert engine.drawn_by == [1] * 4 + [2] * 4 + [3] * 4
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(logs) == 3
    for log in logs:
        assert 0 < log["loss"] < 100
        assert log["rollouts/canary_gap"] < 1e-5
        assert log["rollouts/policy_lag"] == log["rollouts/stale_share"] == log["rollouts/stale_rows"] == 0
        assert log["rollouts/sync_seconds"] > 0
    before, after = tiny.llama(1, layers=2).parameters(), run.model.parameters()
    assert max(float((a - b).detach().abs().max()) for a, b in zip(before, after, strict=True)) > 1e-2


def test_older_weights_are_used_as_long_as_they_may_be(tmp_path: Path):
    engine = FakeEngine(tiny.llama(9, layers=2))
    run = trainer(tmp_path, engine, max_staleness=1)
    run.train()
    assert [path.name for path in engine.loaded] == ["policy-00000000", "policy-00000002"]
    lags = [entry["rollouts/policy_lag"] for entry in run.state.log_history if "loss" in entry]
    assert lags == [0, 1, 0]


def test_a_resumed_run_hands_its_weights_over_first_and_ends_as_one_that_was_not_interrupted(tmp_path: Path):
    whole = trainer(tmp_path / "whole", FakeEngine(tiny.llama(9, layers=2)))
    whole.train()
    first = trainer(tmp_path / "cut", FakeEngine(tiny.llama(9, layers=2)), save_strategy="steps", save_steps=2)
    first.train()
    shutil.rmtree(tmp_path / "cut" / "checkpoint-3", ignore_errors=True)
    engine = FakeEngine(tiny.llama(9, layers=2))  # it lost its weights meanwhile
    resumed = trainer(tmp_path / "cut", engine, save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert [path.name for path in engine.loaded] == ["policy-00000002"]
    for ours, wanted in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, wanted)


def test_a_dropped_update_stops_the_run_before_its_rollouts_are_trained(tmp_path: Path):
    engine = FakeEngine(tiny.llama(9, layers=2))
    run = trainer(tmp_path, engine)

    def second_update_is_lost(engine: FakeEngine, asked: Any) -> None:
        engine.drops_updates = len(engine.loaded) == 1

    engine.fault = second_update_is_lost
    with pytest.raises(ServerResponseError, match=r"differ by|did not change"):
        run.train()
    assert run.state.global_step == 1


def test_evaluation_samples_from_the_weights_that_are_evaluated(tmp_path: Path):
    engine = FakeEngine(tiny.llama(9, layers=2))
    run = trainer(tmp_path, engine, max_steps=1)
    run.train()
    watched = Watched(run)
    assert run.evaluate(ROWS[:3])["eval/loss"] > 0
    assert watched.versions == [[1]]
    assert max(watched.gaps) < 1e-5


def test_something_that_is_no_source_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"rollouts must be a RolloutSource or a config with build\(\), got str"):
        DistillationTrainer(
            model=tiny.llama(1),
            args=DistillationConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none"),
            processing_class=tiny.char_tokenizer(),
            teacher="self",
            rollouts="vllm",
        )
