# SPDX-License-Identifier: Apache-2.0
"""The files of a teacher store: shards, each a unit that is there whole or not at all, and an index written last.

A shard is one safetensors file of columns. Its header says what the whole store was made from, which shard it is, and
a checksum over that and over names, types, shapes and bytes of its columns (safetensors has none); so a shard can be
judged without the index, and a writer that was killed goes on behind the last whole one. The index `store.json` holds
the checksums too and has one of its own. Names of files follow from numbers and are never read from a file.

Checksums find damage, not malice: a store is as trustworthy as whoever could write to its folder.
"""

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cohobate.errors import ConfigError, DataError
from cohobate.files import written_whole
from cohobate.teachers.store_format import FORMAT, TEXT_COLUMNS, Columns, Header, row_columns

INDEX = "store.json"
_MOST_INDEX_BYTES = 256 * 2**20
_KEY = "cohobate"  # of the metadata of a shard; safetensors orders several keys by chance


class DamagedShard(DataError):
    """A file of a store that is not what was written. The writer makes it again, a reader stops."""


class _OtherFormat(ConfigError):
    """Written by another version of this file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """What the index says of a shard."""

    number: int
    texts: int
    rows: int
    digest: str  # sha256 over its header and columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """A finished store."""

    header: Header
    shards: tuple[ShardEntry, ...]
    command: tuple[str, ...] = field(default=())  # that made it, without the folder

    def to_json(self) -> str:
        plain: dict[str, Any] = {"header": asdict(self.header), "command": list(self.command)}
        plain["shards"] = [{name: getattr(s, name) for name in ("texts", "rows", "digest")} for s in self.shards]
        return json.dumps({**plain, "digest": _digest_of(plain)}, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def repair_command(folder: Path, command: Sequence[str] = ()) -> str:
    """What to type to make, finish or mend the store in `folder`."""
    known = list(command) or ["cohobate", "score", "--teacher", "MODEL", "--data", "ROWS"]
    return shlex.join([*known, "--output", str(folder)])


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(folder: Path, header: Header, number: int, num_shards: int, columns: Columns) -> ShardEntry:
    """Put a shard in its place, whole.

    Raises:
        DataError: the disk does not take it.
    """
    path = shard_path(folder, number)
    about = {"header": asdict(header), "number": number, "num_shards": num_shards}
    digest = _digest_of(about, sorted(columns.items()))
    metadata = {_KEY: json.dumps({**about, "digest": digest}, sort_keys=True)}
    with _explained(path, sum(value.nbytes for value in columns.values())), written_whole(path) as temporary:
        save_file(columns, temporary, metadata=metadata)
        temporary.chmod(0o644)  # safetensors leaves it to its owner alone; others of a cluster may read the index too
    sync_folder(folder)
    texts, rows = len(columns["text_first"]), len(columns["log_normalizer"])
    return ShardEntry(number=number, texts=texts, rows=rows, digest=digest)


def write_index(folder: Path, index: Index) -> None:
    """The last act of a writer: from now on the store can be read."""
    text = index.to_json()
    path = folder / INDEX
    if path.is_file() and path.read_bytes() == text.encode():
        return
    with _explained(path, len(text)), written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """A rename is safe from a loss of power only when the folder itself is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_index(folder: Path) -> Index:
    """What `write_index` wrote.

    Raises:
        ConfigError: there is no finished store, or one of another format.
        DamagedShard: the index is not what was written.
    """
    path = folder / INDEX
    if not path.is_file():
        parts = len(list(folder.glob("shard-*.safetensors"))) if folder.is_dir() else 0
        state = f"it is unfinished: {parts} shards and no {INDEX}" if parts else "there is none"
        raise ConfigError(f"teacher store {folder}: {state}. Make it with: {repair_command(folder)}")
    if path.stat().st_size > _MOST_INDEX_BYTES:
        raise DamagedShard(f"{path} has {path.stat().st_size} bytes, which no index has. {_again(folder)}")
    try:
        plain = json.loads(path.read_bytes())
        found = plain.pop("digest")
        _check_format(path, plain["header"]["format"])
        if found != _digest_of(plain):
            raise ValueError("its checksum is not that of its content")
        header = Header(**plain["header"])
        shards = tuple(ShardEntry(number=i, **entry) for i, entry in enumerate(plain["shards"]))
        return Index(header=header, shards=shards, command=tuple(plain["command"]))
    except _OtherFormat:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedShard(f"{path} is damaged ({error}). {_again(folder)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A shard's file, mapped into memory; `entry` is what it says of itself."""

    file: Any
    header: Header
    num_shards: int
    entry: ShardEntry

    def read(self, names: Sequence[str], begin: int, end: int) -> Columns:
        """Some rows of some columns."""
        return {name: self.file.get_slice(name)[begin:end] for name in names}

    def column(self, name: str) -> np.ndarray:
        return self.file.get_tensor(name)

    def digest(self) -> str:
        """Of the bytes as they are now, one column in memory at a time."""
        about = {"header": asdict(self.header), "number": self.entry.number, "num_shards": self.num_shards}
        return _digest_of(about, ((name, self.column(name)) for name in sorted(self.file.keys())))


def open_shard(folder: Path, number: int) -> Shard:
    """Map a shard and check everything but its bytes (`verify`).

    Raises:
        FileNotFoundError: there is none.
        ConfigError: it has another format.
        DamagedShard: it is no shard, cut short, or not the one of this number.
    """
    path = shard_path(folder, number)
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        file = safe_open(path, framework="numpy")
        about = json.loads((file.metadata() or {})[_KEY])
        _check_format(path, about["header"]["format"])
        header = Header(**about["header"])
        if about["number"] != number:
            raise ValueError(f"it is shard {about['number']}")
        entry = _entry(file, header, number, str(about["digest"]))
        return Shard(file=file, header=header, num_shards=int(about["num_shards"]), entry=entry)
    except _OtherFormat:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedShard(f"{path} is damaged ({error}).") from error


def verify(folder: Path, shard: Shard) -> None:
    """Compare a shard's bytes with its checksum. Raises DamagedShard."""
    if shard.digest() != shard.entry.digest:
        path = shard_path(folder, shard.entry.number)
        raise DamagedShard(f"{path} is damaged: its checksum is not that of its content.")


def _entry(file: Any, header: Header, number: int, digest: str) -> ShardEntry:
    """The shard's size by its columns, which must be those of the header. Raises ValueError."""
    wanted = row_columns(header)
    names = set(file.keys())
    if names != {*wanted, *TEXT_COLUMNS}:
        raise ValueError(f"its columns are {', '.join(sorted(names))}")
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    texts, rows = shapes["text_first"][0], shapes["log_normalizer"][0]
    expected: dict[str, tuple[int, ...]] = {name: (rows, *width) for name, (_, width) in wanted.items()}
    expected |= {"text_sample": (texts, 2), "text_tokens": (texts, 2)}
    expected |= {"text_first": (texts,), "text_begin": (texts + 1,)}
    if shapes != expected:
        raise ValueError(f"its columns have the shapes {shapes}, not {expected}")
    return ShardEntry(number=number, texts=texts, rows=rows, digest=digest)


def _digest_of(plain: Mapping[str, Any], columns: Iterable[tuple[str, np.ndarray]] = ()) -> str:
    """sha256 over JSON, and over names, types, shapes and bytes of columns."""
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for name, column in columns:
        digest.update(f"{name} {column.dtype.str} {column.shape};".encode())
        if column.size:
            digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


def _check_format(path: Path, number: object) -> None:
    if number != FORMAT:
        raise _OtherFormat(
            f"{path} has format {number}, this version reads {FORMAT}. Make the store again in an empty folder: "
            f"{repair_command(Path('FOLDER'))}"
        )


def _again(folder: Path) -> str:
    return f"Mend it with the command that made it: {repair_command(folder)}"


@contextmanager
def _explained(path: Path, num_bytes: int) -> Iterator[None]:
    """An error of the disk as one that says which file, how much it takes and what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        known = path.parent.is_dir()
        free = f"{shutil.disk_usage(path.parent).free} are free" if known else "its folder is gone"
        raise DataError(
            f"cannot write {path} ({error}): it takes about {num_bytes} bytes, {free}. Make room and run the same "
            "command again: finished shards stay."
        ) from error
