# SPDX-License-Identifier: Apache-2.0
"""The command as a person uses it: what it prints, its exit code, and what it leaves behind."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli_runs import refused
from cohobate.cli import main
from cohobate.cli.recipe import load_recipe
from cohobate.errors import ConfigError, ServerUnreachable
from cohobate.teachers import LocalTeacher

SMALL = [
    "student.model=student",
    "data.train=rows.jsonl",
    "training.max_steps=2",
    "training.per_device_train_batch_size=4",
    "training.use_cpu=true",
    "training.dataloader_pin_memory=false",
    "sampling.max_completion_length=5",
]
LARGER = ["teacher.model=teacher"]


# ------------------------------------------------------------------ help


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["eval", "--help"], ["demo", "--help"]])
def test_help_has_examples_and_is_wrapped_for_80_columns_already(cohobate, arguments: list[str], monkeypatch):
    texts = []
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        done = cohobate(*arguments)
        assert done.code == 0
        texts.append([line.strip() for line in done.out[: done.out.index("╭─")].splitlines()])
    assert texts[0] == texts[1]
    assert any(line.startswith("cohobate ") for line in texts[0])


def test_help_of_train_lists_every_shipped_recipe(cohobate):
    from cohobate.cli.recipe import shipped_recipes

    text = cohobate("train", "--help").out
    assert all(f" {name} " in text for name in shipped_recipes())


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom cohobate.cli import main\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ train


def test_train_leaves_model_card_metrics_recipe_and_result(cohobate, place: Path):
    done = cohobate("train", "gkd", *SMALL, *LARGER, "data.eval=rows.jsonl", "eval.grader=exact_match")
    assert done.code == 0, done.err
    folder = place / "runs" / "gkd"
    before, after = load_file(place / "student" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in after)

    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "2306.13649" in card
    assert "| student | student |" in card
    assert "| teacher | teacher |" in card
    assert '"on_policy_fraction": 0.5' in card

    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in logged if "loss" in entry] == [1, 2]
    result = json.loads((folder / "result.json").read_text())
    assert [entry["step"] for entry in result["evaluations"]] == [0, 2]
    assert all(0 <= entry["eval/accuracy"] <= 1 for entry in result["evaluations"])
    assert (
        load_recipe(str(folder / "recipe.yaml")).recipe
        == load_recipe("gkd", [*SMALL, *LARGER, "data.eval=rows.jsonl", "eval.grader=exact_match"]).recipe
    )
    for word in ("method    gkd", "16 to train on, 16 held out", "step 2/2", "before", "after", "done: 2 steps"):
        assert word in done.out


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("opd", LARGER),
        ("iw_opd", [*LARGER, "sampling.num_iterations=2", "sampling.num_generations=2"]),
        ("opsd", []),
        ("opsd", ["student.lora.target_modules=[q_proj,v_proj]", "teacher.kind=adapter_off"]),
        ("opsd", ["teacher.kind=live"]),
        ("sdft", []),
        ("sdpo", ["objective.top_k=9", "data.privileged.lessons.feedback=verdict"]),
        ("gkd", [*LARGER, "objective.select.keep=0.5"]),
        ("gkd", [*LARGER, "objective.clip=token", "objective.clip_limit=0.5"]),
        ("gkd", ["objective.kind=cross_entropy", "teacher=null", "sampling.on_policy_fraction=0", "method=sft"]),
    ],
    ids=["opd", "iw_opd", "opsd", "opsd with lora", "opsd live", "sdft", "sdpo", "selected tokens", "clipped", "sft"],
)
def test_every_method_trains(cohobate, place: Path, name: str, changes: list[str]):
    done = cohobate("train", name, *SMALL, *changes, "output_dir=out")
    assert done.code == 0, done.err
    logged = [json.loads(line) for line in (place / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in logged if "loss" in entry]
    norms = [entry["grad_norm"] for entry in logged if "grad_norm" in entry]
    assert len(losses) == 2
    assert all(abs(loss) < 100 for loss in losses)
    assert all(0 < norm < 1000 for norm in norms)


SDPO = [*SMALL, "objective.top_k=9"]


def test_a_group_with_a_success_teaches_and_the_run_is_graded(cohobate, place: Path):
    done = cohobate("train", "sdpo", *SDPO, "data.eval=rows.jsonl", "eval.grader=final_answer", "output_dir=out")
    assert done.code == 0, done.err
    logged = [json.loads(line) for line in (place / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in logged if "loss" in entry]
    assert all(entry["lessons/demonstration_share"] + entry["lessons/without_share"] == 1 for entry in steps)
    assert all("eval/loss" not in entry for entry in logged)
    result = json.loads((place / "out" / "result.json").read_text())
    assert [entry["step"] for entry in result["evaluations"]] == [0, 2]
    assert "2601.20802" in (place / "out" / "README.md").read_text(encoding="utf-8")


def test_doctor_samples_groups_and_says_if_nothing_was_learnt_from(cohobate, place: Path):
    done = cohobate("doctor", "sdpo", *SDPO, "data.privileged.lessons.feedback=verdict")
    assert done.code == 0, done.err
    assert "successful" in done.out
    assert "without a lesson 0" in done.out
    done = cohobate("doctor", "sdpo", *SDPO, "data.privileged.lessons.success_threshold=2")
    assert done.code == 0, done.err
    assert "none has a lesson, so nothing was compared" in done.out


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (["data.privileged.lessons.grader=exact"], 2, ["unknown grader 'exact'", "exact_match"]),
        (["data.privileged.lessons.feedback=verdcit"], 2, ["unknown feedback 'verdcit'", "'verdict'"]),
        (["data.privileged.lessons.garder=exact_match"], 2, ["data.privileged.lessons.garder", "'grader'"]),
        (["data.privileged.source=solution"], 2, ["source and lessons"]),
        (["data.train=unanswered.jsonl"], 1, ["needs the column 'answer'"]),
        (["sampling.num_generations=1"], 2, ["num_generations=1 leaves every completion alone"]),
        (["objective.top_k=100"], 2, ["top_k=100 is more than the 23 ids"]),
        (["objective.top_k=null"], 2, ["top_k_of='student' without top_k"]),
        (["objective.top_k_of=studnet"], 2, ["objective.top_k_of", "'student'"]),
        (["objective.importance_clip=0.5"], 2, ["at least 1"]),
        (["sampling.top_p=0.9"], 2, ["top_p must be 1.0", "importance_clip"]),
        (["data.privileged.lessons.template='{question} {demonstration} {hnit}'"], 1, ["{hnit}"]),
        (
            ["teacher={kind: server, teacher_model_server_url: 'http://localhost:1'}"],
            2,
            ["provides TopKScores: top_k_of='student' asks the teacher for the ids"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value and "=" in value[0] else "",
)
def test_what_a_run_with_lessons_cannot_do_is_one_paragraph(
    cohobate, place: Path, changes: list[str], code: int, words: list[str]
):
    (place / "unanswered.jsonl").write_text('{"prompt": "1+1="}\n' * 4, encoding="utf-8")
    refused(cohobate("train", "sdpo", *SDPO, *changes), code, *words)


def test_scores_cannot_be_stored_for_lessons(cohobate, place: Path):
    (place / "mine.yaml").write_text(
        "method: mine\nstudent: {model: student}\nteacher: {kind: stored, path: store, model: teacher}\n"
        "objective: {kind: divergence}\noutput_dir: out\n"
        "data: {kind: rows, train: rows.jsonl, privileged: {lessons: {grader: exact_match}}}\n"
        "sampling: {on_policy_fraction: 0}\n",
        encoding="utf-8",
    )
    done = cohobate("score", "--recipe", "mine.yaml", "--teacher", "teacher", "--output", "store")
    refused(done, 2, "made of a group of completions")


def test_show_prints_the_recipe_and_runs_nothing(cohobate, place: Path):
    done = cohobate("train", "opsd", "--show", "student.model=nowhere", "data.train=nothing.jsonl", "seed=5")
    assert done.code == 0
    assert "seed: 5" in done.out
    assert not (place / "runs").exists()


def test_a_finished_run_is_not_overwritten_and_can_go_on(cohobate, place: Path):
    assert cohobate("train", "gkd", *SMALL, *LARGER).code == 0
    refused = cohobate("train", "gkd", *SMALL, *LARGER)
    assert refused.code == 2
    assert "checkpoint-2" in refused.err
    assert "--resume" in refused.err
    weights = (place / "runs/gkd/model.safetensors").read_bytes()
    (place / "runs/gkd/model.safetensors").unlink()
    done = cohobate("train", "gkd", *SMALL, *LARGER, "--resume")
    assert done.code == 0, done.err
    assert "checkpoint-2 has all of max_steps=2: nothing to train" in done.out
    assert (place / "runs/gkd/model.safetensors").read_bytes() == weights
    longer = [*SMALL, *LARGER, "training.max_steps=4"]
    done = cohobate("train", "gkd", *longer, "--resume")
    assert done.code == 0, done.err
    logged = [json.loads(line) for line in (place / "runs/gkd/metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in logged if "loss" in entry] == [1, 2, 3, 4]


# ------------------------------------------------------------------ bad input: one paragraph, a cure, an exit code


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (["training.max_stpes=3"], 2, ["max_stpes", "max_steps"]),
        (["temperature=0.7"], 2, ["sampling_temperature", "distill_temperature"]),
        (["teacher.model=other"], 2, ["'a'", "'b'"]),
        (["student.model=nowhere"], 2, ["nowhere"]),
        (["data.train=nothing.jsonl"], 1, ["nothing.jsonl"]),
        (["training.per_device_train_batch_size=17"], 1, ["16", "17"]),
        (["training.eval_strategy=steps"], 2, ["eval_strategy"]),
        (["eval.grader=exact_match"], 2, ["eval.grader", "data.eval"]),
        (["training.bf16=true", "training.fp16=true"], 2, ["fp16 and bf16"]),
        (["objective.kind=cross_entropy"], 2, ["teacher"]),
        (["data.privileged.source=soluton"], 1, ["soluton", "solution"]),
        (["sampling.on_policy_fraction=2"], 2, ["on_policy_fraction"]),
        (["data.prompts.max_prompt_length=2"], 1, ["max_prompt_length"]),
        (["output_dir=rows.jsonl/out"], 2, ["output_dir"]),
        (["training.learning_rate=nan"], 2, ["learning_rate", "nan"]),
        (["training.learning_rate=-1"], 2, ["learning_rate"]),
        (["training.max_steps=0"], 2, ["training.max_steps must be", "num_train_epochs"]),
        (["training.packing=true"], 2, ["training.packing fills", "training.token_budget"]),
        (["sampling.top_p=2"], 2, ["sampling.top_p must be in (0, 1]"]),
        (["sampling.num_iterations=2"], 2, ["sampling.num_iterations=2 trains several steps"]),
        (["training.per_device_train_batch_size=0"], 2, ["per_device_train_batch_size"]),
        (["eval.grader=exact_match", "data.eval=unanswered.jsonl", "eval.before=false"], 1, ["answer"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value and "=" in value[0] else "",
)
def test_a_wrong_setting_is_one_paragraph(cohobate, place: Path, changes: list[str], code: int, words: list[str]):
    (place / "unanswered.jsonl").write_text('{"prompt": "1+1="}\n', encoding="utf-8")
    refused(cohobate("train", "gkd", *SMALL, *LARGER, *changes), code, *words)
    assert not [path for path in (place / "runs").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", ["empty"]),
        ('{"question": "1+1="}\n' * 4, ["question", "prompt"]),
        ('{"prompt": "1+1=", "completion": ""}\n' * 4, ["completion", "empty"]),
        ("\n \n", ["empty"]),
        ('{"prompt": "1+1="\n', ["bad.jsonl", "line 1 is no JSON"]),
        ('{"prompt": "1+1=", "text": "1"}\n' * 4, ["prompt", "text"]),
    ],
    ids=["empty", "no prompt", "empty completion", "blank lines", "not JSON", "two kinds"],
)
def test_bad_rows_are_one_paragraph(cohobate, place: Path, rows: str, words: list[str]):
    (place / "bad.jsonl").write_text(rows, encoding="utf-8")
    refused(cohobate("train", "gkd", *SMALL, *LARGER, "data.train=bad.jsonl"), 1, *words)


def test_an_output_folder_that_the_file_system_refuses_is_one_paragraph(cohobate, place: Path, monkeypatch):
    def refuse(**_options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    refused(cohobate("train", "gkd", *SMALL, *LARGER), 2, "output_dir", "Read-only")


def test_a_non_finite_gradient_stops_before_the_optimizer_step_and_says_so(cohobate, place: Path):
    wild = ["training.learning_rate=1e30", "training.max_grad_norm=0", "training.warmup_steps=0"]
    done = cohobate("train", "gkd", *SMALL, *LARGER, "training.max_steps=5", *wild)
    refused(done, 1, "step 2", "not taken")


def test_the_developers_flag_lets_the_error_through():
    with pytest.raises(ConfigError, match="Did you mean 'gkd'"):
        main(["--traceback", "train", "gdk"])


# ------------------------------------------------------------------ signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_that_resumes(cohobate, place: Path, number: signal.Signals):
    arguments = ["train", "gkd", *SMALL, *LARGER, "training.max_steps=100000"]
    with subprocess.Popen(
        [sys.executable, "-m", "cohobate.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 2/"):
                break
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert "--resume" in err
    checkpoints = list((place / "runs" / "gkd").glob("checkpoint-*"))
    assert len(checkpoints) == 1
    reached = int(checkpoints[0].name.removeprefix("checkpoint-"))
    assert reached >= 2
    done = cohobate("train", "gkd", *SMALL, *LARGER, f"training.max_steps={reached + 1}", "--resume")
    assert done.code == 0, done.err
    assert f"step {reached + 1}/{reached + 1}" in done.out


def test_a_teacher_that_goes_away_leaves_a_checkpoint_and_asks_to_run_again(
    cohobate, place: Path, monkeypatch: pytest.MonkeyPatch
):
    scored = LocalTeacher.score
    calls = []

    def score(self, batch):
        calls.append(batch)
        if len(calls) == 3:
            raise ServerUnreachable("nobody answers at http://localhost:1.")
        return scored(self, batch)

    monkeypatch.setattr(LocalTeacher, "score", score)
    change = ["training.max_steps=4", "training.save_steps=100", "eval.before=false"]
    done = cohobate("train", "gkd", *SMALL, *LARGER, *change)
    refused(done, 75, "nobody answers", "checkpoint-2 is the last whole step", "--resume")
    done = cohobate("train", "gkd", *SMALL, *LARGER, *change, "--resume")
    assert done.code == 0, done.err
    assert "step 3/4" in done.out


# ------------------------------------------------------------------ eval and demo


def test_eval_grades_every_row_and_writes_every_completion(cohobate, place: Path):
    output = place / "result.json"
    done = cohobate(
        "eval",
        "student",
        "--data",
        "rows.jsonl",
        "--grader",
        "exact_match",
        "--max-new-tokens",
        "4",
        "-o",
        str(output),
    )
    assert done.code == 0, done.err
    result = json.loads(output.read_text())
    assert result["num_rows"] == 16
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    right = [a["completion"].strip() == row["answer"] for a, row in zip(result["answers"], rows, strict=True)]
    assert [a["score"] == 1 for a in result["answers"]] == right
    assert result["accuracy"] == sum(right) / 16
    assert f"{result['accuracy']:.1%}" in done.out
    assert list(place.glob(".result*")) == []


def test_eval_does_not_depend_on_the_batch_size(cohobate, place: Path):
    found = []
    for size in ("1", "5"):
        output = place / f"{size}.json"
        done = cohobate(
            *("eval", "student", "-d", "rows.jsonl", "-g", "exact_match", "--max-new-tokens", "4"),
            *("--batch-size", size, "-t", "1.0", "-o", str(output)),
        )
        assert done.code == 0, done.err
        found.append([answer["completion"] for answer in json.loads(output.read_text())["answers"]])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["eval", "student", "-d", "rows.jsonl", "-g", "exact"], 2, ["exact", "exact_match"]),
        (["eval", "nowhere", "-d", "rows.jsonl", "-g", "exact_match"], 2, ["nowhere"]),
        (["eval", "student", "-d", "nothing.jsonl", "-g", "exact_match"], 1, ["nothing.jsonl"]),
        (["eval", "student", "-d", "rows.jsonl", "-g", "exact_match", "-o", "no/where.json"], 2, ["--output"]),
        (["eval", "student", "-d", "rows.jsonl", "-g", "exact_match", "--adapter", "student"], 2, ["--adapter"]),
    ],
    ids=["grader", "model", "data", "output", "adapter"],
)
def test_a_wrong_argument_of_eval_is_one_paragraph(
    cohobate, place: Path, arguments: list[str], code: int, words: list[str]
):
    refused(cohobate(*arguments), code, *words)


def test_eval_puts_a_trained_adapter_on_its_model(cohobate, place: Path):
    lora = [
        "student.lora.target_modules=[q_proj,v_proj,up_proj]",
        "training.learning_rate=0.3",
        "training.warmup_steps=0",
    ]
    assert cohobate("train", "opd", *SMALL, *LARGER, *lora, "output_dir=out").code == 0
    found = []
    for adapter in ([], ["--adapter", "out"]):
        arguments = [
            "eval",
            "student",
            "-d",
            "rows.jsonl",
            "-g",
            "exact_match",
            "--max-new-tokens",
            "6",
            "-o",
            "r.json",
        ]
        done = cohobate(*arguments, *adapter)
        assert done.code == 0, done.err
        found.append([answer["completion"] for answer in json.loads((place / "r.json").read_text())["answers"]])
    assert found[0] != found[1]


def test_demo_shows_progress_and_a_table_of_all_seeds(cohobate, place: Path, monkeypatch: pytest.MonkeyPatch):
    from cohobate.demo import run

    calls = []

    def run_demo(*, progress, **options):
        calls.append(options)
        progress(3, 4, "half way")
        curves = [[{"step": s, "accuracy": a, "seconds": 2.0} for s, a in ((0, 0.25), (4, b))] for b in (0.5, 0.75)]
        return {
            "seeds": 2,
            "seconds": 61.0,
            "load_average_before": 0.5,
            "methods": {next(iter(run.METHODS)): [{"curve": curve} for curve in curves]},
        }

    monkeypatch.setattr(run, "run_demo", run_demo)
    done = cohobate("demo", "--quick", "-o", "somewhere")
    assert done.code == 0, done.err
    assert calls == [{"output_dir": Path("somewhere"), "seeds": 3, "quick": True}]
    assert "half way" in done.out
    assert "62 (50–75)" in done.out
    assert "1 min 1 s in all; load average before it 0.5" in done.out


def test_time_left_is_said_in_plain_lines(capsys: pytest.CaptureFixture[str]):
    from cohobate.cli.progress import Steps, duration

    with Steps("row", 10) as steps:
        steps.advance_to(0)
        time.sleep(0.01)
        steps.advance_to(5)
        steps.say("accuracy 0.5")
    out = capsys.readouterr().out
    assert out.startswith("row 5/10  accuracy 0.5  (")
    assert out.endswith("left)\n")
    assert [duration(s) for s in (9.6, 95, 7265)] == ["10 s", "1 min 35 s", "2 h 1 min"]
