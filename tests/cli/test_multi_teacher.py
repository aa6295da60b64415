# SPDX-License-Identifier: Apache-2.0
"""The recipe `multi_teacher` as a person runs it: what it says, what it refuses, and that a resumed run goes on."""

import json
from pathlib import Path

import pytest

from cli_runs import RUN, refused

SETTINGS = [
    "student.model=student",
    "teachers.0.model=teacher",
    "teachers.1.model=second",
    "data.train=kinds.jsonl",
    "training.max_steps=2",
    "training.per_device_train_batch_size=4",
    "training.use_cpu=true",
    "sampling.max_completion_length=5",
]
ROUTED = [*SETTINGS, "route_by=domain", "teachers.0.routes=[math,algebra]"]
AVERAGED = [*SETTINGS, "route_by=null", "teachers.0.routes=null", "objective.kd_mode=averaged_logits"]


@pytest.fixture
def kinds(place: Path) -> Path:
    """Rows of three domains, the last of them rare, and a second teacher."""
    domains = ["math", "algebra", "math", "math", "math", "algebra", "math", "code"]
    rows = [{"prompt": f"{i}+{i}=", "domain": domain} for i, domain in enumerate(domains)]
    (place / "kinds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (place / "second").symlink_to(place / "student")
    return place


def logs(place: Path, run: str = "multi_teacher") -> list[dict[str, float]]:
    lines = (place / "runs" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for line in lines if "loss" in (entry := json.loads(line))]


def test_a_run_names_each_teacher_with_its_routes_and_a_resumed_one_goes_on_as_it_was(cohobate, kinds: Path):
    done = cohobate("train", "multi_teacher", *ROUTED, "training.max_steps=4", "training.save_steps=2")
    assert done.code == 0, done.err
    said = "teacher (the same tokenizer; domain: math, algebra), second (the same tokenizer; domain: all others)"
    assert f"teacher   {said}" in done.out
    whole = logs(kinds)
    shares = [(log["teacher0/row_share"], log["teacher1/row_share"]) for log in whole]
    assert all(a + b == pytest.approx(1.0) for a, b in shares)
    assert sum(b for _, b in shares) == pytest.approx(2 * 1 / 4)  # one row of eight, in each of two epochs
    run = [*ROUTED, "training.save_steps=2", "output_dir=runs/again", "training.lr_scheduler_type=constant"]
    assert cohobate("train", "multi_teacher", *run).code == 0
    done = cohobate("train", "multi_teacher", *run, "training.max_steps=4", "--resume")
    assert done.code == 0, done.err
    assert [log["teacher1/row_share"] for log in logs(kinds, "again")] == [b for _, b in shares]
    for change in ("teachers.0.routes=[math]", "route_by=prompt"):  # another experiment
        done = cohobate("train", "multi_teacher", *run, "training.max_steps=5", "--resume", change)
        refused(done, 2, change.partition("=")[0])


def test_doctor_takes_a_row_of_every_teacher_the_whole_way(cohobate, kinds: Path):
    done = cohobate("doctor", "multi_teacher", *ROUTED, "--rows", "2")
    assert done.code == 0, done.err
    assert "rows      3 taken the whole way: loss" in done.out  # the eighth is the first that the second one reads
    assert " kd " in done.out
    assert " kd of the second teacher " in done.out


def test_teachers_can_be_averaged_or_added_up_instead(cohobate, kinds: Path):
    done = cohobate("train", "multi_teacher", *AVERAGED)
    assert done.code == 0, done.err
    assert "teacher   teacher (the same tokenizer), second (the same tokenizer)" in done.out
    assert all("kd/average" in log and "teacher0/row_share" not in log for log in logs(kinds))
    added = ["objective.kd_mode=sum", "teachers.0.weight=0.3", "teachers.1.weight=0.7", "output_dir=runs/sum"]
    done = cohobate("train", "multi_teacher", *AVERAGED, *added)
    assert done.code == 0, done.err
    for log in logs(kinds, "sum"):
        assert log["loss"] == pytest.approx(0.3 * log["kd/teacher0"] + 0.7 * log["kd/teacher1"], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["route_by=domian"], ["no row has the column 'domian'", "Did you mean 'domain'?"]),
        (
            ["teachers.1.routes=[coding]"],
            ["has 'code' in the column 'domain'", "known are 'math', 'algebra', 'coding'"],
        ),
        (["teachers.1.routes=[math]"], ["the value 'math' of domain twice, for teachers[0] and teachers[1]"]),
        (["teachers.0.routes=null"], ["teachers[0] and teachers[1] have no routes"]),
        (["teachers.0.routes=[]"], ["teachers[0].routes lists no value"]),
        (["teachers.0.routes=[1.5]"], ["teachers.0.routes"]),
        (["route_by=null"], ["teachers[0].routes has values of a column that is not named. Write route_by=COLUMN"]),
        (["objective.kd_mode=averaged_logits"], ["kd_mode='averaged_logits' compares what several teachers say"]),
        (["teachers.1.aligner={subtokens: auto}"], ["teachers[1].aligner", "objective.kind=csd"]),
        (["teachers.1.path=store"], ["teachers[1].path: objective.kind multi_teacher compares whole distributions"]),
        (["teachers.1.model=other"], ["teachers.1 (other)", "tokenizer must be the student's"]),
        (["objective.mismatch_weight=1"], ["Unknown key objective.mismatch_weight"]),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_trained(
    cohobate, kinds: Path, changes: list[str], words: list[str]
):
    done = cohobate("train", "multi_teacher", *ROUTED, *changes)
    refused(done, 1 if "in the column" in words[0] or "no row has" in words[0] else 2, *words)
    assert not list(kinds.glob("runs/**/metrics.jsonl"))


def test_one_teacher_is_gkds_at_every_beta(cohobate, kinds: Path):
    """The loss of the first step, of one teacher by either recipe on the same completions."""
    run = ["student.model=student", "data.train=kinds.jsonl", *SETTINGS[4:], "sampling.on_policy_fraction=1.0"]
    for beta in ("0.0", "0.3", "1.0"):
        asked = [*run, f"objective.beta={beta}", f"output_dir=runs/{beta}"]
        one = ["teachers=[{model: teacher}]", "route_by=null"]
        assert cohobate("train", "multi_teacher", *asked, *one).code == 0
        assert cohobate("train", "gkd", *asked, "teacher.model=teacher", f"output_dir=runs/gkd{beta}").code == 0
        found, wanted = (logs(kinds, name)[0]["loss"] for name in (beta, f"gkd{beta}"))
        assert found == pytest.approx(wanted, rel=1e-5)


def test_routes_need_several_teachers(cohobate, kinds: Path):
    run = ["student.model=student", "teacher.model=teacher", "data.train=kinds.jsonl", "route_by=domain"]
    refused(cohobate("train", "gkd", *run), 2, "route_by=domain chooses between several `teachers`")


def test_a_store_needs_only_the_rows_that_are_routed_to_it(cohobate, place: Path):
    """With csd, which mixes teachers of either kind: a store for some rows, a model for the others."""
    rows = [{"text": f"{a}2+1{a}=5bc3{a}", "sample_id": f"r{a}", "kind": "ab"[a % 3 == 0]} for a in range(9)]
    for name, some in (("all", rows), ("few", [row for row in rows if row["kind"] == "b"])):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    csd = [change for change in RUN if not change.startswith("data.")]
    done = cohobate("score", "--recipe", "csd", "-o", "store", "--dtype", "float32", *csd, "data.train=few.jsonl")
    assert done.code == 0, done.err
    run = [*csd, "data.train=all.jsonl", "teachers.0.path=store", "sampling.on_policy_fraction=0"]
    refused(cohobate("train", "csd", *run), 1, "is not in the teacher store")
    routed = ["route_by=kind", "teachers.0.routes=[b]", "teachers.1.model=bpe"]
    done = cohobate("train", "csd", *run, *routed)
    assert done.code == 0, done.err
    assert "store (own tokenizer; kind: b), bpe (the same tokenizer; kind: all others)" in done.out
    assert any(log.get("kd/teacher0", 0.0) > 0 for log in logs(place, "csd"))
    refused(cohobate("train", "csd", *run, *routed, "teachers.0.routes=[a]", "output_dir=runs/b"), 1, "teacher store")
