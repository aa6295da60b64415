# SPDX-License-Identifier: Apache-2.0
"""Sampling with `model.generate`: the row is the unit, and nothing but the request decides it."""

import inspect
import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

import tiny
from cohobate.align import ResponseTokenBatch, RolloutRequest, SamplingConfig
from cohobate.errors import AlignmentError, ConfigError, NonFiniteError
from cohobate.rollouts import LocalRollouts

PROMPTS = [[5, 6, 7], [8], [9, 1, 3, 4, 10, 11], [12, 13]]  # 1 is end-of-sequence, here inside a prompt


def request(prompts: list[list[int]] = PROMPTS, *, width: int | None = None, seeds: Any = "rows") -> RolloutRequest:
    width = width or max(map(len, prompts))
    ids = torch.full((len(prompts), width), tiny.PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    if seeds == "rows":
        seeds = torch.tensor([1000 + sum(prompt) for prompt in prompts])
    return RolloutRequest(prompt_ids=ids, prompt_attention_mask=mask, seeds=seeds)


def source(model: nn.Module | None = None, **fields: Any) -> LocalRollouts:
    fields = {"eos_token_ids": [tiny.EOS], "pad_token_id": tiny.PAD} | fields
    return LocalRollouts(tiny.llama(1) if model is None else model, **fields)


def completions(batch: Any) -> list[list[int]]:
    """Each row's attended tokens from its completion start on."""
    return [
        ids[start:][mask[start:].bool()].tolist()
        for ids, mask, start in zip(batch.input_ids, batch.attention_mask, batch.response_start_idx, strict=True)
    ]


def greedy_alone(model: nn.Module, prompt: list[int], steps: int, eos: tuple[int, ...] = (tiny.EOS,)) -> list[int]:
    """Argmax after argmax on the unpadded row, without a cache."""
    row = list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            row.append(int(model(input_ids=torch.tensor([row])).logits[0, -1].argmax()))
        if row[-1] in eos:
            break
    return row[len(prompt) :]


def test_greedy_rows_equal_the_argmax_of_each_row_alone():
    model = tiny.llama(1)
    endless = [greedy_alone(model, prompt, 12, eos=()) for prompt in PROMPTS]
    eos = (endless[0][4], endless[1][2])
    batch = source(model, eos_token_ids=eos).sample(request(), SamplingConfig(max_new_tokens=12, temperature=0.0))
    assert completions(batch) == [greedy_alone(model, prompt, 12, eos) for prompt in PROMPTS]
    assert len({len(c) for c in completions(batch)}) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_neighbours_or_its_padding(temperature: float):
    rollouts, sampling = source(), SamplingConfig(max_new_tokens=10, temperature=temperature)
    together = completions(rollouts.sample(request(), sampling))
    alone = [completions(rollouts.sample(request([prompt]), sampling))[0] for prompt in PROMPTS]
    wider = completions(rollouts.sample(request(width=15), sampling))
    reverse = completions(rollouts.sample(request(PROMPTS[::-1]), sampling))[::-1]
    assert together == alone == wider == reverse


@pytest.mark.parametrize("rows_per_batch", [1, 3])
def test_a_bound_on_rows_changes_no_row(rows_per_batch: int):
    sampling = SamplingConfig(max_new_tokens=10, n_samples_per_prompt=2)
    whole = source().sample(request(), sampling)
    parts = source(rows_per_batch=rows_per_batch).sample(request(), sampling)
    assert completions(parts) == completions(whole)
    torch.testing.assert_close(parts.sampler_logprobs, whole.sampler_logprobs, rtol=1e-4, atol=1e-5)


def test_another_seed_is_another_completion_and_the_same_seed_the_same():
    sampling = SamplingConfig(max_new_tokens=10)
    first = completions(source().sample(request(), sampling))
    assert completions(source().sample(request(), sampling)) == first
    other = completions(source().sample(request(seeds=torch.arange(4)), sampling))
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_with_seeds_the_global_generator_is_neither_read_nor_moved():
    sampling = SamplingConfig(max_new_tokens=6)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        before = torch.get_rng_state()
        first = completions(source().sample(request(), sampling))
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(1)
        assert completions(source().sample(request(), sampling)) == first


def test_without_seeds_the_global_generator_decides():
    sampling, drawn = SamplingConfig(max_new_tokens=6), []
    with torch.random.fork_rng():
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            drawn.append(completions(source().sample(request(seeds=None), sampling)))
    assert drawn[0] == drawn[1] != drawn[2]


def test_samples_of_a_prompt_stand_together_and_differ():
    sampling = SamplingConfig(max_new_tokens=10, n_samples_per_prompt=3)
    batch = source().sample(request(), sampling)
    prompts = [
        ids[: batch.response_start_idx[0]][mask[: batch.response_start_idx[0]].bool()].tolist()
        for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]
    assert prompts == [prompt for prompt in PROMPTS for _ in range(3)]
    rows = completions(batch)
    assert all(len({tuple(r) for r in rows[i : i + 3]}) == 3 for i in range(0, 12, 3))
    first_only = completions(source().sample(request(), SamplingConfig(max_new_tokens=10)))
    assert rows[::3] == first_only  # sample j does not depend on how many there are


def scripted(model: Any, script: list[list[int]]) -> Any:
    """`model`, whose next tokens follow `script[row]` whatever it is given: its head reads the step from the cache."""
    state = {"step": 0}
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        output.logits = torch.full_like(output.logits, -5.0)
        for row, tokens in enumerate(script):
            output.logits[row, -1, tokens[min(state["step"], len(tokens) - 1)]] = 5.0
        state["step"] += 1
        return output

    forward.__signature__ = inspect.signature(original)
    model.forward = forward
    return model


def test_pad_that_equals_eos_keeps_the_eos_and_the_prompts_own():
    model = scripted(tiny.llama(1), [[7, 9, 4, 4], [4, 4, 4, 4]])
    rollouts = source(model, eos_token_ids=[9], pad_token_id=9)
    prompts = request([[9, 9, 5], [5]])
    batch = rollouts.sample(prompts, SamplingConfig(max_new_tokens=4, temperature=0.0))
    assert batch.input_ids.tolist() == [[9, 9, 5, 7, 9, 9, 9], [0, 0, 5, 4, 4, 4, 4]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]]
    assert batch.response_start_idx.tolist() == [3, 3]
    assert ResponseTokenBatch.from_rollout(batch).response_mask.sum(1).tolist() == [2, 4]


