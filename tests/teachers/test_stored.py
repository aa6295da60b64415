# SPDX-License-Identifier: Apache-2.0
"""A teacher that is read from a store: the same scores as when it was asked, or an error."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from cohobate.align import AlignedBatch, AlignedSide
from cohobate.data import PromptConfig
from cohobate.errors import ConfigError, DataError, VocabularyMismatch
from cohobate.functional import kept_scores as kept_scores_file
from cohobate.functional.kept_scores import kept_scores
from cohobate.functional.scores import HiddenScores, SampledScores, TopKScores, top_k_scores
from cohobate.teachers import LocalTeacher
from cohobate.teachers.store_scoring import TextScorer, planned, text_batch
from cohobate.teachers.stored import StoredTeacher
from cohobate.vocab import fingerprint, template_fingerprint
from cohobate.vocab.tokens import merges_fingerprint
from teachers.canned_store import dense, scores_of, texts, write

TOKENIZER = tiny.char_tokenizer()
TEXTS = texts()
PARTS = {
    "tokenizer": fingerprint(TOKENIZER),
    "merges": merges_fingerprint(TOKENIZER),
    "template": template_fingerprint(TOKENIZER),
}
FIELDS = ("ids", "logits", "log_normalizer", "log_normalizer_t1", "realized_logit")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    made: dict[str, dict[str, Any]] = {
        "plain": {},
        "warm": {"temperature": 2.0},
        "compact": {"values": "compact"},
        "own": {"tokens": "teacher", "max_length": 9, "special_roles": {"<a>": "<eos>"}},
        "prompted": {"tokens": "teacher", "prompts": {"system_prompt": "Be brief."}},
    }
    for name, changes in made.items():
        write(folder / name, TEXTS, **PARTS, **changes)
    return {name: folder / name for name in made}


def left_padded(batch: AlignedBatch) -> AlignedBatch:
    """The same texts for a teacher with the student's tokenizer, padded on the other side."""
    ids, mask = (batch.teacher.model_inputs[name] for name in ("input_ids", "attention_mask"))
    width, index = ids.shape[1], batch.teacher.pair_index
    shift = width - mask.sum(1)
    moved = {name: torch.stack([row.roll(int(s)) for row, s in zip(value, shift, strict=True)])
             for name, value in (("input_ids", ids), ("attention_mask", mask))}  # fmt: skip
    side = AlignedSide(model_inputs=moved, pair_index=index + shift[index // width])
    return replace(batch, student=side, teacher=side)


def check(found: TopKScores, wanted: TopKScores) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert (found.temperature, found.vocab_size) == (wanted.temperature, wanted.vocab_size)


@pytest.mark.parametrize("order", [range(12), [5], [11, 0, 7], [3, 3]])
def test_any_batch_of_rows_reads_what_was_scored(stores: dict[str, Path], order: Any) -> None:
    teacher = StoredTeacher(stores["plain"], TOKENIZER)
    assert (teacher.provides, teacher.texts, teacher.vocab_size) == (TopKScores, None, 40)
    part = [TEXTS[i] for i in order]
    batch = text_batch(part)
    check(teacher.score(batch), scores_of(part))
    check(teacher.score(left_padded(batch)), scores_of(part))


def test_a_batch_without_predictions_gives_scores_of_none(stores: dict[str, Path]) -> None:
    batch = text_batch(TEXTS[:1])
    none = torch.zeros(0, dtype=torch.int64)
    side = AlignedSide(model_inputs=batch.teacher.model_inputs, pair_index=none)
    empty = replace(batch, student=side, teacher=side, target_ids=none, weights=torch.zeros(0), row=none)
    for name in ("plain", "compact", "warm"):
        found = StoredTeacher(stores[name], TOKENIZER).score(empty)
        assert found.ids.shape == found.logits.shape == (0, 7)
        assert found.log_normalizer.shape == found.realized_logit.shape == (0,)


def test_compact_scores_are_near_and_their_normalisers_exact(stores: dict[str, Path]) -> None:
    found, wanted = StoredTeacher(stores["compact"], TOKENIZER).score(text_batch(TEXTS)), scores_of(TEXTS)
    steps = (wanted.logits.amax(1) - wanted.logits.amin(1)) / 65_534
    assert ((found.logits - wanted.logits).abs() <= steps[:, None] + 2e-6).all()
    assert not torch.equal(found.logits, wanted.logits)
    for name in ("ids", "log_normalizer", "realized_logit"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))
    torch.testing.assert_close(found.logprobs().logsumexp(-1), wanted.logprobs().logsumexp(-1), rtol=0, atol=3e-6)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_fewer_ids_than_the_store_has_are_the_likeliest_of_all(stores: dict[str, Path], k: int) -> None:
    check(StoredTeacher(stores["plain"], TOKENIZER, top_k=k).score(text_batch(TEXTS)), scores_of(TEXTS, top_k=k))


def test_a_store_answers_at_its_own_temperature_and_at_one(stores: dict[str, Path]) -> None:
    batch = text_batch(TEXTS)
    check(StoredTeacher(stores["warm"], TOKENIZER).score(batch), scores_of(TEXTS, temperature=2.0))
    check(StoredTeacher(stores["warm"], TOKENIZER, temperature=1.0).score(batch), scores_of(TEXTS))
    for name, temperature in (("warm", 3.0), ("plain", 2.0)):
        with pytest.raises(ConfigError, match=r"has the normalisers at (2 and )?1\. .* --distill-temperature"):
            StoredTeacher(stores[name], TOKENIZER, temperature=temperature)


def test_more_ids_than_the_store_has_are_refused(stores: dict[str, Path]) -> None:
    for k in (0, 8):
        with pytest.raises(ConfigError, match=rf"top_k={k}, but the teacher store .* keeps 7 .* --top-k {max(1, k)}"):
            StoredTeacher(stores["plain"], TOKENIZER, top_k=k)


def test_a_sampled_completion_is_refused_even_if_the_store_has_its_tokens(stores: dict[str, Path]) -> None:
    batch = replace(text_batch(TEXTS[:2]), is_sampled=torch.tensor([False, True]))
    with pytest.raises(DataError, match=r"'row 1' was sampled in this run.*on_policy_fraction=0"):
        StoredTeacher(stores["plain"], TOKENIZER).score(batch)


def test_a_changed_row_is_an_error_and_not_another_rows_scores(stores: dict[str, Path]) -> None:
    teacher = StoredTeacher(stores["plain"], TOKENIZER)
    swapped = replace(text_batch(TEXTS[:2]), sample_ids=("row 1", "row 0"))
    with pytest.raises(DataError, match=r"row 'row 1' is in the teacher store .*, but with other tokens"):
        teacher.score(swapped)


def test_rows_that_are_missing_can_be_found_before_the_first_step(stores: dict[str, Path]) -> None:
    teacher = StoredTeacher(stores["plain"], TOKENIZER)
    teacher.check_batch(text_batch(TEXTS))
    with pytest.raises(DataError, match=r"row 'x' is not in the teacher store .*NEW_FOLDER"):
        teacher.check_batch(replace(text_batch(TEXTS[:3]), sample_ids=("row 0", "x", "y")))


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (tiny.char_tokenizer("0123456789+=bacdefgh "), "the ids or special-token roles and the merges differ"),
        (tiny.char_tokenizer("0123456789+=abcdefgh x"), "the ids or special-token roles and the merges differ"),
    ],
)
def test_another_tokenizer_is_refused(stores: dict[str, Path], other: Any, differs: str) -> None:
    with pytest.raises(VocabularyMismatch, match=rf"another student's tokenizer .*{differs}.*cohobate score"):
        StoredTeacher(stores["plain"], other)


