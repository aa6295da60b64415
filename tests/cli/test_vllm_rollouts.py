# SPDX-License-Identifier: Apache-2.0
"""`rollouts.kind=vllm` in a recipe: what the command says of it, and that it cleans up."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from cli_runs import refused
from cohobate.cli import schema
from cohobate.cli.build import rollouts
from cohobate.cli.recipe import load_recipe
from cohobate.rollouts import VLLMRolloutsConfig
from fake_engine import FakeEngine
from fake_server import serve

RUN = [
    "student.model=student",
    "teacher.model=teacher",
    "data.train=rows.jsonl",
    "training.max_steps=2",
    "training.per_device_train_batch_size=4",
    "training.use_cpu=true",
    "sampling.max_completion_length=5",
    "rollouts.kind=vllm",
    "rollouts.sync_folder=weights",
]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(tiny.llama(9))


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with serve(engine.handle) as url:
        yield url


def test_a_run_says_who_samples_and_hands_its_weights_over(cohobate, place: Path, engine: FakeEngine, url: str):
    done = cohobate("train", "opd", *RUN, f"rollouts.url={url}")
    assert done.code == 0, done.err
    assert f"rollouts  {url} (vllm), weights by way of weights" in done.out
    assert "rollouts  " + url + " serves 'student', rows up to 128 tokens; it took the student's weights" in done.out
    assert len(engine.loaded) == 2
    assert not (place / "weights").exists()
    lines = [json.loads(line) for line in (place / "runs" / "opd" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["rollouts/canary_gap"] < 1e-5 for line in lines if "loss" in line)


def test_the_doctor_tries_the_server_and_leaves_nothing_behind(cohobate, place: Path, engine: FakeEngine, url: str):
    before = set(place.rglob("*"))
    done = cohobate("doctor", "opd", *RUN, f"rollouts.url={url}")
    assert done.code == 0, done.err
    assert "agrees with it within" in done.out
    assert "4 taken the whole way: loss " in done.out
    assert set(place.rglob("*")) == before
    engine.dev = False
    refused(cohobate("doctor", "opd", *RUN, f"rollouts.url={url}"), 2, "VLLM_SERVER_DEV_MODE=1")


def test_the_settings_are_those_of_the_part_and_a_key_of_another_kind_is_refused(cohobate, place: Path):
    section = load_recipe("opd", [*RUN, "rollouts.url=http://localhost:1"]).recipe.rollouts
    assert isinstance(section, schema.VLLMRollouts)
    assert rollouts(section) == VLLMRolloutsConfig(url="http://localhost:1", sync_folder="weights")
    assert rollouts(load_recipe("opd", RUN[:7]).recipe.rollouts) is None
    refused(cohobate("train", "opd", *RUN[:7], "rollouts.url=http://localhost:1"), 2, "rollouts")
    refused(cohobate("train", "opd", *RUN, "rollouts.urk=http://localhost:1"), 2, "rollouts", "url")
    refused(cohobate("train", "opd", *RUN, "rollouts.url=http://server.example"), 2, "https")
