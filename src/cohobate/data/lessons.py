# SPDX-License-Identifier: Apache-2.0
"""What one completion's teacher is shown of the group that the completion was drawn with.

Several completions of one row are graded. The teacher of one of them sees a successful other one, or what a feedback
says of the completion itself, or both; it then scores the completion token by token. So a score that is one bit a
completion becomes a difference of distributions at every token (SDPO, arXiv 2601.20802). A completion about which
nothing can be shown has no lesson: its teacher would be the student.

Nothing is drawn here: the demonstration of completion i is the next successful completion after i, around the group.
It spreads over the successful ones, and a group is taught alike on any number of ranks.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cohobate.data.graders import GRADERS, expected_answer, grader_named, read_answer
from cohobate.errors import ConfigError, DataError, did_you_mean

DEFAULT_LESSON_TEMPLATE = (
    "{question}\n\nAn answer to this question that was checked and is right:\n{demonstration}\n\n"
    "What a check of your own earlier answer found:\n{feedback}\n\n"
    "With this in mind, answer the question yourself.\n\n{question}"
)

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_PIECES = ("demonstration", "feedback")

GraderCallable = Callable[[Mapping[str, Any], str], float]
"""`(row, completion text) -> score`, as `data.graders.Grader`."""

FeedbackCallable = Callable[[Mapping[str, Any], str], str | None]
"""`(row, completion text) -> what the teacher reads about it`, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What the teacher of one completion sees. Without demonstration and feedback there is none."""

    score: float  # the grader's, of this completion
    demonstration: str | None = None  # text of a successful completion of the same group
    feedback: str | None = None  # about this completion

    @property
    def is_empty(self) -> bool:
        return self.demonstration is None and self.feedback is None


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonConfig:
    """How a group of completions is graded, and what of it is shown."""

    grader: str | GraderCallable  # a name of `data.graders.GRADERS`, or a callable
    success_threshold: float = 1.0  # a score from which on a completion is successful
    demonstrations: bool = True  # show a successful completion of the group
    own_success: bool = False  # its own, if there is no other successful one
    drop_thinking: bool = True  # show of a demonstration only what follows its last </think>
    feedback: str | FeedbackCallable | None = None  # a name of `FEEDBACKS`, or a callable
    feedback_with_demonstration: bool = False  # show feedback also where there is a demonstration
    # The teacher's last user turn. {question}, {demonstration}, {feedback}, any column; a paragraph (between blank
    # lines) whose pieces are all absent is left out, one with the question only loses them.
    template: str = DEFAULT_LESSON_TEMPLATE

    def __post_init__(self) -> None:
        if isinstance(self.grader, str):
            grader_named(self.grader)
        if isinstance(self.feedback, str):
            _feedback_named(self.feedback)
        if not math.isfinite(self.success_threshold):
            raise ConfigError(f"success_threshold must be a finite number, got {self.success_threshold}.")
        if not self.demonstrations and self.feedback is None:
            raise ConfigError("lessons without demonstrations and without feedback show nothing. Set one of them.")
        if not self.demonstrations and self.own_success:
            raise ConfigError("own_success says which demonstrations there are, and demonstrations is false.")
        if self.feedback_with_demonstration and (self.feedback is None or not self.demonstrations):
            raise ConfigError("feedback_with_demonstration needs both: set feedback, and leave demonstrations on.")
        shown = {"demonstration": self.demonstrations, "feedback": self.feedback is not None}
        asked = _PLACEHOLDER.findall(self.template)
        for name in ("question", *(piece for piece in _PIECES if shown[piece])):
            if name not in asked:
                raise ConfigError(
                    f"the lessons' template {self.template!r} does not contain {{{name}}}, so the teacher would not "
                    "see it."
                )

    @property
    def needs_peers(self) -> bool:
        """Whether a completion that was drawn alone has nothing to learn from."""
        return self.feedback is None and not self.own_success

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Refuse rows that what is named could not read (DataError, MissingExtra): now, and not at their turn."""
        if isinstance(self.grader, str) or isinstance(self.feedback, str):
            for row in rows:
                expected_answer(row)
        if isinstance(self.grader, str):
            for row in rows[:1]:
                GRADERS[self.grader](row, expected_answer(row))

    def of_group(self, row: Mapping[str, Any], texts: Sequence[str]) -> list[Lesson]:
        """The lessons of the completions `texts` of one row, in their order; each is graded once.

        Raises:
            DataError: a score that is no number, or feedback that is no text.
        """
        scores = [self._score(row, text) for text in texts]
        answers = [_after_thinking(text) if self.drop_thinking else text for text in texts]
        shown = [s >= self.success_threshold and bool(a.strip()) for s, a in zip(scores, answers, strict=True)]
        lessons = []
        for i, text in enumerate(texts):
            chosen = self._demonstration(i, shown)
            demonstration = None if chosen is None else answers[chosen]
            wanted = demonstration is None or self.feedback_with_demonstration
            feedback = self._feedback(row, text, scores[i]) if wanted else None
            lessons.append(Lesson(score=scores[i], demonstration=demonstration, feedback=feedback))
        return lessons

    def fill(self, lesson: Lesson, value_of: Callable[[str], str]) -> str:
        """The template with a lesson in it; `value_of` gives the question and the columns."""
        pieces = {"demonstration": lesson.demonstration, "feedback": lesson.feedback}
        paragraphs = []
        for paragraph in self.template.split("\n\n"):
            asked = _PLACEHOLDER.findall(paragraph)
            found = [pieces[name] for name in asked if name in pieces]
            if found and "question" not in asked and all(value is None for value in found):
                continue
            paragraphs.append(
                _PLACEHOLDER.sub(
                    lambda match: pieces[match[1]] or "" if match[1] in pieces else value_of(match[1]), paragraph
                )
            )
        return "\n\n".join(paragraphs)

    def example(self) -> Lesson:
        """A short lesson with everything that may be shown, to try the template on rows before there are any."""
        return Lesson(
            score=0.0,
            demonstration="..." if self.demonstrations else None,
            feedback=None if self.feedback is None else "...",
        )

    def _score(self, row: Mapping[str, Any], text: str) -> float:
        grade = GRADERS[self.grader] if isinstance(self.grader, str) else self.grader
        given: Any = grade(row, text)
        try:
            score = float(given)
        except (TypeError, ValueError):
            score = math.nan
        if math.isnan(score):
            raise DataError(f"the grader gave {given!r} for row {_name(row)}; a score is a number.")
        return score

    def _demonstration(self, i: int, shown: Sequence[bool]) -> int | None:
        """The next one to show after i, around the group; i itself comes last, if at all."""
        if not self.demonstrations:
            return None
        others = [(i + step) % len(shown) for step in range(1, len(shown) + self.own_success)]
        return next((j for j in others if shown[j]), None)

    def _feedback(self, row: Mapping[str, Any], text: str, score: float) -> str | None:
        if self.feedback is None:
            return None
        if isinstance(self.feedback, str):
            return FEEDBACKS[self.feedback](row, text, score >= self.success_threshold)
        said = self.feedback(row, text)
        if said is not None and not isinstance(said, str):
            raise DataError(
                f"the feedback gave {type(said).__name__} {str(said)[:60]!r} for row {_name(row)}; it must be text, "
                "or None for nothing."
            )
        return said if said is not None and said.strip() else None


