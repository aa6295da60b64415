# SPDX-License-Identifier: Apache-2.0
"""The same store from workers of a local Ray cluster, byte for byte."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tiny
from cohobate.errors import MissingExtra
from cohobate.teachers.store_ray import run_on_ray
from cohobate.teachers.store_writer import plan_shards
from teachers.canned_store import header, texts

ROWS = "".join(f'{{"prompt": "{i}+{i * 7}=", "completion": "{i * 8}"}}\n' for i in range(40))
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def score(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "cohobate.cli", "score", "-t", "T", "-d", "rows.jsonl", "-k", "5"]
    done = subprocess.run(
        [*command, "--shard-rows", "30", *arguments],
        cwd=folder,
        env={**os.environ, **RAY},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.server
@pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")
def test_ray_makes_the_files_that_one_process_makes_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    tiny.llama(5, hidden=24, layers=2).save_pretrained(tmp_path / "T")
    tiny.char_tokenizer().save_pretrained(tmp_path / "T")
    (tmp_path / "rows.jsonl").write_text(ROWS, encoding="utf-8")
    score(tmp_path, "-o", "local")
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    assert len(wanted) == 6
    assert "5 made, 0 were there" in score(tmp_path, "-o", "ray", "--launcher", "ray", "--workers", "2")
    assert {path.name: path.read_bytes() for path in (tmp_path / "ray").iterdir()} == wanted
    (tmp_path / "ray" / "store.json").unlink()
    (tmp_path / "ray" / "shard-00002.safetensors").write_bytes(b"torn")
    assert "1 made (1 had been damaged), 4 were there" in score(tmp_path, "-o", "ray", "--launcher", "ray")
    assert {path.name: path.read_bytes() for path in (tmp_path / "ray").iterdir()} == wanted


def test_without_ray_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    jobs = plan_shards(texts(), 9)
    with pytest.raises(MissingExtra, match=r"needs the package ray: pip install 'cohobate\[ray\]'"):
        list(run_on_ray(jobs, folder=tmp_path, header=header(texts()), num_shards=len(jobs), load={"model": "T"}))
