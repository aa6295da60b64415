# SPDX-License-Identifier: Apache-2.0
"""A teacher beside its own tokenizer: its own head, its own predictions, and what is kept of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from cohobate.align import AlignedBatch, TeacherSide
from cohobate.align.agreement import no_chunks
from cohobate.errors import ConfigError
from cohobate.functional import kept_scores
from cohobate.functional.scores import DenseScores, HiddenScores, SampledScores, TopKScores, top_k_scores
from cohobate.teachers import EMATeacher, LocalTeacher, OwnTokenizerTeacher

REAL = len(tiny.char_tokenizer())  # 23


@pytest.fixture
def own_batch(batch: AlignedBatch) -> AlignedBatch:
    """The batch of five student pairs with a teacher of seven predictions, some rows with more than the student."""
    ids = batch.teacher.model_inputs["input_ids"]
    index = torch.tensor([3, 4, 5, 6, 7, 13, 15])
    side = TeacherSide(
        model_inputs=batch.teacher.model_inputs,
        pair_index=index,
        target_ids=ids.flatten()[index + 1],
        row=index // ids.shape[1],
        chunks=no_chunks(),
    )
    return replace(batch, teacher=side, teachers=(side,))


def own_logits(model: Any, side: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = model(**side.model_inputs, use_cache=False).logits
    return logits.reshape(-1, logits.shape[-1])[side.pair_index]


def test_it_scores_its_own_predictions_over_its_real_ids(own_batch: AlignedBatch) -> None:
    model = tiny.llama(3, vocab_size=32)  # a head padded beyond the tokenizer
    teacher = OwnTokenizerTeacher(LocalTeacher(model), tiny.char_tokenizer())
    scores = teacher.score(own_batch)
    assert teacher.provides is HiddenScores
    assert isinstance(scores, HiddenScores)
    assert scores.vocab_size == REAL
    wanted = own_logits(model, own_batch.teacher)[:, :REAL]
    torch.testing.assert_close(scores.logits(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 5, REAL])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("block", [1, 3, 100])
def test_the_kept_logits_are_those_of_the_whole_rows_whatever_the_blocks(
    own_batch: AlignedBatch, monkeypatch: pytest.MonkeyPatch, k: int, temperature: float, block: int
) -> None:
    monkeypatch.setattr(kept_scores, "_BLOCK_BYTES", 4 * REAL * block)
    model = tiny.llama(3)
    teacher = OwnTokenizerTeacher(LocalTeacher(model), tiny.char_tokenizer(), top_k=k, temperature=temperature)
    assert teacher.provides is TopKScores
    found = teacher.score(own_batch)
    assert isinstance(found, TopKScores)
    dense, targets = own_logits(model, own_batch.teacher), own_batch.teacher.target_ids
    for name in ("ids", "logits", "log_normalizer", "log_normalizer_t1", "realized_logit"):
        wanted = getattr(top_k_scores(dense, targets, k, temperature=temperature, rows="pairs"), name)
        torch.testing.assert_close(getattr(found, name), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.realized_logit, dense[range(7), targets], rtol=1e-4, atol=1e-5)
    assert (found.temperature, found.vocab_size) == (temperature, REAL)


def test_no_block_is_larger_than_said(own_batch: AlignedBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_scores, "_BLOCK_BYTES", 4 * REAL * 2)
    made: list[int] = []
    whole = HiddenScores.logits
    monkeypatch.setattr(HiddenScores, "logits", lambda self: made.append(self.hidden.shape[0]) or whole(self))
    teacher = OwnTokenizerTeacher(LocalTeacher(tiny.llama(3)), tiny.char_tokenizer(), top_k=2)
    teacher.score(own_batch)
    assert max(made[-4:]) <= 2
    assert sum(made[-4:]) == 7


@pytest.mark.parametrize("k", [None, 4])
def test_a_batch_without_predictions_is_scored(own_batch: AlignedBatch, k: int | None) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    side = replace(own_batch.teacher, pair_index=none, target_ids=none, row=none)
    scores = OwnTokenizerTeacher(LocalTeacher(tiny.llama(3)), tiny.char_tokenizer(), top_k=k).score(
        replace(own_batch, teacher=side, teachers=(side,))
    )
    rows = scores.ids if isinstance(scores, TopKScores) else scores.logits()  # pyright: ignore[reportAttributeAccessIssue]
    assert rows.shape == (0, REAL if k is None else k)


def test_a_head_that_is_scored_by_its_own_logits_is_cut_too(own_batch: AlignedBatch) -> None:
    class Dense:
        provides = DenseScores

        def score(self, batch: AlignedBatch, /) -> DenseScores:
            return DenseScores(dense=torch.arange(7.0 * 30).reshape(7, 30))

    scores = OwnTokenizerTeacher(Dense(), tiny.char_tokenizer()).score(own_batch)
    assert isinstance(scores, DenseScores)
    assert scores.dense.tolist() == torch.arange(7.0 * 30).reshape(7, 30)[:, :REAL].tolist()
    kept = OwnTokenizerTeacher(Dense(), tiny.char_tokenizer(), top_k=2).score(own_batch)
    assert isinstance(kept, TopKScores)
    assert kept.ids[0].tolist() == [REAL - 2, REAL - 1]


def test_it_leaves_no_trace_on_the_model(own_batch: AlignedBatch, state_of: Any) -> None:
    model = tiny.llama(3).train()
    before = state_of(model)
    OwnTokenizerTeacher(LocalTeacher(model), tiny.char_tokenizer(), top_k=3).score(own_batch)
    assert state_of(model) == before


def test_it_says_how_it_reads_and_no_row_is_longer_than_its_model() -> None:
    tokenizer = tiny.char_tokenizer()
    roles = {"<eos>": "<eos>"}
    inner = LocalTeacher(tiny.llama(3))  # 128 positions
    (text,) = OwnTokenizerTeacher(inner, tokenizer, special_roles=roles).texts
    assert (text.tokenizer, text.special_roles, text.max_length) == (tokenizer, roles, 128)
    assert OwnTokenizerTeacher(inner, tokenizer, max_length=40).text.max_length == 40
    assert OwnTokenizerTeacher(inner, tokenizer, max_length=400).text.max_length == 128


class Odd:
    """A teacher of sampled log-probs."""

    provides = SampledScores

    def score(self, batch: AlignedBatch, /) -> SampledScores:
        return SampledScores(logprobs=torch.zeros(7))


def test_what_cannot_work_is_refused(own_batch: AlignedBatch, batch: AlignedBatch) -> None:
    tokenizer, inner = tiny.char_tokenizer(), LocalTeacher(tiny.llama(3))
    with pytest.raises(ConfigError, match=r"top_k must be in \[1, 23\]"):
        OwnTokenizerTeacher(inner, tokenizer, top_k=24)
    with pytest.raises(ConfigError, match="Odd provides SampledScores"):
        OwnTokenizerTeacher(Odd(), tokenizer, top_k=2)
    with pytest.raises(ConfigError, match="Put it into a LocalTeacher first"):
        OwnTokenizerTeacher(tiny.llama(3), tokenizer)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"predicts 20 ids, but the tokenizer .* has 23"):
        OwnTokenizerTeacher(LocalTeacher(tiny.llama(3, vocab_size=20)), tokenizer)
    with pytest.raises(ConfigError, match="aligned for a teacher with the student's tokenizer"):
        OwnTokenizerTeacher(inner, tokenizer).score(batch)


def test_the_state_of_the_inner_teacher_travels_and_foreign_state_is_refused() -> None:
    tokenizer, student = tiny.char_tokenizer(), tiny.llama(3)
    teacher = OwnTokenizerTeacher(EMATeacher(decay=0.5).build(student), tokenizer)
    with torch.no_grad():
        next(student.parameters()).add_(1.0)
    teacher.after_optimizer_step()
    state = {name: value.clone() for name, value in teacher.state_dict().items()}
    assert int(state["num_updates"]) == 1
    other = OwnTokenizerTeacher(EMATeacher(decay=0.5).build(tiny.llama(3)), tokenizer)
    other.load_state_dict(state)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in state.items())
    plain = OwnTokenizerTeacher(LocalTeacher(student), tokenizer)
    plain.after_optimizer_step()
    assert plain.state_dict() == {}
    plain.load_state_dict({})
    with pytest.raises(ValueError, match=r"LocalTeacher carries no state, but the checkpoint has"):
        plain.load_state_dict(state)
