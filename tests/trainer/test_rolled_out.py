# SPDX-License-Identifier: Apache-2.0
"""Which policy wrote a row, and that rows of an older one are dropped, counted, and never trained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from cohobate.align.rollout import RolloutBatch, RolloutRequest, SamplingConfig
from cohobate.data import PromptRow
from cohobate.rollouts import LocalRollouts
from cohobate.trainer import DistillationConfig, DistillationTrainer
from cohobate.trainer.rolled_out import RolledOut, completion_ids

ROWS = [{"prompt": f"{i}+{i * 7}=", "completion": f"{i * 8}"} for i in range(8)]


def rolled_out(*, is_sampled: list[bool], versions: list[int] | None) -> RolledOut:
    """Row i is `[i, 10 + i]` with one completion token."""
    rows = len(is_sampled)
    first = torch.arange(rows)
    return RolledOut(
        rollout=RolloutBatch(
            input_ids=torch.stack([first, 10 + first], dim=1),
            attention_mask=torch.ones(rows, 2, dtype=torch.int64),
            response_start_idx=torch.ones(rows, dtype=torch.int64),
            policy_version=None if versions is None else torch.tensor(versions),
        ),
        rows=tuple(PromptRow(sample_id=str(i), prompt_ids=(i,), completion_ids=None, row={}) for i in range(rows)),
        is_sampled=torch.tensor(is_sampled),
        sampling_seconds=1.0,
    )


def versions_of(rolled: RolledOut) -> list[int]:
    assert rolled.rollout.policy_version is not None
    return rolled.rollout.policy_version.tolist()


def test_sampled_rows_of_a_source_that_says_no_version_are_by_the_weights_of_now():
    assert versions_of(rolled_out(is_sampled=[True, False], versions=None).stamped(7)) == [7, -1]


def test_a_version_that_the_source_said_stays():
    rolled = rolled_out(is_sampled=[True, True, False], versions=[3, -1, -1])
    assert versions_of(rolled.stamped(7)) == [3, 7, -1]


def test_rows_of_weights_that_are_too_old_leave_with_all_that_belongs_to_them():
    rolled = rolled_out(is_sampled=[True, True, False, True], versions=[5, 4, -1, 3])
    kept = rolled.fresh(step=6, max_staleness=1)
    assert completion_ids(kept.rollout) == [(10,), (12,)]
    assert [row.sample_id for row in kept.rows] == ["0", "2"]
    assert kept.is_sampled.tolist() == [True, False]
    assert rolled.fresh(step=6, max_staleness=3) is rolled


class AgeingRollouts:
    """Samples here, and says of every other row (or of all) that it was written `lag` steps ago."""

    def __init__(self, lag: int, *, every: int = 2) -> None:
        self.lag, self.every, self.step = lag, every, -1
        self.prepared: list[int] = []
        self.inner: Any = None

    def prepare(self, model: torch.nn.Module, policy_version: int) -> None:
        self.step = policy_version
        self.prepared.append(policy_version)

    def metrics(self) -> dict[str, tuple[float, float]]:
        return {"rollouts/asked": (2.0, 1.0)}

    def sample(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        drawn = self.inner.sample(request, sampling)
        old = torch.arange(drawn.input_ids.shape[0]) % self.every == self.every - 1
        return replace(drawn, policy_version=(self.step - self.lag * old).clamp(min=0))


def run(folder: Path, source: AgeingRollouts | None, rows: list[dict[str, Any]], **changes: Any) -> Any:
    base: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "max_completion_length": 4,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0.0,
    }
    trainer = DistillationTrainer(
        model=tiny.llama(1),
        teacher=tiny.llama(5),
        args=DistillationConfig(**base | changes),
        train_dataset=rows,
        processing_class=tiny.char_tokenizer(),
        rollouts=source,
    )
    if source is not None:
        source.inner = LocalRollouts(
            trainer.model, eos_token_ids=trainer.eos_token_ids, pad_token_id=0, vocab_size=trainer.vocab_size
        )
    trainer.train()
    return trainer


def test_a_source_is_given_the_weights_of_every_step_and_its_numbers_are_logged(tmp_path: Path):
    source = AgeingRollouts(lag=0)
    found = run(tmp_path, source, ROWS)
    assert source.prepared == [0, 1, 2]
    log = found.state.log_history[0]
    assert log["rollouts/asked"] == 2.0
    assert log["rollouts/policy_lag"] == log["rollouts/stale_share"] == 0.0


def test_stale_rows_are_counted_and_the_step_is_that_of_the_others_alone(tmp_path: Path):
    prompts = [{"prompt": row["prompt"], "sample_id": f"row {i}"} for i, row in enumerate(ROWS)]
    # Nothing is older than step 0, so the first step is made without effect.
    second_only = {"max_steps": 2, "warmup_steps": 1, "optim": "sgd", "learning_rate": 0.1}
    aged = run(tmp_path / "aged", AgeingRollouts(lag=1), prompts, **second_only)
    others = run(tmp_path / "fresh", None, prompts[::2], per_device_train_batch_size=2, **second_only)
    log, wanted = aged.state.log_history[1], others.state.log_history[1]
    assert log["rollouts/stale_share"] == log["rollouts/policy_lag"] == 0.5
    assert log["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    for a, b in zip(aged.model.parameters(), others.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_rows_within_max_staleness_are_trained(tmp_path: Path):
    found = run(tmp_path, AgeingRollouts(lag=1), ROWS, max_staleness=1, max_steps=2)
    assert found.state.log_history[1]["rollouts/policy_lag"] == 0.5
    assert found.state.log_history[1]["rollouts/stale_share"] == 0.0


def test_a_step_without_a_fresh_row_changes_nothing(tmp_path: Path):
    source = AgeingRollouts(lag=1, every=1)
    found = run(tmp_path, source, ROWS, max_steps=2, warmup_steps=1, optim="sgd")
    assert found.state.log_history[1]["rollouts/stale_share"] == 1.0
    assert found.state.log_history[1]["loss"] == 0.0
    for a, b in zip(found.model.parameters(), tiny.llama(1).parameters(), strict=True):
        assert torch.equal(a, b)


def test_evaluation_asks_for_the_weights_of_now_too(tmp_path: Path):
    source = AgeingRollouts(lag=0)
    found = run(tmp_path, source, ROWS, max_steps=1)
    found.evaluate(ROWS[:2])
    assert source.prepared == [0, 1]
