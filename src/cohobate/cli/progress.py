# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a run goes on: a bar on a terminal, plain lines in a file or a pipe."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

HEARTBEAT_SECONDS = 30.0
TRAINING = {
    "loss": "loss",
    "kl/forward": "kl/forward",
    "kl/reverse": "kl/reverse",
    "kd/*": "kd",
    "ce": "ce",
    "lessons/success_share": "successful",
    "align/unaligned_student_share": "unaligned",
    "completion/mean_length": "length",
    "grad_norm": "grad_norm",
}
EVALUATION = {
    "eval/accuracy": "accuracy",
    "eval/loss": "loss",
    "eval/kd/*": "kd",
    "eval/ce": "ce",
    "eval/completion/mean_length": "length",
    "eval/completion/truncated_share": "cut",
}
"""Which of the logged numbers a line shows, and what it calls them; `*` is each teacher's or their average."""

SCALED = "scaled loss"
"""Where a divergence is made as large as the cross-entropy, the loss of a step is no number to follow: `kd` and `ce`
are, and so is the held-out loss, which adds them with fixed weights."""


class Steps(AbstractContextManager["Steps"]):
    """Counts towards a total. On a terminal one bar that redraws itself; else a line whenever there is news.

    A silent run looks like a dead one, so without news a line comes every half minute.
    """

    def __init__(self, what: str, total: int, *, console: Console | None = None) -> None:
        self.what, self.total, self.done = what, total, 0
        self._console = console or Console(file=sys.stdout)
        self._bar = _bar(self._console) if self._console.is_terminal else None
        self._task = self._bar.add_task(what, total=total) if self._bar else None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance_to(self, done: int, total: int | None = None) -> None:
        self.done, self.total = done, self.total if total is None else total
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, total=self.total)
        elif time.monotonic() - self._last_line >= HEARTBEAT_SECONDS:
            self.say("")

    def describe(self, what: str) -> None:
        """Say what is being done now."""
        self.what = what
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=what)

    def say(self, text: str) -> None:
        """A line that stays, with the place it belongs to and the time that is left."""
        place = f"{self.what} {self.done}/{self.total}"
        if self._bar:
            self._bar.console.print(f"{place}  {text}".rstrip(), highlight=False, markup=False)
            return
        self._last_line = time.monotonic()
        left = self._remaining()
        self._console.print(
            "  ".join(part for part in (place, text, left) if part), highlight=False, markup=False, soft_wrap=True
        )

    def _remaining(self) -> str:
        if not 0 < self.done < self.total:
            return ""
        seconds = (time.monotonic() - self._started) / self.done * (self.total - self.done)
        return f"({duration(seconds)} left)"


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
    )


def duration(seconds: float) -> str:
    """`95 s` as `1 min 35 s`, in the two units that matter."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def numbers(logs: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Some of the logged numbers on one line."""
    shown = {
        label: logs[name]
        for pattern, usual in labels.items()
        for name, label in _named(pattern, usual, logs)
        if isinstance(logs.get(name), int | float)
    }
    return "  ".join(f"{label} {value:.4g}" for label, value in shown.items())


def _named(pattern: str, label: str, logs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The names that a pattern stands for, with their labels: `kd` of one teacher, `kd0`, `kd1` of several."""
    if not pattern.endswith("*"):
        return [(pattern, label)]
    each = sorted(name for name in logs if name.startswith(f"{pattern[:-1]}teacher"))
    if len(each) > 1:
        return [(name, label + name.removeprefix(f"{pattern[:-1]}teacher")) for name in each]
    return [(name, label) for name in each or [f"{pattern[:-1]}average"]]


class RunProgress(TrainerCallback):
    """Shows a training run through `Steps`; on the first process only."""

    def __init__(self, open_steps: Callable[[str, int], Steps] = Steps, *, scaled: bool = False) -> None:
        """`scaled`: the loss of a step is on a scale of its own (`SCALED`)."""
        self._open = open_steps
        self._labels = TRAINING | {"loss": SCALED} if scaled else TRAINING
        self._steps: Steps | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._steps = self._open("first evaluation" if args.eval_on_start else "step", state.max_steps)
            self._steps.__enter__()
            self._steps.advance_to(state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._steps:
            self._steps.describe("step")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._steps:
            self._steps.advance_to(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not self._steps or not logs or "train_runtime" in logs:
            return
        if any(name.startswith("eval/") for name in logs):
            self._steps.say(f"evaluated: {numbers(logs, EVALUATION)}")
        else:
            self._steps.say(numbers(logs, self._labels))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away; safe to call twice, and needed when a run ends by an error."""
        if self._steps:
            self._steps.__exit__(None, None, None)
            self._steps = None
