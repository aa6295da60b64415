# SPDX-License-Identifier: Apache-2.0
"""Rollouts from a server are what the student's own `generate` would give: the same contract, the right log-probs."""

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import tiny
from cohobate.align import SamplingConfig
from cohobate.errors import AlignmentError, ConfigError, DataError, ServerResponseError, ServerUnreachable
from cohobate.rollouts import MixedRollouts, VLLMRolloutsConfig
from fake_engine import FakeEngine
from fake_server import body_response
from vllm_cases import EOS, PROMPTS, completions, moved, own_logprobs, request, source

FREE = SamplingConfig(max_new_tokens=8)


def model(seed: int = 1) -> Any:
    return tiny.llama(seed, layers=2)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(model(9))  # not the student's weights: it must be given them


def test_sampler_logprobs_are_the_students_own(engine: FakeEngine, tmp_path: Path):
    student = model()
    rollouts = source(engine, student, tmp_path / "sync")
    rollouts.prepare(student, 7)
    batch = rollouts.sample(request(), SamplingConfig(max_new_tokens=8, n_samples_per_prompt=3))
    assert batch.sampler_logprobs is not None
    torch.testing.assert_close(batch.sampler_logprobs.double(), own_logprobs(student, batch), rtol=0, atol=1e-5)
    assert batch.policy_version is not None
    assert batch.policy_version.tolist() == [7] * 12
    prompts = [p for p in PROMPTS for _ in range(3)]
    for ids, mask, prompt in zip(batch.input_ids, batch.attention_mask, prompts, strict=True):
        assert ids[mask.bool()].tolist()[: len(prompt)] == prompt  # prompt-major, whatever came first
    lengths = [len(row) for row in completions(batch)]
    assert len(set(lengths)) > 1
    for row in completions(batch):
        assert not set(row[:-1]) & set(EOS)
        assert row[-1] in EOS or len(row) == 8
    assert batch.response_start_idx.tolist() == [7] * 12
    assert batch.input_ids.shape[1] == 7 + max(lengths)


def test_a_row_is_drawn_by_its_key_alone(engine: FakeEngine, tmp_path: Path):
    student = model()
    rollouts = source(engine, student, tmp_path / "sync", concurrency=2)
    rollouts.prepare(student, 0)
    whole = completions(rollouts.sample(request(), FREE))
    assert completions(rollouts.sample(request(PROMPTS[2:3], [303]), FREE)) == [whole[2]]
    two = completions(rollouts.sample(request(), SamplingConfig(max_new_tokens=8, n_samples_per_prompt=2)))
    assert two[::2] == whole
    assert two[1::2] != whole
    assert completions(rollouts.sample(request(seeds=[1, 2, 3, 4]), FREE)) != whole
    keyless = request()
    keyless = type(keyless)(prompt_ids=keyless.prompt_ids, prompt_attention_mask=keyless.prompt_attention_mask)
    state = torch.get_rng_state()
    first = completions(rollouts.sample(keyless, FREE))
    assert completions(rollouts.sample(keyless, FREE)) != first
    torch.set_rng_state(state)
    assert completions(rollouts.sample(keyless, FREE)) == first


def test_a_request_leaves_nothing_for_the_server_to_fill_in(engine: FakeEngine, tmp_path: Path):
    student = model()
    rollouts = source(engine, student, tmp_path / "sync")
    rollouts.prepare(student, 0)
    sampling = SamplingConfig(max_new_tokens=5, temperature=0.7, top_p=0.9, top_k=6, min_p=0.01)
    rollouts.sample(request([[5, 6]]), sampling)
    asked = next(payload for payload in engine.asked if "seed" in payload)
    wanted = {
        "prompt": [[5, 6]], "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 6, "min_p": 0.01, "n": 1,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "stop": [],
        "stop_token_ids": list(EOS), "ignore_eos": True, "add_special_tokens": False, "logit_bias": None,
        "return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 0, "skip_special_tokens": False,
    }  # fmt: skip
    assert {name: asked.get(name) for name in wanted} == wanted
    assert 0 <= asked["seed"] < 2**63