def verdict(row: Mapping[str, Any], completion_text: str, is_right: bool) -> str:
    """Whether the final answer is right, and what was read as the answer; never what the right one is.

    Right or wrong is the run's grader's word; the column `answer` only says whether a number is looked for.
    """
    said = read_answer(row, completion_text)
    if said is None:
        return "No final answer was found in it."
    read = said if len(said) <= _LONGEST_ANSWER else f"{said[:_LONGEST_ANSWER]} ..."
    return f"The final answer was read as: {read}\nThat is {'right' if is_right else 'wrong'}."


_LONGEST_ANSWER = 200  # characters that are repeated: without a mark a whole completion may be its final answer

FEEDBACKS: dict[str, Callable[[Mapping[str, Any], str, bool], str | None]] = {"verdict": verdict}
"""Feedback that a recipe can name: `(row, completion text, whether it was successful) -> text`."""


def _feedback_named(name: str) -> None:
    if name not in FEEDBACKS:
        raise ConfigError(f"unknown feedback {name!r}.{did_you_mean(name, FEEDBACKS)} Valid: {', '.join(FEEDBACKS)}.")


def _after_thinking(text: str) -> str:
    _, mark, answer = text.rpartition("</think>")
    return answer.strip() if mark else text


def _name(row: Mapping[str, Any]) -> str:
    return repr(row.get("sample_id", "(unnamed)"))
