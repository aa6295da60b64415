# SPDX-License-Identifier: Apache-2.0
"""Rollouts from a real vLLM that is given the student's weights while it runs (`make test-server`)."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tiny_bpe
from cohobate.align import SamplingConfig
from cohobate.errors import ConfigError, ServerResponseError
from cohobate.rollouts import VLLMRollouts, VLLMRolloutsConfig, vllm_sync
from cohobate.teachers.load import load_model, load_tokenizer
from cohobate.teachers.smollm2 import SMOLLM2_NAME, smollm2_folder
from cohobate.trainer import DistillationConfig, DistillationTrainer
from vllm_cases import completions, moved, own_logprobs, request
from vllm_server import vllm

pytestmark = pytest.mark.server

NUM_IDS, HEAD = 27, 32  # of the tiny tokenizer, and rows of the head
FLAGS = ("--max-model-len", "200")
DEV = {"VLLM_SERVER_DEV_MODE": "1"}
PROMPTS = [[2 + (7 * i + 3 * j) % 25 for j in range(n)] for i, n in enumerate((5, 12, 3, 150))]


def tiny_model(seed: int, *, tie: bool) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=HEAD,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=tie,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            initializer_range=0.2,
        )
        return LlamaForCausalLM(config).eval()


def saved(folder: Path, *, tie: bool) -> Path:
    tiny_model(0, tie=tie).save_pretrained(folder)
    tiny_bpe.student_tokenizer().save_pretrained(folder)
    return folder


@contextlib.contextmanager
def rollouts_at(url: str, model: Any, folder: Path, **options: Any) -> Iterator[VLLMRollouts]:
    vocab_size = options.pop("vocab_size", None)
    config = VLLMRolloutsConfig(url=url, sync_folder=str(folder), **options)
    made = config.build(model, eos_token_ids=[1, 9], pad_token_id=0, vocab_size=vocab_size, canary_prompts=PROMPTS)
    try:
        yield made
    finally:
        made.close()


def tempered(logits: torch.Tensor) -> torch.Tensor:
    kept = (logits / 0.7).masked_fill(torch.arange(HEAD) >= NUM_IDS, -torch.inf)
    return kept.masked_fill(kept < kept.topk(5, dim=-1).values[:, -1:], -torch.inf)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_each_version_of_a_student_is_what_the_server_samples_from(tmp_path: Path, tie: bool):
    """With processed log-probabilities; the served model is another one until it is given the student's weights."""
    flags = (*FLAGS, "--logprobs-mode", "processed_logprobs")
    student = tiny_model(1, tie=tie)
    with (
        vllm(saved(tmp_path / "model", tie=tie), tmp_path / "log.txt", *flags, **DEV) as url,
        rollouts_at(url, student, tmp_path / "sync", vocab_size=NUM_IDS) as rollouts,
    ):
        seen = []
        for step in range(4):
            rollouts.prepare(student, step)
            assert rollouts.metrics()["rollouts/canary_gap"][0] < 1e-4
            sampling = SamplingConfig(max_new_tokens=12, temperature=0.7, top_k=5, n_samples_per_prompt=4)
            batch = rollouts.sample(request(PROMPTS), sampling)
            assert batch.sampler_logprobs is not None
            wanted = own_logprobs(student, batch, tempered)
            torch.testing.assert_close(batch.sampler_logprobs.double(), wanted, rtol=0, atol=1e-3)
            again = completions(rollouts.sample(request(PROMPTS), sampling))
            assert again == completions(batch)  # a row is drawn by its key
            assert max(i for row in again for i in row) < NUM_IDS
            assert all(not set(row[:-1]) & {1, 9} and (row[-1] in (1, 9) or len(row) == 12) for row in again)
            seen.append(again)
            moved(student, 0.05, step)
        assert all(a != b for a, b in itertools.pairwise(seen))


