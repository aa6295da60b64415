# SPDX-License-Identifier: Apache-2.0
"""`cohobate score`: rows to a store, and a run that reads the store beside the run that has the teacher."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny
import tiny_bpe
from cohobate.cli import main
from cohobate.cli.app import ENVIRONMENT
from cohobate.data import PrivilegedConfig, PromptConfig
from cohobate.errors import ConfigError, DataError
from cohobate.objectives import DivergenceObjective
from cohobate.objectives.cross_tokenizer import CommonSupportObjective
from cohobate.teachers import LocalTeacher, OwnTokenizerTeacher, load_model
from cohobate.teachers.store_files import read_index
from cohobate.teachers.stored import StoredTeacher
from cohobate.trainer import DistillationConfig, DistillationTrainer
from cohobate.vocab import SubtokenTables

STUDENT, OTHER = tiny_bpe.student_tokenizer(), tiny_bpe.teacher_tokenizer()
ROWS = [{"prompt": f"{i}+{i * 7}=", "completion": f"{i * 8}+12{i}", "hint": f"{i * 8}"} for i in range(12)]
HELD_OUT = [{"prompt": f"{i}+34=", "completion": f"{i + 34}"} for i in range(4)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`student` and `big` share a tokenizer and have heads padded differently; `other` has its own. And rows."""
    folder = tmp_path_factory.mktemp("score")
    for name, seed, width, tokenizer in (
        ("student", 1, 29, STUDENT),
        ("big", 5, 32, STUDENT),
        ("other", 6, 31, OTHER),
    ):
        tiny.llama(seed, vocab_size=width, hidden=16, layers=2).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_rows(folder / "rows.jsonl", ROWS)
    write_rows(folder / "held_out.jsonl", HELD_OUT)
    write_rows(folder / "prompts.jsonl", [{"prompt": "1+1="}])
    return folder


@pytest.fixture
def score(capfd: pytest.CaptureFixture[str], parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `cohobate score` in a folder of its own beside the parts: exit code, what it printed, and its errors."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ENVIRONMENT[name]))
    for path in parts.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["score", *arguments])
        assert isinstance(caught.value.code, int)
        return (caught.value.code, *capfd.readouterr())

    return run


BASE = ["-t", "big", "-s", "student", "-d", "rows.jsonl", "-d", "held_out.jsonl", "-o", "store", "-k", "6"]


def trainer(folder: Path, teacher: Any, objective: Any, *, own: bool = False, **parts: Any) -> DistillationTrainer:
    args = DistillationConfig(
        output_dir=str(folder / "run"),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=3,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        on_policy_fraction=parts.pop("on_policy_fraction", 0.0),
    )
    return DistillationTrainer(
        model=load_model(folder / "student").float(),
        teacher=teacher,
        args=args,
        train_dataset=parts.pop("rows", ROWS),
        eval_dataset=parts.pop("held_out", HELD_OUT),
        processing_class=STUDENT,
        teacher_processing_class=None if own else STUDENT,
        objective=objective,
        **parts,
    )


def numbers(run: DistillationTrainer) -> tuple[list[float], list[float], float]:
    run.train()
    log = [entry for entry in run.state.log_history if "loss" in entry]
    return [e["loss"] for e in log], [e["grad_norm"] for e in log], run.evaluate()["eval/loss"]


def check_equal(stored: DistillationTrainer, live: DistillationTrainer, tolerance: float = 1e-5) -> None:
    found, wanted = numbers(stored), numbers(live)
    assert found[0] == pytest.approx(wanted[0], abs=tolerance)
    assert found[1] == pytest.approx(wanted[1], rel=20 * tolerance)  # Adam makes steps of a size out of rounding
    assert found[2] == pytest.approx(wanted[2], abs=tolerance)
    assert len(found[0]) == 3
    assert all(loss > 1e-2 for loss in found[0])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_run_from_the_store_is_the_run_with_the_teacher_at_the_same_k(
    score: Any, tmp_path: Path, temperature: float, beta: float
) -> None:
    code, out, err = score(*BASE, "--distill-temperature", str(temperature), "--shard-rows", "20")
    assert code == 0, err
    assert "predictions of 16 rows at K=6" in out
    live = DivergenceObjective(beta=beta, temperature=temperature, top_k=6)
    check_equal(
        trainer(tmp_path, StoredTeacher("store", STUDENT), DivergenceObjective(beta=beta, temperature=temperature)),
        trainer(tmp_path, LocalTeacher(load_model("big"), vocab_size=len(STUDENT)), live),
    )


