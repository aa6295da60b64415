# SPDX-License-Identifier: Apache-2.0
"""Rows from reasoning-gym: reproducible, held-out rows held out, right solutions, and the task's own scorer."""

import re
from typing import Any

import pytest

from cohobate.data import reasoning_gym
from cohobate.data.graders import reasoning_gym_grader
from cohobate.data.reasoning_gym import reasoning_gym_splits, score_reasoning_gym
from cohobate.errors import ConfigError, DataError, MissingExtra

SMALL = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}


def test_equal_arguments_give_equal_rows_and_another_seed_gives_others():
    first = reasoning_gym_splits("chain_sum", train_size=30, eval_size=10, seed=3, config=SMALL)
    assert first == reasoning_gym_splits("chain_sum", train_size=30, eval_size=10, seed=3, config=SMALL)
    other, _ = reasoning_gym_splits("chain_sum", train_size=30, eval_size=10, seed=4, config=SMALL)
    assert len({r["question"] for r in first[0]} & {r["question"] for r in other}) < 10


def test_more_training_rows_do_not_change_the_held_out_ones():
    _, held_out = reasoning_gym_splits("chain_sum", train_size=1, eval_size=10, config=SMALL)
    assert held_out == reasoning_gym_splits("chain_sum", train_size=50, eval_size=10, config=SMALL)[1]


def test_no_held_out_question_is_trained_on_even_where_questions_are_few():
    # One digit, two terms: 162 different questions in all, so independent draws of 60 and 60 would share many.
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, held_out = reasoning_gym_splits("chain_sum", train_size=60, eval_size=60, config=config)
    questions = [r["question"] for r in train + held_out]
    assert len(questions) == len(set(questions)) == 120
    names = [r["sample_id"] for r in train + held_out]
    assert len(names) == len(set(names))


def test_a_task_with_too_few_questions_says_so():
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(ConfigError, match=r"chain_sum with .* gave only \d+ different questions of the 500"):
        reasoning_gym_splits("chain_sum", train_size=500, eval_size=0, config=config)


def value(expression: str) -> int:
    """An expression of +, - and * between whole numbers, from left to right (products alone, or sums alone)."""
    first, *rest = re.split(r"\s*([-+*])\s+", expression.strip())
    total = int(first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total = {"+": total + int(term), "-": total - int(term), "*": total * int(term)}[sign]
    return total


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("chain_sum", {"min_terms": 2, "max_terms": 5, "allow_negation": True}),
        ("products", {"min_terms": 2, "max_terms": 3, "max_digits": 3}),
    ],
)
def test_every_line_of_a_worked_solution_is_true_and_the_last_says_the_answer(task: str, config: dict[str, Any]):
    rows, _ = reasoning_gym_splits(task, train_size=200, eval_size=0, config=config)
    for row in rows:
        *lines, last = row["solution"].splitlines()
        assert lines
        for line in lines:
            assert len({value(side) for side in line.split(" = ")}) == 1, line
        assert value(lines[-1].split(" = ")[-1]) == int(row["answer"])
        assert last == f"The answer is {row['answer']}."


@pytest.mark.parametrize("task", ["chain_sum", "products", "gsm_symbolic", "leg_counting", "number_sorting", "aiw"])
def test_the_tasks_own_scorer_accepts_the_solution_and_no_other_answer(task: str):
    rows, _ = reasoning_gym_splits(task, train_size=10, eval_size=0)
    for row in rows:
        assert row["prompt"] == [{"role": "user", "content": row["question"].strip()}]
        assert reasoning_gym_grader(row, row["solution"]) == 1.0
        assert reasoning_gym_grader(row, f"The answer is {row['answer']}7.") == 0.0
        assert reasoning_gym_grader(row, "I do not know.") == 0.0


def test_partial_marks_are_no_success():
    [row], _ = reasoning_gym_splits("chain_sum", train_size=1, eval_size=0, config=SMALL)
    nearly = row["answer"] + "0"
    assert 0.0 < score_reasoning_gym(row, nearly) < 1.0
    assert reasoning_gym_grader(row, nearly) == 0.0


def test_rows_survive_a_data_set_of_columns():
    datasets = pytest.importorskip("datasets")
    rows, _ = reasoning_gym_splits("chain_sum", train_size=5, eval_size=0, config=SMALL)
    for row in datasets.Dataset.from_list(rows):
        assert reasoning_gym_grader(row, row["solution"]) == 1.0


def test_a_row_that_lost_a_column_is_an_error():
    [row], _ = reasoning_gym_splits("chain_sum", train_size=1, eval_size=0, config=SMALL)
    del row["metadata"]
    with pytest.raises(DataError, match=r"needs the columns \['metadata'\], and row 'chain_sum-0-0' lacks them"):
        reasoning_gym_grader(row, "1")


def test_wrong_names_are_refused_with_the_near_ones():
    with pytest.raises(ConfigError, match=r"no task 'chain_sums'\. Did you mean 'chain_sum'\?"):
        reasoning_gym_splits("chain_sums", train_size=1, eval_size=0)
    with pytest.raises(ConfigError, match=r"refuses \{'max_term': 3\} for chain_sum: .*max_term"):
        reasoning_gym_splits("chain_sum", train_size=1, eval_size=0, config={"max_term": 3})
    with pytest.raises(ConfigError, match="refuses"):
        reasoning_gym_splits("chain_sum", train_size=1, eval_size=0, config={"min_terms": 9})


def test_a_task_without_right_answers_is_refused():
    with pytest.raises(ConfigError, match="propositional_logic has problems without one right answer"):
        reasoning_gym_splits("propositional_logic", train_size=1, eval_size=0)


def test_without_reasoning_gym_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reasoning_gym, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"the extra `smollm2`"):
        reasoning_gym_splits("chain_sum", train_size=1, eval_size=0)
