# SPDX-License-Identifier: Apache-2.0
"""Data sets from files and folders, and a one-paragraph error with a cure for each that cannot be one."""

import json
from pathlib import Path

import pytest

from cohobate.data import load_rows
from cohobate.errors import DataError

ROWS = [{"question": "1+1", "answer": "2", "prüf": None}, {"question": "é", "answer": "3", "prüf": "x"}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def write(path: Path, rows: list[dict[str, str | None]] = ROWS) -> Path:
    import datasets

    table = datasets.Dataset.from_list(rows)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".csv":
        table.to_csv(path)
    else:
        table.save_to_disk(path)
    return path


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet", "d.csv", "folder"])
def test_every_format_gives_the_rows(tmp_path: Path, name: str):
    rows = load_rows(write(tmp_path / name))
    assert list(rows["question"]) == ["1+1", "é"]
    assert rows.column_names == ["question", "answer", "prüf"]


def test_columns_can_be_renamed_and_rows_limited(tmp_path: Path):
    rows = load_rows(write(tmp_path / "d.jsonl"), rename={"question": "prompt"}, columns=("prompt",), limit=1)
    assert rows.to_list() == [{"prompt": "1+1", "answer": "2", "prüf": None}]


def test_json_values_are_what_is_written(tmp_path: Path):
    lines = b'\xef\xbb\xbf{"prompt": "a", "answer": "2024-01-01"}\n\n{"prompt": "b", "answer": "007", "n": 7}\n'
    rows = load_rows(write_bytes(tmp_path / "d.jsonl", lines)).to_list()
    assert rows == [
        {"prompt": "a", "answer": "2024-01-01", "n": None},
        {"prompt": "b", "answer": "007", "n": 7},
    ]
    assert load_rows(write_bytes(tmp_path / "d.json", b'[{"prompt": "a"}]')).to_list() == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (b'{"a": "7"}\n{"a": 7}\n', "the column 'a' has text in some rows and 7 in another"),
        (b'{"a": 1}\n{"a"', "line 2 is no JSON"),
        (b'{"a": 1}\n[2]\n', "row 2 is list, not an object"),
    ],
)
def test_json_that_is_no_table_says_where(tmp_path: Path, lines: bytes, why: str):
    with pytest.raises(DataError, match=why):
        load_rows(write_bytes(tmp_path / "d.jsonl", lines))


def test_a_folder_with_splits_needs_one_named(tmp_path: Path):
    import datasets

    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    assert len(load_rows(tmp_path / "d", split="test")) == 1
    with pytest.raises(DataError, match="choose one with split=; the splits are train, test"):
        load_rows(tmp_path / "d")
    with pytest.raises(DataError, match=r"no split 'tests'; the splits are train, test.*Did you mean 'test'"):
        load_rows(tmp_path / "d", split="tests")


def test_what_cannot_be_loaded_says_why(tmp_path: Path):
    path = write(tmp_path / "d.jsonl")
    with pytest.raises(DataError, match=r"no column 'promt'; the columns are question.*") as caught:
        load_rows(path, columns=("promt",))
    assert str(path) in str(caught.value)
    with pytest.raises(DataError, match=r"no column 'qestion'.*Did you mean 'question'"):
        load_rows(path, rename={"qestion": "prompt"})
    with pytest.raises(DataError, match="cannot rename 'question' to 'answer'"):
        load_rows(path, rename={"question": "answer"})
    with pytest.raises(DataError, match="the data set is empty"):
        load_rows(path, limit=0)
    with pytest.raises(DataError, match="no such file"):
        load_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"files of kind '.pkl' are not read; known are JSONL"):
        load_rows(write_bytes(tmp_path / "d.pkl", b"x"))
    with pytest.raises(DataError, match="the file is empty"):
        load_rows(write_bytes(tmp_path / "e.jsonl", b""))
    with pytest.raises(DataError, match="cannot be read as a data set"):
        load_rows(write_bytes(tmp_path / "f.jsonl", b"{not json\n"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="cannot be read as a data set"):
        load_rows(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"cannot be read as a data set.*a hub name, which needs the network once"):
        load_rows("nobody/no-such-data-set")  # the suite runs offline
    with pytest.raises(DataError, match=r"without splits; leave split='train' out"):
        load_rows(write(tmp_path / "g"), split="train")


def write_bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