def test_raw_log_probabilities_are_taken_where_they_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    student = tiny_model(1, tie=False)
    with vllm(saved(tmp_path / "model", tie=False), tmp_path / "log.txt", *FLAGS, **DEV) as url:
        with rollouts_at(url, student, tmp_path / "sync") as rollouts:
            rollouts.prepare(student, 0)
            batch = rollouts.sample(request(PROMPTS), SamplingConfig(max_new_tokens=12))
            assert batch.sampler_logprobs is not None
            wanted = own_logprobs(student, batch)
            torch.testing.assert_close(batch.sampler_logprobs.double(), wanted, rtol=0, atol=1e-3)
            cold = rollouts.sample(request(PROMPTS), SamplingConfig(max_new_tokens=12, temperature=0.7))
            assert cold.sampler_logprobs is not None
            assert cold.sampler_logprobs.isnan().any()
            # an update that reads the old folder again
            load = rollouts.engine.load_weights
            monkeypatch.setattr(rollouts.engine, "load_weights", lambda folder: load(str(tmp_path / "model")))
            moved(student, 0.02)
            with pytest.raises(ServerResponseError, match="differ by"):
                rollouts.prepare(student, 1)
            monkeypatch.undo()
            # one that leaves the prefix cache as it was
            rollouts.prepare(student, 2)
            post = rollouts.engine.client.post

            def kept(path: str, payload: Any, **options: Any) -> bytes:
                return b'{"success": true}' if path == "/reset_prefix_cache" else post(path, payload, **options)

            monkeypatch.setattr(rollouts.engine.client, "post", kept)
            moved(student, 0.1)
            with pytest.raises(ServerResponseError, match="prefixes that older weights have computed"):
                rollouts.prepare(student, 3)
            monkeypatch.undo()
            rollouts.prepare(student, 4)
        with (
            rollouts_at(url, student, tmp_path / "sync", server_folder="/nowhere") as astray,
            pytest.raises(ConfigError, match=r"could not load /nowhere/policy-00000000.*server_folder"),
        ):
            astray.prepare(student, 0)


def test_a_run_over_smollm2_hands_over_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tied model in bfloat16 on the server, in float32 here; with a head that is left out, the canary finds it."""
    questions = [
        "What is 17 + 5?",
        "Name a colour of the rainbow.",
        "Write one line about cats.",
        "Why is the sky blue?",
    ]
    args = DistillationConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=5e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        max_completion_length=32,
    )
    tokenizer, student = load_tokenizer(SMOLLM2_NAME), load_model(SMOLLM2_NAME, dtype="float32")
    teacher = load_model(SMOLLM2_NAME, dtype="float32")
    moved(teacher, 3e-3)
    flags = ("--max-model-len", "512")
    with vllm(smollm2_folder(), tmp_path / "log.txt", *flags, dtype="bfloat16", **DEV) as url:
        rollouts = VLLMRolloutsConfig(url=url, sync_folder=str(tmp_path / "sync"), weights_dtype="bfloat16")
        run = DistillationTrainer(
            model=student,
            teacher=teacher,
            args=args,
            train_dataset=[
                {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "No."}]}
                for q in questions
            ],
            processing_class=tokenizer,
            rollouts=rollouts,
        )
        run.train()
        logs = [entry for entry in run.state.log_history if "loss" in entry]
        for log in logs:
            print({k: round(v, 4) for k, v in log.items() if k.startswith(("rollouts/", "speed/", "loss"))})
            assert log["rollouts/canary_gap"] <= 0.05
            assert log["rollouts/policy_lag"] == log["rollouts/stale_rows"] == 0
        whole = vllm_sync.whole_state
        monkeypatch.setattr(
            vllm_sync,
            "whole_state",
            lambda *a, **k: {n: v for n, v in whole(*a, **k).items() if n != "lm_head.weight"},
        )
        moved(student, 5e-3)
        with pytest.raises(ServerResponseError, match="differ by"):
            run.rollouts.prepare(student, 5)
        monkeypatch.undo()
        run.rollouts.prepare(student, 5)
        assert run.rollouts.metrics()["rollouts/canary_gap"][0] <= 0.05
        run.rollouts.close()