def tempered(logits: torch.Tensor) -> torch.Tensor:
    kept = logits / 0.7
    return kept.masked_fill(kept < kept.topk(5, dim=-1).values[:, -1:], -torch.inf)


def test_with_a_temperature_the_servers_processed_logprobs_are_taken(tmp_path: Path, caplog: Any):
    student, engine = model(), FakeEngine(model(9), processed=True)
    rollouts = source(engine, student, tmp_path / "sync")
    rollouts.prepare(student, 0)
    batch = rollouts.sample(request(), SamplingConfig(max_new_tokens=8, temperature=0.7, top_k=5))
    assert batch.sampler_logprobs is not None
    wanted = own_logprobs(student, batch, tempered)
    torch.testing.assert_close(batch.sampler_logprobs.double(), wanted, rtol=0, atol=1e-5)
    greedy = rollouts.sample(request(), SamplingConfig(max_new_tokens=8, temperature=0.0))
    assert greedy.sampler_logprobs is not None
    torch.testing.assert_close(greedy.sampler_logprobs.double(), own_logprobs(student, greedy), rtol=0, atol=1e-5)
    assert not caplog.records


@pytest.mark.parametrize("change", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_raw_logprobs_of_another_distribution_are_unknown_and_said_to_be(
    engine: FakeEngine, tmp_path: Path, caplog: Any, change: dict[str, Any]
):
    student = model()
    rollouts = source(engine, student, tmp_path / "sync")
    rollouts.prepare(student, 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            batch = rollouts.sample(request(), SamplingConfig(max_new_tokens=8, **change))
    assert batch.sampler_logprobs is not None
    chosen = torch.arange(batch.input_ids.shape[1]) >= 7
    assert batch.sampler_logprobs[(batch.attention_mask != 0) & chosen].isnan().all()
    assert (batch.sampler_logprobs[:, :7] == 0).all()
    assert [record.message.count("--logprobs-mode processed_logprobs") for record in caplog.records] == [1]
    plain = rollouts.sample(request(), FREE)
    assert plain.sampler_logprobs is not None
    assert plain.sampler_logprobs.isfinite().all()


def test_ids_without_a_token_are_excluded(tmp_path: Path):
    student, engine = model(), FakeEngine(model(9), processed=True)
    rollouts = source(engine, student, tmp_path / "sync", vocab_size=18)
    rollouts.prepare(student, 0)
    many = SamplingConfig(max_new_tokens=8, n_samples_per_prompt=8)
    batch = rollouts.sample(request(), many)
    assert max(i for row in completions(batch) for i in row) < 18

    def cut(logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(torch.arange(23) >= 18, -torch.inf)

    assert batch.sampler_logprobs is not None
    torch.testing.assert_close(batch.sampler_logprobs.double(), own_logprobs(student, batch, cut), rtol=0, atol=1e-5)
    raw = source(FakeEngine(model(9)), student, tmp_path / "raw", vocab_size=18)
    raw.prepare(student, 0)
    found = raw.sample(request(), FREE).sampler_logprobs
    assert found is not None
    assert found.isnan().any()


def test_an_empty_request_gives_an_empty_batch_and_a_mixed_one_keeps_its_order(engine: FakeEngine, tmp_path: Path):
    student = model()
    rollouts = source(engine, student, tmp_path / "sync")
    rollouts.prepare(student, 3)
    empty = rollouts.sample(request([]), FREE)
    assert empty.input_ids.shape == (0, 0)
    mixed = MixedRollouts(
        rollouts,
        is_sampled=torch.tensor([True, False, True, False]),
        completions=[None, [9, 1], None, [3]],
        pad_token_id=0,
    )
    batch = mixed.sample(request(), FREE)
    alone = completions(rollouts.sample(request(), FREE))
    assert completions(batch) == [alone[0], [9, 1], alone[2], [3]]
    assert batch.policy_version is not None
    assert batch.policy_version.tolist() == [3, -1, 3, -1]


def test_weights_are_handed_over_when_they_would_be_too_old(engine: FakeEngine, tmp_path: Path):
    student = model()
    rollouts = source(engine, student, tmp_path / "sync", max_staleness=2)
    versions = []
    for step in range(6):
        rollouts.prepare(student, step)
        batch = rollouts.sample(request(), FREE)
        assert batch.policy_version is not None
        versions.append(batch.policy_version[0].item())
        moved(student, 0.01, step)
    assert versions == [0, 0, 0, 3, 3, 3]
    assert [path.name for path in engine.loaded] == ["policy-00000000", "policy-00000003"]
    rollouts.prepare(student, 1)  # a run that began anew
    assert engine.loaded[-1].name == "policy-00000001"
    assert [path.name for path in (tmp_path / "sync").iterdir()] == ["policy-00000001"]
    rollouts.close()
    assert not (tmp_path / "sync").exists()


def test_the_same_version_with_other_weights_is_handed_over_too(engine: FakeEngine, tmp_path: Path):
    student = model()
    rollouts = source(engine, student, tmp_path / "sync")
    rollouts.prepare(student, 0)
    rollouts.prepare(student, 0)
    assert len(engine.loaded) == 1
    moved(student, 0.01)
    rollouts.prepare(student, 0)
    assert len(engine.loaded) == 2


def test_the_server_may_see_the_folder_under_another_path(engine: FakeEngine, tmp_path: Path):
    (tmp_path / "there").symlink_to(tmp_path / "here")
    student = model()
    rollouts = source(engine, student, tmp_path / "here", server_folder=str(tmp_path / "there"))
    rollouts.prepare(student, 0)
    assert engine.loaded == [tmp_path / "there" / "policy-00000000"]
    wrong = source(FakeEngine(model(9)), student, tmp_path / "here", server_folder=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"could not load .*nowhere.*name that as server_folder.*Worker failed"):
        wrong.prepare(student, 0)


def test_what_cannot_work_is_refused_with_what_to_do(engine: FakeEngine, tmp_path: Path):
    student = model()
    with pytest.raises(ConfigError, match="prepare"):
        source(engine, student, tmp_path).sample(request(), FREE)
    closed = FakeEngine(model(9), dev=False)
    with pytest.raises(ConfigError, match=r"has no /collective_rpc.*VLLM_SERVER_DEV_MODE=1"):
        source(closed, student, tmp_path).prepare(student, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to sync_folder"):
        source(engine, student, tmp_path / "file").prepare(student, 0)
    rollouts = source(engine, student, tmp_path / "sync")
    rollouts.prepare(student, 0)
    with pytest.raises(DataError, match=r"prompt 3 has 7 tokens, and 122 more may be drawn.*max_model_len is 128"):
        rollouts.sample(request(), SamplingConfig(max_new_tokens=122))
    with pytest.raises(AlignmentError, match="no attended prompt token"):
        rollouts.sample(request([[], [3]]), FREE)
    with pytest.raises(ConfigError, match="need a model with a head"):
        source(engine, student.model, tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"canary_tolerance": 0.0}, "canary_tolerance"),
        ({"concurrency": 0}, "concurrency"),
        ({"weights_dtype": "int8"}, "weights_dtype"),
        ({"sync_folder": ""}, "sync_folder"),
        ({"server_folder": "org/model"}, "server_folder must be an absolute path"),
        ({"timeout": -1.0}, "timeout"),
        ({"url": "http://server.example"}, "https"),
    ],
)
def test_settings_are_checked_when_the_run_is_built(change: dict[str, Any], says: str):
    settings = {"url": "http://localhost:8000", "sync_folder": "weights"} | change
    with pytest.raises(ConfigError, match=says):
        VLLMRolloutsConfig(**settings).build(model(), eos_token_ids=EOS, pad_token_id=0)


def test_a_server_that_is_away_is_waited_for_and_then_given_up(engine: FakeEngine, tmp_path: Path):
    student = model()
    rollouts = source(engine, student, tmp_path / "sync")
    rollouts.prepare(student, 0)
    before = completions(rollouts.sample(request(), FREE))
    fails = iter([True, False] * 50)
    engine.fault = lambda engine, asked: body_response(b"{}", 503) if next(fails) else None
    assert completions(rollouts.sample(request(), FREE)) == before

    def refused(engine: FakeEngine, asked: httpx.Request) -> None:
        raise httpx.ConnectError("[Errno 111] Connection refused")

    engine.fault = refused
    with pytest.raises(ServerUnreachable, match=r"the rollout server .* is unreachable since"):
        rollouts.sample(request(), FREE)


# ------------------------------------------------------------------ stale rollouts


def restarting(times: int) -> Any:
    """In the middle of each of so many draws, the server comes back as it was started."""
    left = [times]

    def fault(engine: FakeEngine, asked: httpx.Request) -> None:
        if b'"seed"' in asked.content and left[0] > 0 and b"[2]" in asked.content:
            left[0] -= 1
            engine.restart()

    return fault


@pytest.mark.parametrize("named", [True, False], ids=["marked", "canary alone"])
def test_what_a_restarted_server_drew_is_dropped_counted_and_drawn_anew(
    engine: FakeEngine, tmp_path: Path, named: bool, caplog: Any
):
    student = model()
    rollouts = source(engine, student, tmp_path / "sync", concurrency=1)
    restart = restarting(1)

    def fault(engine: FakeEngine, asked: httpx.Request) -> httpx.Response | None:
        if not named and "weight" in asked.url.path:
            return body_response(b"{}", 404)
        return restart(engine, asked)

    engine.fault = fault
    rollouts.prepare(student, 4)
    rollouts.metrics()
    with caplog.at_level(logging.WARNING):
        batch = rollouts.sample(request(), FREE)
    assert "4 rollouts are dropped and drawn anew" in caplog.text
    assert batch.sampler_logprobs is not None
    torch.testing.assert_close(batch.sampler_logprobs.double(), own_logprobs(student, batch), rtol=0, atol=1e-5)
    found = rollouts.metrics()
    assert found["rollouts/stale_rows"] == (4.0, 1.0)
    assert found["rollouts/sync_seconds"][1] == 1.0
    rollouts.sample(request(), FREE)
    assert rollouts.metrics()["rollouts/stale_rows"] == (0.0, 1.0)


def test_somebody_elses_weights_of_little_difference_are_found_by_their_name(engine: FakeEngine, tmp_path: Path):
    student = model()
    rollouts = source(engine, student, tmp_path / "sync")
    rollouts.prepare(student, 0)
    engine.mark = "theirs"
    rollouts.sample(request(), FREE)
    assert rollouts.metrics()["rollouts/stale_rows"] == (4.0, 1.0)


def test_a_server_that_lost_older_weights_gets_those_of_now_and_says_so(engine: FakeEngine, tmp_path: Path):
    student = model()
    rollouts = source(engine, student, tmp_path / "sync", max_staleness=5, concurrency=1)
    rollouts.prepare(student, 2)
    moved(student, 0.05)
    rollouts.prepare(student, 3)  # not handed over yet
    engine.fault = restarting(1)
    batch = rollouts.sample(request(), FREE)
    assert batch.policy_version is not None
    assert batch.policy_version.tolist() == [3] * 4
    assert batch.sampler_logprobs is not None
    torch.testing.assert_close(batch.sampler_logprobs.double(), own_logprobs(student, batch), rtol=0, atol=1e-5)


def test_a_server_that_keeps_losing_its_weights_is_an_error(engine: FakeEngine, tmp_path: Path):
    student = model()
    rollouts = source(engine, student, tmp_path / "sync", concurrency=1)
    rollouts.prepare(student, 0)
    engine.fault = restarting(9)
    with pytest.raises(ServerResponseError, match="during each of 3 draws"):
        rollouts.sample(request(), FREE)
