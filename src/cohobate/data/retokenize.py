# SPDX-License-Identifier: Apache-2.0
"""What a teacher with its own tokenizer reads: its own prompt, and the student's completion in its own tokens.

The prompt is written anew from the data row, by the teacher's chat template. The completion is not: whatever the
student wrote or was recorded with is known only as ids of the student's tokenizer, so their bytes are what the teacher
is given, tokenized as the continuation of its prompt, as it would have written them itself.

They are given as *content*. A student may spell `<|im_end|>` letter by letter; the teacher then reads these letters,
not the end of its turn. A control token that the student did write as one stands for itself on the teacher's side if
both vocabularies have it and it frames no turn (`<think>`), or if the user named its counterpart. The end of the turn
is paired by its role: the teacher has one exactly if the student has.

A model may write anything, so nothing that stands in a completion is an error here. Where bytes are no text, a special
has no counterpart, or the teacher's length is over, its row ends at the last boundary that both sides share; the
student's tokens after it are in no chunk, and neither are those of characters that the teacher's tokenizer changes
(NFC). How many they are is logged.

S tokens of a completion.
"""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cohobate.align.agreement import align_agreeing, chunks_of, no_chunks, ranges_of, valid_text
from cohobate.align.cross_tokenizer import TeacherText, TeacherTokens
from cohobate.align.spans import Chunks
from cohobate.data.control import Span
from cohobate.data.privileged import CompletionView, PrivilegedConfig, PrivilegedContext
from cohobate.data.prompts import PromptConfig, PromptRow
from cohobate.data.rendering import Renderer, completion_ids
from cohobate.errors import ConfigError, DataError
from cohobate.vocab.pieces import TokenPieces, token_pieces
from cohobate.vocab.tokens import alphabet, text_steps

_QUESTION, _ANSWER = ({"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"})
_OF_PROMPTS = (
    "system_prompt",
    "template_args",
    "allow_control_tokens",
)  # of a PromptConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A completion as text with control tokens in it, as far as it is text."""

    text: str
    control: tuple[Span, ...]  # where the text holds the teacher's control tokens
    positions: tuple[int, ...]  # the student's tokens that these stand for
    end: tuple[int, int] | None  # the student's position of its end of turn, and its id
    num_tokens: int  # of the completion that are tokens of the student at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """How one side's chat template writes an assistant's turn."""

    space: bool = False  # a space that is not the answer's stands in front of it
    end_id: int | None = None  # the control token that ends it
    turn_ids: frozenset[int] = frozenset()  # control tokens that begin or end turns


