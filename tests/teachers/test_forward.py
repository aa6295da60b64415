# SPDX-License-Identifier: Apache-2.0
"""The pair path against the model's own full logits: value, and the gradient of every parameter."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from cohobate.errors import ConfigError
from cohobate.functional.fused_linear import fused_linear_divergence
from cohobate.teachers import HeadNotReadable, check_head, dense_pair_scores, logit_row_checksum, pair_scores
from cohobate.teachers import forward as forward_module

SIZE = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
WIDE = {"intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZE | WIDE),
    "llama, tied": ("LlamaConfig", SIZE | WIDE | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", SIZE | WIDE),
    "gemma2": ("Gemma2Config", SIZE | WIDE | {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "cohere": ("CohereConfig", SIZE | WIDE | {"logit_scale": 0.25}),
    "granite": ("GraniteConfig", SIZE | WIDE | {"logits_scaling": 3.0}),
    "phi, biased": ("PhiConfig", SIZE | {"intermediate_size": 48, "initializer_range": 0.2}),
    "gpt2": ("GPT2Config", {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}),
    "gpt_neox": ("GPTNeoXConfig", SIZE | {"intermediate_size": 48, "initializer_range": 0.2}),
}


def make(name: str, seed: int = 0) -> Any:
    kind, fields = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields)).eval()
        for parameter in model.parameters():  # biases and norms start at 0 and 1, where a mistake would not show
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def inputs(rows: int = 3, width: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 40, (rows, width), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # padded on the left
    mask[1, 5:] = 0  # and on the right
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": torch.where(mask == 1, mask.cumsum(1) - 1, 0),
    }


PAIRS = torch.tensor([2, 3, 6, 7, 11, 14, 14, 20])  # rows 0, 1, 2 of width 7; one position twice


def own_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**batch, use_cache=False).logits
    return logits.reshape(-1, logits.shape[-1])[PAIRS]


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits.log_softmax(-1) * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def assert_same_values_and_gradients(model: nn.Module, seen: Any, batch: dict[str, Tensor]) -> None:
    expected = own_logits(model, batch)
    torch.testing.assert_close(seen.logits(), expected, rtol=1e-4, atol=1e-5)
    ours, theirs = gradients(model, seen.logits()), gradients(model, expected)
    assert theirs.keys() == ours.keys()
    assert len(theirs) == sum(p.requires_grad for p in model.parameters())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", MODELS)
def test_pair_logits_and_every_gradient_equal_the_models_own(name: str):
    model = make(name)
    assert check_head(model)
    assert_same_values_and_gradients(model, pair_scores(model, inputs(), PAIRS), inputs())


@pytest.mark.parametrize("name", MODELS)
def test_dense_pair_logits_and_every_gradient_equal_the_models_own(name: str):
    model = make(name)
    assert_same_values_and_gradients(model, dense_pair_scores(model, inputs(), PAIRS), inputs())


def test_no_logits_of_all_positions_are_made():
    model = make("llama")
    widths = []
    model.lm_head.register_forward_hook(lambda module, args, output: widths.append(tuple(output.shape)))
    pair_scores(model, inputs(), PAIRS)
    dense_pair_scores(model, inputs(), PAIRS)
    assert widths == [(3, 1, 40), (1, 8, 40)]


def test_the_head_is_left_without_a_hook_also_after_an_error():
    model = make("llama")
    with pytest.raises(IndexError):
        pair_scores(model, inputs(), torch.tensor([99]))
    assert not model.lm_head._forward_pre_hooks
    torch.testing.assert_close(model(**inputs()).logits.shape, torch.Size([3, 7, 40]))


def test_left_padded_rows_score_as_alone_and_unpadded():
    model = make("gpt2")  # learned absolute positions: the most sensitive to a missing position_ids
    batch = inputs()
    seen = pair_scores(model, batch, torch.tensor([2, 3, 4, 5, 6])).logits()
    alone = model(input_ids=batch["input_ids"][:1, 2:], attention_mask=torch.ones(1, 5, dtype=torch.int64)).logits[0]
    torch.testing.assert_close(seen, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score", [pair_scores, dense_pair_scores])
def test_the_cut_gives_padded_ids_neither_logit_nor_gradient(score: Any):
    model = make("phi, biased")
    seen = score(model, inputs(), PAIRS, vocab_size=33)
    assert seen.vocab_size == 33
    torch.testing.assert_close(seen.logits(), own_logits(model, inputs())[:, :33], rtol=1e-4, atol=1e-5)
    grads = gradients(model, seen.logits())
    assert grads["lm_head.weight"][:33].abs().sum() > 0
    assert (grads["lm_head.weight"][33:] == 0).all()
    assert (grads["lm_head.bias"][33:] == 0).all()


@pytest.mark.parametrize("score", [pair_scores, dense_pair_scores])
def test_a_batch_without_pairs_keeps_a_gradient_path_to_the_body(score: Any):
    model = make("llama")
    logits = score(model, inputs(), torch.zeros(0, dtype=torch.int64)).logits()
    assert logits.shape == (0, 40)
    logits.sum().backward()
    assert (model.model.layers[0].mlp.up_proj.weight.grad == 0).all()


def lora(model: nn.Module, **fields: Any) -> Any:
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"], "task_type": "CAUSAL_LM"} | fields
    with torch.random.fork_rng():
        torch.manual_seed(3)
        wrapped = get_peft_model(model, LoraConfig(**fields)).eval()
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name or "embedding_A" in name:  # starts at 0, where the other would get no gradient
                parameter.data = 0.1 * torch.randn_like(parameter)
    return wrapped


@pytest.mark.parametrize("name", ["llama", "phi, biased", "cohere"])
def test_an_adapter_on_the_head_gets_its_own_gradients(name: str):
    model = make(name)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    wrapped = lora(model)
    assert check_head(wrapped)
    seen = pair_scores(wrapped, inputs(), PAIRS)
    assert seen.hidden.shape[1] == 32 + 4
    assert_same_values_and_gradients(wrapped, seen, inputs())
    assert any("lm_head" in n and "lora_A" in n for n, p in wrapped.named_parameters() if p.grad is not None)


# ------------------------------------------------------------------ through the fused loss


def fused_loss(model: nn.Module, teacher: nn.Module) -> Tensor:
    """JSD of the pairs by the fused function, which makes every gradient itself."""
    with torch.no_grad():
        t = pair_scores(teacher, inputs(), PAIRS)
    s = pair_scores(model, inputs(), PAIRS)
    return fused_linear_divergence(
        s.hidden,
        s.head.weight,
        t.hidden,
        t.head.weight,
        beta=0.5,
        student_bias=s.head.bias,
        teacher_bias=t.head.bias,
        student_scale=s.head.scale,
        teacher_scale=t.head.scale,
        student_softcap=s.head.softcap,
        teacher_softcap=t.head.softcap,
        chunk_size=3,
    ).loss_sum


def plain_loss(model: nn.Module, teacher: nn.Module) -> Tensor:
    """The same from both models' own logits, by autograd, from the definition in probability space."""
    with torch.no_grad():
        t = own_logits(teacher, inputs()).float().softmax(-1)
    s = own_logits(model, inputs()).float().softmax(-1)
    m = (s + t) / 2
    return 0.5 * (t * (t / m).log() + s * (s / m).log()).sum()


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_fused_is_plain(model: nn.Module, teacher: nn.Module, tolerance: float = 1e-3) -> dict[str, Tensor]:
    """Returns the gradients of the fused loss."""
    ours, theirs = fused_loss(model, teacher), plain_loss(model, teacher)
    assert ours.item() == pytest.approx(theirs.item(), rel=tolerance)
    found, expected = gradients_of(ours, model), gradients_of(theirs, model)
    assert found.keys() == expected.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for name, gradient in expected.items():
        assert gradient.norm() > 1e-6, name
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), name
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_fused_loss_gives_every_parameter_the_gradient_of_the_models_own_logits(name: str):
    assert_fused_is_plain(make(name), make(name, seed=1))


