# SPDX-License-Identifier: Apache-2.0
"""Teachers of the student's own weights: what each remembers, and that the student cannot tell it was asked."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import tiny
from cohobate.errors import ConfigError
from cohobate.teachers import AdapterOffTeacher, EMATeacher, FrozenTeacher, LiveTeacher, logit_row_checksum

CONFIGS = [FrozenTeacher(), EMATeacher(decay=0.9), LiveTeacher(), AdapterOffTeacher()]


def full_student() -> Any:
    """All weights trainable, dropout on, in training mode but for one module."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=23, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5, initializer_range=0.3)
        model = GPT2LMHeadModel(config).train()
    model.transformer.ln_f.eval()
    return model


def lora_student(**fields: Any) -> Any:
    """LoRA with dropout on the attention of a Llama, the adapter not zero, a frozen second adapter beside it."""
    fields = {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.5, "task_type": "CAUSAL_LM"} | fields
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(tiny.llama(0, tie=False), LoraConfig(**fields))
        model.add_adapter("other", LoraConfig(**fields))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn_like(parameter)
    return model.train()


def own_logits(model: Any, side: Any) -> torch.Tensor:
    """The student's own logits on a side, in eval mode, its mode given back."""
    flags = [(m, m.training) for m in model.modules()]
    with torch.no_grad():
        logits = model.eval()(**side.model_inputs, use_cache=False).logits
    for module, flag in flags:
        module.training = flag
    return logits.reshape(-1, logits.shape[-1])[side.pair_index]


def move(model: Any, by: float = 0.1) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += by


CASES = [(lora_student, config) for config in CONFIGS]
CASES += [(full_student, config) for config in CONFIGS if not isinstance(config, AdapterOffTeacher)]


@pytest.mark.parametrize(("student", "config"), CASES)
def test_scoring_leaves_the_student_exactly_as_it_was(student, config, batch, state_of):
    model = student()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.5)
    before = state_of(model)
    teacher = config.build(model)
    scores = teacher.score(batch)
    assert state_of(model) == before
    assert not scores.logits().requires_grad


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_scoring_that_fails_leaves_the_student_exactly_as_it_was(config, batch, state_of, monkeypatch):
    model = lora_student()
    teacher = config.build(model)
    before = state_of(model)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(model.base_model.model.model.norm, "forward", broken)
    with pytest.raises(RuntimeError, match="on purpose"):
        teacher.score(batch)
    assert state_of(model) == before