def test_another_chat_template_is_refused(stores: dict[str, Path]) -> None:
    other = tiny.char_tokenizer()
    other.chat_template = "{{ messages }}"
    with pytest.raises(VocabularyMismatch, match=r"another teacher's tokenizer .*: the chat template differ"):
        StoredTeacher(stores["own"], other)


def test_a_teacher_with_its_own_tokenizer_brings_how_it_was_scored(stores: dict[str, Path]) -> None:
    teacher = StoredTeacher(stores["own"], TOKENIZER)
    assert teacher.texts is not None
    (text,) = teacher.texts
    assert (text.tokenizer, text.max_length, text.special_roles) == (TOKENIZER, 9, {"<a>": "<eos>"})
    check(teacher.score(text_batch(TEXTS)), scores_of(TEXTS))


def test_the_teachers_own_prompts_must_be_those_that_it_was_scored_with(stores: dict[str, Path]) -> None:
    prompts = PromptConfig(system_prompt="Be brief.")
    teacher = StoredTeacher(stores["prompted"], TOKENIZER, prompts=prompts)
    assert teacher.texts is not None
    assert teacher.texts[0].prompts is prompts
    for name, wrong in (("prompted", None), ("own", prompts), ("prompted", PromptConfig(system_prompt=""))):
        with pytest.raises(ConfigError, match=r"prompts of the teacher are .* here and .* in the teacher store"):
            StoredTeacher(stores[name], TOKENIZER, prompts=wrong)
    with pytest.raises(ConfigError, match="reads the student's prompts"):
        StoredTeacher(stores["plain"], TOKENIZER, prompts=prompts)