def test_a_compact_store_changes_the_loss_by_less_than_its_step(score: Any, tmp_path: Path) -> None:
    assert score(*BASE, "--compact")[0] == 0
    check_equal(
        trainer(tmp_path, StoredTeacher("store", STUDENT), DivergenceObjective(beta=0.5)),
        trainer(
            tmp_path,
            LocalTeacher(load_model("big"), vocab_size=len(STUDENT)),
            DivergenceObjective(beta=0.5, top_k=6),
        ),
        tolerance=1e-3,
    )


def test_a_privileged_teacher_is_scored_as_the_run_will_ask_it(score: Any, tmp_path: Path) -> None:
    """By a recipe, which says what the teacher sees more; without it the run finds other tokens and stops."""
    template = "{privileged} {question}"
    recipe = tmp_path / "my.yaml"
    recipe.write_text(RECIPE.format(template=template), encoding="utf-8")
    code, _, err = score("-r", "my.yaml", "-t", "big", "-o", "store", "-k", "6", "data.eval=null")
    assert code == 0, err
    privileged = PrivilegedConfig(source="hint", template=template)
    stored = StoredTeacher("store", STUDENT)
    assert stored.store.header.num_texts == len(ROWS)
    kept = DivergenceObjective(beta=0.5, top_k=6)
    options: dict[str, Any] = {"privileged": privileged, "held_out": ROWS}
    check_equal(
        trainer(tmp_path, stored, DivergenceObjective(beta=0.5), **options),
        trainer(tmp_path, LocalTeacher(load_model("big"), vocab_size=len(STUDENT)), kept, **options),
    )
    with pytest.raises(DataError, match=r"row '.*' is in the teacher store store, but with other tokens.*--recipe my"):
        trainer(tmp_path, stored, DivergenceObjective(beta=0.5), held_out=ROWS)


RECIPE = """
method: gkd
student: {{model: student}}
teacher: {{kind: local, model: nowhere}}
objective: {{kind: divergence, beta: 0.5}}
data:
  kind: rows
  train: rows.jsonl
  eval: held_out.jsonl
  privileged: {{source: hint, template: "{template}"}}
sampling: {{on_policy_fraction: 0.0}}
output_dir: runs/my
"""


@pytest.mark.parametrize("max_length", [None, 9])
def test_a_teacher_with_its_own_tokenizer_serves_csd_from_the_store(
    score: Any, tmp_path: Path, max_length: int | None
) -> None:
    limit = [] if max_length is None else ["--max-length", str(max_length)]
    arguments = ["-t", "other", "-s", "student", "--own-tokenizer", "-d", "rows.jsonl", "-d", "held_out.jsonl"]
    code, _, err = score(*arguments, "-o", "store", "-k", "8", *limit)
    assert code == 0, err
    assert read_index(Path("store")).header.tokens == "teacher"
    objective = CommonSupportObjective(parts=(SubtokenTables.build(STUDENT, OTHER),), dynamic_scaling="off")
    live = OwnTokenizerTeacher(LocalTeacher(load_model("other")), OTHER, top_k=8, max_length=max_length)
    check_equal(
        trainer(tmp_path, StoredTeacher("store", OTHER), objective, own=True),
        trainer(tmp_path, live, objective, own=True),
    )


