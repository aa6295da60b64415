# SPDX-License-Identifier: Apache-2.0
"""Which settings a run may go on with, and what the user is asked before it becomes another experiment."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from cli_runs import RUN, refused
from cohobate.cli import changes
from cohobate.cli.changes import Change, changes_since, check_allowed, named_keys
from cohobate.cli.recipe import load_recipe
from cohobate.cli.schema import ServerTeacher, TeacherEntry
from cohobate.errors import ConfigError

CSD = ["student.model=s", "teachers.0.model=t", "data.train=rows.jsonl"]
SERVER = ["student.model=s", "teacher.teacher_model_server_url=http://localhost:8000", "data.train=rows.jsonl"]


def refusal(folder: Path, name: str, before: list[str], now: list[str], *allowed: str) -> str:
    """What is refused of a run that was begun with `before`, or nothing."""
    path = folder / "recipe.yaml"
    path.write_text(load_recipe(name, before).text, encoding="utf-8")
    try:
        check_allowed(changes_since(path, load_recipe(name, now)), named_keys(allowed), folder)
    except ConfigError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("student.model=other", "student.model s -> other"),
        ("student.lora.rank=4", "student.lora (not set) -> {rank: 4, alpha: 32, "),
        ("teachers.0.model=u", "teachers.0.model t -> u"),
        ("teachers.0.top_k=9", "teachers.0.top_k 128 -> 9"),
        ("teachers.0.weight=2", "teachers.0.weight 1.0 -> 2.0"),
        ("teachers.1.model=u", "teachers.1 (not set) -> {"),
        ("teachers.0.aligner.special_roles={a: b}", "teachers.0.aligner.special_roles (not set) -> {a: b}"),
        ("objective.beta=0.25", "objective.beta 0.5 -> 0.25"),
        ("objective.distill_temperature=2", "objective.distill_temperature 1.0 -> 2.0"),
        ("data.train=others.jsonl", "data.train rows.jsonl -> others.jsonl"),
        ("data.prompts.system_prompt=Hello", "data.prompts.system_prompt (not set) -> Hello"),
    ],
)
def test_what_makes_another_experiment_is_refused_until_it_is_allowed(tmp_path: Path, change: str, said: str):
    key = said.split()[0]
    text = refusal(tmp_path, "csd", CSD, [*CSD, change])
    assert said in text
    assert text.endswith(f"--allow-change {key}")
    for allowed in (key, f"seed, {key}", key.partition(".")[0], key.replace(".0.", "[0].")):
        assert refusal(tmp_path, "csd", CSD, [*CSD, change], allowed) == ""
    for other in (key[:-1], f"{key}.x", "seed"):
        assert said in refusal(tmp_path, "csd", CSD, [*CSD, change], other)


@pytest.mark.parametrize(
    "change",
    [
        "training.learning_rate=1",
        "training.max_steps=7",
        "training.logging_steps=3",
        "training.save_steps=9",
        "data.eval=rows.jsonl",
        "output_dir=elsewhere",
        "method=mine",
    ],
)
def test_what_is_the_same_experiment_further_on_is_only_a_change(tmp_path: Path, change: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(load_recipe("csd", CSD).text, encoding="utf-8")
    found = changes_since(path, load_recipe("csd", [*CSD, change]))
    assert [c.key for c in found] == [change.partition("=")[0]]
    assert refusal(tmp_path, "csd", CSD, [*CSD, change]) == ""


def test_a_server_may_move_but_not_say_less(tmp_path: Path):
    moved = [*SERVER, "teacher.teacher_model_server_url=https://far.example", "teacher.token_env=T"]
    moved += ["teacher.concurrency=2"]
    assert refusal(tmp_path, "server", SERVER, moved) == ""
    assert "teacher.loss_top_k 16 -> 4" in refusal(tmp_path, "server", SERVER, [*moved, "teacher.loss_top_k=4"])
    assert {*changes._OF_PLACE} <= {*TeacherEntry.model_fields} | {*ServerTeacher.model_fields}


def test_a_default_that_is_written_out_is_no_change(tmp_path: Path):
    assert refusal(tmp_path, "csd", CSD, [*CSD, "teachers.0.weight=1", "objective.min_support=1"]) == ""
    assert changes_since(tmp_path / "nothing.yaml", load_recipe("csd", CSD)) == []
    assert len(str(Change(key="a", old="x" * 99, new=None))) == len("a  -> (not set)") + 80
    local = ["student.model=s", "teacher.model=t", "data.train=rows.jsonl"]
    other = [*local[::2], "teacher.kind=ema", "teacher.decay=0.9"]
    assert "teacher {kind: local, model: t} -> {kind: ema, decay: 0.9}." in refusal(tmp_path, "gkd", local, other)


def test_a_resumed_run_prints_what_may_change_and_stops_at_the_rest(cohobate: Any, place: Path):
    assert cohobate("train", "csd", *RUN).code == 0
    kept = (place / "runs/csd/recipe.yaml").read_bytes()
    longer = [*RUN, "training.max_steps=3", "--resume"]
    stopped = cohobate("train", "csd", *longer, "objective.beta=0.25", "teachers.0.top_k=5")
    words = ["teachers.0.top_k 9 -> 5; objective.beta 0.5 -> 0.25", "--allow-change teachers.0.top_k,objective.beta"]
    refused(stopped, 2, *words, "runs/csd/recipe.yaml")
    assert "loading" not in stopped.out
    assert (place / "runs/csd/recipe.yaml").read_bytes() == kept
    shutil.copytree(place / "runs/csd", place / "runs/copy")
    done = cohobate("train", "csd", *longer, "output_dir=runs/copy")
    assert done.code == 0, done.err
    assert "changed   training.max_steps 2 -> 3\n" in done.out
    allowed = ["--allow-change", "objective.beta,teachers.0.top_k"]
    done = cohobate("train", "csd", *longer, "objective.beta=0.25", "teachers.0.top_k=5", *allowed)
    assert done.code == 0, done.err
    assert "changed   objective.beta 0.5 -> 0.25\n" in done.out
    assert "step 3/3" in done.out
    # What was allowed once is what the run is by now.
    more = ["training.max_steps=4", "objective.beta=0.25", "teachers.0.top_k=5", "--resume"]
    assert cohobate("train", "csd", *RUN, *more).code == 0


def test_allowing_a_change_is_for_runs_that_go_on(cohobate: Any):
    refused(cohobate("train", "csd", *RUN, "--allow-change", "seed"), 2, "add --resume")


def test_a_recipe_of_before_that_cannot_be_read_is_named(tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_text("method: csd\nobjetive: {}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"recipe.yaml, the recipe that the run was begun with.*student is missing"):
        changes_since(path, load_recipe("csd", CSD))