class TeacherReader:
    """The rows and completions of one student as one teacher reads them."""

    def __init__(
        self,
        text: TeacherText,
        student_tokenizer: Any,
        *,
        eos_token_ids: Sequence[int],
        privileged: PrivilegedConfig | None = None,
    ) -> None:
        """`eos_token_ids`: the ids that end a completion of the student. `privileged`: what the teacher sees more.

        Raises:
            ConfigError: settings that have no effect on a teacher, or control tokens that do not exist.
            VocabularyMismatch: a tokenizer whose ids do not give the text's bytes back.
        """
        self.text = text
        self._context = PrivilegedContext(
            text.tokenizer, _context_config(text.prompts, privileged), own_tokenizer=True
        )
        self._student, self._teacher = token_pieces(student_tokenizer), token_pieces(text.tokenizer)
        self._renderer = Renderer(text.tokenizer)
        student_renderer = Renderer(student_tokenizer)
        self._student_prefix = student_renderer.prefix_ids
        self._student_frame = read_frame(student_renderer, self._student)
        self._frame = read_frame(self._renderer, self._teacher)
        self._rewrite = _rewriting(text.tokenizer)
        self._named = _named(student_tokenizer, text.tokenizer, text.special_roles or {})
        ours, self._content_of = _contents(student_tokenizer), _contents(text.tokenizer)
        ends = {*eos_token_ids, self._student_frame.end_id}
        self._ends = frozenset(i for i in ends if i is not None and (i in ours or i in self._student.roles))
        kept = (self._student_frame.turn_ids | self._ends, self._frame.turn_ids)
        self._counterpart = _shared_control(student_tokenizer, text.tokenizer, kept) | self._named
        self._marks = self._student.special.copy()  # [V] ids that are no ordinary text
        self._marks[[*self._counterpart, *self._ends]] = True
        self._try_to_write_control_as_text()

    @property
    def reads_completion(self) -> bool:
        """Whether the prompt depends on what the student answered."""
        config = self._context.config
        return callable(config.source) or config.lessons is not None

    @property
    def pad_token_id(self) -> int:
        """Stands where the mask is 0."""
        own = getattr(self.text.tokenizer, "pad_token_id", None)
        return 0 if own is None else own

    def prompt_ids(self, row: PromptRow, completion: CompletionView | None = None) -> tuple[int, ...]:
        """Everything that the teacher reads before the completion; empty for a `text` row, which has no prompt.

        Raises:
            DataError: naming the row, as `PrivilegedContext`.
        """
        return self._context(row, completion)

    def __call__(self, row: PromptRow, completion: Sequence[int], prompt_ids: Sequence[int]) -> TeacherTokens:
        """The teacher's row behind `prompt_ids`, and the chunks over both sides' completions."""
        ids = np.asarray(completion, dtype=np.int64)
        if row.source is None:
            return self._read_text(row, ids)
        is_chat = not isinstance(row.source.prompt, str)
        content = self._content(ids, skip_space=is_chat and self._student_frame.space)
        lead = " " if is_chat and self._frame.space and content.text else ""
        control = tuple(Span(a + len(lead), b + len(lead), i) for a, b, i in content.control)
        read = self._encoded(lead + content.text, control, continues=True)
        end_id = self._frame.end_id if is_chat else None
        may_lead = (is_chat and self._student_frame.space, bool(lead))
        return self._row(tuple(prompt_ids), ids, read, content, end_id=end_id, may_lead=may_lead)

    def _read_text(self, row: PromptRow, completion: NDArray[np.int64]) -> TeacherTokens:
        """A `text` row: both sides read it from its beginning, and neither's first token is predicted."""
        whole = np.concatenate([np.asarray(row.prompt_ids, dtype=np.int64), completion])
        prefix = self._student_prefix
        framed = len(prefix) if tuple(whole[: len(prefix)].tolist()) == prefix else 0
        ids = whole[framed:]
        content = self._content(ids, skip_space=self._student.prefix_space and not _begins_with_space(row))
        read = self._encoded(content.text, content.control, continues=False)
        made = self._row(self._renderer.prefix_ids, ids, read, content, end_id=None, may_lead=(False, False))
        shift = framed - len(row.prompt_ids)  # the student's prompt is the text's first token
        ranges = ranges_of(made.chunks) + np.array([shift, shift, 0, 0])
        return replace(made, chunks=chunks_of(ranges[ranges[:, 0] >= 0]))

    def _content(self, ids: NDArray[np.int64], *, skip_space: bool) -> Content:
        """The text that `ids` spell, up to what is none."""
        pieces = self._student.pieces
        unknown = np.flatnonzero((ids < 0) | (ids >= len(pieces)))
        stop = int(unknown[0]) if len(unknown) else len(ids)
        text, control, positions, end, before = "", [], [], None, 0
        for mark in [*np.flatnonzero(self._marks[ids[:stop]]).tolist(), stop]:
            spelled = b"".join(map(pieces.__getitem__, ids[before:mark].tolist()))
            part = valid_text(spelled)
            text += part
            if mark == stop or len(part.encode()) < len(spelled):
                break
            token_id, before = int(ids[mark]), mark + 1
            if token_id in self._ends:
                end = (mark, token_id)
                break
            if token_id not in self._counterpart:
                break
            other = self._counterpart[token_id]
            control.append(Span(len(text), len(text) + len(self._content_of[other]), other))
            positions.append(mark)
            text += self._content_of[other]
        if skip_space and text.startswith(" "):
            text, control = text[1:], [Span(a - 1, b - 1, i) for a, b, i in control]
        return Content(text=text, control=tuple(control), positions=tuple(positions), end=end, num_tokens=stop)

    def _try_to_write_control_as_text(self) -> None:
        """A tokenizer that cannot is refused now (ConfigError), not at the first completion that spells a control."""
        spelled = next((text for text in self._content_of.values() if not text.isspace()), None)
        if spelled is not None:
            self._encoded(spelled, (), continues=True)

    def _encoded(self, text: str, control: tuple[Span, ...], *, continues: bool) -> tuple[int, ...]:
        """The teacher's ids of `text`; none if its tokenizer cannot encode it."""
        encode = self._renderer.control.encode_after if continues else self._renderer.control.encode
        try:
            return encode(text, control) if text else ()
        except DataError:
            return ()

    def _row(
        self,
        prompt_ids: tuple[int, ...],
        ids: NDArray[np.int64],
        read: tuple[int, ...],
        content: Content,
        *,
        end_id: int | None,
        may_lead: tuple[bool, bool],
    ) -> TeacherTokens:
        """Prompt and content in one row, with its end of turn, cut at the last boundary that both sides have.

        `ids` are the student's tokens of the content and `read` the teacher's; `end_id` what ends the teacher's turn,
        by default its eos.
        """
        pairs = _placed(content, read)
        whole = len(pairs) == len(content.control)
        if content.end is not None and whole:
            position, student_end = content.end
            default = self.text.tokenizer.eos_token_id if end_id is None else end_id
            own_end = self._named.get(student_end, default)
            if own_end is not None:
                pairs.append((position, len(read)))
                read = (*read, own_end)
        chunks = align_agreeing(
            self._student,
            ids[: content.num_tokens],
            self._teacher,
            np.asarray(read, dtype=np.int64),
            pairs=pairs,
            may_lead=may_lead,
            rewrite=self._rewrite,
        )
        return _cut(prompt_ids, read, chunks, self.text.max_length)