def test_a_tied_embedding_gets_the_sum_of_both_gradients_from_the_fused_loss():
    tied, untied, teacher = make("llama, tied"), make("llama"), make("llama", seed=1)
    untied.load_state_dict(tied.state_dict())  # equal, but two parameters
    both = assert_fused_is_plain(tied, teacher)["model.embed_tokens.weight"]
    apart = assert_fused_is_plain(untied, teacher)
    torch.testing.assert_close(
        both, apart["model.embed_tokens.weight"] + apart["lm_head.weight"], rtol=1e-4, atol=1e-6
    )


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning")
@pytest.mark.parametrize("name", ["llama", "llama, tied", "phi, biased", "gemma2"])
def test_an_adapter_on_the_head_is_in_the_fused_loss_and_gets_its_gradients(name: str):
    wrapped, teacher = lora(make(name), target_modules=["lm_head"]), make(name, seed=1)
    found = assert_fused_is_plain(wrapped, teacher)
    assert {n.split(".")[-3] for n in found} == {"lora_A", "lora_B"}
    with wrapped.disable_adapter():
        without = fused_loss(wrapped, teacher).item()
    assert abs(without - fused_loss(wrapped, teacher).item()) > 1e-3


def test_an_adapter_that_is_tied_like_the_weight_below_it_gets_both_gradients():
    wrapped = lora(make("llama, tied"), target_modules=["embed_tokens"], ensure_weight_tying=True)
    assert_fused_is_plain(wrapped, make("llama", seed=1))


