# SPDX-License-Identifier: Apache-2.0
"""Recipes with teachers that have tokenizers of their own, as a person runs them: what trains, and what is refused."""

import json
import re
from pathlib import Path

import pytest

from cli_runs import RUN, refused
from cohobate.vocab import Projection, SubtokenTables
from tiny_bpe import student_tokenizer, teacher_tokenizer


def losses(place: Path, run: str = "csd") -> list[float]:
    lines = (place / "runs" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry["loss"] for line in lines if "loss" in (entry := json.loads(line))]


def test_tables_from_disk_train_as_tables_that_are_made_at_the_start_do(cohobate, place: Path):
    done = cohobate("train", "csd", *RUN)
    assert done.code == 0, done.err
    assert "teacher   bpe_teacher (own tokenizer)" in done.out
    assert all(f" {name} " in done.out for name in ("scaled loss", "kd", "ce", "unaligned"))
    assert "loss      held out: 1 kd + 0.1 ce, where chunks that are not one token on both sides count 5" in done.out
    assert cohobate("subtokens", "build", "-s", "bpe", "-t", "bpe_teacher", "-o", "tables").code == 0
    again = cohobate("train", "csd", *RUN, "teachers.0.aligner.subtokens=tables", "output_dir=runs/disk")
    assert again.code == 0, again.err
    assert losses(place) == losses(place, "disk")


def test_a_bare_off_is_a_word_and_completions_of_its_own_without_it_are_noticed(
    cohobate, place: Path, caplog: pytest.LogCaptureFixture
):
    own = ["sampling.on_policy_fraction=1.0", "data.train=rows.jsonl"]
    done = cohobate("train", "csd", *RUN, *own, "objective.dynamic_scaling=off")
    assert done.code == 0, done.err
    assert "multiplied by kd_weight" not in caplog.text
    done = cohobate("train", "csd", *RUN, *own, "output_dir=runs/scaled")
    assert done.code == 0, done.err
    assert "the divergence stays multiplied by kd_weight / ce_weight" in caplog.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["objective.dynamic_scaling=call", "training.gradient_accumulation_steps=2"],
            "gradient_accumulation_steps=2",
        ),
        (["objective.dynamic_scaling=call", "training.token_budget=30"], "token_budget=30"),
        (["objective.dynamic_scaling=call"], ""),
        (["training.gradient_accumulation_steps=2"], ""),
        (["objective.chosen_over=call", "training.gradient_accumulation_steps=2"], ""),  # nothing is chosen here
    ],
)
def test_a_scale_of_each_micro_batch_is_noticed_where_a_step_has_several(
    cohobate, place: Path, caplog: pytest.LogCaptureFixture, changes: list[str], said: str
):
    run = [*RUN, "training.per_device_train_batch_size=2", "training.max_steps=1", *changes]
    assert cohobate("train", "csd", *run).code == 0
    found = [r.getMessage() for r in caplog.records if "decides in each micro-batch for itself" in r.getMessage()]
    assert len(found) == bool(said)
    if found:
        assert found[0].startswith(f"dynamic_scaling='call' decides in each micro-batch for itself, and {said} cuts")


def test_without_scaling_the_loss_of_a_step_is_the_held_out_one(cohobate, place: Path):
    """One step over all rows at learning rate 0 has the loss that the evaluation before it found."""
    run = [*RUN, "data.eval=text.jsonl", "objective.dynamic_scaling=off", "training.learning_rate=0"]
    run += ["training.max_steps=1", "training.per_device_train_batch_size=12"]
    done = cohobate("train", "csd", *run)
    assert done.code == 0, done.err
    assert "loss      1 kd + 0.1 ce, where" in done.out
    assert "scaled loss" not in done.out
    lines = [re.findall(r"(loss|kd|ce) (\S+)", line) for line in done.out.splitlines() if " kd " in line]
    assert len(lines) == 5  # the two of a run's end and what is said of the loss among them
    assert lines[1] == lines[2]
    assert len(lines[1]) == 3


