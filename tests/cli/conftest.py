# SPDX-License-Identifier: Apache-2.0
import json
import os
from pathlib import Path

import pytest

import tiny
import tiny_bpe
from cli_runs import Outcome
from cohobate.cli import main
from cohobate.cli.app import ENVIRONMENT


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `student`, `teacher`, `other` (another vocabulary) and `rows.jsonl`; not to be written into."""
    folder = tmp_path_factory.mktemp("parts")
    tokenizer = tiny.char_tokenizer()
    for name, seed in (("student", 1), ("teacher", 2)):
        tiny.llama(seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    tiny.llama(3).save_pretrained(folder / "other")
    tiny.char_tokenizer("0123456789+=bacdefgh ").save_pretrained(folder / "other")
    for name, seed, own in (
        ("bpe", 4, tiny_bpe.student_tokenizer()),
        ("bpe_teacher", 5, tiny_bpe.teacher_tokenizer()),
    ):
        tiny.llama(seed, vocab_size=len(own)).save_pretrained(folder / name)
        own.save_pretrained(folder / name)
    write_rows(folder / "text.jsonl", [{"text": f"{a}2+1{a}=5bc3{a}"} for a in range(12)])
    rows = [
        {"prompt": f"{a}+{b}=", "completion": f"{a + b}", "answer": f"{a + b}", "solution": f"{a}+{b}={a + b}"}
        for a in range(4)
        for b in range(4)
    ]
    write_rows(folder / "rows.jsonl", rows)
    return folder


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def place(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, with the parts linked into it."""
    for path in parts.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cohobate(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs the command in this process."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ENVIRONMENT[name]))

    def run(*arguments: str) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, *capfd.readouterr())

    return run
