# SPDX-License-Identifier: Apache-2.0
"""One training step written by hand, from generation to the optimizer, with public functions and a separate teacher.

The batch is as crooked as a real one: left-padded prompts, completions that stop at different places, two samples per
prompt, an empty completion, a row without any token, PAD == EOS, and left-padded teacher prefixes of other lengths.
The oracle runs every example alone, without padding, mask or position ids, and knows nothing of the alignment.
"""

import hashlib

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from cohobate.align import RolloutBatch, TeacherContext, build_opsd_training_batch, concat_rollouts
from cohobate.functional.jsd_loss import generalized_jsd_loss

EOS = PAD = 2
STOPS = [EOS, 3, 4, 5]  # several, so that a random model stops often
PROMPTS = [[6, 7, 8], [9], [10, 2, 11, 12, 13]]  # a separator with the id of EOS stands inside the last one
SAMPLES = 2


def tiny_llama(seed: int, hidden: int, device: torch.device, attention: str) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,  # far from uniform, so that a wrong position is a wrong number
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=PAD,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(device).eval()


def checksum(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def left_padded(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def sampled_rollout(student: LlamaForCausalLM, device: torch.device) -> tuple[RolloutBatch, list[list[int]]]:
    """Two samples of every prompt, an empty completion and a row without tokens; and the completions as lists."""
    ids, mask = left_padded(PROMPTS, device)
    torch.manual_seed(5)
    with torch.no_grad():
        drawn = student.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            max_new_tokens=6,
            num_return_sequences=SAMPLES,
            eos_token_id=STOPS,
            pad_token_id=PAD,
        )
    assert isinstance(drawn, torch.Tensor)
    start = ids.shape[1]
    completions, lengths = [], []
    for row in drawn[:, start:].tolist():
        stop = next((place for place, token in enumerate(row) if token in STOPS), len(row) - 1)
        completions.append(row[: stop + 1])  # by index: an EOS is a token, what follows is padding
        lengths.append(stop + 1)
    column = torch.arange(drawn.shape[1], device=device)
    in_row = column < start + torch.tensor(lengths, device=device)[:, None]
    prompt_mask = torch.ones_like(drawn)
    prompt_mask[:, :start] = mask.repeat_interleave(SAMPLES, dim=0)
    sampled = RolloutBatch(
        input_ids=drawn,
        attention_mask=prompt_mask * in_row,
        response_start_idx=torch.full((len(drawn),), start, device=device),
    )
    empty = RolloutBatch(
        input_ids=torch.tensor([[14, 15], [PAD, PAD]], device=device),
        attention_mask=torch.tensor([[1, 1], [0, 0]], device=device),
        response_start_idx=torch.tensor([2, 1], device=device),
    )
    return concat_rollouts([sampled, empty], pad_token_id=PAD), [*completions, [], []]


@torch.random.fork_rng()
def one_step(device: torch.device, attention: str) -> None:
    student = tiny_llama(0, 32, device, attention)
    teacher = tiny_llama(1, 48, device, attention).requires_grad_(False)
    teacher_before = checksum(teacher)
    student_before = {name: value.detach().clone() for name, value in student.named_parameters()}

    rollout, completions = sampled_rollout(student, device)
    assert len({len(c) for c in completions}) >= 3, "the case needs completions of several lengths"
    assert any(c and c[-1] == EOS for c in completions), "the case needs a real EOS, equal to PAD"
    prompts = [prompt for prompt in PROMPTS for _ in range(SAMPLES)] + [[14, 15], []]
    prefixes = [[16, *prompt, 17] for prompt in prompts]
    prefixes[-1] = []
    context_ids, context_mask = left_padded(prefixes, device)
    batch = build_opsd_training_batch(
        rollout=rollout,
        teacher_context=TeacherContext(input_ids=context_ids, attention_mask=context_mask),
        pad_token_id=PAD,
    )
    student_logits = student(**batch.student_model_inputs).logits
    with torch.no_grad():
        teacher_logits = teacher(**batch.teacher_model_inputs).logits
    aligned_student, aligned_teacher = batch.align_logits(student_logits, teacher_logits)
    output = generalized_jsd_loss(aligned_student, aligned_teacher, batch.response_mask, beta=0.9)
    output.loss.backward()
    gradient = {name: value.grad.clone() for name, value in student.named_parameters() if value.grad is not None}

    # the oracle: every example alone, without padding
    student.zero_grad()
    count = sum(map(len, completions))
    assert output.valid_token_count == count
    losses = []
    for row, (prompt, prefix, completion) in enumerate(zip(prompts, prefixes, completions, strict=True)):
        kept = batch.response_mask[row]
        assert batch.completion_ids[row][kept].tolist() == completion
        assert not aligned_student[row][~kept].any()
        assert not aligned_teacher[row][~kept].any()
        if not completion:
            continue
        alone = student(torch.tensor([prompt + completion], device=device)).logits[0, len(prompt) - 1 : -1]
        with torch.no_grad():
            taught = teacher(torch.tensor([prefix + completion], device=device)).logits[0, len(prefix) - 1 : -1]
        assert_close(aligned_student[row][kept], alone, rtol=1e-4, atol=1e-4)
        assert_close(aligned_teacher[row][kept], taught, rtol=1e-4, atol=1e-4)
        p, q = taught.double().softmax(-1), alone.double().softmax(-1)
        m = 0.9 * p + 0.1 * q
        losses.append((0.9 * p * (p / m).log() + 0.1 * q * (q / m).log()).sum())
    expected = torch.stack(losses).sum() / count
    expected.backward()
    assert_close(output.loss.detach().double(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert set(gradient) == set(student_before)
    for name, value in student.named_parameters():
        assert_close(gradient[name], value.grad, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")

    # the flat form picks the same numbers
    student_index, teacher_index, _ = batch.pairs()
    assert student_logits.reshape(-1, 24)[student_index].equal(aligned_student[batch.response_mask])
    assert teacher_logits.reshape(-1, 24)[teacher_index].equal(aligned_teacher[batch.response_mask])

    torch.optim.SGD(student.parameters(), lr=0.1).step()
    unmoved = [name for name, value in student.named_parameters() if torch.equal(value, student_before[name])]
    assert unmoved == []
    assert checksum(teacher) == teacher_before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_step_with_public_functions_equals_every_example_alone(attention):
    one_step(torch.device("cpu"), attention)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_same_step_on_a_gpu(attention, monkeypatch):
    assert torch.cuda.is_available(), "the mark `gpu` asks for a GPU"
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32, attention {attention}")
    one_step(torch.device("cuda"), attention)