def test_tokens_after_the_first_eos_are_padding_even_when_decoding_goes_on():
    model = scripted(tiny.llama(1), [[4, 1, 4, 4], [4, 4, 4, 4]])
    batch = source(model).sample(request([[5], [5]]), SamplingConfig(max_new_tokens=4, temperature=0.0))
    assert batch.input_ids.tolist() == [[5, 4, 1, 0, 0], [5, 4, 4, 4, 4]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert (batch.sampler_logprobs[0, 3:] == 0).all()


def test_any_of_several_stop_tokens_ends_a_row_and_the_width_is_the_longest_row():
    model = scripted(tiny.llama(1), [[4, 6, 4, 4, 4], [4, 4, 2, 4, 4]])
    batch = source(model, eos_token_ids=[2, 6]).sample(
        request([[5], [5]]), SamplingConfig(max_new_tokens=5, temperature=0.0)
    )
    assert completions(batch) == [[4, 6], [4, 4, 2]]
    assert batch.input_ids.shape == (2, 1 + 3)


def test_without_stop_tokens_every_row_runs_to_the_end():
    model = scripted(tiny.llama(1), [[1, 1, 1]])
    batch = source(model, eos_token_ids=[]).sample(request([[5]]), SamplingConfig(max_new_tokens=3, temperature=0.0))
    assert completions(batch) == [[1, 1, 1]]


def logprobs_alone(model: nn.Module, batch: Any, row: int) -> torch.Tensor:
    """Raw logits `[R, V]` before each completion token, from the unpadded row without a cache."""
    ids = batch.input_ids[row][batch.attention_mask[row].bool()]
    prompt = int(batch.attention_mask[row, : batch.response_start_idx[row]].sum())
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0, prompt - 1 : -1].double()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_new_tokens=8),
        SamplingConfig(max_new_tokens=8, temperature=0.0),
        SamplingConfig(max_new_tokens=8, temperature=0.6),
        SamplingConfig(max_new_tokens=8, temperature=1.7, top_k=4),
        SamplingConfig(max_new_tokens=8, temperature=1.3, top_p=0.7),
        SamplingConfig(max_new_tokens=8, temperature=1.3, min_p=0.2),
    ],
)
def test_sampler_logprobs_are_of_the_distribution_drawn_from(sampling: SamplingConfig):
    model = tiny.llama(1)
    batch = source(model).sample(request(), sampling)
    for row, tokens in enumerate(completions(batch)):
        start = int(batch.response_start_idx[row])
        noted = batch.sampler_logprobs[row, start : start + len(tokens)].tolist()
        for logits, token, logprob in zip(logprobs_alone(model, batch, row), tokens, noted, strict=True):
            assert logprob == pytest.approx(math.log(truncated(logits, sampling)[token]), abs=1e-3)
        assert (batch.sampler_logprobs[row, :start] == 0).all()


