# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

import tiny


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
