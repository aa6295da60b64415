# SPDX-License-Identifier: Apache-2.0
"""Mathematical equality of answers by math-verify, in a process of its own.

math-verify hands what a model wrote to a computer algebra system, and a model can write 9^9^9^9. Its own time limit
is an alarm signal: it fails outside the main thread, replaces an alarm that somebody else has set, and cannot stop a
long computation inside C. So the work is done by a child process that is spoken to in lines of JSON and killed at a
deadline; the next answer starts a new one. This same file is the child's program.
"""

import atexit
import json
import subprocess
import sys
import threading
from importlib.util import find_spec
from typing import Literal, cast

from cohobate.errors import MissingExtra

Verdict = Literal["equal", "different", "unreadable", "late"]
DEADLINE_SECONDS = 15.0


def math_verdict(answer: str, text: str, *, deadline: float = DEADLINE_SECONDS) -> Verdict:
    """Whether the answer that `text` gives equals `answer` (LaTeX or plain). Safe in threads; returns within
    `deadline`.

    "unreadable" speaks of `answer`, in which math-verify sees no number or expression; "late" was stopped undecided.

    Raises:
        MissingExtra: if math-verify is not installed.
    """
    if find_spec("math_verify") is None:
        raise MissingExtra("the grader math_verify needs the extra `math`: pip install 'cohobate[math]'.")
    return _child.ask({"answer": answer, "text": text}, deadline)


class _Child:
    """One child process, started when it is first needed; one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: dict[str, str], deadline: float) -> Verdict:
        """The child's one-word answer, or "late" if it had to be killed at the deadline."""
        with self._lock:
            process = self._process if self._process is not None and self._process.poll() is None else self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(deadline, process.kill)
            timer.start()
            try:
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline().strip()
            except BrokenPipeError:
                answer = ""
            finally:
                timer.cancel()
            if not answer:
                self._stop()
            return cast(Verdict, answer or "late")

    def _start(self) -> "subprocess.Popen[str]":
        self._stop()
        # -P: this file's folder must not hide installed packages from the child.
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        with self._lock:
            self._stop()


_child = _Child()
atexit.register(_child.close)


def _compare(answer: str, text: str) -> Verdict:
    from math_verify import parse, verify

    wanted = parse(answer) if "$" in answer or "\\boxed" in answer else parse(f"${answer}$")
    if all(isinstance(part, str) for part in wanted):  # the text itself, for want of an expression
        return "unreadable"
    return "equal" if verify(wanted, parse(text)) else "different"


def _serve() -> None:
    sys.stdin.reconfigure(encoding="utf-8")  # pyright: ignore[reportAttributeAccessIssue]
    for line in sys.stdin:
        question = json.loads(line)
        print(_compare(question["answer"], question["text"]), flush=True)


if __name__ == "__main__":
    _serve()
