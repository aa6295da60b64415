# SPDX-License-Identifier: Apache-2.0
"""Sub-token tables spell every token's bytes by the other side's own merges; stale ones are refused."""

import json
import random
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cohobate.errors import VocabularyMismatch
from cohobate.vocab import SubtokenTables, token_bytes
from cohobate.vocab.subtokens import SINGLE, write_tables
from cohobate.vocab.tokens import alphabet
from small_tokenizers import bpe, chat_tokenizer, sentencepiece_tokenizer, word_tokenizer

STUDENT = [(), (3,), (2,), (1,), (0,), (0, 1), (0, 3), (0, 0)]
TEACHER = [(4,), (3,), (2,), (1,), (), (2, 1), (3, 2), (2, 4), (2, 4, 3)]


@cache
def other() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=bpe(size=330), eos_token="<|im_end|>", bos_token="<|im_start|>")


@cache
def tables() -> SubtokenTables:
    return SubtokenTables.build(chat_tokenizer(), other())


def merge_by_hand(piece: bytes, tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    """Byte pair encoding from its definition: join the neighbours of lowest rank until none can be joined."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    letters = {piece: text for text, piece in zip(model["vocab"], decoded(model["vocab"]), strict=True)}
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    parts = [letters[bytes([byte])] for byte in piece]
    while True:
        ranked = [(ranks.get((a, b), len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(ranked, default=(len(ranks), 0))
        if rank == len(ranks):
            return decoded(parts)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def decoded(texts: list[str]) -> list[bytes]:
    return [alphabet(other()).read(text) for text in texts]


def test_a_chain_is_what_the_destinations_merges_make_of_the_bytes():
    source, destination = token_bytes(chat_tokenizer()), token_bytes(other())
    checked = 0
    for piece, chain in zip(source, tables().student_to_teacher, strict=True):
        if piece is not None and piece not in destination:
            assert [destination[i] for i in chain] == merge_by_hand(piece, other())
            checked += 1
    assert checked > 100


def test_a_token_that_both_have_is_one_token_on_both_sides():
    ours, theirs = token_bytes(chat_tokenizer()), token_bytes(other())
    shared = [piece for piece in ours if piece is not None and piece in theirs]
    student, teacher = tables().common
    pairs = {(int(s), int(t)) for s, t in zip(student, teacher, strict=True)}
    assert {(ours.index(piece), theirs.index(piece)) for piece in shared} < pairs
    specials = [(ours[s], theirs[t]) for s, t in pairs if ours[s] is None]
    assert specials == [(None, None)]  # eos; the student has no bos
    assert len(pairs) == len(shared) + 1


def test_tokens_that_are_no_text_alone_are_spelled_byte_by_byte():
    euro = "€".encode()
    whole = Tokenizer(models.BPE({**letters(), "âĤ": 256}, [("â", "Ĥ")]))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    source = PreTrainedTokenizerFast(tokenizer_object=whole)
    assert token_bytes(source)[256] == euro[:2]
    table = SubtokenTables.build(source, other()).student_to_teacher
    assert [token_bytes(other())[i] for i in table[256]] == [euro[:1], euro[1:2]]


def letters() -> dict[str, int]:
    return {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def test_sentencepiece_vocabularies_are_spelled_with_their_own_letters_and_byte_tokens():
    source, destination = other(), sentencepiece_tokenizer()
    pieces, wanted = token_bytes(source), token_bytes(destination)
    table = SubtokenTables.build(source, destination).student_to_teacher
    assert all(
        b"".join(wanted[i] or b"" for i in chain) == piece for piece, chain in zip(pieces, table, strict=True) if piece
    )
    ab = pieces.index(b"a")
    assert wanted[table[ab][0]] == b"a"
    assert [wanted[i] for i in table[pieces.index(bytes([0xE6]))]] == [bytes([0xE6])]


def test_of_several_tokens_with_the_same_bytes_the_lowest_id_is_taken():
    def of(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
        made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token=None))
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        return PreTrainedTokenizerFast(tokenizer_object=made)

    bytes_ = {f"<0x{byte:02X}>": byte for byte in range(256)}
    twice = of({**bytes_, "a": 256})  # id 97 is the byte of "a" too
    once = of({**bytes_, "b": 256})
    built = SubtokenTables.build(twice, once)
    assert built.student_to_teacher[97] == (97,)
    assert built.student_to_teacher[256] == ()
    assert built.teacher_to_student[97] == (97,)
    built.validate(twice, once)


def test_specials_meet_by_role_or_as_the_user_says_and_no_id_twice():
    ours, theirs = chat_tokenizer(), other()
    start = ours.convert_tokens_to_ids("<|im_start|>"), theirs.convert_tokens_to_ids("<|endoftext|>")
    named = SubtokenTables.build(ours, theirs, {"<|im_start|>": "<|endoftext|>"})
    assert named.student_to_teacher[start[0]] == (start[1],)
    assert named.teacher_to_student[start[1]] == (start[0],)
    assert tables().student_to_teacher[start[0]] == ()
    named.validate(ours, theirs)
    with pytest.raises(VocabularyMismatch, match=r"'<eot>', which .* does not have"):
        SubtokenTables.build(ours, theirs, {"<|im_start|>": "<eot>"})


def test_what_was_saved_is_what_is_loaded(tmp_path: Path):
    file = tmp_path / "tables.bin"
    tables().save(file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tables.bin"]
    loaded = SubtokenTables.load(file)
    assert list(loaded.student_to_teacher) == list(tables().student_to_teacher)
    assert list(loaded.teacher_to_student) == list(tables().teacher_to_student)
    loaded.validate(chat_tokenizer(), other())


def test_a_folder_or_two_files_make_a_pair_and_one_direction_does_not(tmp_path: Path):
    for name in ("student_to_teacher", "teacher_to_student"):
        write_tables(tmp_path / f"{name}.safetensors", {SINGLE: getattr(tables(), name)})
    SubtokenTables.load(tmp_path).validate(chat_tokenizer(), other())
    one, two = tmp_path / "student_to_teacher.safetensors", tmp_path / "teacher_to_student.safetensors"
    SubtokenTables.load(one, two).validate(chat_tokenizer(), other())
    with pytest.raises(VocabularyMismatch, match="swapped"):
        SubtokenTables.load(two, one).validate(chat_tokenizer(), other())
    two.unlink()
    with pytest.raises(VocabularyMismatch, match=r"no sub-token table at .*teacher_to_student.*subtokens build"):
        SubtokenTables.load(tmp_path)
    write_tables(one, {"student_to_teacher": tables().student_to_teacher})
    with pytest.raises(
        VocabularyMismatch, match="holds student_to_teacher, not teacher_to_student: a pair needs both"
    ):
        SubtokenTables.load(one)


def test_a_file_that_is_something_else_is_refused(tmp_path: Path):
    (tmp_path / "text").write_text("no tables")
    with pytest.raises(VocabularyMismatch, match="is no sub-token table"):
        SubtokenTables.load(tmp_path / "text")
    save_file({"x": np.zeros(1)}, tmp_path / "other")
    with pytest.raises(VocabularyMismatch, match="holds no sub-token table"):
        SubtokenTables.load(tmp_path / "other")
    tables().save(tmp_path / "cut")
    with safe_open(tmp_path / "cut", framework="numpy") as file:
        header = file.metadata()
    tensors = load_file(tmp_path / "cut")
    tensors["student_to_teacher.ids"] = tensors["student_to_teacher.ids"][:-1]
    save_file(tensors, tmp_path / "cut", metadata=header)
    with pytest.raises(VocabularyMismatch, match="damaged: its student_to_teacher rows"):
        SubtokenTables.load(tmp_path / "cut")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": lambda x: x.astype(np.float32)}, "needs int32 ids and offsets, one row each"),
        ({"offsets": lambda x: x.astype(np.float64)}, "needs int32"),
        ({"ids": lambda x: x[:, None].copy()}, "one row each"),
        ({"offsets": lambda x: x[None].copy()}, "one row each"),
        ({"offsets": lambda x: np.append(x[:5], [0, *x[6:]]).astype(np.uint32)}, "needs int32"),
        ({"header": lambda _: [1]}, "a header with fields"),
        ({"header": lambda x: x | {"roles": None}}, "does not say which specials play which role"),
        ({"header": lambda x: x | {"roles": [["eos", 1]]}}, "does not say which specials play which role"),
    ],
)
def test_a_damaged_file_is_refused_before_it_is_used(tmp_path: Path, change: dict, message: str):
    tables().save(tmp_path / "t")
    with safe_open(tmp_path / "t", framework="numpy") as file:
        headers = file.metadata()
    arrays = load_file(tmp_path / "t")
    ((part, to),) = change.items()
    if part == "header":
        headers["student_to_teacher"] = json.dumps(to(json.loads(headers["student_to_teacher"])))
    else:
        arrays[f"student_to_teacher.{part}"] = to(arrays[f"student_to_teacher.{part}"])
    save_file(arrays, tmp_path / "t", metadata=headers)
    with pytest.raises(VocabularyMismatch, match=message):
        SubtokenTables.load(tmp_path / "t").validate(chat_tokenizer(), other())


def test_chains_may_be_arrays():
    forward, reverse = [np.array([0]), np.array([0, 0])], [np.array([0])]
    made = SubtokenTables.from_chains(forward, reverse)  # pyright: ignore[reportArgumentType]
    assert list(made.student_to_teacher) == [(0,), (0, 0)]


def test_a_role_is_not_for_ordinary_tokens():
    with pytest.raises(VocabularyMismatch, match="names 'x', an ordinary token of"):
        SubtokenTables.build(chat_tokenizer(), other(), {"x": "y"})


def test_tables_of_another_tokenizer_are_refused_with_the_side_and_the_field():
    changed = PreTrainedTokenizerFast(tokenizer_object=bpe(size=331), eos_token="<|im_end|>", bos_token="<|im_start|>")
    with pytest.raises(
        VocabularyMismatch, match=r"destination_fingerprint is not that of the teacher's.*subtokens build"
    ):
        tables().validate(chat_tokenizer(), changed)
    with pytest.raises(VocabularyMismatch, match=r"source_fingerprint is not that of the student's"):
        tables().validate(changed, other())
    reordered = json.loads(other().backend_tokenizer.to_str())
    reordered["model"]["merges"] = reordered["model"]["merges"][::-1]
    same_bytes = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(reordered)), eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    with pytest.raises(VocabularyMismatch, match="destination_merges is not that of the teacher's"):
        tables().validate(chat_tokenizer(), same_bytes)
    by_hand = SubtokenTables.from_chains(STUDENT, TEACHER)
    with pytest.raises(VocabularyMismatch, match="made by from_chains and says nothing of its tokenizers"):
        by_hand.validate(chat_tokenizer(), other())


@pytest.mark.parametrize("seed", range(12))
def test_no_changed_chain_passes(seed: int):
    rng = random.Random(seed)
    rows = list(tables().student_to_teacher)
    token_id = rng.choice([i for i, row in enumerate(rows) if row])
    change = rng.choice(["drop", "other", "longer", "empty"])
    row = rows[token_id]
    rows[token_id] = {
        "drop": row[:-1],
        "other": (*row[:-1], (row[-1] + 1) % len(tables().teacher_to_student)),
        "longer": (*row, row[-1]),
        "empty": (),
    }[change]
    header = tables().student_to_teacher.header
    broken = SubtokenTables(
        student_to_teacher=type(tables().student_to_teacher).from_chains(rows, header),
        teacher_to_student=tables().teacher_to_student,
    )
    with pytest.raises(VocabularyMismatch):
        broken.validate(chat_tokenizer(), other())


@pytest.mark.parametrize(
    ("forward", "reverse", "message"),
    [
        ([(0,)], [()], "says that student id 0 is teacher id 0, teacher_to_student does not"),
        ([()], [(0,)], "teacher_to_student says that student id 0 is teacher id 0, student_to_teacher does not"),
        ([(5,)], [(0,)], "ids from 5 to 5, but the other side has 0 to 0"),
        ([(0, 0)], [()], "no student token is one teacher token"),
    ],
)
def test_chains_that_cannot_be_a_pair_are_refused(forward: list, reverse: list, message: str):
    with pytest.raises(VocabularyMismatch, match=message):
        SubtokenTables.from_chains(forward, reverse)


def test_the_worked_example_by_hand():
    made = SubtokenTables.from_chains([(4,), *STUDENT[1:]], [*TEACHER[:4], (0,), *TEACHER[5:]])
    assert made.student_to_teacher[5] == (0, 1)
    assert made.student_to_teacher[0] == (4,)
    assert made.teacher_to_student[8] == (2, 4, 3)
    student, teacher = made.common
    assert list(zip(student.tolist(), teacher.tolist(), strict=True)) == [(0, 4), (1, 3), (2, 2), (3, 1), (4, 0)]
    with pytest.raises(IndexError, match="source id 8 is outside the table's 0 to 7"):
        made.student_to_teacher[8]


def test_what_is_no_bpe_or_cannot_write_text_is_refused():
    words = word_tokenizer({"<unk>": 0, "<eos>": 1, "a": 2})
    with pytest.raises(VocabularyMismatch, match=r"WordLevel vocabulary; its decoder is Fuse\. Sub-token tables"):
        SubtokenTables.build(other(), words)
    narrow = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    narrow.pre_tokenizer, narrow.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    with pytest.raises(VocabularyMismatch, match=r"cannot write \d+ of the \d+ tokens .* no token for 254 of the 256"):
        SubtokenTables.build(other(), PreTrainedTokenizerFast(tokenizer_object=narrow))
    with pytest.raises(VocabularyMismatch, match="NFKC, Lowercase"):
        SubtokenTables.build(chat_tokenizer(nfkc=True), other())


def test_progress_is_told():
    told: list[tuple[int, int]] = []
    SubtokenTables.build(chat_tokenizer(), other(), progress=lambda done, total: told.append((done, total)))
    sizes = [len(tables().student_to_teacher), len(tables().teacher_to_student)]
    assert [total for done, total in told if done == total] == sizes
