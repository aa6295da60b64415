# SPDX-License-Identifier: Apache-2.0
"""Reads a teacher store: finds a text by its name and tokens, and its predictions in the shards.

Files are mapped into memory, so what is in it at a time is an index of 60 bytes a text, and the rows that were asked
for. A shard's checksum is compared when its first row is asked for: opening a large store costs nothing, and no row is
ever given out unchecked.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cohobate.errors import DataError
from cohobate.teachers.store_command import ANEW, anew, files_note
from cohobate.teachers.store_files import (
    DamagedShard,
    Index,
    Shard,
    open_shard,
    read_index,
    repair_command,
    verify,
)
from cohobate.teachers.store_format import AskedText, Columns, Header, Text, name_key, row_columns


class Store:
    """A finished store, to be read."""

    def __init__(self, folder: str | Path, *, run: Sequence[str] = ()) -> None:
        """Opens every shard and compares all but the bytes of its rows with the index.

        `run`: the recipe that reads it, as options of `cohobate score` (`store_command.py`).

        Raises:
            ConfigError: no finished store is there.
            DamagedShard: a file is missing, cut short or not the one of the index; with the command that mends it.
        """
        self.folder, self.run = Path(folder), tuple(run)
        self.index: Index = read_index(self.folder)
        self.header: Header = self.index.header
        self._shards = [self._open(number) for number in range(len(self.index.shards))]
        self._verified: set[int] = set()
        names = ("text_sample", "text_tokens", "text_first", "text_begin")
        parts = [shard.read(names, 0, shard.entry.texts) for shard in self._shards]
        self._keys = np.concatenate([np.hstack([p["text_sample"], p["text_tokens"]]) for p in parts])  # [T, 4]
        self._first = np.concatenate([part["text_first"] for part in parts])  # [T]
        self._begin = np.concatenate([part["text_begin"] for part in parts])  # [T]
        counts = [shard.entry.texts for shard in self._shards]
        self._shard_of = np.repeat(np.arange(len(counts)), counts)  # [T]
        self._order = np.argsort(self._keys[:, 0], kind="stable")
        self._sorted = self._keys[self._order, 0]

    def _open(self, number: int) -> Shard:
        try:
            shard = open_shard(self.folder, number)
        except FileNotFoundError as error:
            raise self.damaged(f"{error.args[0]} is missing.") from error
        except DamagedShard as error:
            raise self.damaged(str(error)) from error
        differing = shard.header.differences(self.header)
        if shard.entry != self.index.shards[number] or shard.num_shards != len(self.index.shards) or differing:
            what = f" ({'; '.join(differing)})" if differing else ""
            raise self.damaged(f"shard {number} in {self.folder} is not the one that its index names{what}.")
        return shard

    def damaged(self, what: str) -> DamagedShard:
        return DamagedShard(f"{what} Mend the store: {self.command}")

    @property
    def command(self) -> str:
        """What made this store, and mends it."""
        return repair_command(self.folder, self.index.command)

    def anew(self, **changed: Any) -> str:
        """A sentence with the command that scores what is asked now, into another folder."""
        made_by = self.index.command
        return f"{ANEW}{files_note(made_by, self.run)}: {anew(made_by, self.header, run=self.run, **changed)}"

    def verify(self, numbers: Sequence[int] | None = None) -> None:
        """Compare the bytes of these shards (all) with their checksums, once each. Raises DamagedShard."""
        for number in range(len(self._shards)) if numbers is None else numbers:
            if number not in self._verified:
                try:
                    verify(self.folder, self._shards[number])
                except DamagedShard as error:
                    raise self.damaged(str(error)) from error
                self._verified.add(number)

    def texts_named(self, sample_id: str) -> np.ndarray:
        """Numbers of the texts of a row of data."""
        return self._having(name_key(sample_id))

    def _having(self, words: Sequence[int]) -> np.ndarray:
        """Numbers of the texts whose key begins with `words`."""
        first = np.uint64(words[0])
        begin, end = np.searchsorted(self._sorted, first), np.searchsorted(self._sorted, first, side="right")
        found = self._order[begin:end]
        return found[(self._keys[found, : len(words)] == np.array(words, dtype=np.uint64)).all(1)]

    def __contains__(self, sample_id: str) -> bool:
        return len(self.texts_named(sample_id)) > 0

    def check(self, text: Text) -> int:
        """The number of a text that the store has with all the predictions that it is asked for; reads no shard.

        Raises:
            DataError: naming the row that the store does not have, or has with other tokens; and the command.
        """
        found = self._having(text.key)
        if not len(found):
            raise DataError(self._missing(text))
        number = int(found[0])
        first = int(self._first[number])
        if text.first < first:
            raise DataError(
                f"row {text.sample_id!r} is in the teacher store {self.folder} from its prediction {first} on, and "
                f"prediction {text.first} is asked for: its prompt was longer when it was scored. {self.anew()}"
            )
        return number

    def read(self, asked: AskedText) -> Columns:
        """The columns of the predictions that are asked for.

        Raises:
            DataError: as `check`.
            DamagedShard: the shard's bytes are not those that were written.
        """
        number = self.check(asked.text)
        first, shard_number = int(self._first[number]), int(self._shard_of[number])
        self.verify((shard_number,))
        low, high = int(asked.positions.min()), int(asked.positions.max()) + 1
        begin = int(self._begin[number]) - first
        columns = self._shards[shard_number].read(tuple(row_columns(self.header)), begin + low, begin + high)
        if high - low == len(asked.positions) and (np.diff(asked.positions) == 1).all():
            return columns
        return {name: column[asked.positions - low] for name, column in columns.items()}

    def _missing(self, text: Text) -> str:
        """Why there is nothing for this text."""
        self.verify()  # a damaged name must not be taken for a missing row
        same_name = self.texts_named(text.sample_id)
        if not len(same_name):
            return (
                f"row {text.sample_id!r} is not in the teacher store {self.folder}. Was it made from other data or "
                f"another split? {self.anew()}"
            )
        lengths = sorted({self._length(int(number)) for number in same_name})
        now = "others of the same number" if lengths == [len(text.ids)] else str(len(text.ids))
        return (
            f"row {text.sample_id!r} is in the teacher store {self.folder}, but with other tokens: the teacher read "
            f"{' or '.join(map(str, lengths))} of them, and would read {now} now. Its prompt, completion, chat "
            f"template or tokenizer has changed since. {self.anew()}"
        )

    def _length(self, number: int) -> int:
        """Ids of a text."""
        shard = self._shards[int(self._shard_of[number])]
        same = np.flatnonzero(self._shard_of == self._shard_of[number])
        rows = np.append(self._begin[same], shard.entry.rows)
        place = number - int(same[0])
        return int(self._first[number] + rows[place + 1] - rows[place]) + 1
