# SPDX-License-Identifier: Apache-2.0
"""What is kept of a prediction, what of it is lost, how much room it takes, and by what it is found again."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cohobate.align import AlignedBatch, AlignedSide
from cohobate.data import PromptConfig
from cohobate.errors import AlignmentError, ConfigError
from cohobate.functional.scores import TopKScores
from cohobate.teachers.store_format import (
    Text,
    asked_texts,
    data_digest,
    decoded,
    encoded,
    prompt_settings,
    row_columns,
    text_columns,
)
from teachers import canned_store
from teachers.canned_store import header, texts

FIELDS = ("ids", "logits", "log_normalizer", "log_normalizer_t1", "realized_logit")


def scores(vocab_size: int, top_k: int, *, rows: int = 50, temperature: float = 1.0, seed: int = 0) -> TopKScores:
    rng = np.random.default_rng(seed)
    ids = np.stack([np.sort(rng.choice(vocab_size, top_k, replace=False)) for _ in range(rows)])
    logits = torch.from_numpy(rng.normal(0, 5, (rows, top_k))).float()
    tail = torch.from_numpy(rng.uniform(0.01, 3, rows)).float()
    return TopKScores(
        ids=torch.from_numpy(ids),
        logits=logits,
        log_normalizer=(logits / temperature).logsumexp(-1) + tail,
        log_normalizer_t1=logits.logsumexp(-1) + tail,
        realized_logit=torch.from_numpy(rng.normal(0, 5, rows)).float(),
        temperature=temperature,
        vocab_size=vocab_size,
    )


def there_and_back(made: TopKScores, **changes: Any) -> TopKScores:
    known = header(
        texts(), vocab_size=made.vocab_size, top_k=made.ids.shape[1], temperature=made.temperature, **changes
    )
    columns = encoded(made, known)
    wanted = row_columns(known)
    assert {name: (column.dtype.type, column.shape[1:]) for name, column in columns.items()} == wanted
    return decoded(columns, known)


@pytest.mark.parametrize("vocab_size", [200, 65_536, 65_537, 151_665, 262_145])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_exact_columns_give_back_every_bit(vocab_size: int, temperature: float) -> None:
    made = scores(vocab_size, 100, temperature=temperature)
    found = there_and_back(made)
    for name in FIELDS:
        assert torch.equal(getattr(found, name), getattr(made, name)), name
    assert (found.temperature, found.vocab_size) == (temperature, vocab_size)


def test_ids_on_both_sides_of_every_border_of_65536_come_back() -> None:
    ids = [0, 65_535, 65_536, 65_537, 131_071, 131_072, 196_607, 196_608, 199_999]
    one = scores(200_000, len(ids), rows=2)
    low = replace(one, ids=torch.tensor([ids, list(range(len(ids)))]))
    assert torch.equal(there_and_back(low).ids, low.ids)
    high = replace(one, ids=torch.tensor([list(range(196_600, 196_609)), list(range(65_540, 65_549))]))
    assert torch.equal(there_and_back(high, values="compact").ids, high.ids)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_compact_logits_are_off_by_at_most_one_step_and_their_mass_by_nothing(temperature: float, seed: int) -> None:
    made = scores(5000, 64, temperature=temperature, seed=seed)
    found = there_and_back(made, values="compact")
    for wanted, got in zip(made.logits.tolist(), found.logits.tolist(), strict=True):
        step = (max(wanted) - min(wanted)) / 65_534
        assert max(abs(a - b) for a, b in zip(wanted, got, strict=True)) <= step + 2e-6  # and float32's own rounding
        masses = [math.log(math.fsum(math.exp(x / temperature) for x in row)) for row in (wanted, got)]
        assert masses[0] == pytest.approx(masses[1], abs=2e-6)
    for name in FIELDS:
        if name != "logits":
            assert torch.equal(getattr(found, name), getattr(made, name)), name


def test_without_the_shift_the_mass_of_a_row_would_be_off() -> None:
    """The shift is there for a reason: rounding alone moves the mass of a wide row by more than a float32 does."""
    logits = torch.tensor([[0.4, -0.3, -9e3] + [-5.0 - i for i in range(20)]])
    made = replace(scores(100, 23, rows=1), logits=logits, log_normalizer=logits.logsumexp(-1) + 1e-4)
    found = there_and_back(made, values="compact")
    step = 9000.4 / 65_534
    assert (found.logits - logits).abs().max() > 0.1 * step
    assert float(found.logits.double().logsumexp(-1) - logits.double().logsumexp(-1)) == pytest.approx(0, abs=1e-3)
    assert float(found.logprobs().exp().sum()) <= 1


@pytest.mark.parametrize("values", ["exact", "compact"])
def test_ids_that_a_teacher_rules_out_stay_ruled_out(values: str) -> None:
    made = scores(100, 5, rows=3)
    made.logits[1, 2:] = -math.inf
    made.logits[2, :4] = -math.inf  # one id alone: a range of 0
    made = replace(made, log_normalizer=made.logits.logsumexp(-1), log_normalizer_t1=made.logits.logsumexp(-1))
    made.realized_logit[0] = -math.inf
    found = there_and_back(made, values=values)
    assert torch.equal(found.logits.isinf(), made.logits.isinf())
    torch.testing.assert_close(found.logits, made.logits, rtol=0, atol=1e-3)
    assert found.realized_logit[0] == -math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logits", math.nan),
        ("logits", math.inf),
        ("log_normalizer", math.nan),
        ("log_normalizer", -math.inf),
        ("log_normalizer_t1", math.inf),
        ("realized_logit", math.nan),
        ("realized_logit", math.inf),
    ],
)
def test_numbers_that_are_no_distribution_are_refused_with_their_row(field: str, value: float) -> None:
    made = scores(100, 5, rows=4, temperature=2.0)
    getattr(made, field)[2] = value
    with pytest.raises(ValueError, match="prediction 2 has a logit that is NaN"):
        there_and_back(made)


@pytest.mark.parametrize(("values", "most"), [("exact", 1100), ("compact", 600)])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("vocab_size", [49_152, 151_665, 262_144])
def test_a_prediction_takes_no_more_room_than_promised(
    values: str, most: int, temperature: float, vocab_size: int
) -> None:
    known = header(texts(), values=values, temperature=temperature, vocab_size=vocab_size, top_k=128)
    size = sum(np.dtype(kind).itemsize * math.prod(width) for kind, width in row_columns(known).values())
    assert size <= most - 60  # what a text of one prediction takes besides
    columns = text_columns(texts(1))
    assert sum(column.nbytes for column in columns.values()) <= 60


def test_a_text_is_known_by_its_name_and_every_id() -> None:
    one = Text(sample_id="a", ids=np.array([1, 2, 3]), first=0)
    others = [
        replace(one, sample_id="b"),
        replace(one, ids=np.array([1, 2, 4])),
        replace(one, ids=np.array([2, 1, 3])),
        replace(one, ids=np.array([1, 2, 3, 3])),
        replace(one, ids=np.array([1, 2])),
    ]
    assert len({text.key for text in [one, *others]}) == 6
    assert replace(one, ids=one.ids.astype(np.int32), first=1).key == one.key  # of integers of any width
    assert one.key[:2] == others[1].key[:2]  # the name's half
    digests = {data_digest(part) for part in ([one], [one, one], others, others[::-1], [replace(one, first=1)])}
    assert len(digests) == 5


def test_a_batch_is_asked_for_without_its_padding(batch: AlignedBatch) -> None:
    ids = batch.teacher.model_inputs["input_ids"]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 0]])
    index = torch.tensor([4, 6, 7, 9 + 5, 9 + 6])
    side = AlignedSide(model_inputs={"input_ids": ids, "attention_mask": mask}, pair_index=index)
    asked = list(asked_texts(replace(batch, teacher=side, target_ids=ids.flatten()[index + 1])))
    assert [one.text.sample_id for one in asked] == ["a", "b"]
    assert [one.text.ids.tolist() for one in asked] == [ids[0, 2:].tolist(), ids[1, :8].tolist()]
    assert [one.positions.tolist() for one in asked] == [[2, 4, 5], [5, 6]]
    assert [one.text.first for one in asked] == [2, 5]
    assert [one.pairs for one in asked] == [slice(0, 3), slice(3, 5)]
    nothing = replace(
        batch,
        student=AlignedSide(model_inputs={}, pair_index=index[:0]),
        teacher=replace(side, pair_index=index[:0]),
        **{name: getattr(batch, name)[:0] for name in ("target_ids", "weights", "row")},
    )
    assert list(asked_texts(nothing)) == []


@pytest.mark.parametrize("index", [8, 9 + 7, 1])
def test_a_prediction_of_a_token_that_does_not_follow_is_refused(batch: AlignedBatch, index: int) -> None:
    """The last id of a row, the last before its padding, and one in the padding before it."""
    ids = batch.teacher.model_inputs["input_ids"]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 0]])
    side = AlignedSide(model_inputs={"input_ids": ids, "attention_mask": mask}, pair_index=torch.tensor([index] * 5))
    target = ids.flatten()[(side.pair_index + 1) % 18]
    with pytest.raises(AlignmentError, match=f"row '{'ab'[index // 9]}': a prediction is of another token"):
        list(asked_texts(replace(batch, teacher=side, target_ids=target)))
    with pytest.raises(AlignmentError):  # in its place, but of another token
        list(asked_texts(replace(batch, target_ids=torch.full((5,), 22))))


def test_settings_of_a_teachers_prompts_are_those_that_are_not_as_usual() -> None:
    assert prompt_settings(None) is None
    assert prompt_settings(PromptConfig(max_prompt_length=9)) is None
    assert prompt_settings(PromptConfig(system_prompt="")) == {"system_prompt": ""}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"top_k": 0}, r"top_k must be in \[1, 40\]"),
        ({"top_k": 41}, r"top_k must be in \[1, 40\]"),
        ({"top_k": 65_536, "vocab_size": 10**6}, r"top_k must be in \[1, 65535\]"),
        ({"values": "compakt"}, r"values must be 'exact' or 'compact'.* Did you mean 'compact'"),
    ],
)
def test_a_store_that_cannot_be_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        header(texts(), **changes)


def test_every_difference_of_two_headers_is_named() -> None:
    one = header(texts())
    other = replace(one, teacher_weights="e" * 64, temperature=2.0, template="f" * 64)
    assert one.differences(other) == [
        "teacher_weights is bbbbbbbbbbbb… in the store and eeeeeeeeeeee… now",
        "template is not there in the store and ffffffffffff… now",
        "temperature is 1.0 in the store and 2.0 now",
    ]
    assert one.differences(header(texts())) == []


def test_canned_scores_are_those_of_their_texts() -> None:
    one, two = texts(2)
    both = canned_store.scores_of([one, two])
    alone = canned_store.scores_of([two])
    assert torch.equal(both.logits[one.num_rows :], alone.logits)
