# SPDX-License-Identifier: Apache-2.0
"""A teacher with weights of its own reads its own side of the batch and leaves no trace."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import tiny
from cohobate.errors import ConfigError
from cohobate.functional.scores import DenseScores, HiddenScores
from cohobate.teachers import LocalTeacher


def own_logits(model, side):
    with torch.no_grad():
        logits = model(**side.model_inputs, use_cache=False).logits
    return logits.reshape(-1, logits.shape[-1])[side.pair_index]


def test_it_scores_the_teacher_side_at_the_teacher_positions(batch):
    model = tiny.llama(3)
    teacher = LocalTeacher(model)
    scores = teacher.score(batch)
    assert isinstance(scores, HiddenScores)
    assert teacher.provides is HiddenScores
    torch.testing.assert_close(scores.logits(), own_logits(model, batch.teacher), rtol=1e-4, atol=1e-5)
    assert (scores.logits() - own_logits(model, batch.student)).abs().max() > 0.1


def test_a_wider_head_is_cut_to_the_real_ids(batch):
    model = tiny.llama(3, vocab_size=32)
    scores = LocalTeacher(model, vocab_size=23).score(batch)
    torch.testing.assert_close(scores.logits(), own_logits(model, batch.teacher)[:, :23], rtol=1e-4, atol=1e-5)


def test_a_model_in_training_mode_scores_without_dropout_and_stays_in_its_mode(batch, state_of):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=23, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5)
        model = GPT2LMHeadModel(config).train()
    model.transformer.ln_f.eval()
    before = state_of(model)
    scores = LocalTeacher(model).score(batch)
    assert state_of(model) == before
    torch.testing.assert_close(scores.logits(), own_logits(model.eval(), batch.teacher), rtol=1e-4, atol=1e-5)


def test_even_a_loss_that_forgets_to_detach_cannot_reach_the_teacher(batch):
    model = tiny.llama(3, tie=False)
    scores = LocalTeacher(model).score(batch)
    student = scores.hidden.clone().requires_grad_()
    loss = (student @ scores.head.weight.T - scores.logits()).square().sum() + student.sum()
    loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())  # the flags themselves are the owner's


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_a_head_that_is_no_plain_linear_map_is_scored_by_its_own_logits(batch):
    model = tiny.llama(3, tie=False)
    model.lm_head.__class__ = Doubled
    teacher = LocalTeacher(model, vocab_size=20)
    scores = teacher.score(batch)
    assert teacher.provides is DenseScores
    assert isinstance(scores, DenseScores)
    torch.testing.assert_close(scores.dense, own_logits(model, batch.teacher)[:, :20], rtol=1e-4, atol=1e-5)


def test_the_model_is_moved_once_when_the_teacher_is_made():
    model = tiny.llama(3)
    moves = []
    original = model.to
    model.to = lambda *a, **k: moves.append(a) or original(*a, **k)
    LocalTeacher(model, device="cpu")
    assert moves == [("cpu",)]


def test_an_encoder_decoder_is_refused():
    config = T5Config(vocab_size=23, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(ConfigError, match="causal model"):
        LocalTeacher(T5ForConditionalGeneration(config))
