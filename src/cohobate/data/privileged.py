# SPDX-License-Identifier: Apache-2.0
"""What the teacher sees more than the student: a worked solution, a demonstration, feedback on the student's answer.

The result is the complete teacher prefix: what stands before the completion in the teacher's input. Both sides then
predict the same completion tokens, so the prefix must end where the student's does (at the start of the answer). Each
side has its own system prompt, template arguments and generation prefix; what is not set is as on the student's side,
and a row with nothing privileged gets the student's prompt ids themselves, never a second encoding of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cohobate.data.lessons import Lesson, LessonConfig
from cohobate.data.prompts import PromptRow, PromptSource, render_source
from cohobate.data.rendering import Renderer, check_template_args
from cohobate.data.rows import is_conversation, read_conversation, with_system
from cohobate.errors import ConfigError, DataError, did_you_mean

DEFAULT_TEMPLATE = (
    "{question}\n\nFor reference, here is a worked solution:\n\n{privileged}\n\n"
    "Now answer the question yourself, in your own words.\n\n{question}"
)

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionView:
    """What the student answered, for contexts that react to it."""

    ids: tuple[int, ...]
    text: str
    lesson: Lesson | None = None  # what is shown of its group, in a run with `PrivilegedConfig.lessons`


ContextCallable = Callable[[Mapping[str, Any], CompletionView | None], Sequence[Mapping[str, Any]] | str | None]
"""`(row, completion) -> teacher messages`, or text for the template, or None for nothing privileged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivilegedConfig:
    """The teacher's side of a prompt. None: as on the student's side."""

    source: str | ContextCallable | None = None  # a column of the row, or a callable
    lessons: LessonConfig | None = None  # instead of a source: what the group of each completion teaches
    template: str = DEFAULT_TEMPLATE  # the teacher's last user turn: {question}, {privileged}, and any column
    system_prompt: str | None = None  # replaces the student's; "" drops it
    template_args: Mapping[str, Any] | None = None  # replaces the student's
    generation_prefix: str = ""  # written after the generation prompt; control tokens in it count
    max_length: int | None = None  # tokens of the whole prefix
    allow_control_tokens: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.source, str) and "privileged" not in _PLACEHOLDER.findall(self.template):
            raise ConfigError(
                f"the privileged template {self.template!r} does not contain {{privileged}}, so the teacher would not "
                f"see the column {self.source!r}."
            )
        if self.lessons is not None:
            self._check_with_lessons()
        check_template_args(self.template_args)

    def _check_with_lessons(self) -> None:
        if self.source is not None:
            raise ConfigError(
                "source and lessons each say what the teacher sees more; set one of them. A template of lessons may "
                "ask for any column."
            )
        if self.template != DEFAULT_TEMPLATE:
            raise ConfigError("the template of lessons is their own: set lessons.template, and leave template out.")
        if self.allow_control_tokens:
            raise ConfigError(
                "allow_control_tokens would let a completion that spells control tokens write turns of the teacher's "
                "conversation. Leave it out beside lessons."
            )


