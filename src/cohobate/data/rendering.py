# SPDX-License-Identifier: Apache-2.0
"""Text and conversations to ids, knowing which control tokens the chat template wrote and which somebody typed.

For a conversation without control tokens in its text the ids are exactly those of the tokenizer's own
`apply_chat_template`. To know where each character of a rendering comes from, the template is rendered a second time
with every character of the content replaced by a private one of its own; white space, quotes and backslashes stay, so
trimming and JSON act as before. Roles are not replaced: they are structure, and must be known words.

A template that reads control tokens inside the content (Qwen3 splits assistant content at `</think>`) is not let: with
such content the second rendering counts, in which the content is opaque. Reasoning has a field of its own,
`reasoning_content`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from cohobate.data.control import ControlTokens, Span
from cohobate.errors import ConfigError, DataError

Messages = Sequence[Mapping[str, Any]]

_FIRST_MARK = 0xF0000  # two planes of private use: more than all characters that Unicode has assigned
_KEPT = frozenset(map(chr, [*range(0x20), 0x7F])) | frozenset('"\\')
_OWN_ARGUMENTS = ("messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text, and where its control tokens may be read: None is everywhere that the tokenizer would."""

    text: str
    control: tuple[Span, ...] | None = None

    @property
    def has_typed_control(self) -> bool:
        """Whether the text holds control tokens that somebody typed, which are encoded as text."""
        return self.control is not None


class Renderer:
    """One tokenizer with its chat template."""

    def __init__(self, tokenizer: Any, *, allow_control_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._allow = allow_control_tokens
        self.control = ControlTokens(tokenizer)
        self.prefix_ids = _prefix_ids(tokenizer.backend_tokenizer)

    def ids(self, rendered: Rendered) -> tuple[int, ...]:
        """Ids of the text alone: a chat template writes its own BOS, so none is added."""
        return self.control.encode(rendered.text, rendered.control)

    def text_ids(self, rendered: Rendered) -> tuple[int, ...]:
        """Ids of plain text with the BOS (if any) that the tokenizer itself puts first, once."""
        ids = self.ids(rendered)
        return ids if ids[: len(self.prefix_ids)] == self.prefix_ids else self.prefix_ids + ids

    def text(self, text: str) -> Rendered:
        """Plain text: every control token in it was typed."""
        return Rendered(text, () if not self._allow and self.control.find(text) else None)

    def append_trusted(self, rendered: Rendered, text: str) -> Rendered:
        """`rendered` with `text` of the recipe after it; control tokens in that text are meant as such."""
        if not text or rendered.control is None:
            return Rendered(rendered.text + text, rendered.control)
        shift = len(rendered.text)
        added = (Span(start + shift, end + shift, i) for start, end, i in self.control.find(text))
        return Rendered(rendered.text + text, (*rendered.control, *added))

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """The conversation as the chat template writes it.

        Raises:
            DataError: no chat template, or the template refuses the conversation, or a key reads like a control token.
        """
        arguments = {**(template_args or {}), "add_generation_prompt": add_generation_prompt}
        text = self._render(messages, tools, arguments)
        if self._allow or not self.control.find(text):
            return Rendered(text)
        for key in _keys([messages, tools]):
            if self.control.find(key):
                raise DataError(f"the key {key!r} of a message or tool reads like a control token. Rename or drop it.")
        marks = _marks([messages, tools])
        typed = any(map(self.control.find, _strings([messages, tools])))
        try:
            marked = self._render(_replace(messages, marks), _replace(tools, marks), arguments)
        except DataError:
            if typed:
                raise
            return Rendered(text)
        plain = marked.translate({mark: original for original, mark in marks.items()})
        if plain != text:
            return Rendered(plain, tuple(self.control.find(marked))) if typed else Rendered(text)
        if any(_has_mark(marked[start:end]) for start, end, _ in self.control.find(text)):
            return Rendered(text, tuple(self.control.find(marked)))
        return Rendered(text)

    def _render(self, messages: Any, tools: Any, arguments: Mapping[str, Any]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(
                "the row is a conversation, and the tokenizer has no chat template. Set tokenizer.chat_template, or "
                "give `prompt` as a string, which is taken as it is."
            )
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **arguments)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error


def check_template_args(template_args: Mapping[str, Any] | None) -> None:
    """Refuse template arguments that would replace what Cohobate itself passes."""
    for name in template_args or {}:
        if name in _OWN_ARGUMENTS:
            raise ConfigError(f"template_args cannot set {name!r}: it is given by the row or by Cohobate.")


def completion_ids(renderer: Renderer, prompt: Rendered, whole: Rendered, *, is_chat: bool) -> tuple[int, ...]:
    """Ids of `whole` after `prompt`, which must be its beginning, so that prompt ids + these are what the model reads.

    Where one token would span the border (it is never cut), the rest is encoded on its own, as a model that continues
    the prompt would write it. In a conversation, white space that the template writes after the turn's last control
    token is left out: a model that stops there never writes it.

    Raises:
        DataError: the prompt is not the beginning of the whole.
    """
    if not whole.text.startswith(prompt.text):
        raise DataError(_prefix_error(prompt.text, whole.text))
    if is_chat:
        whole = _until_end_of_turn(renderer, whole, len(prompt.text))
    encode = renderer.ids if is_chat else renderer.text_ids
    prompt_ids, whole_ids = encode(prompt), encode(whole)
    if whole_ids[: len(prompt_ids)] == prompt_ids:
        return whole_ids[len(prompt_ids) :]
    start = len(prompt.text)
    spans = whole.control
    if spans is not None:
        spans = tuple(Span(s - start, e - start, i) for s, e, i in spans if s >= start)
    return renderer.control.encode_after(whole.text[start:], spans)


def _until_end_of_turn(renderer: Renderer, whole: Rendered, start: int) -> Rendered:
    spans = renderer.control.find(whole.text) if whole.control is None else whole.control
    if not spans or spans[-1].start < start or whole.text[spans[-1].end :].strip():
        return whole
    return Rendered(whole.text[: spans[-1].end], whole.control)


def _prefix_error(prompt: str, whole: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole)))
    return (
        "the chat template writes the prompt differently once the answer follows, so the answer cannot be told. "
        f"From character {at} on the prompt has {prompt[at : at + 40]!r}, the whole {whole[at : at + 40]!r}. Often "
        "template arguments decide this (enable_thinking); or give the row as `prompt` and `completion` strings."
    )


