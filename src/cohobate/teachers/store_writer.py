# SPDX-License-Identifier: Apache-2.0
"""Writes a teacher store shard by shard, and goes on where an earlier writer was stopped.

Which texts a shard holds follows from the data alone, and each shard is scored by itself. So it makes no difference
when the writer was killed, how often, or which process made which shard: the files are the same, byte for byte, as
those of a run that nobody disturbed (on one kind of machine). At most two shards are in memory: one that is scored,
one that is put on the disk.
"""

import fcntl
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cohobate.errors import ConfigError, DataError
from cohobate.functional.scores import TopKScores
from cohobate.teachers.store_files import (
    DamagedShard,
    Index,
    Shard,
    ShardEntry,
    open_shard,
    repair_command,
    shard_path,
    verify,
    write_index,
    write_shard,
)
from cohobate.teachers.store_format import Header, NonFiniteRow, Text, encoded, text_columns

SHARD_ROWS = 65_536  # predictions of a shard: 50 MB at K = 128, and what a killed writer does again
_log = logging.getLogger(__name__)

ScoreTexts = Callable[[Sequence[Text]], TopKScores]
"""The teacher: texts -> the scores of all their predictions, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """A shard that is to be made."""

    number: int
    texts: tuple[Text, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a writer did."""

    index: Index
    kept: int  # shards that were there already
    mended: tuple[int, ...]  # numbers of those that were damaged


RunJobs = Callable[[Sequence[ShardJob]], Iterable[ShardEntry]]
"""Makes shards somewhere, in any order."""


def plan_shards(texts: Sequence[Text], shard_rows: int) -> list[ShardJob]:
    """Consecutive texts until there are `shard_rows` predictions; no text is cut. Texts without one are left out."""
    jobs: list[ShardJob] = []
    part: list[Text] = []
    rows = 0
    for text in texts:
        if text.num_rows < 1:
            continue
        part.append(text)
        rows += text.num_rows
        if rows >= shard_rows:
            jobs.append(ShardJob(number=len(jobs), texts=tuple(part)))
            part, rows = [], 0
    return [*jobs, ShardJob(number=len(jobs), texts=tuple(part))] if part else jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMaker:
    """Scores the texts of a shard and puts its file in place."""

    folder: Path
    header: Header
    num_shards: int
    score: ScoreTexts

    def __call__(self, job: ShardJob) -> ShardEntry:
        return self.put(job, self.score(job.texts))

    def put(self, job: ShardJob, scores: TopKScores) -> ShardEntry:
        """The file of a job whose texts were scored."""
        if scores.vocab_size != self.header.vocab_size:
            raise ConfigError(
                f"the teacher predicts {scores.vocab_size} ids, and the store is to be of {self.header.vocab_size}, "
                "those of the tokenizer. Is its config.json that of its weights?"
            )
        columns = text_columns(job.texts)
        try:
            columns |= encoded(scores, self.header)
        except NonFiniteRow as error:
            begins = columns["text_begin"]
            place = int((begins <= error.row).sum()) - 1
            raise DataError(
                f"row {job.texts[place].sample_id!r}, prediction {error.row - int(begins[place])}: the teacher gave a "
                "logit that is NaN or +inf. Run it in another dtype (--dtype), or leave the row out."
            ) from error
        return write_shard(self.folder, self.header, job.number, self.num_shards, columns)


def make_shards(make: ShardMaker, jobs: Sequence[ShardJob]) -> Iterator[ShardEntry]:
    """Shards in order, each put on the disk while the next one is scored, so that a GPU need not wait."""
    with ThreadPoolExecutor(max_workers=1) as disk:
        before: Future[ShardEntry] | None = None
        for job in jobs:
            scores = make.score(job.texts)
            if before is not None:
                yield before.result()
            before = disk.submit(make.put, job, scores)
            del scores
        if before is not None:
            yield before.result()


def write_store(
    folder: Path,
    header: Header,
    jobs: Sequence[ShardJob],
    run: RunJobs,
    *,
    command: Sequence[str] = (),
    on_check: Callable[[int, int], None] | None = None,
) -> Written:
    """Make the shards that are missing or damaged, then the index.

    Args:
        jobs: of `plan_shards`.
        run: makes shards, here or elsewhere.
        command: what to type to get this store again; stands in messages about it.
        on_check: told how many of the shards that are there have been compared with their checksums.

    Raises:
        ConfigError: the folder holds a store that was made from something else, or another writer is at work.
        DataError: a text cannot be scored, or the disk is full.
    """
    if not jobs:
        raise DataError("there is nothing to score: no row has a recorded completion.")
    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        for left_over in [*folder.glob(".shard-*.tmp"), *folder.glob(".store.json.*.tmp")]:
            left_over.unlink()
        entries, mended = _finished(folder, header, len(jobs), on_check)
        missing = [job for job in jobs if job.number not in entries]
        kept = len(entries)
        entries |= {entry.number: entry for entry in (run(missing) if missing else ())}
        absent = [job.number for job in jobs if job.number not in entries]
        if absent:
            raise DataError(
                f"shards {absent[:8]} were not made. Run the same command again: {repair_command(folder, command)}"
            )
        shards = tuple(entries[job.number] for job in jobs)
        index = Index(header=header, shards=shards, command=tuple(command))
        write_index(folder, index)
    return Written(index=index, kept=kept, mended=mended)


def _finished(
    folder: Path, header: Header, num_shards: int, on_check: Callable[[int, int], None] | None
) -> tuple[dict[int, ShardEntry], tuple[int, ...]]:
    """Whole shards by number; damaged ones are named in the log and done again."""
    entries: dict[int, ShardEntry] = {}
    mended: list[int] = []
    paths = sorted(folder.glob("shard-*.safetensors"))
    for place, path in enumerate(paths):
        if on_check is not None:
            on_check(place, len(paths))
        digits = path.name.removeprefix("shard-").removesuffix(".safetensors")
        number = int(digits) if digits.isdecimal() else -1
        if path != shard_path(folder, number):
            raise ConfigError(f"{path} is no file of a store. Take it away, or name another --output.")
        try:
            shard = open_shard(folder, number)
            verify(folder, shard)
            _check_same(folder, shard, header, num_shards)
        except DamagedShard as error:
            _log.warning("%s It is made again.", error)
            mended.append(number)
        else:
            entries[number] = shard.entry
    if beyond := [number for number in mended if number >= num_shards]:
        raise ConfigError(
            f"{shard_path(folder, min(beyond))} is damaged and no shard of this store, which has {num_shards}. "
            "Take it away."
        )
    return entries, tuple(mended)


def _check_same(folder: Path, shard: Shard, header: Header, num_shards: int) -> None:
    found = shard.header.differences(header)
    if shard.num_shards != num_shards and not found:
        found = [f"num_shards is {shard.num_shards} in the store and {num_shards} now"]
    if found:
        raise ConfigError(
            f"{folder} holds a teacher store that was made from something else: {'; '.join(found)}. Name another "
            "--output, remove the folder, or give the settings that it was made with."
        )


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which goes away with the process.

    Raises:
        ConfigError: naming the process that holds it.
    """
    path = folder / ".lock"
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise ConfigError(f"{folder} is being written by {holder}. Wait for it, or stop it first.") from error
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)  # its holder has just removed it
    try:
        os.truncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
        path.unlink()
    finally:
        os.close(handle)
