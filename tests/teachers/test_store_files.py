# SPDX-License-Identifier: Apache-2.0
"""A teacher store under everything that can happen to files: kills, full disks, damage, another writer."""

import errno
import json
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cohobate.errors import CohobateError, ConfigError, DataError
from cohobate.functional.scores import TopKScores
from cohobate.teachers import store_files
from cohobate.teachers.store_files import ShardEntry, read_index
from cohobate.teachers.store_format import AskedText, Text, decoded
from cohobate.teachers.store_reader import Store
from cohobate.teachers.store_writer import ShardJob, ShardMaker, make_shards, only_writer, plan_shards, write_store
from teachers.canned_store import content, header, scores_of, texts, write

TEXTS = texts()
FIELDS = ("ids", "logits", "log_normalizer", "log_normalizer_t1", "realized_logit")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that nobody disturbed; not to be written into."""
    folder = tmp_path_factory.mktemp("clean") / "store"
    written = write(folder, TEXTS)
    assert len(written.index.shards) >= 3
    assert sorted(content(folder)) == [*(f"shard-{i:05d}.safetensors" for i in range(len(written.index.shards))),
                                       "store.json"]  # fmt: skip
    return folder


@pytest.fixture
def store(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "store"))


def asked(text: Text, positions: Sequence[int] | None = None) -> AskedText:
    place = np.arange(text.first, len(text.ids) - 1) if positions is None else np.array(positions)
    return AskedText(text=replace(text, first=int(place.min())), row=0, pairs=slice(0, len(place)), positions=place)


def read_all(folder: Path, given: Sequence[Text] = TEXTS) -> list[TopKScores]:
    store = Store(folder)
    return [decoded(store.read(asked(text)), store.header) for text in given]


def same(found: TopKScores, wanted: TopKScores) -> bool:
    return all(torch.equal(getattr(found, name), getattr(wanted, name)) for name in FIELDS)


# ------------------------------------------------------------------ writing and reading


def test_every_text_reads_as_it_was_scored(clean: Path) -> None:
    for text, found in zip(TEXTS, read_all(clean), strict=True):
        assert same(found, scores_of([text]))


def test_some_predictions_of_a_text_can_be_asked_for(clean: Path) -> None:
    store = Store(clean)
    text = max(TEXTS, key=lambda text: text.num_rows)
    whole = scores_of([text])
    for positions in ([text.first + 1, text.first + 2], [len(text.ids) - 2], [text.first, text.first + 2]):
        found = decoded(store.read(asked(text, positions)), store.header)
        rows = [p - text.first for p in positions]
        assert torch.equal(found.logits, whole.logits[rows])
        assert torch.equal(found.realized_logit, whole.realized_logit[rows])


def test_no_text_is_cut_and_none_without_a_prediction_is_kept() -> None:
    silent = Text(sample_id="silent", ids=np.array([1, 2]), first=1)
    jobs = plan_shards([silent, *TEXTS[:6], silent, *TEXTS[6:]], 9)
    assert [text for job in jobs for text in job.texts] == TEXTS
    assert [job.number for job in jobs] == list(range(len(jobs)))
    sizes = [sum(text.num_rows for text in job.texts) for job in jobs]
    assert all(9 <= size < 9 + 8 for size in sizes[:-1])
    assert plan_shards([silent], 9) == []


def test_two_texts_of_one_name_are_told_apart_by_their_tokens(tmp_path: Path) -> None:
    given = [replace(TEXTS[0]), replace(TEXTS[1], sample_id=TEXTS[0].sample_id)]
    write(tmp_path / "store", given)
    for text, found in zip(given, read_all(tmp_path / "store", given), strict=True):
        assert same(found, scores_of([text]))


def test_one_shard_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[Any] = []

    def scored(part: Sequence[Text]) -> TopKScores:
        assert not any(ref() is not None for ref in alive)
        made = scores_of(part)
        alive.append(weakref.ref(made.logits))
        return made

    write(tmp_path / "store", TEXTS, score=scored)
    assert len(alive) >= 3


def test_a_shard_is_put_on_the_disk_while_the_next_is_scored_and_no_third_waits(clean: Path, tmp_path: Path) -> None:
    begun, done, scored_shards = [threading.Event() for _ in range(20)], [], 0

    class Watched(ShardMaker):
        def put(self, job: ShardJob, scores: TopKScores) -> ShardEntry:
            begun[job.number].set()
            entry = ShardMaker.put(self, job, scores)
            done.append(job.number)
            return entry

    def scored(part: Sequence[Text]) -> TopKScores:
        nonlocal scored_shards
        if scored_shards:
            assert begun[scored_shards - 1].wait(20)
        assert done[: scored_shards - 1] == list(range(scored_shards - 1))
        scored_shards += 1
        return scores_of(part)

    about, jobs, folder = header(TEXTS), plan_shards(TEXTS, 9), tmp_path / "store"
    make = Watched(folder=folder, header=about, num_shards=len(jobs), score=scored)
    command = read_index(clean).command
    write_store(folder, about, jobs, lambda missing: make_shards(make, missing), command=command)
    assert content(folder) == content(clean)


def test_a_shard_that_cannot_be_put_on_the_disk_ends_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_files, "save_file", full)
    make = ShardMaker(folder=tmp_path, header=header(TEXTS), num_shards=3, score=scores_of)
    with pytest.raises(DataError, match="No space left"):
        list(make_shards(make, plan_shards(TEXTS, 9)[:1]))


def test_a_number_that_is_no_distribution_names_its_row(tmp_path: Path) -> None:
    def scored(part: Sequence[Text]) -> TopKScores:
        made = scores_of(part)
        place = sum(text.num_rows for text in part[:2]) + 1
        made.logits[place, 0] = torch.nan
        return made

    with pytest.raises(DataError, match=f"row '{TEXTS[2].sample_id}', prediction 1: the teacher gave"):
        write(tmp_path / "store", TEXTS, score=scored)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="predicts 40 ids, and the store is to be of 41"):
        write(tmp_path / "store", TEXTS, vocab_size=41)


def test_a_store_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to score"):
        write(tmp_path / "store", [])


# ------------------------------------------------------------------ killed, and going on

EVENTS = ("fsync", "replace", "unlink", "open", "write", "truncate", "mkdir")


def run_and_kill(at: int, act: Callable[[], Any]) -> bool:
    """`act` in a process of its own that is killed before its `at`-th file event; whether it was."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    try:
        count = 0

        def event() -> bool:
            nonlocal count
            count += 1
            return count == at

        def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def watched(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*arguments: Any, **options: Any) -> Any:
                if event():
                    die()
                return call(*arguments, **options)

            return wrapper

        save, write_text = store_files.save_file, Path.write_text

        def half_saved(columns: Any, path: Path, **options: Any) -> None:
            if event():
                path.write_bytes(b"half")
                die()
            save(columns, path, **options)
            if event():
                die()

        def half_written(path: Path, text: str, **options: Any) -> None:
            if event():
                write_text(path, text[: len(text) // 2])
                die()
            write_text(path, text, **options)

        for name in EVENTS:
            setattr(os, name, watched(getattr(os, name)))
        store_files.save_file, Path.write_text = half_saved, half_written  # pyright: ignore
        act()
        os._exit(0)
    except BaseException:
        os._exit(1)


def unfinished_or_whole(folder: Path) -> None:
    """What a reader sees at any moment: all of the store, or that there is none yet."""
    try:
        found = read_all(folder)
    except ConfigError as error:
        assert "cohobate score" in str(error)  # noqa: PT017
    else:
        assert all(same(a, scores_of([text])) for a, text in zip(found, TEXTS, strict=True))


def test_a_writer_killed_at_any_file_event_goes_on_to_the_same_bytes(clean: Path, tmp_path: Path) -> None:
    wanted, at = content(clean), 0
    while True:
        at += 1
        folder = tmp_path / f"killed-{at}"
        killed = run_and_kill(at, lambda folder=folder: write(folder, TEXTS))
        if not killed:
            break
        unfinished_or_whole(folder)
        write(folder, TEXTS)
        assert content(folder) == wanted, f"killed before event {at}"
    assert content(folder) == wanted
    assert at > 6 * len(wanted)  # every file has its write, fsync, rename and the folder's fsync


@pytest.mark.parametrize("every", [2, 7, 9])
def test_a_writer_killed_again_and_again_comes_to_the_same_bytes(clean: Path, tmp_path: Path, every: int) -> None:
    folder, tries = tmp_path / "store", 0
    while run_and_kill(every + tries, lambda: write(folder, TEXTS)):
        tries += 1
        assert tries < 60
    assert content(folder) == content(clean)


def test_shards_that_are_whole_are_not_scored_again(store: Path, clean: Path) -> None:
    (store / "store.json").unlink()
    (store / "shard-00001.safetensors").unlink()
    scored: list[str] = []

    def score(part: Sequence[Text]) -> TopKScores:
        scored.extend(text.sample_id for text in part)
        return scores_of(part)

    written = write(store, TEXTS, score=score)
    assert scored == [text.sample_id for text in plan_shards(TEXTS, 9)[1].texts]
    assert written.kept == len(written.index.shards) - 1
    assert content(store) == content(clean)
    scored.clear()
    assert write(store, TEXTS, score=score).kept == len(written.index.shards)
    assert not scored


def test_a_file_is_on_the_disk_before_its_name_and_the_name_before_the_next_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill cannot show, since the page cache survives it."""
    folder, done = tmp_path / "store", []
    fsync, rename = os.fsync, os.replace

    def synced(handle: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{handle}"))
        done.append(("sync folder" if name == folder else "sync file", name.name))
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        done.append(("rename", Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write(folder, TEXTS)
    assert [kind for kind, _ in done] == ["sync file", "rename", "sync folder"] * (len(done) // 3)
    assert done[-2] == ("rename", "store.json")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_full_disk_is_an_error_with_the_file_and_what_to_do(
    clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    folder, save, count = tmp_path / "store", store_files.save_file, 0

    def full(*arguments: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count > failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*arguments, **options)

    monkeypatch.setattr(store_files, "save_file", full)
    with pytest.raises(DataError, match=rf"shard-0000{failing}\.safetensors .*No space left.* bytes, \d+ are free"):
        write(folder, TEXTS)
    assert sorted(content(folder)) == [".lock", *(f"shard-0000{i}.safetensors" for i in range(failing))]
    monkeypatch.setattr(store_files, "save_file", save)
    write(folder, TEXTS)
    assert content(folder) == content(clean)


# ------------------------------------------------------------------ made from something else

CHANGES = {
    "teacher_config": "e" * 64,
    "teacher_weights": "e" * 64,
    "teacher_dtype": "bfloat16",
    "teacher_revision": "e" * 40,
    "tokens": "teacher",
    "tokenizer": "e" * 64,
    "merges": "e" * 64,
    "template": "e" * 64,
    "max_length": 7,
    "special_roles": {"<a>": "<b>"},
    "prompts": {"system_prompt": ""},
    "top_k": 6,
    "temperature": 2.0,
    "vocab_size": 41,
    "values": "compact",
    "data": "e" * 64,
    "batch_tokens": 65,
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_store_is_not_continued_with_anything_changed(store: Path, field: str) -> None:
    before = content(store)
    with pytest.raises(ConfigError, match=rf"made from something else: {field} is .* in the store and .* now"):
        write(store, TEXTS, **{field: CHANGES[field]})
    assert {name: value for name, value in content(store).items() if name != ".lock"} == before


def test_a_store_is_not_continued_with_another_row_or_another_cut(store: Path) -> None:
    ids = TEXTS[3].ids.copy()
    ids[0] += 1
    with pytest.raises(ConfigError, match="data is"):
        write(store, [*TEXTS[:3], replace(TEXTS[3], ids=ids), *TEXTS[4:]])
    with pytest.raises(ConfigError, match=r"data is .*num_texts is 12 in the store and 11 now"):
        write(store, TEXTS[:-1])
    with pytest.raises(ConfigError, match="shard_rows is 9 in the store and 10 now"):
        write(store, TEXTS, shard_rows=10)


# ------------------------------------------------------------------ damage


def opened(folder: Path) -> str:
    """Empty if everything reads as it was written, else the error."""
    try:
        found = read_all(folder)
    except CohobateError as error:
        return str(error)
    assert all(same(a, scores_of([text])) for a, text in zip(found, TEXTS, strict=True)), "silent damage"
    return ""


def mended(folder: Path, clean: Path) -> None:
    """The command that the error names makes the store whole again."""
    write(folder, TEXTS)
    assert content(folder) == content(clean)


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "shard-00002.safetensors", "store.json"])
def test_one_bit_flipped_anywhere_is_never_silent_and_is_mended(store: Path, clean: Path, name: str) -> None:
    path = store / name
    good = path.read_bytes()
    rng = np.random.default_rng(len(good))
    silent = 0
    for place in rng.integers(0, len(good), 60):
        bad = bytearray(good)
        bad[place] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(bad)
        found = opened(store)
        silent += not found
        assert not found or "cohobate score" in found, found
        if found and "has format" not in found:
            mended(store, clean)
        path.write_bytes(good)
    assert silent == 0


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "store.json"])
def test_a_file_cut_anywhere_is_an_error_that_names_it(store: Path, clean: Path, name: str) -> None:
    path = store / name
    good = path.read_bytes()
    for length in [0, 1, 7, 8, 9, *range(50, len(good), len(good) // 15), len(good) - 2]:
        path.write_bytes(good[:length])
        found = opened(store)
        assert name in found
        assert "cohobate score" in found
    mended(store, clean)


def test_a_missing_shard_is_an_error_that_names_it(store: Path, clean: Path) -> None:
    (store / "shard-00001.safetensors").unlink()
    with pytest.raises(DataError, match=r"shard-00001\.safetensors is missing\. Mend the store: cohobate score"):
        Store(store)
    mended(store, clean)


def test_swapped_shards_are_found_and_mended(store: Path, clean: Path) -> None:
    one, two = (store / f"shard-0000{i}.safetensors" for i in (0, 1))
    bytes_of_one = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(bytes_of_one)
    with pytest.raises(DataError, match=r"shard-00000.* is damaged \(it is shard 1\)"):
        Store(store)
    mended(store, clean)


def test_a_shard_of_another_store_is_found(store: Path, tmp_path: Path) -> None:
    write(tmp_path / "other", TEXTS, teacher_weights="e" * 64)
    shutil.copy(tmp_path / "other" / "shard-00001.safetensors", store)
    with pytest.raises(DataError, match=r"shard 1 in .* is not the one that its index names \(teacher_weights is e"):
        Store(store)


@pytest.mark.parametrize("change", ["fewer", "reordered", "count", "header", "foreign"])
def test_an_index_that_was_edited_is_found_even_with_its_checksum_made_anew(store: Path, change: str) -> None:
    path = store / "store.json"
    plain = json.loads(path.read_text())
    plain.pop("digest")
    if change == "fewer":
        plain["shards"].pop()
    elif change == "reordered":
        plain["shards"].reverse()
    elif change == "count":
        plain["shards"][0]["rows"] += 1
    elif change == "header":
        plain["header"]["temperature"] = 2.0
    else:
        plain["header"]["unheard_of"] = 1
    path.write_text(json.dumps({**plain, "digest": "0" * 64}))
    assert "checksum is not that of its content" in opened(store)
    path.write_text(json.dumps({**plain, "digest": store_files._digest_of(plain)}))
    assert "is not the one that its index names" in opened(store) or "unheard_of" in opened(store)


@pytest.mark.parametrize(
    "hostile", [b"[" * 100_000, b"null", b"7", b'{"digest": 1}', b'{"digest": 1, "header": 3}', b"\xff"]
)
def test_an_index_that_is_none_is_an_error(store: Path, hostile: bytes) -> None:
    (store / "store.json").write_bytes(hostile)
    assert "store.json is damaged" in opened(store)


def test_a_shard_header_that_promises_too_much_is_an_error(store: Path) -> None:
    path = store / "shard-00000.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])
    assert "shard-00000.safetensors is damaged" in opened(store)


def test_another_format_is_named_with_its_number(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_files, "FORMAT", 2)
    with pytest.raises(ConfigError, match=r"store\.json has format 1, this version reads 2\. Make the store again"):
        Store(store)
    with pytest.raises(ConfigError, match=r"shard-00000\.safetensors has format 1"):
        write(store, TEXTS)


def test_an_unfinished_store_and_none_say_what_to_type(store: Path, tmp_path: Path) -> None:
    (store / "store.json").unlink()
    with pytest.raises(ConfigError, match=r"it is unfinished: \d shards and no store\.json\. .*cohobate score"):
        Store(store)
    with pytest.raises(ConfigError, match=r"there is none\. Make it with: cohobate score --teacher MODEL"):
        Store(tmp_path / "nowhere")


def test_a_foreign_file_among_the_shards_is_not_touched(store: Path) -> None:
    (store / "shard-1.safetensors").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"shard-1\.safetensors is no file of a store"):
        write(store, TEXTS)
    assert (store / "shard-1.safetensors").read_bytes() == b"mine"


# ------------------------------------------------------------------ rows that are not there


def test_a_missing_row_is_an_error_with_its_name_and_the_command(clean: Path) -> None:
    store = Store(clean)
    with pytest.raises(DataError, match=r"row 'row 99' is not in the teacher store .*NEW_FOLDER"):
        store.read(asked(replace(TEXTS[0], sample_id="row 99")))


def test_a_row_with_other_tokens_is_never_given_the_old_scores(clean: Path) -> None:
    store = Store(clean)
    for place in range(len(TEXTS[0].ids)):
        ids = TEXTS[0].ids.copy()
        ids[place] = (ids[place] + 1) % 40
        with pytest.raises(DataError, match=r"row 'row 0' is in the teacher store .*, but with other tokens"):
            store.read(asked(replace(TEXTS[0], ids=ids)))
    longer = replace(TEXTS[0], ids=np.append(TEXTS[0].ids, 3))
    n = len(TEXTS[0].ids)
    with pytest.raises(DataError, match=rf"the teacher read {n} of them, and would read {n + 1} now"):
        store.read(asked(longer))
    with pytest.raises(DataError, match="but with other tokens"):  # of another row
        store.read(asked(replace(TEXTS[0], ids=TEXTS[1].ids)))


def test_a_prediction_before_the_first_that_was_scored_is_an_error(clean: Path) -> None:
    text = next(text for text in TEXTS if text.first > 0)
    with pytest.raises(DataError, match=rf"from its prediction {text.first} on, and prediction 0 is asked for"):
        Store(clean).read(asked(replace(text, first=0)))


# ------------------------------------------------------------------ one writer


def test_a_second_writer_is_told_who_the_first_one_is_and_a_dead_one_is_no_hindrance(
    clean: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    reads, writes = os.pipe()
    first = os.fork()
    if not first:
        with only_writer(folder):
            os.write(writes, b"held")
            time.sleep(60)
        os._exit(0)
    try:
        assert os.read(reads, 4) == b"held"
        with pytest.raises(ConfigError, match=rf"is being written by process {first} on "):
            write(folder, TEXTS)
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        os.close(reads)
        os.close(writes)
    write(folder, TEXTS)
    assert content(folder) == content(clean)
