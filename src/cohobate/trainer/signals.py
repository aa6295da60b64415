# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM end a run after the current optimizer step, with a checkpoint that resumes."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class GracefulStop(TrainerCallback):
    """Turns the first SIGINT or SIGTERM into a flag that the trainer reads at the next step; a second acts at once.

    The flag joins the all-reduce that every step makes anyway, so all ranks stop after the same step.
    """

    def __init__(self, announce: Callable[[int], None] | None = None) -> None:
        """`announce(signal number)` tells the user that the first signal was heard."""
        self.received: int | None = None
        self._announce = announce
        self._previous: dict[int, Any] = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            previous = self._previous.get(number)
            if callable(previous):
                previous(number, frame)
            raise KeyboardInterrupt
        self.received = number
        if self._announce is not None:
            self._announce(number)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.received = None
        # Where an earlier training ended in an error its handlers are still ours, and must not become their own past.
        if not self._previous and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the earlier signal handlers back; safe to call twice."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous.clear()