def _prefix_ids(backend: Any) -> tuple[int, ...]:
    """What the tokenizer's post-processor puts before any text (BOS); what it puts after belongs to no prompt."""
    if backend.post_processor is None or not backend.num_special_tokens_to_add(False):
        return ()
    processed = backend.post_processor.process(_probe(), None, True)
    core = processed.special_tokens_mask.index(0)
    return tuple(processed.ids[:core])


def _probe() -> Any:
    return Tokenizer(WordLevel({"x": 0}, unk_token="x")).encode("x")


def _strings(value: Any) -> Iterator[str]:
    """Every string in messages and tools, except roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key != "role":
                yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _keys(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _keys(inner)


def _marks(value: Any) -> dict[int, int]:
    """A private character for each character of the content."""
    characters = dict.fromkeys(c for text in _strings(value) for c in text if c not in _KEPT and not c.isspace())
    return {ord(c): _FIRST_MARK + n for n, c in enumerate(characters)}


def _has_mark(text: str) -> bool:
    return any(ord(c) >= _FIRST_MARK for c in text)


def _replace(value: Any, marks: Mapping[int, int]) -> Any:
    if isinstance(value, str):
        return value.translate(marks)
    if isinstance(value, Mapping):
        return {key: inner if _is_structure(key, inner) else _replace(inner, marks) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace(inner, marks) for inner in value]
    return value


def _is_structure(key: str, value: Any) -> bool:
    """Roles and kinds (`text`, `function`, `object`) that templates compare with words of their own."""
    return key == "role" or (key == "type" and isinstance(value, str) and value.isidentifier())
