# SPDX-License-Identifier: Apache-2.0
"""What counts as a right answer, and that a row which cannot be graded is an error and not a zero."""

import importlib.util
import signal
import subprocess
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohobate.data import math_grading
from cohobate.data.graders import (
    GRADERS,
    exact_match,
    final_answer,
    final_answer_match,
    grader_named,
    math_verify_grader,
)
from cohobate.data.math_grading import math_verdict
from cohobate.errors import ConfigError, DataError, MissingExtra


def row(answer: Any, **columns: Any) -> dict[str, Any]:
    return {"sample_id": "r7", "answer": answer, **columns}


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("42", " 42\n", 1.0),
        (42, "42", 1.0),
        ("42", "42.", 0.0),
        ("42", "The answer is 42", 0.0),
        (" yes ", "yes", 1.0),
    ],
)
def test_exact_match_forgives_white_space_around_only(answer: Any, text: str, score: float):
    assert exact_match(row(answer), text) == score


@pytest.mark.parametrize("name", GRADERS)
@pytest.mark.parametrize("columns", [{}, {"answer": None}, {"answer": "  "}])
def test_a_row_without_an_answer_is_an_error_that_lists_its_columns(name: str, columns: dict[str, Any]):
    with pytest.raises(DataError, match=r"needs the column 'answer', and row 'r7' has none\. Its columns: sample_id"):
        GRADERS[name]({"sample_id": "r7", **columns}, "42")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 * 4 = 12", "12"),
        ("The answer is 12.", "12"),
        ("The answer is 3 * 4 = 12", "12"),
        ("The answer is 12 apples, because 5 + 7 = 12 and 9 are left", "12"),
        ("the answer is: 12. I checked it 3 times.", "12"),
        ("Final answer: **-12**", "-12"),
        ("I thought the answer is 11. No: the answer is 12", "12"),
        ("It is 4.\n#### 1,200", "1200"),
        ("#### 5\n#### 6", "6"),
        ("<answer> 7 </answer> after 9 tries", "7"),
        ("\\boxed{1} or rather \\boxed{2}, not 3", "2"),
        ("\\boxed{\\frac{1}{2}}", "1/2"),
        ("$\\boxed{\\text{about }\\$ 3.50}$ and \\boxed{4", "3.50"),
        ("5-4 = 1", "1"),
        ("it is −4", "-4"),
        ("costs $1,234.50 in total", "1234.50"),
        ("x2 and y3 are names", None),
        ("The answer is unknown, but 5 is near", "5"),
        ("+7", "7"),
        ("", None),
    ],
)
def test_the_number_a_text_commits_to(text: str, number: str | None):
    assert final_answer(text, numeric=True) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Well, the answer is Amelia is a hero, and Bob is not.", "Amelia is a hero, and Bob is not."),
        ("<answer>a, b</answer>", "a, b"),
        ("Friday", "Friday"),
        ("  ", None),
    ],
)
def test_the_words_a_text_commits_to(text: str, answer: str | None):
    assert final_answer(text, numeric=False) == answer


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("12", "The answer is 12.0", 1.0),
        ("1/2", "so 0.5", 1.0),
        ("1,000", "#### 1000", 1.0),
        ("12", "120", 0.0),
        ("12", "no number", 0.0),
        ("0.3", "\\boxed{3/10}", 1.0),
        ("Friday", "It was a day.\nThe answer is **friday**.", 1.0),
        ("Friday", "It was Friday", 0.0),
        ("12", "1/0", 0.0),
        ("nan", "nan", 1.0),  # a word, not a number
        ("1e999999999", "1", 0.0),
    ],
)
def test_final_answers_are_compared_as_numbers_where_both_are(answer: str, text: str, score: float):
    assert final_answer_match(row(answer), text) == score


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_any_number_written_in_any_usual_way_is_itself(number: Any):
    for text in (
        f"{number}",
        f"it is {number:,}",
        f"The answer is {number}.",
        f"\\boxed{{{number}}}",
        f"#### {number}",
    ):
        assert final_answer_match(row(str(number)), text) == 1.0
        assert final_answer_match(row(str(number + 1)), text) == 0.0


@given(st.text())
def test_no_text_of_a_model_breaks_a_grader(text: str):
    for answer in ("12", "Friday"):
        assert final_answer_match(row(answer), text) in (0.0, 1.0)
        assert exact_match(row(answer), text) in (0.0, 1.0)


def test_an_unknown_grader_gets_the_nearest_name():
    assert grader_named("exact_match") is exact_match
    with pytest.raises(ConfigError, match=r"unknown grader 'exact_matsh'\. Did you mean 'exact_match'\? Valid: "):
        grader_named("exact_matsh")


# ------------------------------------------------------------------ math-verify


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("1/2", "so it is $0.5$", 1.0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
        ("$x^2$", "the answer is $x \\cdot x$", 1.0),
        ("12", "it is 12.", 1.0),
        ("12", "it is \\boxed{13}", 0.0),
        ("12", "no idea", 0.0),
        ("12", "two\nlines: \\boxed{12}\n", 1.0),
    ],
)
def test_math_verify_compares_by_value(answer: str, text: str, score: float):
    assert math_verify_grader(row(answer), text) == score


def test_math_verify_works_outside_the_main_thread():
    scores: list[float] = []

    def grade() -> None:
        scores.extend(math_verify_grader(row("12"), f"it is {n}") for n in (12, 13))

    threads = [threading.Thread(target=grade) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(scores) == [0.0] * 3 + [1.0] * 3


def test_math_verify_leaves_an_alarm_of_the_caller_alone():
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.alarm(100)
        math_verify_grader(row("12"), "it is 12")
        assert signal.alarm(0) > 0
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_endless_computation_is_stopped_at_the_deadline_and_the_next_answer_is_graded(
    monkeypatch: pytest.MonkeyPatch,
):
    assert math_verify_grader(row("12"), "12") == 1.0  # the child is up
    start = time.monotonic()
    assert math_verdict("1", "$9^{9^{9^{9}}}$", deadline=0.5) == "late"
    assert time.monotonic() - start < 4.0
    monkeypatch.setattr("cohobate.data.graders.math_verdict", lambda *_: "late")
    assert math_verify_grader(row("1"), "$9^{9^{9^{9}}}$") == 0.0
    monkeypatch.undo()
    assert math_verify_grader(row("12"), "12") == 1.0


def test_a_child_that_died_is_replaced():
    assert math_verdict("12", "12") == "equal"
    process: Any = math_grading._child._process
    assert isinstance(process, subprocess.Popen)
    process.kill()
    process.wait()
    assert math_verdict("12", "12") == "equal"
    assert math_grading._child._process is not process


def test_an_answer_that_is_no_mathematics_is_an_error_of_the_row():
    with pytest.raises(DataError, match=r"no number or expression in the answer .* of row 'r7'.*final_answer"):
        math_verify_grader(row("?!"), "12")


def test_without_math_verify_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(math_grading, "find_spec", lambda name: None if name == "math_verify" else find(name))
    with pytest.raises(MissingExtra, match=r"the extra `math`: pip install 'cohobate\[math\]'"):
        math_verify_grader(row("12"), "12")
