# SPDX-License-Identifier: Apache-2.0
"""Rows of a data set to the ids that the student continues, and to the ids of a recorded completion.

Tokens in, tokens out: a prompt is encoded here, once, and its ids are what is sampled from, trained on and scored. The
ids of a prompt do not depend on whether its answer is recorded or sampled. Nothing is ever cut: an over-long row is an
error, or a counted skip. Control tokens that somebody typed are text (`data/control.py`).
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from cohobate.data.rendering import Rendered, Renderer, check_template_args, completion_ids
from cohobate.data.rows import (
    Prompt,
    RowContent,
    RowKind,
    dataset_fingerprint,
    read_row,
    row_fingerprint,
    sample_id,
    with_system,
)
from cohobate.errors import ConfigError, DataError, did_you_mean


class PromptTooLong(DataError):
    """A prompt or recorded completion over its limit; `encode_rows` skips and counts these if asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig:
    """How rows become prompts, on the student's side."""

    system_prompt: str | None = None  # replaces the conversation's own; "" drops it, None keeps it
    template_args: Mapping[str, Any] | None = None  # passed to the chat template, e.g. {"enable_thinking": False}
    string_prompts: Literal["text", "user_turn"] = "text"  # a string is plain text, or a user's turn of a conversation
    row_kind: RowKind | None = None  # the column to read where a row has several
    sample_id_column: str | None = None  # None: `sample_id` if there is one, else data fingerprint + row number
    max_prompt_length: int | None = None  # tokens
    max_completion_length: int | None = None  # tokens of a recorded completion
    over_long: Literal["error", "skip"] = "error"
    append_eos: bool = True  # a recorded string ends with the end-of-sequence token, which is a target
    allow_control_tokens: bool = False  # read control tokens inside the data as such: only for data of your own

    def __post_init__(self) -> None:
        for name, choices in (
            ("string_prompts", ("text", "user_turn")),
            ("over_long", ("error", "skip")),
            ("row_kind", (None, *get_args(RowKind))),
        ):
            value = getattr(self, name)
            if value not in choices:
                words = [choice for choice in choices if choice]
                hint = did_you_mean(str(value), words)
                raise ConfigError(f"{name} must be one of {', '.join(words)}, got {value!r}.{hint}")
        for name in ("max_prompt_length", "max_completion_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}. Leave it out for no limit.")
        check_template_args(self.template_args)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """What a prompt was encoded from, so that the teacher's side can be written anew from it."""

    prompt: Prompt  # a string, or the messages with the student's system prompt
    tools: tuple[Any, ...] | None = None
    template_args: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One row, ready to be sampled from or trained on."""

    sample_id: str  # durable: travels through rollouts, scores, logs and errors
    prompt_ids: tuple[int, ...]  # what the student continues, never empty
    completion_ids: tuple[int, ...] | None  # the recorded completion with its end-of-turn token, or None
    row: Mapping[str, Any]  # every column of the data set, for callables, graders and routers
    source: PromptSource | None = None  # None for `text` rows
    has_typed_control: bool = False  # text of the row spells control tokens; they were encoded as text


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """A data set, encoded, and what to tell the user about it."""

    rows: tuple[PromptRow, ...]
    skipped: tuple[str, ...]  # sample_ids of the over-long rows that were left out
    fingerprint: str  # sha256 over the content of all rows, also the skipped ones

    @property
    def num_typed_control(self) -> int:
        """Rows whose text spells control tokens, which were encoded as text."""
        return sum(row.has_typed_control for row in self.rows)


class PromptEncoder:
    """Rows to `PromptRow`s, for one tokenizer."""

    def __init__(self, tokenizer: Any, config: PromptConfig | None = None) -> None:
        self.config = config or PromptConfig()
        self._renderer = Renderer(tokenizer, allow_control_tokens=self.config.allow_control_tokens)
        self._eos = getattr(tokenizer, "eos_token_id", None) if self.config.append_eos else None

    def __call__(self, row: Mapping[str, Any], index: int, *, fingerprint: str | None = None) -> PromptRow:
        """Row number `index` of a data set with this content `fingerprint` (None: of the row alone).

        Raises:
            DataError: naming the row; `PromptTooLong` over a limit.
        """
        name = f"number {index}"
        try:
            content = read_row(row, kind=self.config.row_kind)
            fingerprint = fingerprint or row_fingerprint(row)
            name = sample_id(row, index, column=self.config.sample_id_column, fingerprint=fingerprint)
            encoded = self._encode(content, row, name)
            self._check_lengths(encoded)
        except DataError as error:
            raise type(error)(f"row {name}: {error}") from error
        return encoded

    def encode_rows(self, rows: Iterable[Mapping[str, Any]]) -> EncodedRows:
        """All rows of a data set in order.

        Raises:
            DataError: no row, two rows of one name, or a row that cannot be used; over-long rows only if
                `over_long="error"`, or if none is left.
        """
        rows = rows if hasattr(rows, "__len__") else list(rows)
        fingerprint = dataset_fingerprint(rows)
        encoded: dict[str, PromptRow] = {}
        skipped: list[str] = []
        for index, row in enumerate(rows):
            try:
                made = self(row, index, fingerprint=fingerprint)
            except PromptTooLong:
                if self.config.over_long == "error":
                    raise
                skipped.append(sample_id(row, index, column=self.config.sample_id_column, fingerprint=fingerprint))
                continue
            if made.sample_id in encoded:
                raise DataError(
                    f"two rows are named {made.sample_id!r}, the second is row {index}. Names must be unique: give "
                    "another sample_id_column, or drop the column so that rows are numbered."
                )
            encoded[made.sample_id] = made
        if not encoded:
            raise DataError(
                f"all {len(skipped)} rows are over their limit (max_prompt_length={self.config.max_prompt_length}, "
                f"max_completion_length={self.config.max_completion_length}). Raise it."
                if skipped
                else "the data set is empty. Check the path, the split and the filters before it."
            )
        _warn_of_spelled_answers(list(encoded.values()))
        return EncodedRows(rows=tuple(encoded.values()), skipped=tuple(skipped), fingerprint=fingerprint)

    def _encode(self, content: RowContent, row: Mapping[str, Any], name: str) -> PromptRow:
        made = PromptRow(sample_id=name, prompt_ids=(), completion_ids=None, row=row)
        if content.prompt is None:
            return self._encode_text(content, made)
        if isinstance(content.prompt, str) and self.config.string_prompts == "text":
            return self._encode_string(content, made)
        return self._encode_chat(content, made)

    def _encode_text(self, content: RowContent, made: PromptRow) -> PromptRow:
        """The first token has no predictor, so it is the whole prompt; every other token is a target."""
        assert isinstance(content.completion, str)
        text = self._renderer.text(content.completion)
        ids = self._with_eos(self._renderer.text_ids(text))
        if len(ids) < 2:
            raise DataError("`text` is a single token, which nothing predicts. Drop the row.")
        return replace(made, prompt_ids=ids[:1], completion_ids=ids[1:], has_typed_control=text.has_typed_control)

    def _encode_string(self, content: RowContent, made: PromptRow) -> PromptRow:
        if self.config.system_prompt is not None or self.config.template_args:
            raise DataError(
                "`prompt` is a string and is taken as it is, so system_prompt and template_args have nowhere to go. "
                "Set string_prompts='user_turn' to make it a user's turn of a conversation."
            )
        assert isinstance(content.prompt, str)
        prompt = self._renderer.text(content.prompt)
        completion, whole = None, prompt
        if content.completion is not None:
            assert isinstance(content.completion, str)
            whole = self._renderer.text(content.prompt + content.completion)
            completion = self._with_eos(completion_ids(self._renderer, prompt, whole, is_chat=False))
        return replace(
            made,
            prompt_ids=self._renderer.text_ids(prompt),
            completion_ids=completion,
            source=PromptSource(prompt=content.prompt),
            has_typed_control=whole.has_typed_control,
        )

    def _encode_chat(self, content: RowContent, made: PromptRow) -> PromptRow:
        prompt, answer = content.prompt, content.completion
        if isinstance(prompt, str):
            prompt = ({"role": "user", "content": prompt},)
        assert prompt is not None
        if isinstance(answer, str):
            answer = {"role": "assistant", "content": answer}
        source = PromptSource(
            prompt=tuple(dict(message) for message in with_system(prompt, self.config.system_prompt)),
            tools=tuple(made.row["tools"]) if made.row.get("tools") else None,
            template_args=self.config.template_args,
        )
        asked = render_source(self._renderer, source)
        completion, whole = None, asked
        if answer is not None:
            assert not isinstance(source.prompt, str)
            whole = self._renderer.chat(
                [*source.prompt, answer], tools=source.tools, template_args=source.template_args
            )
            completion = completion_ids(self._renderer, asked, whole, is_chat=True)
        return replace(
            made,
            prompt_ids=self._renderer.ids(asked),
            completion_ids=completion,
            source=source,
            has_typed_control=whole.has_typed_control,
        )

    def _with_eos(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids if self._eos is None or ids[-1:] == (self._eos,) else (*ids, self._eos)

    def _check_lengths(self, row: PromptRow) -> None:
        if not row.prompt_ids:
            raise DataError("the prompt has no token, so nothing would predict the first token of its completion.")
        if row.completion_ids is not None and not row.completion_ids:
            raise DataError("the recorded completion has no token. Drop the row, or leave its completion out.")
        for what, ids, limit in (
            ("prompt", row.prompt_ids, self.config.max_prompt_length),
            ("completion", row.completion_ids or (), self.config.max_completion_length),
        ):
            if limit is not None and len(ids) > limit:
                raise PromptTooLong(
                    f"the {what} has {len(ids)} tokens, over max_{what}_length={limit}. Nothing is cut: raise the "
                    "limit, drop the row, or set over_long='skip' to leave such rows out and count them."
                )


def _warn_of_spelled_answers(rows: list[PromptRow]) -> None:
    names = [row.sample_id for row in rows if row.has_typed_control and row.completion_ids is not None]
    if names:
        warnings.warn(
            f"{len(names)} of {len(rows)} rows spell control tokens and have a recorded answer (first: {names[0]})."
            " They are encoded as plain text: a student would learn to write them letter by letter. Reasoning belongs "
            "in the message's `reasoning_content`; if all text is your own, set allow_control_tokens=True.",
            stacklevel=3,
        )


def render_source(renderer: Renderer, source: PromptSource) -> Rendered:
    """A prompt that waits for its answer."""
    if isinstance(source.prompt, str):
        return renderer.text(source.prompt)
    return renderer.chat(
        source.prompt, tools=source.tools, template_args=source.template_args, add_generation_prompt=True
    )
