# SPDX-License-Identifier: Apache-2.0
"""What a row means, and the rows that are refused with a cure."""

import datetime
import os
import subprocess
import sys
from typing import Any

import pytest

from cohobate.data.rows import RowContent, dataset_fingerprint, read_row, sample_id, with_system
from cohobate.errors import DataError

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "prompt", "completion"),
    [
        ({"prompt": "q"}, "q", None),
        ({"prompt": "q", "completion": None, "messages": None}, "q", None),
        ({"prompt": "q", "completion": "a"}, "q", "a"),
        ({"prompt": [USER]}, (USER,), None),
        ({"prompt": [USER], "completion": "a"}, (USER,), ANSWER),
        ({"prompt": [USER], "completion": [ANSWER]}, (USER,), ANSWER),
        ({"messages": [USER, ANSWER]}, (USER,), ANSWER),
        ({"messages": [USER, ANSWER, USER]}, (USER, ANSWER, USER), None),
        ({"messages": [{**USER, "tool_calls": None}, ANSWER]}, (USER,), ANSWER),
        ({"text": "t"}, None, "t"),
    ],
)
def test_every_kind_of_row_is_read(row: dict[str, Any], prompt: Any, completion: Any):
    assert read_row(row) == RowContent(prompt=prompt, completion=completion)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, r"none of `prompt`, `messages`, `text`; its columns are \(none\)"),
        ({"promt": "q"}, r"its columns are promt. Did you mean 'prompt'\?"),
        ({"question": "q", "answer": "a"}, r"columns are question, answer.*rename="),
        ({"prompt": "q", "text": "t"}, "has `prompt` and `text`.*row_kind='prompt'"),
        ({"messages": [USER], "completion": "a"}, "has `messages` and `completion`"),
        ({"prompt": ""}, "`prompt` is empty"),
        ({"prompt": "q", "completion": ""}, "`completion` is empty. Drop the row, or leave the column out"),
        ({"prompt": 3}, "`prompt` must be a conversation.*int 3"),
        ({"prompt": []}, r"`prompt` must be a conversation.*list \[\]"),
        ({"prompt": "q", "completion": [ANSWER]}, "`completion` must be one too, got list"),
        ({"prompt": [USER, ANSWER]}, "`prompt` ends with the assistant's turn.*`completion`"),
        ({"prompt": [USER], "completion": [ANSWER, USER, ANSWER]}, "got the roles assistant, user, assistant"),
        ({"prompt": [USER], "completion": ""}, "recorded completion is empty"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "recorded completion is empty"),
        ({"messages": [ANSWER]}, "an answer and no question"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "role 'asistant'.*Did you mean 'assistant'"),
        ({"messages": [{"role": "<|im_start|>user", "content": "a"}]}, "message 0 of `messages` has role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content of type int"),
        ({"text": 3}, "`text` must be a string, got int 3"),
        (["prompt"], "must be a mapping"),
    ],
)
def test_a_row_that_means_nothing_is_refused_with_what_was_found(row: Any, message: str):
    with pytest.raises(DataError, match=message):
        read_row(row)


def test_where_a_row_has_several_kinds_one_can_be_chosen():
    row = {"prompt": "q", "completion": "a", "text": "t"}
    assert read_row(row, kind="text").completion == "t"
    assert read_row(row, kind="prompt") == RowContent(prompt="q", completion="a")
    with pytest.raises(DataError, match="row_kind is 'messages', but the row's columns are prompt, completion, text"):
        read_row(row, kind="messages")


def test_an_answer_that_only_calls_a_tool_is_an_answer():
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    assert read_row({"messages": [USER, call]}).completion == call


def test_the_system_prompt_of_the_configuration_replaces_the_rows():
    system = {"role": "system", "content": "s"}
    assert with_system([system, USER], None) == (system, USER)
    assert with_system([system, USER], "new") == ({"role": "system", "content": "new"}, USER)
    assert with_system([USER], "new") == ({"role": "system", "content": "new"}, USER)
    assert with_system([system, USER], "") == (USER,)


def test_a_row_is_named_by_its_column_or_by_fingerprint_and_number():
    assert sample_id({"sample_id": "x"}, 3, column=None, fingerprint="f" * 64) == "x"
    assert sample_id({"sample_id": None}, 3, column=None, fingerprint="f" * 64) == "ffffffffffff:3"
    assert sample_id({"uid": 7}, 3, column="uid", fingerprint="f" * 64) == "7"
    for row in ({"uid": None}, {"uid": ""}, {"uid": 1.5}, {"uid": True}, {"id": "a"}):
        with pytest.raises(DataError, match=r"row 3 has .* in the column 'uid'"):
            sample_id(row, 3, column="uid", fingerprint="")


ROWS = [
    {"prompt": "é", "n": 1, "when": datetime.date(2026, 1, 2), "raw": b"\x00", "tags": {"b", "a"}},
    {"n": 2.5, "prompt": "b"},
]


def test_the_fingerprint_is_of_the_content_and_of_nothing_else():
    reference = dataset_fingerprint(ROWS)
    assert dataset_fingerprint([dict(reversed(row.items())) for row in ROWS]) == reference
    changed = [
        ROWS[::-1],
        ROWS[:1],
        [{**ROWS[0], "prompt": "e"}, ROWS[1]],
        [{**ROWS[0], "raw": b"\x01"}, ROWS[1]],
        [{**ROWS[0], "when": datetime.date(2026, 1, 3)}, ROWS[1]],
        [{**ROWS[0], "tags": {"a"}}, ROWS[1]],
        [{**ROWS[0], "more": None}, ROWS[1]],
    ]
    assert len({reference, *map(dataset_fingerprint, changed)}) == len(changed) + 1


def test_the_fingerprint_is_the_same_in_another_process():
    program = f"import datetime; from cohobate.data.rows import dataset_fingerprint as f; print(f({ROWS!r}))"
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    other = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == dataset_fingerprint(ROWS)


def test_a_value_of_an_unknown_type_has_no_address_in_the_fingerprint():
    assert dataset_fingerprint([{"a": object()}]) == dataset_fingerprint([{"a": object()}])