@pytest.mark.parametrize("name", ["llama", "llama, tied", "phi, biased"])
def test_under_autocast_the_fused_loss_is_the_models_own_and_gradients_keep_the_parameters_dtype(name: str):
    model, teacher = make(name), make(name, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = fused_loss(model, teacher), plain_loss(model, teacher)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(theirs.item(), rel=2e-2)
    found, expected = gradients_of(ours, model), gradients_of(theirs, model)
    for parameter, gradient in expected.items():
        assert found[parameter].dtype == torch.float32
        assert (found[parameter] - gradient).norm() <= 6e-2 * gradient.norm(), parameter


def test_an_evaluation_of_the_fused_loss_leaves_no_gradient_and_gives_the_same_value():
    model, teacher = make("llama, tied"), make("llama", seed=1)
    with torch.no_grad():
        value = fused_loss(model, teacher)
    assert not value.requires_grad
    torch.testing.assert_close(value, fused_loss(model, teacher).detach())


def test_two_adapters_with_biases_on_the_head_add_up():
    wrapped = lora(make("phi, biased"), lora_bias=True)
    wrapped.add_adapter("second", LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    wrapped.base_model.set_adapter(["default", "second"])
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1
    assert pair_scores(wrapped, inputs(), PAIRS).hidden.shape[1] == 32 + 4 + 2
    assert check_head(wrapped)
    assert_same_values_and_gradients(wrapped, pair_scores(wrapped, inputs(), PAIRS), inputs())


def test_switched_off_and_merged_adapters_act_as_the_model_does():
    wrapped = lora(make("llama"))
    with wrapped.disable_adapter():
        off = pair_scores(wrapped, inputs(), PAIRS).logits()
        torch.testing.assert_close(off, own_logits(wrapped, inputs()), rtol=1e-4, atol=1e-5)
    on = pair_scores(wrapped, inputs(), PAIRS).logits()
    assert (on - off).abs().max() > 0.1
    wrapped.merge_adapter()
    torch.testing.assert_close(pair_scores(wrapped, inputs(), PAIRS).logits(), on, rtol=1e-4, atol=1e-4)
    wrapped.base_model.disable_adapter_layers()
    with pytest.raises(HeadNotReadable, match="merged"):
        pair_scores(wrapped, inputs(), PAIRS)


def test_dropout_on_the_heads_adapter_is_the_models_dropout():
    wrapped = lora(make("llama"), target_modules=["lm_head"], lora_dropout=0.5).train()
    results = []
    with torch.random.fork_rng():
        for seed in (4, 4, 5):  # all positions in order: the same numbers of the generator drop the same entries
            torch.manual_seed(seed)
            results.append(pair_scores(wrapped, inputs(), torch.arange(21)).logits())
        torch.manual_seed(4)
        own = wrapped(**inputs(), use_cache=False).logits.reshape(21, 40)
    torch.testing.assert_close(results[0], own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert (results[0] - results[2]).abs().max() > 0.01  # it drops


def test_a_fully_trained_copy_of_the_head_is_the_head():
    wrapped = lora(make("llama"), target_modules=["q_proj"], modules_to_save=["lm_head"])
    copy = wrapped.base_model.model.lm_head.modules_to_save["default"]
    copy.weight.data += 0.3
    assert check_head(wrapped)
    assert_same_values_and_gradients(wrapped, pair_scores(wrapped, inputs(), PAIRS), inputs())
    assert copy.weight.grad is not None
    with wrapped.disable_adapter():
        torch.testing.assert_close(pair_scores(wrapped, inputs(), PAIRS).logits(), own_logits(wrapped, inputs()))


def test_a_variant_of_lora_on_the_head_is_refused_and_scored_densely():
    wrapped = lora(make("llama"), use_dora=True)
    assert not check_head(wrapped)
    with pytest.raises(HeadNotReadable, match="DoRA"):
        pair_scores(wrapped, inputs(), PAIRS)
    assert_same_values_and_gradients(wrapped, dense_pair_scores(wrapped, inputs(), PAIRS), inputs())


def test_weights_that_are_whole_only_inside_their_module_are_refused_and_scored_densely():
    model = make("llama")
    model.lm_head.weight.ds_id = 0  # as DeepSpeed marks a ZeRO-3 parameter
    assert not check_head(model)
    with pytest.raises(HeadNotReadable, match=r"FSDP1 or ZeRO-3.*Use FSDP2"):
        pair_scores(model, inputs(), PAIRS)
    assert_same_values_and_gradients(model, dense_pair_scores(model, inputs(), PAIRS), inputs())


def test_prompt_tuning_which_moves_every_position_is_refused():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = get_peft_model(make("llama"), config)
    for score in (pair_scores, dense_pair_scores):
        with pytest.raises(ConfigError, match="Use LoRA"):
            score(wrapped, inputs(), PAIRS)
    with pytest.raises(ConfigError, match="Use LoRA"):
        check_head(wrapped)


def test_a_ddp_wrapped_model_is_called_as_wrapped_and_reaches_every_parameter():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(make("cohere"))
        calls = []
        wrapped.register_forward_hook(lambda *_: calls.append(1))
        seen = pair_scores(wrapped, inputs(), PAIRS)
        assert calls == [1]
        ours = gradients(wrapped, seen.logits())
    finally:
        dist.destroy_process_group()
    plain = make("cohere")
    theirs = gradients(plain, own_logits(plain, inputs()))
    assert {name.removeprefix("module.") for name in ours} == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[f"module.{name}"], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite"])
def test_the_canary_catches_a_scale_or_cap_that_nobody_told_us_of(name: str, monkeypatch: pytest.MonkeyPatch):
    model = make(name)
    monkeypatch.setattr(forward_module, "scale_and_softcap", lambda base: (1.0, None))
    assert not check_head(model)


def test_the_canary_catches_a_cap_far_above_the_logits(monkeypatch: pytest.MonkeyPatch):
    MODELS["capped at 30"] = ("Gemma2Config", MODELS["gemma2"][1] | {"final_logit_softcapping": 30.0})
    model = make("capped at 30")
    del MODELS["capped at 30"]
    assert check_head(model)
    monkeypatch.setattr(forward_module, "scale_and_softcap", lambda base: (1.0, None))
    assert not check_head(model)


def test_the_canary_leaves_mode_flags_and_the_global_generator_alone():
    model = make("gpt2").train()  # has dropout
    model.transformer.h[1].eval()
    before, state = [m.training for m in model.modules()], torch.get_rng_state()
    assert check_head(model, inputs())
    assert [m.training for m in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


class NoPositions(nn.Module):
    """A model that knows neither position ids nor a cache, behind the few methods that are asked of one."""

    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(40, 8), nn.Linear(8, 40)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        hidden = self.embed(input_ids).cumsum(1) * attention_mask[..., None]
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(hidden))


def test_a_model_without_position_ids_is_not_given_any():
    model, batch = NoPositions(), inputs()
    full = model(batch["input_ids"], batch["attention_mask"]).logits.reshape(-1, 40)[PAIRS]
    torch.testing.assert_close(pair_scores(model, batch, PAIRS).logits(), full)


def test_a_model_without_an_output_head_still_gives_dense_scores():
    model, batch = NoPositions(), inputs()
    model.get_output_embeddings = lambda: None
    assert not check_head(model)
    full = model(batch["input_ids"], batch["attention_mask"]).logits.reshape(-1, 40)[PAIRS]
    torch.testing.assert_close(dense_pair_scores(model, batch, PAIRS).logits(), full)
    with pytest.raises(HeadNotReadable, match="no output head"):
        pair_scores(model, batch, PAIRS)


def test_under_autocast_the_pairs_are_what_the_model_computes():
    model = make("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = pair_scores(model, inputs(), PAIRS)
        expected = own_logits(model, inputs())
    assert seen.hidden.dtype == seen.head.weight.dtype == torch.bfloat16
    torch.testing.assert_close(seen.logits(), expected.float(), rtol=2e-2, atol=2e-2)
    seen.logits().sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.float32


def test_a_checksum_tells_weights_and_order_apart():
    first, second = (pair_scores(make("llama", seed), inputs(), PAIRS) for seed in (0, 1))
    again = dense_pair_scores(make("llama", 0), inputs(), PAIRS)
    assert logit_row_checksum(first) == pytest.approx(logit_row_checksum(again), rel=1e-5)
    assert abs(logit_row_checksum(first) - logit_row_checksum(second)) > 1e-2
    swapped = again.dense[:, [1, 0, *range(2, 40)]]
    assert abs(logit_row_checksum(type(again)(dense=swapped)) - logit_row_checksum(again)) > 1e-3
    with pytest.raises(ValueError, match="fewer pairs"):
        logit_row_checksum(first, 8)
