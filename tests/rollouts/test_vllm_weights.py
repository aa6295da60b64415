# SPDX-License-Identifier: Apache-2.0
"""What is written for a server is the policy that is trained, and the live model is left as it was."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import tiny
from cohobate.errors import ConfigError
from cohobate.rollouts.vllm_weights import delete_versions, version_folder, whole_state, write_weights
from vllm_cases import moved

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def adapted(seed: int = 1, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        settings = {"task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 6, "target_modules": "all-linear"} | options
        # PEFT warns where an adapter is on one of two tied tensors
        tie = "target_modules" not in options and "trainable_token_indices" not in options
        model = get_peft_model(tiny.llama(seed, layers=2, tie=tie), LoraConfig(**settings))
    moved(model, 0.1)
    return model.eval()


def written(model: Any, folder: Path, **options: Any) -> Any:
    """The model that comes back from what is written for `model`."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    write_weights(whole_state(model, **options), base.config, folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("tie", [True, False])
def test_a_plain_model_comes_back_bit_by_bit_and_untied(tmp_path: Path, tie: bool):
    model = tiny.llama(1, layers=2, tie=tie)
    back = written(model, tmp_path / "w")
    assert torch.equal(logits(back), logits(model))
    state = load_file(tmp_path / "w" / "model.safetensors")
    assert set(state) == {*model.state_dict(), "lm_head.weight"}
    assert torch.equal(state["lm_head.weight"], model.get_output_embeddings().weight)
    assert json.loads((tmp_path / "w" / "config.json").read_text())["tie_word_embeddings"] is False
    assert model.config.tie_word_embeddings is tie
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 1}},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_an_adapter_is_merged_and_the_live_model_is_not_touched(tmp_path: Path, options: dict[str, Any]):
    model = adapted(**options)
    before = {name: p.clone() for name, p in model.named_parameters()}
    counters = {name: p._version for name, p in model.named_parameters()}
    back = written(model, tmp_path / "w")
    torch.testing.assert_close(logits(back), logits(model), rtol=0, atol=2e-5)
    merged = copy.deepcopy(model).merge_and_unload()
    for name, wanted in merged.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name], wanted, rtol=0, atol=1e-6, msg=name)
    assert {name: p._version for name, p in model.named_parameters()} == counters
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    plain = {
        name: v for name, v in tiny.llama(1, layers=2).state_dict().items() if "v_proj" in name or "q_proj" in name
    }
    assert any(not torch.equal(back.state_dict()[name], value) for name, value in plain.items())


def test_what_is_switched_off_or_merged_already_is_not_added(tmp_path: Path):
    model = adapted()
    wanted = logits(model)
    model.merge_adapter()
    torch.testing.assert_close(logits(written(model, tmp_path / "merged")), wanted, rtol=0, atol=2e-5)
    model.unmerge_adapter()
    with model.disable_adapter():
        off = logits(model)
        torch.testing.assert_close(logits(written(model, tmp_path / "off")), off, rtol=0, atol=2e-5)
    assert (off - wanted).abs().max() > 0.1


def test_two_adapters_in_use_are_both_added(tmp_path: Path):
    model = adapted()
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=1, target_modules=["q_proj"]))
    moved(model, 0.1, 3)
    model.base_model.set_adapter(["default", "other"])
    torch.testing.assert_close(logits(written(model, tmp_path / "w")), logits(model), rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"lora_bias": True}, {"trainable_token_indices": [3]}], ids=str
)
def test_other_adapters_are_refused_by_name(options: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"the adapter on model\.\S+ \(peft\..*plain LoRA"):
        whole_state(adapted(**options))


def test_weights_that_are_not_whole_or_not_numbers_are_refused():
    model = tiny.llama(1)
    next(model.parameters()).ds_id = 3  # as ZeRO-3 marks its parts
    with pytest.raises(ConfigError, match=r"ZeRO-3.*rollouts\.kind local"):
        whole_state(model)
    quantised = tiny.llama(1)
    weight = torch.ones(32, 16, dtype=torch.int8)
    quantised.model.layers[0].mlp.gate_proj.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight is quantised"):
        whole_state(quantised)


def test_a_dtype_is_rounded_to_as_the_server_would(tmp_path: Path):
    model = tiny.llama(1)
    state = whole_state(model, dtype=torch.bfloat16)
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value.bfloat16())
    assert whole_state(model, keep=False) == {}


def test_only_folders_of_versions_are_deleted(tmp_path: Path):
    for name in ("policy-00000003", "policy-4", "policy-x", "policies", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "policy-5").write_text("a file")
    (tmp_path / "policy-00000006").symlink_to(tmp_path / "mine")
    delete_versions(tmp_path, but=version_folder(tmp_path, 3))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"policy-00000003", "policy-x", "policies", "mine", "policy-5", "policy-00000006"}
    delete_versions(tmp_path / "nowhere")
