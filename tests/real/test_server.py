# SPDX-License-Identifier: Apache-2.0
"""A teacher on a real vLLM says what the same weights say here (`make test-server`).

vLLM runs in a process and an environment of its own; `COHOBATE_VLLM_PYTHON` names the interpreter of that. The tests
start it, on a tiny model and on SmolLM2, and end it again.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tiny_bpe
from cohobate.align import AlignedBatch, AlignedSide
from cohobate.errors import ConfigError, DataError, ServerResponseError
from cohobate.functional.scores import SampledScores, TopKScores
from cohobate.teachers import Patience, ServerTeacher, check_server
from cohobate.teachers.load import load_model, load_tokenizer
from cohobate.teachers.smollm2 import SMOLLM2_NAME, smollm2_folder
from vllm_server import STARTS_WITHIN, free_port, vllm

pytestmark = pytest.mark.server

TOKEN = "COHOBATE_TEST_TOKEN"
HEAD = 32  # rows of the tiny model's head; its tokenizer has 27 ids


def tiny_model(seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=HEAD,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,  # the least that vLLM's attention on a CPU takes
            max_position_embeddings=256,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            initializer_range=0.2,
        )
        return LlamaForCausalLM(config).eval()


def saved(folder: Path, seed: int) -> Path:
    tiny_model(seed).save_pretrained(folder)
    tiny_bpe.student_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """With a token, and a chunk of prefill that is shorter than most rows."""
    folder = tmp_path_factory.mktemp("vllm")
    flags = ("--max-model-len", "200", "--max-logprobs", "32", "--max-num-batched-tokens", "32")
    with vllm(saved(folder / "model", 0), folder / "log.txt", *flags, VLLM_API_KEY="a-token") as url:
        yield url


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "a-token")


@pytest.fixture
def teacher_at() -> Iterator[Callable[..., ServerTeacher]]:
    """Makes teachers, and closes them."""
    with contextlib.ExitStack() as opened:

        def make(url: str, **options: Any) -> ServerTeacher:
            teacher = ServerTeacher(url, **{"vocab_size": HEAD} | options)
            opened.callback(teacher.close)
            return teacher

        yield make


def batch_of(rows: list[tuple[list[int], int]]) -> AlignedBatch:
    """Rows of `(ids, tokens of the prompt)`, left-padded, every completion token a prediction."""
    width = max(len(ids) for ids, _ in rows)
    ids, mask, index, row = torch.zeros((len(rows), width), dtype=torch.int64), [], [], []
    for r, (own, prompt) in enumerate(rows):
        start = width - len(own)
        ids[r, start:] = torch.tensor(own)
        mask.append([int(c >= start) for c in range(width)])
        index += [r * width + start + t - 1 for t in range(prompt, len(own))]
        row += [r] * (len(own) - prompt)
    attention = torch.tensor(mask)
    inputs = {"input_ids": ids, "attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0)}
    side = AlignedSide(model_inputs=inputs, pair_index=torch.tensor(index))
    return AlignedBatch(
        student=side,
        teacher=side,
        target_ids=torch.tensor([t for own, prompt in rows for t in own[prompt:]]),
        weights=torch.ones(len(index)),
        row=torch.tensor(row),
        is_sampled=torch.ones(len(rows), dtype=torch.bool),
        sample_ids=tuple(f"row-{r}" for r in range(len(rows))),
    )


def random_batch(num_rows: int = 12, seed: int = 0) -> AlignedBatch:
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for r in range(num_rows):
        length = int(torch.randint(3, 150, (1,), generator=draw))
        prompt = length if r == 3 else int(torch.randint(1, length, (1,), generator=draw))  # one is empty
        rows.append((torch.randint(2, 27, (length,), generator=draw).tolist(), prompt))
    return batch_of(rows)


def local_logprobs(batch: AlignedBatch, model: Any) -> Tensor:
    """`[N, V]`, row by row, without any padding."""
    width, found = batch.teacher.model_inputs["input_ids"].shape[1], []
    for r in range(batch.num_rows):
        mask = batch.teacher.model_inputs["attention_mask"][r].bool()
        columns = batch.teacher.pair_index[batch.row == r] - r * width
        with torch.no_grad():
            logits = model(batch.teacher.model_inputs["input_ids"][r][mask][None]).logits[0]
        found.append(logits[columns - int((~mask).sum())].double().log_softmax(-1))
    return torch.cat(found)


def test_log_probabilities_agree_with_the_same_weights_here(tiny_server: str, token: None, teacher_at: Any):
    batch = random_batch()
    wanted = local_logprobs(batch, tiny_model(0))
    teacher = teacher_at(tiny_server, top_k=8, token_env=TOKEN, rows_per_request=3)
    scores = teacher.score(batch)
    assert isinstance(scores, TopKScores)
    assert torch.equal(scores.ids, wanted.topk(8).indices.sort(-1).values)
    torch.testing.assert_close(scores.logprobs().double(), wanted.gather(1, scores.ids), rtol=0, atol=1e-3)
    realized = wanted.gather(1, batch.target_ids[:, None])[:, 0]
    torch.testing.assert_close(scores.realized_logit.double(), realized, rtol=0, atol=1e-3)
    alone = teacher_at(tiny_server, top_k=0, token_env=TOKEN).score(batch)
    assert isinstance(alone, SampledScores)
    torch.testing.assert_close(alone.logprobs.double(), realized, rtol=0, atol=1e-3)
    again = teacher_at(tiny_server, top_k=8, token_env=TOKEN).score(batch)  # prefixes are cached now
    torch.testing.assert_close(again.logits, scores.logits, rtol=0, atol=1e-4)
    whole = teacher_at(tiny_server, top_k=HEAD, temperature=2.0, token_env=TOKEN).score(batch)
    torch.testing.assert_close(whole.logprobs().double(), (wanted / 2).log_softmax(-1), rtol=0, atol=1e-3)


def test_a_server_in_order_passes_every_check(tiny_server: str, token: None, teacher_at: Any):
    teacher = teacher_at(tiny_server, vocab_size=27, head_size=HEAD, top_k=5, token_env=TOKEN)
    found = check_server(teacher, tiny_bpe.student_tokenizer())
    assert all(check.passed for check in found), found
    assert "rows up to 200 tokens" in found[0].detail
    assert "ignores the temperature" in found[-1].detail
    cut = local_logprobs(random_batch(), tiny_model(0))[:, :27].log_softmax(-1)
    scores = teacher_at(tiny_server, vocab_size=27, head_size=HEAD, top_k=27, token_env=TOKEN).score(random_batch())
    torch.testing.assert_close(scores.logprobs().double(), cut.gather(1, scores.ids), rtol=0, atol=1e-3)


def test_refusals_of_the_server_say_what_to_do(tiny_server: str, token: None, teacher_at: Any):
    with pytest.raises(ConfigError, match=r"HTTP 401.*No token was sent"):
        teacher_at(tiny_server).connect()
    with pytest.raises(ConfigError, match="no model 'other', only 'teacher'"):
        teacher_at(tiny_server, model="other", token_env=TOKEN).connect()
    with pytest.raises(ConfigError, match="--max-logprobs 33 or more"):
        teacher_at(tiny_server, vocab_size=40, top_k=33, token_env=TOKEN, canary=[2, 3, 4]).connect()
    teacher = teacher_at(tiny_server, token_env=TOKEN)
    with pytest.raises(DataError, match=r"'row-1' has 200 tokens .* max_model_len is 200"):
        teacher.score(batch_of([([2] * 9, 4), ([3] * 200, 150)]))
    teacher.max_model_len = None  # as if the server did not say
    with pytest.raises(DataError, match="row 'row-1' has 210 tokens, and the teacher server takes no prompt as long"):
        teacher.score(batch_of([([2] * 9, 4), ([3] * 210, 150)]))


def test_a_restart_is_waited_for_and_other_weights_after_it_are_refused(tmp_path: Path, teacher_at: Any):
    port, batch = free_port(), random_batch()
    flags = ("--max-model-len", "200", "--max-logprobs", "32")
    patience = Patience(total=STARTS_WITHIN, first_pause=0.2, longest_pause=2)
    with vllm(saved(tmp_path / "first", 0), tmp_path / "first.txt", *flags, port=port) as url:
        teacher = teacher_at(url, top_k=4, patience=patience)
        before = teacher.score(batch)
    other = saved(tmp_path / "other", 1)
    stop = threading.Event()

    def restart() -> None:
        with vllm(other, tmp_path / "other.txt", *flags, port=port):
            stop.wait(60)

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        with pytest.raises(ServerResponseError, match="another model, other weights"):
            teacher.score(random_batch(seed=1))
        assert torch.equal(teacher.score(batch).logits, before.logits)  # answered before, so still known
    finally:
        stop.set()
        thread.join()


def test_smollm2_agrees_with_the_same_weights_here(tmp_path: Path, teacher_at: Any):
    tokenizer, model = load_tokenizer(SMOLLM2_NAME), load_model(SMOLLM2_NAME)
    texts = ["What is 17 + 5?", "Name a colour of the rainbow.", "Say 'naïve café' in one word — or two."]
    answers = ["17 + 5 = 22.", "Indigo, since you ask: it lies between blue and violet.", "👍"]
    rows = []
    for text, answer in zip(texts, answers, strict=True):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        ids = list(prompt["input_ids"] if hasattr(prompt, "keys") else prompt)
        rows.append(([*ids, *tokenizer.encode(answer, add_special_tokens=False), 2], len(ids)))
    batch = batch_of(rows)
    wanted = local_logprobs(batch, model)
    flags = ("--max-model-len", "512", "--max-logprobs", "64")
    with vllm(smollm2_folder(), tmp_path / "log.txt", *flags) as url:
        teacher = teacher_at(url, vocab_size=49152, top_k=64)
        found = check_server(teacher, tokenizer)
        assert all(check.passed for check in found), found
        scores = teacher.score(batch)
    assert isinstance(scores, TopKScores)
    torch.testing.assert_close(scores.logprobs().double(), wanted.gather(1, scores.ids), rtol=0, atol=1e-3)
    realized = wanted.gather(1, batch.target_ids[:, None])[:, 0]
    torch.testing.assert_close(scores.realized_logit.double(), realized, rtol=0, atol=1e-3)
    assert (scores.ids == wanted.topk(64).indices.sort(-1).values).double().mean() > 0.999