class PrivilegedContext:
    """Rows, and what the student answered, to complete teacher prefixes."""

    def __init__(self, tokenizer: Any, config: PrivilegedConfig | None = None, *, own_tokenizer: bool = False) -> None:
        """`own_tokenizer`: `tokenizer` is not the student's, whose ids would mean nothing to it."""
        self.config = config or PrivilegedConfig()
        self._own_tokenizer = own_tokenizer
        self._renderer = Renderer(tokenizer, allow_control_tokens=self.config.allow_control_tokens)
        own = (self.config.system_prompt, self.config.template_args, self.config.generation_prefix or None)
        self._writes_anew = any(value is not None for value in own)

    def __call__(self, prompt_row: PromptRow, completion: CompletionView | None = None) -> tuple[int, ...]:
        """Ids of everything that the teacher reads before the completion of this row.

        With its own tokenizer a teacher reads a `text` row from the beginning: there is nothing before it.

        Raises:
            DataError: naming the row: a missing column, messages that do not end with a question, a prefix over
                `max_length`.
        """
        try:
            ids = self._prefix(prompt_row, completion)
        except DataError as error:
            raise type(error)(f"row {prompt_row.sample_id}, teacher's side: {error}") from error
        return ids

    def _prefix(self, prompt_row: PromptRow, completion: CompletionView | None) -> tuple[int, ...]:
        value = self._privileged(prompt_row.row, completion)
        says_nothing = value is None and not self._writes_anew
        if says_nothing and (prompt_row.source is None or not self._own_tokenizer):
            ids = () if self._own_tokenizer else prompt_row.prompt_ids
        else:
            source = self._source(prompt_row, value)
            asked = render_source(self._renderer, source)
            rendered = self._renderer.append_trusted(asked, self.config.generation_prefix)
            is_text = isinstance(source.prompt, str)
            ids = self._renderer.text_ids(rendered) if is_text else self._renderer.ids(rendered)
        if self.config.max_length is not None and len(ids) > self.config.max_length:
            raise DataError(
                f"the prefix has {len(ids)} tokens, over max_length={self.config.max_length} (the student's prompt "
                f"has {len(prompt_row.prompt_ids)}). It is never cut: either end of it is needed. Raise the limit, or "
                "show the teacher less."
            )
        return ids

    def _privileged(self, row: Mapping[str, Any], completion: CompletionView | None) -> Any:
        if self.config.lessons is not None:
            return _lesson_of(completion)
        source = self.config.source
        if source is None:
            return None
        if not isinstance(source, str):
            return source(row, completion)
        if source not in row:
            columns = [str(column) for column in row]
            raise DataError(
                f"the row has no column {source!r}, which the teacher is to see; its columns are {', '.join(columns)}."
                f"{did_you_mean(source, columns)}"
            )
        return row[source]

    def _source(self, prompt_row: PromptRow, value: Any) -> PromptSource:
        student = prompt_row.source
        if student is None:
            raise DataError(
                "a `text` row has no question that the teacher could read with more in it. Give such rows as `prompt` "
                "and `completion`."
            )
        config = self.config
        if isinstance(value, Lesson):
            prompt = self._filled(prompt_row, student.prompt, value)
        elif is_conversation(value):
            prompt = read_conversation(value, "the privileged context")
            if prompt[-1]["role"] in ("assistant", "model"):
                raise DataError("the teacher's messages end with the assistant's turn; they must end with a question.")
        elif value is None:
            prompt = student.prompt
        else:
            prompt = self._filled(prompt_row, student.prompt, _as_text(value))
        if isinstance(prompt, str):
            if config.system_prompt is not None or config.template_args is not None:
                raise DataError(
                    "the prompt is a string and is taken as it is, so system_prompt and template_args have nowhere to "
                    "go. Set string_prompts='user_turn' on the student's side."
                )
            return PromptSource(prompt=prompt)
        messages = tuple(dict(message) for message in with_system(prompt, config.system_prompt))
        args = student.template_args if config.template_args is None else config.template_args
        return replace(student, prompt=messages, template_args=args)

    def _filled(self, prompt_row: PromptRow, prompt: Any, shown: str | Lesson) -> Any:
        """The student's prompt with its question replaced by the template around it."""
        if isinstance(prompt, str):
            return self._fill(prompt_row.row, prompt, shown)
        last = max((i for i, message in enumerate(prompt) if message["role"] == "user"), default=None)
        if last is None:
            raise DataError("the conversation has no user's turn in which the privileged context could be shown.")
        question = _as_text(prompt[last].get("content"))
        asked = {**prompt[last], "content": self._fill(prompt_row.row, question, shown)}
        return (*prompt[:last], asked, *prompt[last + 1 :])

    def _fill(self, row: Mapping[str, Any], question: str, shown: str | Lesson) -> str:
        own = ("demonstration", "feedback") if isinstance(shown, Lesson) else ("privileged",)

        def value_of(name: str) -> str:
            if name == "question":
                return question
            if row.get(name) is None:
                names = ["question", *own]
                raise DataError(
                    f"the privileged template asks for {{{name}}}, which is neither a column of the row nor one of "
                    f"{', '.join(f'{{{n}}}' for n in names)}.{did_you_mean(name, [*names, *map(str, row)])}"
                )
            return _as_text(row[name])

        if isinstance(shown, Lesson):
            assert self.config.lessons is not None
            return self.config.lessons.fill(shown, value_of)
        template = self.config.template
        return _PLACEHOLDER.sub(lambda match: shown if match[1] == "privileged" else value_of(match[1]), template)


def _lesson_of(completion: CompletionView | None) -> Lesson | None:
    """The lesson, or None for an empty one."""
    if completion is None or completion.lesson is None:
        raise ConfigError(
            "privileged.lessons are made of a group of completions that the student samples; here there is none. They "
            "serve training alone: recorded completions cannot be scored with them."
        )
    return None if completion.lesson.is_empty else completion.lesson


def _as_text(value: Any) -> str:
    """Text of a column: a string, a number, several strings below each other, or the text parts of a message."""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, (list, tuple)):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        if parts and len(texts) == len(parts):
            return "\n\n".join(texts)
    raise DataError(
        f"text was expected, a string or a list of strings, got {type(value).__name__} {str(value)[:60]!r}."
    )
