# SPDX-License-Identifier: Apache-2.0
"""A run without its training: what it says, what it refuses, and that it leaves nothing behind."""

from pathlib import Path

import pytest

from cli_runs import RUN, refused
from cohobate.teachers import LocalTeacher

SAME = ["student.model=student", "teacher.model=teacher", "data.train=rows.jsonl", "training.use_cpu=true"]


def test_a_recipe_that_would_run_is_ok_and_nothing_is_left_behind(cohobate, place: Path):
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    done = cohobate("doctor", "gkd", *SAME, "sampling.max_completion_length=5", "--rows", "3")
    assert done.code == 0, done.err
    assert "rows      3 taken the whole way: loss " in done.out
    assert "the run would write into runs/gkd" in done.out
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


def test_teachers_with_their_own_tokenizers_are_asked_too(cohobate, place: Path):
    done = cohobate("doctor", "csd", *RUN)
    assert done.code == 0, done.err
    assert "teacher   bpe_teacher (own tokenizer)" in done.out
    assert " kd " in done.out
    assert " unaligned 0" in done.out


def test_what_a_run_refuses_is_refused(cohobate, place: Path):
    refused(cohobate("doctor", "csd", *RUN, "teachers.0.tokenizer=bpe"), 2, "teachers.0", "beside the model")
    refused(cohobate("doctor", "gkd", *SAME[:2]), 2, "data.train=...")


def test_a_loss_that_is_no_number_is_found_before_step_1(cohobate, place: Path, monkeypatch: pytest.MonkeyPatch):
    score = LocalTeacher.score

    def broken(self, batch):
        scores = score(self, batch)
        scores.hidden.fill_(float("nan"))
        return scores

    monkeypatch.setattr(LocalTeacher, "score", broken)
    refused(cohobate("doctor", "gkd", *SAME, "sampling.max_completion_length=5"), 1, "would stop at step 1")