# ------------------------------------------------------------------ asking a model


def test_a_model_is_asked_for_the_same_in_batches_of_any_size() -> None:
    model = tiny.llama(3, vocab_size=48, hidden=64)
    wanted = []
    for text in TEXTS:
        with torch.no_grad():
            logits = model(torch.from_numpy(text.ids)[None]).logits[0, text.first : -1, :40]
        wanted.append(
            top_k_scores(logits, torch.from_numpy(text.ids[text.first + 1 :]), 5, temperature=2.0, rows="pairs")
        )
    told: list[int] = []
    for batch_tokens in (1, 20, 10_000):
        told.clear()
        teacher = LocalTeacher(model, vocab_size=40)
        score = TextScorer(teacher, top_k=5, temperature=2.0, batch_tokens=batch_tokens, on_rows=told.append)
        found = score(TEXTS)
        for name in FIELDS:
            expected = torch.cat([getattr(one, name) for one in wanted])
            torch.testing.assert_close(getattr(found, name), expected, rtol=1e-4, atol=1e-4)
        assert (found.temperature, found.vocab_size) == (2.0, 40)
        assert sum(told) == sum(text.num_rows for text in TEXTS)


def test_batches_keep_to_their_tokens_and_leave_out_no_text() -> None:
    for batch_tokens in (1, 16, 40, 10_000):
        plan = planned(TEXTS, batch_tokens)
        assert sorted(i for part in plan for i in part) == list(range(len(TEXTS)))
        widths = [max(len(TEXTS[i].ids) for i in part) * len(part) for part in plan]
        assert all(w <= batch_tokens or len(part) == 1 for w, part in zip(widths, plan, strict=True))
    assert len(planned(TEXTS, 10_000)) == 1


def test_logits_are_made_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = text_batch(TEXTS)
    scores = LocalTeacher(tiny.llama(3, vocab_size=40)).score(batch)
    monkeypatch.setattr(kept_scores_file, "_BLOCK_BYTES", 4 * 40 * 3)
    made: list[int] = []
    whole = HiddenScores.logits
    monkeypatch.setattr(HiddenScores, "logits", lambda self: made.append(len(self.hidden)) or whole(self))
    kept_scores(scores, batch.teacher.target_ids, 4)
    assert max(made) <= 3
    assert sum(made) == batch.num_pairs


def test_a_teacher_that_does_not_know_all_logits_cannot_fill_a_store() -> None:
    class Sampled:
        provides = SampledScores

        def score(self, batch: AlignedBatch, /) -> SampledScores:
            raise NotImplementedError

    with pytest.raises(ConfigError, match="Sampled provides SampledScores"):
        TextScorer(Sampled(), top_k=3)


def test_canned_logits_have_no_ties() -> None:
    assert all(len(row.unique()) == 40 for row in dense(TEXTS[0]))