@pytest.mark.parametrize("student", [full_student, lora_student])
def test_frozen_stays_where_it_was_and_live_moves_along(student, batch):
    model = student()
    at_start = own_logits(model, batch.teacher)
    frozen, live = FrozenTeacher().build(model), LiveTeacher().build(model)
    checksum = logit_row_checksum(frozen.score(batch))
    move(model)
    assert logit_row_checksum(frozen.score(batch)) == checksum
    torch.testing.assert_close(frozen.score(batch).logits(), at_start, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(live.score(batch).logits(), own_logits(model, batch.teacher), rtol=1e-4, atol=1e-5)
    assert (own_logits(model, batch.teacher) - at_start).abs().max() > 0.01


def test_ema_moves_towards_the_student_by_one_minus_decay(batch):
    model = torch.nn.Linear(1, 1, bias=False)
    student = full_student()
    student.fixed = model  # any trainable weight: teacher 0, student 1, an update rate of .05
    model.weight.data.fill_(0.0)
    teacher = EMATeacher(decay=0.95).build(student)
    model.weight.data.fill_(1.0)
    teacher.after_optimizer_step()
    assert teacher.state_dict()["shadow.fixed.weight"].item() == pytest.approx(0.05)
    teacher.after_optimizer_step()
    assert teacher.state_dict()["shadow.fixed.weight"].item() == pytest.approx(0.05 + 0.95 * 0.05)
    assert teacher.state_dict()["num_updates"].item() == 2


@pytest.mark.parametrize("student", [full_student, lora_student])
def test_ema_scores_as_a_student_with_the_averaged_weights(student, batch):
    model = student()
    teacher = EMATeacher(decay=0.75).build(model)
    average = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    for step in (1, 2, 3):
        move(model, 0.1 * step)
        teacher.after_optimizer_step()
        for name, parameter in model.named_parameters():
            average[name] = 0.75 * average[name] + 0.25 * parameter.detach().double()
    twin = student()
    for name, parameter in twin.named_parameters():
        parameter.data = average[name].float()
    torch.testing.assert_close(teacher.score(batch).logits(), own_logits(twin, batch.teacher), rtol=1e-3, atol=1e-3)
    assert (own_logits(model, batch.teacher) - own_logits(twin, batch.teacher)).abs().max() > 0.05


def test_ema_starts_from_the_weights_at_build_and_follows_only_its_own_verb(batch):
    model = full_student()
    at_start = own_logits(model, batch.teacher)
    teacher = EMATeacher(decay=0.9).build(model)
    torch.testing.assert_close(teacher.score(batch).logits(), at_start, rtol=1e-4, atol=1e-5)
    move(model)
    torch.testing.assert_close(teacher.score(batch).logits(), at_start, rtol=1e-4, atol=1e-5)


def test_ema_of_a_bf16_student_adds_up_updates_that_bf16_would_lose():
    model = tiny.llama(0).to(torch.bfloat16)
    teacher = EMATeacher(decay=0.999).build(model)
    name = "shadow.model.norm.weight"
    assert teacher.state_dict()[name].dtype == torch.float32
    start = teacher.state_dict()[name].clone()
    with torch.no_grad():
        model.model.norm.weight += 1.0  # a step of 0.001 in 1.0: below half of bf16's spacing there (0.0039)
    for _ in range(20):
        teacher.after_optimizer_step()
    moved = teacher.state_dict()[name] - start
    torch.testing.assert_close(moved, torch.full_like(moved, 1 - 0.999**20), rtol=1e-3, atol=1e-5)


def test_ema_of_a_bf16_student_scores_in_bf16_with_the_newest_average(batch):
    model = tiny.llama(0).to(torch.bfloat16)
    at_start = own_logits(model, batch.teacher).float()
    teacher = EMATeacher(decay=0.5).build(model)
    torch.testing.assert_close(teacher.score(batch).logits(), at_start, rtol=0.02, atol=0.1)
    move(model, 0.4)
    teacher.after_optimizer_step()
    twin = tiny.llama(0)
    move(twin, 0.2)
    scores = teacher.score(batch)
    assert scores.hidden.dtype == torch.bfloat16
    expected = own_logits(twin.to(torch.bfloat16), batch.teacher).float()
    torch.testing.assert_close(scores.logits(), expected, rtol=0.05, atol=0.3)
    assert (expected - at_start).abs().max() > 1


def test_under_lora_only_the_adapter_is_remembered():
    model = lora_student()
    state = EMATeacher().build(model).state_dict()
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert state.keys() == {f"shadow.{name}" for name in names} | {"num_updates"}
    assert all("lora" in name and "default" in name for name in names)


@pytest.mark.parametrize("student", [full_student, lora_student])
def test_ema_resumes_exactly(student, batch):
    model, other = student(), student()
    teacher = EMATeacher(decay=0.9).build(model)
    move(model)
    teacher.after_optimizer_step()
    saved = {name: value.clone() for name, value in teacher.state_dict().items()}
    move(other, 0.7)  # a resumed run builds its teacher from whatever weights are there
    resumed = EMATeacher(decay=0.9).build(other)
    resumed.load_state_dict(saved)
    other.load_state_dict(model.state_dict())
    for m, t in ((model, teacher), (other, resumed)):
        move(m, -0.2)
        t.after_optimizer_step()
    ours, theirs = resumed.state_dict(), teacher.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours["num_updates"] == 2
    assert torch.equal(resumed.score(batch).logits(), teacher.score(batch).logits())


def test_a_loaded_state_is_not_tied_to_the_callers_tensors():
    model = full_student()
    teacher = EMATeacher(decay=0.5).build(model)
    saved = {name: value.clone() for name, value in teacher.state_dict().items()}
    copy = {name: value.clone() for name, value in saved.items()}
    teacher.load_state_dict(saved)
    move(model)
    teacher.after_optimizer_step()
    assert all(torch.equal(saved[name], copy[name]) for name in copy)


def test_another_students_state_is_refused_and_changes_nothing():
    teacher = EMATeacher().build(full_student())
    good = {name: value.clone() for name, value in teacher.state_dict().items()}
    name = "shadow.transformer.wte.weight"
    with pytest.raises(ValueError, match=r"missing.*shadow"):
        teacher.load_state_dict({"num_updates": good["num_updates"]})
    with pytest.raises(ValueError, match=r"wte.weight is torch.float32 \(3, 3\), expected torch.float32 \(23, 16\)"):
        teacher.load_state_dict(good | {name: torch.zeros(3, 3)})
    with pytest.raises(ValueError, match="bfloat16"):
        teacher.load_state_dict(good | {name: good[name].bfloat16()})
    assert all(torch.equal(value, good[key]) for key, value in teacher.state_dict().items())


def test_a_decay_outside_the_unit_interval_is_refused_with_its_meaning():
    with pytest.raises(ConfigError, match="share of the old average that stays"):
        EMATeacher(decay=1.5)


def test_adapter_off_is_the_base_model_and_does_not_move(batch):
    model = lora_student()
    base = tiny.llama(0, tie=False)
    teacher = AdapterOffTeacher().build(model)
    torch.testing.assert_close(teacher.score(batch).logits(), own_logits(base, batch.teacher), rtol=1e-4, atol=1e-5)
    move(model, 0.5)
    torch.testing.assert_close(teacher.score(batch).logits(), own_logits(base, batch.teacher), rtol=1e-4, atol=1e-5)
    assert (own_logits(model, batch.teacher) - own_logits(base, batch.teacher)).abs().max() > 0.1


def test_adapter_off_uses_the_original_of_a_fully_trained_head(batch):
    model = lora_student(modules_to_save=["lm_head"])
    teacher = AdapterOffTeacher().build(model)
    move(model, 0.5)
    base = tiny.llama(0, tie=False)
    torch.testing.assert_close(teacher.score(batch).logits(), own_logits(base, batch.teacher), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("off", [True, False])
def test_an_adapter_that_was_off_or_frozen_stays_so(off, batch, state_of):
    model = lora_student()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if off:
        model.base_model.disable_adapter_layers()
    before = state_of(model)
    AdapterOffTeacher().build(model).score(batch)
    assert state_of(model) == before


def test_an_adapter_that_was_off_in_one_layer_stays_so(batch, state_of):
    model = lora_student()
    model.base_model.model.model.layers[0].self_attn.q_proj.enable_adapters(False)
    before = state_of(model)
    teacher = AdapterOffTeacher().build(model)
    with pytest.warns(UserWarning, match="some adapter layers that are enabled"):
        teacher.score(batch)
    assert state_of(model) == before


def test_adapter_off_needs_an_adapter():
    with pytest.raises(ConfigError, match=r"peft_config.*frozen"):
        AdapterOffTeacher().build(full_student())


def test_adapter_off_refuses_weights_that_train_outside_the_adapter():
    model = lora_student()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"1 trainable weights.*norm\.weight"):
        AdapterOffTeacher().build(model)
    with pytest.raises(ConfigError, match="trainable weights"):
        AdapterOffTeacher().build(
            get_peft_model(full_student(), LoraConfig(bias="all", target_modules=["c_attn"], fan_in_fan_out=True))
        )


def test_adapter_off_refuses_a_merged_adapter_instead_of_unmerging_it(batch):
    model = lora_student(target_modules=["q_proj"])
    teacher = AdapterOffTeacher().build(model)
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        teacher.score(batch)


def test_a_student_that_gets_new_trainable_weights_after_the_build_is_noticed(batch):
    model = lora_student()
    frozen = FrozenTeacher().build(model)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"newly trainable.*norm\.weight"):
        frozen.score(batch)


def test_a_student_without_trainable_weights_has_nothing_to_freeze_or_average():
    model = full_student().requires_grad_(False)
    for config in (FrozenTeacher(), EMATeacher()):
        with pytest.raises(ConfigError, match="no trainable weight"):
            config.build(model)


def test_tied_embeddings_are_lent_together(batch):
    model = tiny.llama(0, tie=True)
    frozen = FrozenTeacher().build(model)
    at_start = own_logits(model, batch.teacher)
    with torch.no_grad():
        model.lm_head.weight += torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(frozen.score(batch).logits(), at_start, rtol=1e-4, atol=1e-5)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_cut_to_real_ids_reaches_every_kind(batch):
    for config in CONFIGS:
        assert config.build(lora_student(), vocab_size=20).score(batch).vocab_size == 20
