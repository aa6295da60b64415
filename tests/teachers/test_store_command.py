# SPDX-License-Identifier: Apache-2.0
"""The command that makes a store anew: of the recipe where there is one, else the old one with a word on its files."""

import shlex
from typing import Any

import pytest

from cohobate.teachers.store_command import anew, files_note
from teachers.canned_store import header, texts

HEADER = header(texts())  # 7 ids, temperature 1
BY_FILES = shlex.split(
    "cohobate score --teacher BIG --top-k 7 --student S --data a.jsonl --data b.jsonl --split x --chat"
)
BY_RECIPE = shlex.split(
    "cohobate score --top-k 7 --compact --dtype bfloat16 --recipe old.yaml teacher.model=BIG data.train=a"
)
RUN = ["--recipe", "new.yaml", "data.train=b", "student.model=S"]


@pytest.mark.parametrize(
    ("made_by", "options", "wanted"),
    [
        (BY_FILES, {}, "--teacher BIG --student S --data a.jsonl --data b.jsonl --split x --chat --top-k 7"),
        (
            BY_FILES,
            {"own_tokenizer": True, "top_k": 9},
            "--teacher BIG --student S --data a.jsonl --data b.jsonl --split x --chat --own-tokenizer --top-k 9",
        ),
        ([*BY_FILES, "--own-tokenizer", "--role", "a=b", "--max-length", "9"], {"own_tokenizer": False},
         "--teacher BIG --student S --data a.jsonl --data b.jsonl --split x --chat --top-k 7"),
        ((), {}, "--teacher MODEL --data ROWS --top-k 7"),
        (BY_FILES, {"run": RUN}, "--recipe new.yaml --teacher BIG --top-k 7 data.train=b student.model=S"),
        (
            [*BY_FILES, "--max-length", "9", "--own-tokenizer", "--limit", "3"],
            {"run": [*RUN, "--teacher", "THIS"], "temperature": 2.0},
            "--recipe new.yaml --teacher THIS --max-length 9 --top-k 7 --distill-temperature 2 data.train=b "
            "student.model=S",
        ),
        (
            BY_RECIPE,
            {"run": RUN},
            "--recipe new.yaml --teacher BIG --compact --dtype bfloat16 --top-k 7 data.train=b student.model=S",
        ),
        ((), {"run": RUN}, "--recipe new.yaml --teacher MODEL --top-k 7 data.train=b student.model=S"),
    ],
)  # fmt: skip
def test_what_is_kept_of_the_old_command_concerns_the_teacher(
    made_by: list[str], options: dict[str, Any], wanted: str
) -> None:
    assert anew(made_by, HEADER, **options) == f"cohobate score {wanted} --output NEW_FOLDER"


def test_the_files_of_the_old_command_are_said_to_be_old_where_no_recipe_is_known() -> None:
    assert files_note(BY_FILES, ()) == ", with its files in place of a.jsonl, b.jsonl"
    assert files_note(BY_FILES, RUN) == files_note(BY_RECIPE, ()) == ""


def test_a_store_at_another_temperature_is_scored_at_it_again() -> None:
    warm = header(texts(), temperature=2.0)
    assert "--distill-temperature 2 --output" in anew(BY_FILES, warm)
    assert "--distill-temperature 1 --output" in anew(BY_FILES, warm, temperature=1.0)
