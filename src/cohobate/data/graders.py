# SPDX-License-Identifier: Apache-2.0
"""Is a completion right? A grader is any callable `(row, completion text) -> score in [0, 1]`.

A grader sees the data row with all its columns, so whatever it needs travels with the row. A row that cannot be graded
(no `answer`) is an error, never a zero: a zero would look like a weak model.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Protocol

from cohobate.data.math_grading import math_verdict
from cohobate.data.reasoning_gym import score_reasoning_gym
from cohobate.errors import ConfigError, DataError, did_you_mean

_NUMBER = re.compile(r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?", re.ASCII)
_FRACTION = re.compile(r"\\d?frac\{\s*(-?\d+)\s*\}\{\s*(\d+)\s*\}", re.ASCII)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"^####[ \t]*(.+)$", re.MULTILINE)
_SAID = re.compile(r"\b(?:final\s+)?answer(?:\s+is|\s*:|\s*=)\s*:?\s*(?=([^\n]+))", re.IGNORECASE)
_CLAUSE_END = re.compile(r"[.!?;,](?:\s|$)|\s(?:because|since)\s|\n")
_BOXED = "\\boxed{"


class Grader(Protocol):
    """`row` has all columns of the data set; the text is the completion without special tokens."""

    def __call__(self, row: Mapping[str, Any], completion_text: str, /) -> float: ...


def exact_match(row: Mapping[str, Any], completion_text: str) -> float:
    """1.0 if the completion is the column `answer`, apart from white space around it."""
    return float(completion_text.strip() == expected_answer(row))


def final_answer_match(row: Mapping[str, Any], completion_text: str) -> float:
    """1.0 if the completion's final answer equals the column `answer`: as a number if both are, else as text.

    Text is compared without case and without white space, quotes, asterisks and full stops around it. `final_answer`
    says what counts as a final answer.
    """
    wanted = expected_answer(row)
    said = read_answer(row, completion_text)
    if said is None:
        return 0.0
    number, wanted_number = _as_number(said), _as_number(wanted)
    if number is not None and wanted_number is not None:
        return float(number == wanted_number)
    return float(_plain(said) == _plain(wanted))


def math_verify_grader(row: Mapping[str, Any], completion_text: str) -> float:
    """1.0 if math-verify finds the completion's answer equal to the column `answer`; undecided in time is 0.0.

    Raises:
        DataError: if the row's own `answer` is missing, or is nothing that math-verify can read.
        MissingExtra: if math-verify is not installed.
    """
    wanted = expected_answer(row)
    verdict = math_verdict(wanted, completion_text)
    if verdict == "unreadable":
        raise DataError(
            f"math-verify reads no number or expression in the answer {wanted!r} of row {_name(row)}. For answers in "
            "words use the grader final_answer or exact_match."
        )
    return float(verdict == "equal")


def reasoning_gym_grader(row: Mapping[str, Any], completion_text: str) -> float:
    """1.0 if the task's own scorer gives full marks to the completion's final answer; for `reasoning_gym_splits`.

    Partial marks count as 0: several tasks give 0.01 to any answer, and a mean of such marks is no accuracy.
    """
    said = read_answer(row, completion_text)
    # A full stop may end the sentence around the answer, or belong to an answer that is a sentence.
    return float(said is not None and any(score_reasoning_gym(row, s) >= 1.0 for s in {said, said.removesuffix(".")}))


def final_answer(text: str, *, numeric: bool) -> str | None:
    """The last answer that a text commits to, or None.

    In this order: `\\boxed{…}`, `<answer>…</answer>`, `#### …`, "the answer is …"; the last of its kind. Without any
    of them it is the last number of the text if `numeric`, else the whole text. A numeric answer is the last number of
    its clause, so "12 apples, because 5 + 7 = 12" and "3 * 4 = 12" are both 12.
    """
    text = _FRACTION.sub(r"\1/\2", text.replace("−", "-")) if numeric else text
    for found in (_boxed(text), _last(_TAGGED, text), _last(_HASHES, text), _last(_SAID, text)):
        if found is not None and (not numeric or _NUMBER.search(_clause(found))):
            return _last_number(_clause(found)) if numeric else found.strip()
    return _last_number(text) if numeric else text.strip() or None


def read_answer(row: Mapping[str, Any], completion_text: str) -> str | None:
    """`final_answer` of a completion: a number where the column `answer` is one, text where it is not."""
    return final_answer(completion_text, numeric=_as_number(expected_answer(row)) is not None)


def expected_answer(row: Mapping[str, Any]) -> str:
    """The column `answer` as stripped text.

    Raises:
        DataError: if the row has none; the message lists its columns.
    """
    answer = row.get("answer")
    if answer is None or not str(answer).strip():
        raise DataError(
            f"a grader needs the column 'answer', and row {_name(row)} has none. "
            f"Its columns: {', '.join(map(str, row))}."
        )
    return str(answer).strip()


GRADERS: dict[str, Grader] = {
    "exact_match": exact_match,
    "final_answer": final_answer_match,
    "math_verify": math_verify_grader,
    "reasoning_gym": reasoning_gym_grader,
}


def grader_named(name: str) -> Grader:
    """The grader that a recipe names.

    Raises:
        ConfigError: for an unknown name, with the nearest valid one.
    """
    if name not in GRADERS:
        raise ConfigError(f"unknown grader {name!r}.{did_you_mean(name, GRADERS)} Valid: {', '.join(GRADERS)}.")
    return GRADERS[name]


def _boxed(text: str) -> str | None:
    """The content of the last closed `\\boxed{…}`; braces inside it are counted."""
    start = text.rfind(_BOXED)
    while start >= 0:
        depth, begin = 1, start + len(_BOXED)
        for i in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[begin:i]
        start = text.rfind(_BOXED, 0, start)
    return None


def _clause(text: str) -> str:
    return _CLAUSE_END.split(text.strip(), maxsplit=1)[0]


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return matches[-1] if matches else None


def _last_number(text: str) -> str | None:
    """Without a plus sign, currency and thousands separators, as scorers expect it."""
    number = _last(_NUMBER, text)
    return None if number is None else re.sub(r"[+$,\s]", "", number)


def _as_number(text: str) -> Decimal | None:
    parts = re.sub(r"[$,\s]", "", text).split("/")
    try:
        values = [Decimal(part) for part in parts]
        if not all(value.is_finite() for value in values) or len(values) > 2:
            return None
        return values[0] / values[1] if len(values) == 2 else values[0]
    except ArithmeticError:
        return None


def _plain(text: str) -> str:
    return " ".join(text.split()).strip(" .*\"'`").casefold()


def _name(row: Mapping[str, Any]) -> str:
    return repr(row.get("sample_id", "(unnamed)"))
