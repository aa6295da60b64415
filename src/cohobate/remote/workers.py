# SPDX-License-Identifier: Apache-2.0
"""A few threads that wait for a server in place of the training loop.

Not a `ThreadPoolExecutor`: that one joins its threads when Python exits, and Ctrl-C would hang for as long as the
slowest answer takes. These are daemons, which hold nothing that needs an orderly end.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


class Workers:
    """At most `size` calls at a time; threads are started when they are first needed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, call: Callable[[], _T]) -> "Future[_T]":
        """`call` in some thread; cancelling the future keeps one that has not begun from beginning."""
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise RuntimeError("these workers are closed.")
            self._calls.put(run)
            if len(self._threads) < self._size:
                thread = threading.Thread(target=self._work, name="cohobate-server", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def close(self) -> None:
        """Let every thread end after what it is doing."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