def truncated(logits: torch.Tensor, sampling: SamplingConfig) -> list[float]:
    """The sampling distribution from its definition, in plain Python: temperature, then one truncation."""
    temperature = sampling.temperature or 1.0
    weights = [math.exp((x - max(logits.tolist())) / temperature) for x in logits.tolist()]
    p = [w / sum(weights) for w in weights]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = set(order)
    if sampling.top_k:
        kept = set(order[: sampling.top_k])
    if sampling.top_p < 1:  # the smallest set that reaches top_p
        kept, mass = set(), 0.0
        for i in order:
            if mass >= sampling.top_p:
                break
            kept.add(i)
            mass += p[i]
    if sampling.min_p:
        kept = {i for i in order if p[i] >= sampling.min_p * p[order[0]]}
    mass = sum(p[i] for i in kept)
    return [p[i] / mass if i in kept else 0.0 for i in range(len(p))]


def test_the_first_token_is_drawn_with_the_models_probabilities():
    model, n = tiny.llama(1), 4000
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].double()
    p = (logits / 1.5).softmax(-1)
    batch = source(model).sample(
        request([PROMPTS[0]]), SamplingConfig(max_new_tokens=1, temperature=1.5, n_samples_per_prompt=n)
    )
    observed = torch.bincount(batch.input_ids[:, -1], minlength=23).double() / n
    assert ((observed - p).abs() < 4 * (p * (1 - p) / n).sqrt() + 1e-3).all()


def test_padded_ids_of_a_wide_head_are_never_drawn():
    model = tiny.llama(1)
    sampling = SamplingConfig(max_new_tokens=20, temperature=3.0, n_samples_per_prompt=8)
    free = source(model, eos_token_ids=[]).sample(request(), sampling)
    cut = source(model, eos_token_ids=[], vocab_size=14).sample(request(), sampling)
    assert free.input_ids.max() >= 14
    assert cut.input_ids.max() < 14