def test_several_teachers_have_a_number_each(cohobate, place: Path):
    run = [*RUN, "teachers.1.model=bpe_teacher", "teachers.1.aligner.subtokens=auto", "teachers.1.top_k=5"]
    done = cohobate("train", "csd", *run)
    assert done.code == 0, done.err
    assert re.search(r"step 1/2  scaled loss \S+  kd0 \S+  kd1 \S+  ce ", done.out)


def test_a_recipe_can_be_read_before_it_is_filled_in(cohobate):
    done = cohobate("train", "csd", "--show", "objective.beta=0.25")
    assert done.code == 0, done.err
    assert "model: ???" in done.out
    assert "beta: 0.25" in done.out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["teachers.0.tokenizer=bpe"], ["teachers.0 (bpe_teacher)", "not the one that lies beside the model"]),
        (["teachers.1.model=bpe_teacher"], ["teachers.1 (bpe_teacher)", "it has no aligner"]),
        (["teachers.0.top_k=400"], ["teachers.0 (bpe_teacher)", "top_k must be in [1, 29]"]),
        (["teachers.0.aligner.special_roles={nope: x}"], ["teachers.0 (bpe_teacher)", "nope"]),
        (["teachers.0.aligner.subtokens=nothere"], ["teachers.0 (bpe_teacher)", "there is no nothere"]),
        (["teachers.0.aligner.subtokens=projection.safetensors"], ["is a projection, which X-Token reads"]),
        (["teachers.0.aligner.subtokens=swapped.safetensors"], ["student and teacher are swapped"]),
        (
            ["teachers.0.aligner.subtokens=tables.safetensors", "teachers.0.aligner.special_roles={<pad>: <other>}"],
            ["special_roles pairs '<pad>' with '<other>'", "--role '<pad>=<other>'"],
        ),
        (["objective.dynamic_scaling=off", "objective.kd_weight=0", "objective.ce_weight=0"], ["nothing to learn"]),
        (["teachers.0.path=store", "teachers.0.max_length=9"], ["teachers[0].max_length"]),
        (["teacher.model=bpe_teacher"], ["this recipe has `teachers`", "teachers.0.model=DIR"]),
    ],
)
def test_what_cannot_be_meant_is_refused_by_teacher_and_field(
    cohobate, place: Path, changes: list[str], words: list[str]
):
    ours, theirs = student_tokenizer(), teacher_tokenizer()
    Projection.build(ours, theirs).save(place / "projection.safetensors")
    SubtokenTables.build(ours, theirs).save(place / "tables.safetensors")
    SubtokenTables.build(theirs, ours).save(place / "swapped.safetensors")
    refused(cohobate("train", "csd", *RUN, *changes), 2, *words)


def test_a_projection_from_disk_must_pair_what_the_recipe_pairs(cohobate, place: Path):
    """As one that is made at the start does; else the teacher would read one token and predict another."""
    roles = {"<pad>": "<other>"}
    run = [change for change in RUN if "top_k" not in change] + ["teachers.0.aligner.special_roles={<pad>: <other>}"]
    for name, paired in (("without", {}), ("with", roles)):
        made = Projection.build(student_tokenizer(), teacher_tokenizer(), special_roles=paired)
        made.save(place / f"{name}.safetensors")
    done = cohobate("train", "xtoken", *run, "teachers.0.aligner.projection=without.safetensors")
    words = ["special_roles pairs '<pad>' with '<other>'", "projection at without.safetensors does not"]
    refused(done, 2, *words, "--role '<pad>=<other>'", "projection: auto")
    for name, source in (("disk", "with.safetensors"), ("made", "auto")):
        done = cohobate("train", "xtoken", *run, f"teachers.0.aligner.projection={source}", f"output_dir=runs/{name}")
        assert done.code == 0, done.err
    assert losses(place, "disk") == losses(place, "made")


def test_tables_are_no_projection(cohobate, place: Path):
    SubtokenTables.build(student_tokenizer(), teacher_tokenizer()).save(place / "tables.safetensors")
    run = [change for change in RUN if "top_k" not in change]
    done = cohobate("train", "xtoken", *run, "teachers.0.aligner.projection=tables.safetensors")
    refused(done, 2, "teachers.0 (bpe_teacher)", "is no projection but holds student_to_teacher, teacher_to_student")
