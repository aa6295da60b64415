# SPDX-License-Identifier: Apache-2.0
"""A data set by its path or name, as rows. The one file that imports `datasets`, and late: it takes a second.

Data only: no loading script is ever run (`trust_remote_code` is never passed). A hub name is looked up only if nothing
of that name exists on this machine.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cohobate.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_rows(
    source: str | Path,
    *,
    split: str | None = None,
    rename: Mapping[str, str] | None = None,
    columns: tuple[str, ...] = (),
    limit: int | None = None,
) -> "Dataset":
    """The rows of a JSONL, Parquet or CSV file, a folder of such files or of `save_to_disk`, or a hub data set.

    Args:
        split: needed where there are several. A single file has one, `train`.
        rename: old column name -> new one, e.g. `{"question": "prompt"}`.
        columns: must be there after renaming.
        limit: the first so many rows only.

    Raises:
        DataError: not found, unreadable, empty, no such split, a missing column, a name taken twice.
    """
    with _without_their_errors():
        loaded = _read(source)
    rows = _one_split(loaded, split, source)
    for old, new in (rename or {}).items():
        _check_columns(source, rows.column_names, [old])
        if new in rows.column_names:
            raise DataError(
                f"{source}: cannot rename {old!r} to {new!r}, which is there already. Drop or rename that one."
            )
        rows = rows.rename_column(old, new)
    _check_columns(source, rows.column_names, columns)
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    if not len(rows):
        raise DataError(f"{source}: the data set is empty. Check the path, the split and the limit.")
    return rows


@contextlib.contextmanager
def _without_their_errors() -> Iterator[None]:
    """datasets logs what it then raises; the reason stands in our error."""
    from datasets.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _read(source: str | Path) -> Any:
    import datasets

    path = Path(source).expanduser()
    try:
        if path.is_file():
            kind = _FORMATS.get(path.suffix.lower())
            if kind is None:
                raise DataError(f"{source}: files of kind {path.suffix or '(none)'!r} are not read; {_known()}.")
            with path.open("rb") as file:
                if not any(line.strip() for line in file):
                    raise DataError(f"{source}: the file is empty. Check the path, or write rows into it.")
            if kind == "json":
                return {"train": datasets.Dataset.from_dict(_columns(_json_rows(path)))}
            return datasets.load_dataset(kind, data_files=str(path))
        if path.is_dir():
            if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
                return datasets.load_from_disk(str(path))
            return datasets.load_dataset(str(path))
        if path.suffix.lower() in _FORMATS or path.is_absolute():
            raise DataError(f"{source}: no such file. Relative paths start at {Path.cwd()}.")
        return datasets.load_dataset(str(source))
    except DataError:
        raise
    except Exception as error:  # datasets raises many kinds, also of pyarrow, pandas and the hub client
        cause: BaseException = error
        while cause.__cause__ is not None:  # datasets wraps what is wrong in "an error occurred"
            cause = cause.__cause__
        reason = str(cause).strip().splitlines()
        raise DataError(
            f"{source}: cannot be read as a data set ({type(cause).__name__}: "
            f"{reason[0] if reason else 'no reason given'}). K{_known()[1:]}; a folder of save_to_disk; or a "
            "hub name, which needs the network once."
        ) from error


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON array, or one a line, with the values that stand there.

    Read here, because the reader of `datasets` makes dates of strings that look like one, and numbers of strings
    beside numbers: an answer would no longer be what somebody wrote.
    """
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = []
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                if line.strip():
                    rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON: {error}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is {type(row).__name__}, not an object with columns")
    return rows


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Every column that some row has, in order of appearance."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    for name, values in columns.items():
        other = next((value for value in values if value is not None and not isinstance(value, str)), None)
        if other is not None and any(isinstance(value, str) for value in values):
            raise ValueError(f"the column {name!r} has text in some rows and {other!r} in another; write all as text")
    return columns


def _known() -> str:
    return "known are JSONL, JSON, Parquet and CSV files"


def _one_split(loaded: Any, split: str | None, source: str | Path) -> "Dataset":
    if not isinstance(loaded, dict):
        if split is not None:
            raise DataError(f"{source}: it is one data set without splits; leave split={split!r} out.")
        return loaded
    if split is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if split not in loaded:
        hint = did_you_mean(split, loaded) if split else ""
        wanted = "choose one with split=" if split is None else f"there is no split {split!r}"
        raise DataError(f"{source}: {wanted}; the splits are {', '.join(loaded)}.{hint}")
    return loaded[split]


def _check_columns(source: str | Path, present: list[str], wanted: Any) -> None:
    for name in wanted:
        if name not in present:
            raise DataError(
                f"{source}: there is no column {name!r}; the columns are {', '.join(present) or '(none)'}."
                f"{did_you_mean(name, present)}"
            )