def test_a_recipe_says_who_reads_what_and_options_come_before_it(score: Any, tmp_path: Path) -> None:
    """The same store as by options alone, evaluation rows included; the recipe's K is 128, more than there are."""
    changes = ["student.model=student", "teachers.0.model=other", "data.train=rows.jsonl", "data.eval=held_out.jsonl"]
    code, _, err = score("-r", "csd", *changes, "-o", "store", "-k", "8")
    assert code == 0, err
    options = ["-t", "other", "-s", "student", "--own-tokenizer", "-d", "rows.jsonl", "-d", "held_out.jsonl"]
    assert score(*options, "-o", "second", "-k", "8")[0] == 0
    one, two = read_index(Path("store")), read_index(Path("second"))
    assert (one.header, one.shards) == (two.header, two.shards)
    assert one.command == ("cohobate", "score", "--top-k", "8", "--recipe", "csd", *changes)
    code, _, err = score("-r", "csd", *changes, "-o", "third")
    assert code == 2
    assert "top_k must be in [1, 29] (the teacher's ids), got 128" in err
    several = [*changes, "teachers.1.model=big"]
    assert "the recipe has 2 teachers: other, big" in score("-r", "csd", *several, "-o", "third")[2]
    code, _, err = score("-r", "csd", *several, "-t", "big", "-k", "4", "-o", "third")
    assert code == 0, err
    assert read_index(Path("third")).header.tokens == "student"


# ------------------------------------------------------------------ again, changed, damaged


def content(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_the_same_command_finishes_mends_and_otherwise_does_nothing(
    score: Any, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = [*BASE, "--shard-rows", "20"]
    assert score(*arguments)[0] == 0
    whole = content("store")
    assert "shards: 0 made, 4 were there and whole" in score(*arguments)[1]
    assert content("store") == whole
    Path("store/store.json").unlink()
    Path("store/shard-00001.safetensors").write_bytes(b"torn")
    Path("store/shard-00002.safetensors").unlink()
    code, out, _ = score(*arguments)
    assert code == 0
    assert "shards: 2 made (1 had been damaged), 2 were there and whole" in out
    assert "shard-00001.safetensors is damaged" in caplog.text
    assert content("store") == whole


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (["-k", "5"], "top_k is 6 in the store and 5 now"),
        (["--distill-temperature", "2"], "temperature is 1.0 in the store and 2.0 now"),
        (["--compact"], "values is exact in the store and compact now"),
        (["--dtype", "bfloat16"], "teacher_dtype is as in the file in the store and bfloat16 now"),
        (["-t", "student"], "teacher_weights is"),
        (["--limit", "3"], "num_texts is 16 in the store and 6 now"),
        (["--batch-tokens", "100"], "batch_tokens is 8192 in the store and 100 now"),
    ],
)
def test_a_changed_command_does_not_write_into_the_store(score: Any, changes: list[str], field: str) -> None:
    assert score(*BASE)[0] == 0
    whole = content("store")
    code, _, err = score(*BASE, *changes)
    assert code == 2
    assert field in err
    assert "Name another --output" in err
    assert {name: value for name, value in content("store").items() if name != ".lock"} == whole


def test_one_byte_of_the_weights_is_another_teacher(score: Any, parts: Path) -> None:
    shutil.copytree(parts / "big", "mine")
    arguments = ["-t", "mine", *BASE[2:]]
    assert score(*arguments)[0] == 0
    path = Path("mine/model.safetensors")
    weights = bytearray(path.read_bytes())
    weights[-3] ^= 1
    path.write_bytes(weights)
    code, _, err = score(*arguments)
    assert code == 2
    assert "teacher_weights is" in err
    assert "teacher_config" not in err


def test_a_changed_row_is_found_by_the_run_and_the_command_that_is_named_mends_it(score: Any, tmp_path: Path) -> None:
    assert score(*BASE)[0] == 0
    named = [{**row, "sample_id": f"r{i}"} for i, row in enumerate(ROWS)]
    Path("rows.jsonl").unlink()
    write_rows(Path("rows.jsonl"), named)
    assert score(*BASE[:-4], "-o", "second", "-k", "6")[0] == 0
    changed = [{**row, "completion": row["completion"] + "1"} if i == 7 else row for i, row in enumerate(named)]
    with pytest.raises(DataError, match=r"row 'r7' is in the teacher store second, but with other tokens") as caught:
        trainer(tmp_path, StoredTeacher("second", STUDENT), DivergenceObjective(), rows=changed)
    said, command = str(caught.value).split(", with its files in place of rows.jsonl, held_out.jsonl: ")
    assert said.endswith("Score what this run reads into a new folder")
    command = command.split()
    assert command[:2] == ["cohobate", "score"]
    Path("rows.jsonl").unlink()
    write_rows(Path("rows.jsonl"), changed)
    assert score(*command[2:])[0] == 0
    trainer(tmp_path, StoredTeacher("NEW_FOLDER", STUDENT), DivergenceObjective(), rows=changed).train()