def read_frame(renderer: Renderer, vocabulary: TokenPieces) -> Frame:
    """How the chat template frames an answer, seen by writing one; without a template nothing is known."""
    try:
        turns = {span.token_id for span in renderer.control.find(renderer.chat([_QUESTION]).text)}
        whole = renderer.chat([_QUESTION, _ANSWER])
    except DataError:
        return Frame()
    text, answer = whole.text, str(_ANSWER["content"])
    after = [span for span in renderer.control.find(text) if span.start > text.rfind(answer)]
    end_id = after[-1].token_id if after and not text[after[-1].end :].strip() else None
    try:
        asked = renderer.chat([_QUESTION], add_generation_prompt=True)
        written = completion_ids(renderer, asked, whole, is_chat=True)
    except DataError:  # the template writes the question differently before an answer
        written = ()
    return Frame(
        space=b"".join(vocabulary.pieces[i] for i in written).startswith(b" " + answer.encode()),
        end_id=end_id,
        turn_ids=frozenset(turns | {end_id} if end_id is not None else turns),
    )


def _context_config(prompts: PromptConfig | None, privileged: PrivilegedConfig | None) -> PrivilegedConfig:
    """What the teacher's prompt is written with, from both places that may say it."""
    config = privileged or PrivilegedConfig()
    if prompts is None:
        return config
    usual = PromptConfig()
    for name in PromptConfig.__dataclass_fields__:
        if name not in _OF_PROMPTS and getattr(prompts, name) != getattr(usual, name):
            raise ConfigError(
                f"prompts.{name} of a teacher would have no effect: rows are read on the student's side. A teacher's "
                f"prompts may set {', '.join(_OF_PROMPTS)}."
            )
    for name in _OF_PROMPTS:
        own, other = getattr(prompts, name), getattr(config, name)
        unset = getattr(usual, name)
        if own != unset and other != unset and own != other:
            raise ConfigError(
                f"{name} of the teacher is {own!r} in its prompts and {other!r} in the privileged context; set one of "
                "them."
            )
        if own != unset:
            config = replace(config, **{name: own})
    return config


def _named(student: Any, teacher: Any, special_roles: Mapping[str, str]) -> dict[int, int]:
    """The user's pairs of control tokens by their ids."""
    sides = [{text: i for i, text in _contents(tokenizer).items()} for tokenizer in (student, teacher)]
    for side, known, texts in zip(
        ("student", "teacher"), sides, (special_roles.keys(), special_roles.values()), strict=True
    ):
        for text in texts:
            if text not in known:
                raise ConfigError(
                    f"special_roles names {text!r}, which is no added token of the {side}; it has: "
                    f"{', '.join(sorted(known)[:12])}."
                )
    return {sides[0][ours]: sides[1][theirs] for ours, theirs in special_roles.items()}


def _shared_control(student: Any, teacher: Any, turns: tuple[frozenset[int], frozenset[int]]) -> dict[int, int]:
    """Added tokens of one text that are special on neither side and frame no turn, such as `<think>`."""
    ours, theirs = (
        {
            token.content: i
            for i, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
            if not token.special and not token.content.isspace() and i not in turn_ids
        }
        for tokenizer, turn_ids in zip((student, teacher), turns, strict=True)
    )
    return {i: theirs[content] for content, i in ours.items() if content in theirs}


def _contents(tokenizer: Any) -> dict[int, str]:
    return {i: token.content for i, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items()}


def _rewriting(tokenizer: Any) -> Callable[[str], str] | None:
    """What the tokenizer does to characters of a text: composes them, or takes its mark of a space for one."""
    composes = any(step["type"] == "NFC" for step in text_steps(tokenizer))
    mark = alphabet(tokenizer).space

    def rewrite(text: str) -> str:
        composed = unicodedata.normalize("NFC", text) if composes else text
        return composed if mark is None else composed.replace(mark, " ")

    return rewrite if composes or mark is not None else None


def _begins_with_space(row: PromptRow) -> bool:
    text = row.row.get("text")
    return isinstance(text, str) and text.startswith(" ")


def _placed(content: Content, read: tuple[int, ...]) -> list[tuple[int, int]]:
    """(student's, teacher's) positions of the control tokens in the content, in order, as far as they are there."""
    pairs: list[tuple[int, int]] = []
    after = 0
    for position, span in zip(content.positions, content.control, strict=True):
        if span.token_id not in read[after:]:
            break
        place = read.index(span.token_id, after)
        pairs.append((position, place))
        after = place + 1
    return pairs


def _cut(prompt_ids: tuple[int, ...], read: tuple[int, ...], chunks: Chunks, max_length: int | None) -> TeacherTokens:
    """The row up to its last chunk that fits; a row without any is its first token alone, which costs nothing."""
    ids, begin = (*prompt_ids, *read), len(prompt_ids)
    first = max(1, begin)  # without a prompt nothing predicts the first token
    ranges = ranges_of(chunks) + np.array([0, 0, begin - first, begin - first])
    room = len(ids) if max_length is None else max_length
    ranges = ranges[(ranges[:, 2] >= 0) & (ranges[:, 3] + first <= room)]
    if not len(ranges):
        return TeacherTokens(ids=ids[:1] or (0,), num_prompt=1, chunks=no_chunks())
    return TeacherTokens(ids=ids[: first + ranges[-1, 3]], num_prompt=first, chunks=chunks_of(ranges))
