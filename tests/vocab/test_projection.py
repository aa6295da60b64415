# SPDX-License-Identifier: Apache-2.0
"""A projection's rows come from chains of bytes, add up to one, and belong to one pair of tokenizers."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerFast

from cohobate.errors import VocabularyMismatch
from cohobate.vocab import Projection, SubtokenTables, token_bytes
from small_tokenizers import bpe, chat_tokenizer


@cache
def other() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=bpe(size=330), eos_token="<|im_end|>", bos_token="<|im_start|>")


@cache
def built() -> Projection:
    return Projection.build(chat_tokenizer(), other())


def test_a_token_that_both_have_is_exact_and_alone_in_its_row():
    ours, theirs = token_bytes(chat_tokenizer()), token_bytes(other())
    for token, piece in enumerate(ours):
        if piece is not None:
            assert built().exact[token] == (piece in theirs)
        if built().exact[token] and piece is not None:
            assert theirs[built().indices[token, 0]] == piece
            assert built().weights[token].tolist() == [1, 0, 0, 0]


def test_other_rows_are_the_definition():
    """Weights of a chain fall by ten; the chains of teacher tokens add theirs; four heaviest; normalised."""
    tables = SubtokenTables.build(chat_tokenizer(), other())
    rows: dict[int, dict[int, float]] = {}
    for student, chain in enumerate(tables.student_to_teacher):
        if 1 < len(chain) <= 4:
            raw = [0.9 * 0.1**i for i in range(len(chain))]
            for token, weight in zip(chain, raw, strict=True):
                row = rows.setdefault(student, {})
                row[token] = row.get(token, 0) + weight / sum(raw)
    for teacher, chain in enumerate(tables.teacher_to_student):
        if 1 < len(chain) <= 4:
            raw = [0.9 * 0.1**i for i in range(len(chain))]
            for student, weight in zip(chain, raw, strict=True):
                row = rows.setdefault(student, {})
                row[teacher] = row.get(teacher, 0) + weight / sum(raw)
    checked = 0
    for student in range(built().student_vocab_size):
        if built().exact[student]:
            continue
        want = sorted(rows.get(student, {}).items(), key=lambda item: (-item[1], item[0]))[:4]
        total = sum(weight for _, weight in want)
        assert [i for i in built().indices[student].tolist() if i >= 0] == [token for token, _ in want]
        assert built().weights[student].sum() == pytest.approx(1.0 if want else 0.0, abs=1e-12)
        assert built().weights[student, : len(want)].tolist() == pytest.approx([w / total for _, w in want], abs=1e-12)
        checked += bool(want)
    assert checked > 50


def test_without_the_reverse_pass_only_a_tokens_own_chain_counts():
    tables = SubtokenTables.build(chat_tokenizer(), other())
    alone = Projection.build(chat_tokenizer(), other(), reverse_pass=False)
    for student, chain in enumerate(tables.student_to_teacher):
        used = {i for i in alone.indices[student].tolist() if i >= 0}
        assert used == (set(chain) if len(chain) <= 4 else set())


def test_a_teacher_id_claimed_twice_goes_to_the_lowest_or_to_the_heaviest():
    made = Projection.from_rows(
        [[0, -1], [0, -1], [1, 2], [1, 2], [2, -1]],
        [[1, 0], [1, 0], [0.7, 0.3], [0.9, 0.1], [1, 0]],
        [True, True, False, False, False],
        teacher_vocab_size=3,
    )
    assert [x.tolist() for x in made.strict_pairs] == [[0], [0]]
    assert [x.tolist() for x in made.relaxed_pairs] == [[0, 3, 4], [0, 1, 2]]


def test_what_was_saved_is_loaded_and_belongs_to_its_tokenizers(tmp_path: Path):
    built().save(tmp_path / "p.bin")
    loaded = Projection.load(tmp_path / "p.bin")
    loaded.validate(chat_tokenizer(), other())
    for name in ("indices", "weights", "exact"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(built(), name))
    with pytest.raises(VocabularyMismatch, match="swapped"):
        loaded.validate(other(), chat_tokenizer())
    changed = PreTrainedTokenizerFast(tokenizer_object=bpe(size=331), eos_token="<|im_end|>", bos_token="<|im_start|>")
    with pytest.raises(VocabularyMismatch, match=r"teacher_fingerprint is not .*teacher.*projection build"):
        loaded.validate(chat_tokenizer(), changed)
    (tmp_path / "q").write_text("x")
    with pytest.raises(VocabularyMismatch, match="is no projection"):
        Projection.load(tmp_path / "q")
    with pytest.raises(VocabularyMismatch, match="there is no projection"):
        Projection.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("indices", "weights", "exact", "message"),
    [
        ([[0]], [[0.5]], [False], r"row 0 of the projection adds up to 0\.5, not 1"),
        ([[0]], [[np.nan]], [False], r"row 0 of the projection adds up to nan, not 1"),
        ([[-1, 0]], [[0.0, 1.0]], [True], "has its entries in front"),
        ([[0, 1]], [[0.1, 0.9]], [False], "the weights of a projection's row descend"),
        ([[3]], [[1.0]], [True], "names teacher id 3, but the teacher has 2"),
        ([[-1]], [[1.0]], [False], "0 where its index is -1"),
        ([[0, 1]], [[0.5, 0.5]], [True], "an exact row of a projection has one entry"),
        ([[0]], [[1.0]], [False], "no student token is a teacher token"),
        ([0], [1.0], [True], r"indices and weights \[Vs, k\]"),
    ],
)
def test_rows_that_are_no_projection_are_refused(indices: list, weights: list, exact: list, message: str):
    with pytest.raises(VocabularyMismatch, match=message):
        Projection.from_rows(indices, weights, exact, teacher_vocab_size=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": np.float32}, "integer indices, floating weights and boolean exact, got float32"),
        ({"weights": np.int64}, "got int32, int64 and bool"),
        ({"exact": np.uint8}, "float64 and uint8"),
        ({"header": "[1]"}, "is no projection"),
        ({"teacher_vocab_size": None}, "is no projection"),
        ({"teacher_vocab_size": 10**7}, "has 10000000 teacher ids, but the tokenizer .* has 330"),
        ({"student_fingerprint": None}, "student_fingerprint is not that of the student's"),
    ],
)
def test_a_damaged_file_is_refused_before_it_is_used(tmp_path: Path, change: dict, message: str):
    built().save(tmp_path / "p")
    with safe_open(tmp_path / "p", framework="numpy") as file:
        text = file.metadata()["projection"]
        arrays = {name: file.get_tensor(name) for name in ("indices", "weights", "exact")}
    ((name, to),) = change.items()
    if name in arrays:
        arrays[name] = arrays[name].astype(to)
    text = to if name == "header" else json.dumps(json.loads(text) | ({} if name in arrays else {name: to}))
    save_file(arrays, tmp_path / "p", metadata={"projection": text})
    with pytest.raises(VocabularyMismatch, match=message):
        Projection.load(tmp_path / "p").validate(chat_tokenizer(), other())


def test_a_row_has_at_least_one_entry():
    with pytest.raises(ValueError, match="top_k must be >= 1"):
        Projection.build(chat_tokenizer(), other(), top_k=0)