def test_a_run_that_samples_is_told_that_a_store_cannot_know_it(score: Any, tmp_path: Path) -> None:
    assert score(*BASE)[0] == 0
    stored = StoredTeacher("store", STUDENT)
    with pytest.raises(ConfigError, match=r"recorded completions .* on_policy_fraction=1.0 samples new ones"):
        trainer(tmp_path, stored, DivergenceObjective(), on_policy_fraction=1.0)
    with pytest.raises(DataError, match=r"has no recorded completion, and StoredTeacher knows no other"):
        trainer(tmp_path, stored, DivergenceObjective(), rows=[{"prompt": ROWS[0]["prompt"]}] * 4)
    with pytest.raises(DataError, match=r"row .* is not in the teacher store store"):
        trainer(tmp_path, stored, DivergenceObjective(), held_out=[{"prompt": "1", "completion": "2"}])


# ------------------------------------------------------------------ what a person sees


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["-t", "big"], 2, "--output, --data: needed, unless a recipe"),
        (["-t", "big", "-d", "prompts.jsonl", "-o", "s"], 1, "no row has a recorded completion"),
        ([*BASE, "data.train=x"], 2, "data.train=x: changes are of a recipe. Give one with --recipe."),
        ([*BASE, "--workers", "2"], 2, "add --launcher ray"),
        ([*BASE, "--distill-temperature", "0"], 2, "--distill-temperature must be > 0"),
        ([*BASE, "-k", "100"], 2, "top_k must be in [1, 27]"),
        ([*BASE, "-o", "rows.jsonl"], 2, "that is a file. A store is a folder."),
        ([*BASE, "-o", "a/b"], 2, "Make it first."),
        ([*BASE, "-t", "other"], 2, "do not share a vocabulary"),
        ([*BASE, "--own-tokenizer", "--role", "x"], 2, "wanted STUDENT_SPECIAL=TEACHER_SPECIAL"),
        (["-r", "gkd", "--chat", "-o", "s"], 2, "--chat: a recipe says that itself"),
        ([*BASE, "-t", "nowhere"], 2, "no model folder nowhere"),
    ],
)
def test_wrong_usage_is_one_paragraph(score: Any, arguments: list[str], code: int, text: str) -> None:
    found, _, err = score(*arguments)
    assert text in err
    assert found == code
    assert "Traceback" not in err


def test_a_row_that_is_longer_than_the_teacher_is_named(score: Any) -> None:
    write_rows(Path("long.jsonl"), [{"prompt": "1", "completion": "6" * 200, "sample_id": "too long"}])
    code, _, err = score("-t", "big", "-d", "long.jsonl", "-o", "store", "-k", "3")
    assert code == 1
    assert "row 'too long' has 202 tokens, but the teacher has 128 positions" in err


def test_rows_that_cannot_be_stored_are_counted(score: Any) -> None:
    write_rows(Path("mixed.jsonl"), [{"prompt": "1+1=", "completion": "2"}, {"prompt": "2+2="}])
    code, out, _ = score("-t", "big", "-d", "mixed.jsonl", "-o", "store", "-k", "3")
    assert code == 0
    assert "rows without a recorded completion, which no store can hold: 1" in out
    assert "2 predictions of 1 rows at K=3" in out


def test_prompts_of_the_command_are_those_of_the_config(score: Any, tmp_path: Path) -> None:
    """`--chat` needs a chat template; a tokenizer without one is refused before anything is scored."""
    code, _, err = score("-t", "big", "-d", "rows.jsonl", "-o", "store", "--chat")
    assert code == 1
    assert "chat template" in err
    assert PromptConfig(string_prompts="user_turn") != PromptConfig()
    assert not Path("store").exists()


def test_the_help_does_not_import_torch_and_has_examples(score: Any) -> None:
    code, out, _ = score("--help")
    assert code == 0
    assert "cohobate score -t BIG -d rows.jsonl -o store/" in out
