# SPDX-License-Identifier: Apache-2.0
"""Five ways in which an update does not arrive, each found before anything is sampled; and updates that do arrive."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import tiny
from cohobate.align import SamplingConfig
from cohobate.errors import ConfigError, ServerResponseError
from cohobate.rollouts import vllm_weights
from cohobate.rollouts.vllm_canary import Text, canary_prompts, trainer_logprobs
from fake_engine import FakeEngine
from vllm_cases import moved, own_logprobs, request, source


def adapted(model: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")).eval()


def drops(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.drops_updates = True


def skips_a_tensor(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.skipped = "model.layers.1.mlp.down_proj.weight"


def keeps_prefixes(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.keeps_prefixes = True


def misses_the_adapter(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_weights, "_factors", lambda *_: None)


def misses_the_tied_head(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.keeps_head = True


FAULTS = {
    "the update is dropped": (drops, False, "differ by|did not change"),
    "one tensor is skipped": (skips_a_tensor, False, "differ by .* nats"),
    "the prefix cache is kept": (keeps_prefixes, False, "prefixes that older weights have computed"),
    "the adapter is not merged": (misses_the_adapter, True, "differ by|did not change"),
    "the tied head is missed": (misses_the_tied_head, False, "differ by .* nats.*tied"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_update_that_does_not_arrive_is_found_by_the_next_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fault, lora, says = FAULTS[name]
    student = tiny.llama(1, layers=2)
    engine = FakeEngine(student)
    student = adapted(student) if lora else student
    rollouts = source(engine, student, tmp_path / "sync")
    fault(engine, monkeypatch)
    rollouts.prepare(student, 0)  # the server had these weights from the start
    moved(student, 0.05)
    with pytest.raises(ServerResponseError, match=says):
        rollouts.prepare(student, 1)
    with pytest.raises(ConfigError, match="the server's weights are not known"):
        rollouts.sample(request(), SamplingConfig(max_new_tokens=8))
    with pytest.raises(ServerResponseError, match=says):  # it is not believed the second time either
        rollouts.prepare(student, 1)


@pytest.mark.parametrize("lora", [False, True])
def test_without_a_fault_every_update_passes_and_both_sides_agree(tmp_path: Path, lora: bool):
    student = tiny.llama(1, layers=2)
    engine = FakeEngine(student)
    student = adapted(student) if lora else student
    rollouts = source(engine, student, tmp_path / "sync")
    for step in range(4):
        rollouts.prepare(student, step)
        gap, count = rollouts.metrics()["rollouts/canary_gap"]
        assert count == 1
        assert gap < 1e-5
        batch = rollouts.sample(request(), SamplingConfig(max_new_tokens=8))
        assert batch.sampler_logprobs is not None
        torch.testing.assert_close(batch.sampler_logprobs.double(), own_logprobs(student, batch), rtol=0, atol=1e-5)
        moved(student, 0.05, step)


def test_a_dropped_update_far_below_the_tolerance_is_found(tmp_path: Path):
    student = tiny.llama(1, layers=2)
    engine = FakeEngine(student)
    rollouts = source(engine, student, tmp_path / "sync")
    rollouts.prepare(student, 0)
    engine.drops_updates = True
    moved(student, 1e-3)
    with pytest.raises(ServerResponseError, match="did not change by an update"):
        rollouts.prepare(student, 1)


def test_updates_too_small_to_see_are_no_fault_until_they_add_up(tmp_path: Path):
    student = tiny.llama(1, layers=2)
    engine = FakeEngine(student)
    rollouts = source(engine, student, tmp_path / "sync")
    rollouts.prepare(student, 0)
    engine.drops_updates = True
    passed: list[int] = []

    def updates() -> None:
        for step in range(1, 40):
            moved(student, 1e-6, 0)
            rollouts.prepare(student, step)
            passed.append(step)

    with pytest.raises(ServerResponseError, match="did not change by an update"):
        updates()
    assert 2 <= len(passed) < 30


def test_an_unchanged_student_is_no_fault(tmp_path: Path):
    student = tiny.llama(1, layers=2)
    rollouts = source(FakeEngine(student), student, tmp_path / "sync")
    for step in range(3):  # as with a learning rate of 0
        rollouts.prepare(student, step)


def test_a_cache_in_use_is_waited_for_and_not_for_ever(tmp_path: Path):
    student = tiny.llama(1, layers=2)
    engine = FakeEngine(student)
    rollouts = source(engine, student, tmp_path / "sync")
    engine.busy_resets = 3
    rollouts.prepare(student, 0)
    assert engine.clock.slept == [0.5] * 3
    engine.busy_resets = 10**6
    with pytest.raises(ServerResponseError, match="does not reset its prefix cache"):
        rollouts.prepare(student, 1)


def test_the_canary_has_eight_prompts_of_the_rows_and_one_of_them_is_long():
    rows = [[5] * 60, [6, 7], [], [8, 9, 10]]
    prompts = canary_prompts(rows, num_ids=23, room=None)
    assert [len(p.ids) for p in prompts] == [32, 2, 3, 16, 16, 16, 16, 272]
    assert prompts[-1].ids[:62] == (*[5] * 60, 6, 7)
    assert prompts == canary_prompts(rows, num_ids=23, room=None)
    assert all(0 <= i < 23 for prompt in prompts for i in prompt.ids)
    assert max(len(p.ids) for p in canary_prompts(rows, num_ids=23, room=20)) == 20
    assert len(canary_prompts([[3]] * 30, num_ids=23, room=9)) == 8


def test_the_trainers_logprobs_are_those_of_each_text_alone_and_its_mode_stays():
    model = tiny.llama(1, layers=2)
    model.train()
    model.model.layers[0].eval()
    texts = [Text(ids=tuple(2 + i % 9 for i in range(n)), start=s) for n, s in ((5, 2), (70, 66), (9, 1), (3, 2))]
    found = trainer_logprobs(model, texts)
    assert model.training
    assert not model.model.layers[0].training
    wanted = []
    model.eval()
    for text in texts:
        with torch.no_grad():
            logits = model(torch.tensor([text.ids])).logits[0].double()
        for at in range(text.start, len(text.ids)):
            row = logits[at - 1].tolist()
            total = sum(torch.tensor(row, dtype=torch.float64).exp().tolist())
            wanted.append(row[text.ids[at]] - float(torch.tensor(total, dtype=torch.float64).log()))
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-5)
