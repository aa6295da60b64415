# SPDX-License-Identifier: Apache-2.0
"""What a row of a data set means: which kind it is, its conversation, its recorded completion, its durable name.

A row is one of: `prompt` (a string or a conversation), `prompt` with `completion`, `messages`, `text`. A column that
is None counts as absent, so tables that mix kinds work; two kinds in one row are an error, since either reading could
be meant.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cohobate.errors import DataError, did_you_mean

RowKind = Literal["prompt", "messages", "text"]
Prompt = str | tuple[dict[str, Any], ...]

ROLES = (
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
    "ipython",
    "observation",
    "environment",
    "model",
)
_ANSWERS = ("assistant", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowContent:
    """A row, read. `prompt` is None for `text` rows; a completion is a string or one assistant message."""

    prompt: Prompt | None
    completion: str | dict[str, Any] | None


def read_row(row: Mapping[str, Any], *, kind: RowKind | None = None) -> RowContent:
    """What `row` asks and, if recorded, answers; `kind` chooses a column where a row has several.

    Raises:
        DataError: no kind or two kinds, an empty prompt or completion, a conversation that is none.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"a row must be a mapping from column to value, got {type(row).__name__}.")
    kind = _kind(row) if kind is None else _chosen(row, kind)
    if kind == "text":
        return RowContent(prompt=None, completion=_text(row["text"], "text"))
    if kind == "messages":
        messages = read_conversation(row["messages"], "messages")
        if messages[-1]["role"] not in _ANSWERS:
            return RowContent(prompt=messages, completion=None)
        if len(messages) == 1:
            raise DataError("`messages` holds an answer and no question. Put what was asked before it, or use `text`.")
        return RowContent(prompt=messages[:-1], completion=_answer(messages[-1]))
    prompt = _prompt(row["prompt"])
    recorded = row.get("completion")
    return RowContent(prompt=prompt, completion=None if recorded is None else _completion(recorded, prompt))


def read_conversation(value: Any, column: str) -> tuple[dict[str, Any], ...]:
    """The messages of `value`, without keys that are None; each with a known role.

    Raises:
        DataError: not a conversation.
    """
    if not is_conversation(value):
        raise DataError(
            f"`{column}` must be a conversation, a list of messages like {{'role': 'user', 'content': '…'}}, "
            f"got {_describe(value)}."
        )
    messages = tuple({key: inner for key, inner in message.items() if inner is not None} for message in value)
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            hint = did_you_mean(str(role), ROLES)
            raise DataError(f"message {i} of `{column}` has role {role!r}; known are {', '.join(ROLES)}.{hint}")
        if content is not None and not isinstance(content, (str, list, tuple)):
            raise DataError(f"message {i} of `{column}` has content of type {type(content).__name__}, not a string.")
    return messages


def is_conversation(value: Any) -> bool:
    """Whether `value` is a non-empty list of mappings."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)


def with_system(messages: Sequence[Mapping[str, Any]], system_prompt: str | None) -> tuple[Mapping[str, Any], ...]:
    """`messages` under this system prompt, which replaces their own; None leaves them as they are, "" drops it."""
    if system_prompt is None:
        return tuple(messages)
    rest = tuple(message for i, message in enumerate(messages) if not (i == 0 and message["role"] == "system"))
    return ({"role": "system", "content": system_prompt}, *rest) if system_prompt else rest


def dataset_fingerprint(rows: Iterable[Mapping[str, Any]]) -> str:
    """sha256 (hex) over the content of all rows in order: equal in every process, whatever the file is called."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row_fingerprint(row).encode())
    return digest.hexdigest()


def row_fingerprint(row: Mapping[str, Any]) -> str:
    """sha256 (hex) over one row's columns and values."""
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=_plain).encode()).hexdigest()


def sample_id(row: Mapping[str, Any], index: int, *, column: str | None, fingerprint: str) -> str:
    """The row's durable name: its `column`, by default `sample_id` if there is one, else fingerprint and row number.

    Raises:
        DataError: the named column is missing or holds neither a string nor an integer.
    """
    if column is None and row.get("sample_id") is None:
        return f"{fingerprint[:12]}:{index}"
    column = column or "sample_id"
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise DataError(
            f"row {index} has {value!r} in the column {column!r}, which names rows: a string or an integer is needed. "
            f"Columns: {', '.join(map(str, row))}."
        )
    return str(value)


def _kind(row: Mapping[str, Any]) -> RowKind:
    present = [kind for kind in get_args(RowKind) if row.get(kind) is not None]
    if len(present) == 1:
        if present[0] != "prompt" and row.get("completion") is not None:
            present.append("completion")
        else:
            return present[0]
    if present:
        raise DataError(
            f"the row has {' and '.join(f'`{kind}`' for kind in present)}, and each would be trained on differently. "
            f"Drop one column, or choose with row_kind={present[0]!r}."
        )
    columns = [str(column) for column in row]
    hints = dict.fromkeys(hint for column in columns if (hint := did_you_mean(column, get_args(RowKind))))
    raise DataError(
        f"the row has none of `prompt`, `messages`, `text`; its columns are {', '.join(columns) or '(none)'}."
        f"{next(iter(hints), '')} Rename a column when loading: load_rows(…, rename={{'question': 'prompt'}}), or "
        "data.rename.question=prompt in a recipe."
    )


def _chosen(row: Mapping[str, Any], kind: RowKind) -> RowKind:
    if row.get(kind) is None:
        raise DataError(f"row_kind is {kind!r}, but the row's columns are {', '.join(map(str, row))}.")
    return kind


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return _text(value, "prompt")
    messages = read_conversation(value, "prompt")
    if messages[-1]["role"] in _ANSWERS:
        raise DataError(
            "the conversation in `prompt` ends with the assistant's turn, so nothing is asked. If that turn is a "
            "recorded answer, put it in `completion`, or name the column `messages`."
        )
    return messages


def _completion(value: Any, prompt: Prompt) -> str | dict[str, Any]:
    if isinstance(prompt, str):
        if not isinstance(value, str):
            raise DataError(f"`prompt` is a string, so `completion` must be one too, got {_describe(value)}.")
        return _text(value, "completion")
    if isinstance(value, str):
        return _answer({"role": "assistant", "content": value})
    messages = read_conversation(value, "completion")
    if len(messages) != 1 or messages[0]["role"] not in _ANSWERS:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"`completion` must be one assistant message, got the roles {roles}: other turns are not the student's to "
            "learn. Put the turns before the last answer into `prompt`."
        )
    return _answer(messages[0])


def _answer(message: dict[str, Any]) -> dict[str, Any]:
    said = (message.get(key) for key in ("content", "tool_calls", "reasoning_content", "reasoning", "thinking"))
    if not any(said):
        raise DataError(
            "the recorded completion is empty, so there is nothing to learn from it. Drop the row, or drop the answer "
            "so that the student is sampled."
        )
    return message


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"`{column}` must be a string, got {_describe(value)}.")
    if not value:
        cure = (
            " Drop the row, or leave the column out so that the student is sampled." if column == "completion" else ""
        )
        raise DataError(f"`{column}` is empty.{cure or ' Drop the row.'}")
    return value


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'…' if len(text) > 60 else ''}"


def _plain(value: Any) -> Any:
    """Values that JSON lacks, as something that is equal in every process."""
    if isinstance(value, (bytes, bytearray)):
        return hashlib.sha256(value).hexdigest()
    for method in ("isoformat", "tolist", "tobytes"):
        if hasattr(value, method):
            return _plain(made) if isinstance(made := getattr(value, method)(), bytes) else made
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, Mapping):
        return dict(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"
