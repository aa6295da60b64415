# SPDX-License-Identifier: Apache-2.0
"""A run that reads a store, by the command: what no longer fits is found before a step, and what is said mends it."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import tiny
from cli_runs import Outcome, refused
from cohobate.teachers.store_files import read_index
from tiny_bpe import student_tokenizer

SMALL = ["training.max_steps=2", "training.per_device_train_batch_size=4", "training.use_cpu=true"]
STORED = ["stored", "student.model=bpe", *SMALL]
CSD = ["csd", "student.model=bpe", "teachers.0.model=bpe_teacher", "teachers.0.top_k=6", *SMALL]


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.unlink(missing_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path.name


@pytest.fixture
def rows() -> list[dict[str, str]]:
    return [{"sample_id": f"r{i}", "prompt": f"{i}+12=", "completion": f"{i + 12}"} for i in range(300)]


@pytest.fixture
def big(place: Path) -> str:
    """A larger model with the student's vocabulary."""
    tiny.llama(6, vocab_size=27, hidden=24).save_pretrained(place / "big")
    student_tokenizer().save_pretrained(place / "big")
    return "big"


def command_in(done: Outcome) -> list[str]:
    """The words of the command that an error ends with, behind `cohobate`."""
    found = re.search(r"cohobate score .*--output NEW_FOLDER$", done.err.strip())
    assert found is not None, done.err
    return shlex.split(found[0])[1:]


def nothing_trained(place: Path) -> bool:
    return not [path for path in (place / "runs").rglob("*") if path.is_file()]


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_a_row_that_has_changed_is_found_before_a_step_and_the_command_scores_the_files_in_use(
    cohobate: Any, place: Path, big: str, rows: list[dict[str, str]], key: str
) -> None:
    """The row is the last one of 300, which no step of this run reaches; the store was made from another file."""
    first, second = write(place / "first.jsonl", rows), [*rows[:-1], {**rows[-1], "completion": "3"}]
    done = cohobate("score", "-t", big, "-s", "bpe", "-d", first, "-o", "store", "-k", "6", "--compact")
    assert done.code == 0, done.err
    data = {"data.train": first, "data.eval": first, key: write(place / "second.jsonl", second)}
    run = ["train", *STORED, "teacher.path=store", *(f"{name}={file}" for name, file in data.items())]
    stopped = cohobate(*run)
    refused(stopped, 1, "row 'r299' is in the teacher store store, but with other tokens", f"{key}=second.jsonl")
    assert nothing_trained(place)
    command = command_in(stopped)
    assert "--compact" in command
    assert cohobate(*command).code == 0
    done = cohobate(*run, "teacher.path=NEW_FOLDER")
    assert done.code == 0, done.err
    one, two = (read_index(Path(name)).header for name in ("store", "NEW_FOLDER"))
    assert (one.top_k, one.values, one.teacher_weights) == (two.top_k, two.values, two.teacher_weights)


def test_a_row_that_is_missing_is_named(cohobate: Any, place: Path, big: str, rows: list[dict[str, str]]) -> None:
    first, second = write(place / "first.jsonl", rows[:-1]), write(place / "second.jsonl", rows)
    assert cohobate("score", "-t", big, "-s", "bpe", "-d", first, "-o", "store", "-k", "6").code == 0
    stopped = cohobate("train", *STORED, "teacher.path=store", f"data.train={second}")
    refused(stopped, 1, "row 'r299' is not in the teacher store store", "--recipe stored")


def test_a_changed_row_is_found_for_a_teacher_with_its_own_tokens_too(
    cohobate: Any, place: Path, rows: list[dict[str, str]]
) -> None:
    first = write(place / "first.jsonl", rows)
    second = write(place / "second.jsonl", [*rows[:-1], {**rows[-1], "completion": "3"}])
    made = ["-t", "bpe_teacher", "-s", "bpe", "--own-tokenizer", "-d", first, "-o", "store", "-k", "6"]
    assert cohobate("score", *made).code == 0
    run = ["train", *CSD, "teachers.0.path=store"]
    stopped = cohobate(*run, f"data.train={second}")
    refused(stopped, 1, "row 'r299' is in the teacher store store, but with other tokens", "--teacher bpe_teacher")
    assert nothing_trained(place)
    assert cohobate(*command_in(stopped)).code == 0
    for data, path in ((first, "store"), (second, "NEW_FOLDER")):
        done = cohobate(*run, f"data.train={data}", f"teachers.0.path={path}", f"output_dir=runs/{path}")
        assert done.code == 0, done.err


def test_an_entry_with_an_aligner_refuses_scores_of_the_students_tokens(
    cohobate: Any, place: Path, big: str, rows: list[dict[str, str]]
) -> None:
    """Also where the tokenizer would fit, because the teacher scored rows that it encoded itself."""
    data = write(place / "first.jsonl", rows[:20])
    for name, arguments in (("of_student", ["-t", big, "-s", "bpe"]), ("of_teacher", ["-t", "bpe_teacher"])):
        assert cohobate("score", *arguments, "-d", data, "-o", name, "-k", "6").code == 0
        stopped = cohobate("train", *CSD, f"data.train={data}", f"teachers.0.path={name}")
        words = [f"store {name} holds scores of the student's tokens: it was made without --own-tokenizer", "aligner"]
        refused(stopped, 2, "teachers.0 (bpe_teacher)", *words)
    assert cohobate(*command_in(stopped)).code == 0
    done = cohobate("train", *CSD, f"data.train={data}", "teachers.0.path=NEW_FOLDER")
    assert done.code == 0, done.err


def test_a_teacher_without_aligner_refuses_scores_of_its_own_tokens(
    cohobate: Any, place: Path, big: str, rows: list[dict[str, str]]
) -> None:
    data = write(place / "first.jsonl", rows[:20])
    own = ["score", "-t", big, "-s", "bpe", "--own-tokenizer", "-d", data, "-o", "own", "-k", "6"]
    assert cohobate(*own).code == 0
    words = ["store own holds scores of the teacher's own tokens", "no aligner"]
    entry = ["teachers.0.aligner=null", f"teachers.0.model={big}", "teachers.0.path=own"]
    refused(cohobate("train", *CSD, *entry, f"data.train={data}"), 2, "teachers[0] in a store needs an aligner")
    run = ["train", *STORED, "teacher.path=own", f"teacher.tokenizer={big}", f"data.train={data}"]
    stopped = cohobate(*run)
    refused(stopped, 2, *words, "--recipe stored")
    command = command_in(stopped)
    assert "--own-tokenizer" not in command
    assert cohobate(*command).code == 0
    done = cohobate(*run, "teacher.path=NEW_FOLDER")
    assert done.code == 0, done.err


def test_scoring_tokens_that_mean_something_else_says_which_option_is_meant(cohobate: Any, place: Path) -> None:
    done = cohobate("score", "-t", "bpe_teacher", "-s", "bpe", "-d", "rows.jsonl", "-o", "store")
    refused(done, 2, "do not share a vocabulary", "is scored with --own-tokenizer")
