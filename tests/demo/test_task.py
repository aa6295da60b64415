# SPDX-License-Identifier: Apache-2.0
import re
from typing import Any

import pytest

from cohobate.demo import STUDENT, TEACHER, load_student, load_teacher, task
from cohobate.vocab import check_same_vocabulary

SPLITS = ("pretrain", "train", "heldout")


def numbers(row: dict) -> list[int]:
    return [int(n) for n in row["prompt"].rstrip(":").split(",")]


def test_a_recorded_solution_adds_up_and_uses_each_number_once() -> None:
    for row in task.rows("train", 50):
        steps = re.findall(r"\+(\d+)=(\d+)", row["completion"])
        total = int(row["completion"].split("+")[0])
        used = [total]
        for number, written in steps:
            total += int(number)
            used.append(int(number))
            assert int(written) == total
        assert sorted(used) == sorted(numbers(row))
        assert row["answer"] == str(sum(numbers(row)))
        assert len(row["completion"]) < task.MAX_NEW_TOKENS


def test_no_seed_puts_a_problem_into_two_splits() -> None:
    seen = {
        split: {tuple(sorted(numbers(row))) for seed in range(5) for row in task.rows(split, 300, seed=seed)}
        for split in SPLITS
    }
    for a in SPLITS:
        for b in SPLITS:
            assert a == b or not seen[a] & seen[b]


def test_the_same_seed_gives_the_same_rows_and_another_others() -> None:
    assert task.rows("train", 20, seed=1) == task.rows("train", 20, seed=1)
    assert task.rows("train", 20, seed=1) != task.rows("train", 20, seed=2)


@pytest.mark.parametrize(
    ("written", "marked"),
    [
        ("50+39=89+91=180+81=261", "50+39=89+91=180+81=261"),
        ("50+39=88+91=179+81=260", "50+39=89+91=179+81=260"),  # a wrong total stands, and one goes on from it
        ("50+39=89", "50+39=89+81=170+91=261"),  # what is missing follows in the problem's order
        ("50+39=8", "50+39=89+81=89+91=180"),  # a total cut short is a wrong total
        ("77+", "81+50=131+39=170+91=261"),  # a number that is not in the problem
        ("", "81+50=131+39=170+91=261"),
    ],
)
def test_marked_work_has_every_total_put_right(written: str, marked: str) -> None:
    row = {"prompt": "81,50,39,91:"}
    assert task.marked(row, written) == marked


def test_grading_reads_the_last_total_and_grading_steps_reads_all() -> None:
    row = {"prompt": "81,50,39,91:", "answer": "261"}
    right, lucky = "50+39=89+91=180+81=261", "50+39=88+91=180+81=261"
    assert (task.grade(row, right), task.grade_steps(row, right)) == (1.0, 1.0)
    assert (task.grade(row, lucky), task.grade_steps(row, lucky)) == (1.0, 0.0)
    assert task.grade(row, "261") == 0.0
    assert task.grade(row, right + "1") == 0.0


def test_the_shipped_models_are_small_share_a_tokenizer_and_load_offline() -> None:
    size = sum(file.stat().st_size for folder in (STUDENT, TEACHER) for file in folder.iterdir())
    assert size <= 6 * 2**20
    (student, tokenizer), (teacher, other) = load_student(), load_teacher()
    assert check_same_vocabulary(tokenizer, other, recorded_text=True).size == len(tokenizer)
    assert student.config.vocab_size == teacher.config.vocab_size == len(tokenizer)
    text = "81,50,39,91:50+39=89"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(text)["input_ids"]) == len(text)


def share_right(model: Any, tokenizer: Any, prompts: list[str], rows: list[dict]) -> float:
    batch = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=task.MAX_NEW_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(task.grade(row, text) for row, text in zip(rows, texts, strict=True)) / len(rows)


def test_the_teacher_adds_and_the_half_trained_student_can_read_a_solution() -> None:
    rows = task.rows("heldout", 200)
    alone = [row["prompt"] for row in rows]
    shown = [task.shown_prompt(row["solution"], row["prompt"]) for row in rows]
    assert share_right(*load_teacher(), alone, rows) >= 0.97
    assert 0.2 <= share_right(*load_student(), alone, rows) <= 0.5
    assert share_right(*load_student(), shown, rows) >= 0.97


def test_an_unknown_split_or_a_negative_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of pretrain, train, heldout, got 'test'"):
        task.rows("test", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got -1"):
        task.rows("train", -1)