@pytest.fixture
def no_warnings(caplog: pytest.LogCaptureFixture):
    """transformers warns through its own loggers, which do not reach the root."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_checkpoints_generation_settings_neither_act_nor_warn_and_are_kept(temperature: float):
    sampling = SamplingConfig(max_new_tokens=10, temperature=temperature)
    expected = completions(source(tiny.llama(1)).sample(request(), sampling))
    model = tiny.llama(1)
    own = GenerationConfig(
        do_sample=True,
        temperature=0.1,
        top_k=2,
        top_p=0.3,
        repetition_penalty=5.0,
        no_repeat_ngram_size=1,
        bad_words_ids=[[3]],
        suppress_tokens=[4],
        max_length=7,
        min_new_tokens=9,
        eos_token_id=[5, 6, 7, 8],
        forced_eos_token_id=5,
        num_beams=1,
        pad_token_id=3,
    )
    model.generation_config = own
    assert completions(source(model).sample(request(), sampling)) == expected
    assert model.generation_config is own
    assert own.max_length == 7


def dropout_model() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {"vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(**shape, resid_pdrop=0.5, initializer_range=0.5)
        return GPT2LMHeadModel(config).train()


@pytest.mark.usefixtures("no_warnings")
def test_a_model_in_training_samples_without_dropout_and_stays_in_its_mode():
    model = dropout_model()
    model.transformer.h[0].eval()
    model.activation_checkpointing_enable()
    model.config.use_cache = False
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    flags = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    batch = source(model).sample(request(), SamplingConfig(max_new_tokens=6, temperature=0.0))
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.use_cache is False
    assert all((p.grad == 1).all() for p in model.parameters())
    assert not batch.sampler_logprobs.requires_grad
    assert completions(batch) == [greedy_alone(model.eval(), prompt, 6) for prompt in PROMPTS]


def test_a_failed_generation_gives_mode_and_settings_back(monkeypatch: pytest.MonkeyPatch):
    model = tiny.llama(1).train()
    own = model.generation_config

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(model.model, "forward", broken)
    with pytest.raises(RuntimeError, match="on purpose"):
        source(model).sample(request(), SamplingConfig(max_new_tokens=3))
    assert model.generation_config is own
    assert all(module.training for module in model.modules())


@pytest.mark.usefixtures("no_warnings")
def test_an_adapter_samples_as_the_merged_model_does():
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    wrapped = get_peft_model(tiny.llama(1), config)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.5
    own = wrapped.base_model.model.generation_config
    batch = source(wrapped).sample(request(), SamplingConfig(max_new_tokens=8, temperature=0.0))
    assert wrapped.base_model.model.generation_config is own
    plain = completions(source(tiny.llama(1)).sample(request(), SamplingConfig(max_new_tokens=8, temperature=0.0)))
    merged = wrapped.merge_and_unload().eval()
    assert completions(batch) == [greedy_alone(merged, prompt, 8) for prompt in PROMPTS]
    assert completions(batch) != plain


def test_a_ddp_wrapped_model_samples_as_the_model_inside():
    sampling = SamplingConfig(max_new_tokens=5)
    expected = completions(source().sample(request(), sampling))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(tiny.llama(1))
        assert completions(source(wrapped).sample(request(), sampling)) == expected
    finally:
        dist.destroy_process_group()


def test_a_request_without_rows_gives_a_batch_without_rows():
    empty = RolloutRequest(
        prompt_ids=torch.zeros(0, 4, dtype=torch.int64),
        prompt_attention_mask=torch.zeros(0, 4, dtype=torch.int64),
        seeds=torch.zeros(0, dtype=torch.int64),
    )
    batch = source().sample(empty, SamplingConfig(max_new_tokens=3))
    assert batch.input_ids.shape == batch.attention_mask.shape == batch.sampler_logprobs.shape == (0, 4)


def test_damaged_weights_are_named_by_row():
    model = tiny.llama(1)
    model.model.embed_tokens.weight.data[8] = math.nan  # row 1's prompt alone reads it
    model.lm_head.weight = nn.Parameter(tiny.llama(1).lm_head.weight.detach().clone())
    with pytest.raises(NonFiniteError, match=r"rows \[1\] of a batch of 4"):
        source(model).sample(request(), SamplingConfig(max_new_tokens=2, temperature=0.0))


@pytest.mark.parametrize(
    ("prompts", "mask", "message"),
    [
        ([[1, 2]], [[1, 0]], "row 0: attended columns 0 to 0 of 2.*on the left"),
        ([[1, 2], [3, 4]], [[1, 1], [0, 0]], "row 1: no attended prompt token"),
        ([[1, 2, 3]], [[1, 0, 1]], "row 0"),
    ],
)
def test_prompts_that_cannot_be_continued_are_named(prompts: Any, mask: Any, message: str):
    bad = RolloutRequest(prompt_ids=torch.tensor(prompts), prompt_attention_mask=torch.tensor(mask))
    with pytest.raises(AlignmentError, match=message):
        source().sample(bad, SamplingConfig())


def test_a_model_that_cannot_generate_is_refused():
    with pytest.raises(ConfigError, match="generate"):
        source(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="rows_per_batch"):
        source(rows_per_batch=0)


@pytest.mark.parametrize("bias", [False, True])
def test_a_wide_head_that_multiplies_in_blocks_draws_the_same_and_is_left_as_it_was(bias: bool, monkeypatch: Any):
    model = tiny.llama(3, vocab_size=2500, tie=False)
    if bias:
        model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 2500))
    sampling = SamplingConfig(max_new_tokens=4)
    widths: list[int] = []
    linear = nn.functional.linear

    def seen(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        widths.append(weight.shape[0])
        return linear(hidden, weight, *rest)

    monkeypatch.setattr(nn.functional, "linear", seen)
    found = source(model).sample(request(), sampling)
    assert {1024, 2500 - 2048} <= set(widths)
    assert "forward" not in vars(model.lm_head)
    monkeypatch.setattr("cohobate.rollouts.local._is_plain", lambda weight: False)
    widths.clear()
    wanted = source(model).sample(request(), sampling)
    assert 1024 not in widths
    assert torch.equal(found.input_ids, wanted.input_ids)
    torch.testing.assert_close(found.sampler_logprobs, wanted.sampler_logprobs)


def test_an_error_while_sampling_leaves_the_head_as_it_was():
    model = tiny.llama(3, vocab_size=2500)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        source(model).sample(request(), SamplingConfig(max_new_tokens=2))
    assert "forward" not in vars(model.lm_head)
