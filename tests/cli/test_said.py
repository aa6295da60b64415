# SPDX-License-Identifier: Apache-2.0
"""What stands on stderr: warnings as plain lines, and under torchrun an error of all processes once."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from cohobate.cli import app, said
from cohobate.errors import ConfigError

ERROR_OF_ALL = "warnings.warn('half of it is missing', UserWarning)\n    raise ConfigError('nobody can do that.')"
ERROR_OF_ONE = "if said.rank() == 1:\n        raise DataError('row 7 is mine alone.')\n    time.sleep(60)"
ERROR_OF_EACH = "raise ServerUnreachable(f'rank {said.rank()} hears nothing.')"


def torchrun(folder: Path, body: str) -> str:
    """stderr of two processes of a command that does `body`."""
    script = folder / "command.py"
    script.write_text(
        "import sys, time, warnings\nfrom cohobate.cli import app, main, said\n"
        "from cohobate.errors import ConfigError, DataError, ServerUnreachable\n"
        f"@app.app.command('act')\ndef act() -> None:\n    {body}\nmain(['act'])\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr  # torchrun's own; it tells the processes' in its table
    return done.stderr


@pytest.mark.parametrize(
    ("body", "lines", "code"),
    [
        (ERROR_OF_ALL, ["note: half of it is missing", "Error: nobody can do that."], 2),
        (ERROR_OF_ONE, ["Error: row 7 is mine alone. (rank 1 says this)"], 1),
        (ERROR_OF_EACH, ["Error: rank 0 hears nothing.", "Error: rank 1 hears nothing. (rank 1 says this)"], 75),
    ],
    ids=["all", "one", "each"],
)
def test_under_torchrun_an_error_is_said_once_and_none_is_held_back(
    tmp_path: Path, body: str, lines: list[str], code: int
):
    err = torchrun(tmp_path, body)
    found = [line for line in err.splitlines() if line.startswith(("Error: ", "note: "))]
    if body == ERROR_OF_ALL:  # on a busy machine the first rank may come too late to be the one that says it
        found = [line.removesuffix(" (rank 1 says this)") for line in found]
    assert sorted(found) == sorted(lines)
    assert f"exitcode  : {code} " in err
    assert "command.py:" not in err


def test_an_error_is_said_also_where_the_other_process_died_before_it_could(monkeypatch: pytest.MonkeyPatch):
    class Store:
        def add(self, key: str, amount: int) -> int:
            return 2

        def wait(self, keys: list[str], timeout: Any) -> None:
            raise RuntimeError("timeout")

    for own_rank in ("0", "1"):
        monkeypatch.setenv("RANK", own_rank)
        assert not said._said_elsewhere(Store(), "gone")
    monkeypatch.setattr(Store, "wait", lambda *_: None)
    for own_rank in ("0", "1"):
        monkeypatch.setenv("RANK", own_rank)
        assert said._said_elsewhere(Store(), "gone")
    monkeypatch.setattr(Store, "add", lambda *_: 1)
    monkeypatch.setenv("RANK", "0")
    assert not said._said_elsewhere(Store(), "gone")


def test_a_warning_is_a_plain_line_in_the_command_and_nowhere_else(
    cohobate: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    def warn(*_: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("two\n  lines", UserWarning, stacklevel=1)
        raise ConfigError("over.")

    monkeypatch.setattr(app, "app", lambda args: warn())
    before = warnings.showwarning
    done = cohobate("train")
    assert done.err == "note: two lines\nError: over.\n"
    assert warnings.showwarning is before
    monkeypatch.setenv("RANK", "1")
    assert "note" not in cohobate("train").err


def test_a_terminal_gets_whole_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, said.paragraph("word " * 30).splitlines())) <= 40
