# SPDX-License-Identifier: Apache-2.0
"""What the command says on stderr: a warning is a plain line, and an error of all ranks is said once.

Under torchrun every process meets a wrong setting, and each would say so. Which of them does is agreed upon by the
words themselves, in the store that torchrun's agent keeps for its workers: an error with other words is never held
back, and one with the same words only after another process has said it. torchrun's own table of failed processes
comes after it, and nothing here could stop it.
"""

import hashlib
import os
import signal
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from shutil import get_terminal_size
from typing import Any

_WAIT = timedelta(seconds=5)  # for the agent's store, and for another process to say the same


def rank() -> int:
    """Of this process, as its launcher says it; 0 without one."""
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdigit() else 0


def note(text: str) -> None:
    """A plain line that is no error."""
    print(paragraph(f"note: {text}"), file=sys.stderr, flush=True)


def say_error(text: str) -> None:
    """`Error: ...`, once for all processes that end with these words."""
    store = _agents_store()
    if store is None:
        print(paragraph(f"Error: {text}"), file=sys.stderr, flush=True)
        return
    # When one process has ended, torchrun sends this one SIGTERM; it is about to end anyway, and has something to say.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not _said_elsewhere(store, text):
        who = f" (rank {rank()} says this)" if rank() else ""
        print(paragraph(f"Error: {text}{who}"), file=sys.stderr, flush=True)
        with suppress(Exception):
            store.set(f"{_key(text)}/said", "1")


def paragraph(text: str) -> str:
    """Wrapped to the terminal; to a file, one line for each paragraph so that it can be searched."""
    lines = text.splitlines()
    if not sys.stderr.isatty():
        return "\n".join(lines)
    width = max(40, get_terminal_size().columns)
    return "\n".join(textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Python's warnings without the place in the code, which says nothing to who typed a command; the first rank's."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if rank() == 0:
            note(" ".join(str(message).split()))

    before, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = before


def _agents_store() -> Any:
    """The store that torchrun's agent keeps; None where this process is alone, or there is none to be had."""
    world = os.environ.get("WORLD_SIZE", "1")
    if not (world.isdigit() and int(world) > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
        return None
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (documented there)

    with suppress(Exception):  # an error must be said, whatever becomes of this
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_WAIT)
    return None


def _said_elsewhere(store: Any, text: str) -> bool:
    """Whether another process has said it: the first rank if it comes to it in time, else whoever asks first."""
    said = [f"{_key(text)}/said"]
    if rank():
        with suppress(Exception):  # it has other things to say, or none
            store.wait(said, _WAIT)
            return True
    with suppress(Exception):
        if store.add(_key(text), 1) > 1:
            store.wait(said, _WAIT)
            return True
    return False


def _key(text: str) -> str:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"cohobate/{attempt}/{hashlib.sha256(text.encode()).hexdigest()}"
