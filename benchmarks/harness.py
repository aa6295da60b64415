# SPDX-License-Identifier: Apache-2.0
"""Implementations measured side by side: one long-lived process each, timed in one interleaved rotation.

On a shared machine the clock drifts by tens of percent within minutes. So no implementation is timed alone: every
round runs each once, medians are taken over the rounds, and what is reported is a ratio of medians of one rotation.
Time is CPU seconds of all threads divided by the number of threads, which a neighbour's load disturbs less than the
wall clock; threads wait passively, so that waiting is not counted.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
OURS, FLOOR, REFERENCE = "Cohobate", "floor: the four products", "reference"


class Job(Protocol):
    """One case, ready to run: `run` is what is timed, `clear` drops its results, `facts` tells them."""

    def run(self) -> None: ...
    def clear(self) -> None: ...
    def facts(self, reference: str | None) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """How one library does the work."""

    build: Callable[[dict[str, Any]], Job]
    package: str | None = None  # named with its version in the tables
    warm_first: bool = False  # compiles at the first call: the peak is read at the second
    lives_on: bool = True  # whether the process serves the next case too
    threads: int = 2
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One piece of work, the same for every implementation."""

    name: str
    settings: dict[str, Any]  # JSON values: they travel to the workers
    implementations: tuple[str, ...]
    targets: Mapping[str, str] = field(default_factory=dict)  # by implementation
    base: str = FLOOR  # the implementation that ratios refer to


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one implementation did on one case."""

    case: Case
    implementation: str
    version: str = ""
    seconds: float | None = None  # CPU seconds / threads, median
    wall: float | None = None  # median
    spread: float | None = None  # half the distance between the quartiles, over the median
    peak: int | None = None  # bytes above the inputs
    facts: dict[str, Any] = field(default_factory=dict)
    note: str = ""  # why there is no number


class Worker:
    """The process, or the processes of all ranks, of one implementation of one module."""

    def __init__(self, module: str, name: str, folder: Path) -> None:
        self.implementation: Implementation = _implementations(module)[name]
        self._log = (folder / f"{module}-{abs(hash(name))}.log").open("w+")
        store = tempfile.mktemp(dir=folder)
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), module, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=_environment(self.implementation.threads, rank, self.implementation.ranks, store),
            )
            for rank in range(self.implementation.ranks)
        ]

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """One command to every rank; numbers are those of the slowest rank, everything else rank 0's."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            answers.append(json.loads(line) if line else {"error": f"the process ended: {self._last_words()}"})
        failed = next((a for a in answers if "error" in a or "missing" in a), None)
        if failed is not None or do == "facts":
            return failed or answers[0]
        return {name: None if value is None else max(a[name] for a in answers) for name, value in answers[0].items()}

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else "no output"

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._log.close()


def measure(
    module: str,
    cases: Sequence[Case],
    *,
    rounds: int,
    say: Callable[[str], None],
    after_case: Callable[[list[Measured]], None] = lambda results: None,
) -> list[Measured]:
    """Every case by every implementation it names; one rotation a case, and workers that live through all cases.

    `after_case` gets all results so far each time.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        workers: dict[str, Worker] = {}
        try:
            for case in cases:
                say(f"{module}: {case.name}")
                for name in (*case.implementations, REFERENCE):
                    if name in _implementations(module) and name not in workers:
                        workers[name] = Worker(module, name, Path(folder))
                results += _rotation(case, workers, Path(folder), rounds, say)
                after_case(results)
                for name in [n for n, w in workers.items() if not w.implementation.lives_on]:
                    workers.pop(name).close()
        finally:
            for worker in workers.values():
                worker.close()
    return results


def _rotation(
    case: Case, workers: Mapping[str, Worker], folder: Path, rounds: int, say: Callable[[str], None]
) -> list[Measured]:
    reference = None
    if REFERENCE in workers and case.settings.get("reference", True):
        reference = str(folder / "reference.safetensors")
        answer = workers[REFERENCE].ask("prepare", settings={**case.settings, "write": reference})
        reference = None if "error" in answer else reference
    results = [_prepared(case, name, workers[name]) for name in case.implementations]
    times: dict[str, list[dict[str, float]]] = {m.implementation: [] for m in results if not m.note}
    for _ in range(rounds):
        for name, taken in times.items():
            taken.append(workers[name].ask("time"))
    for m in results:
        worker = workers[m.implementation]
        if not m.note:
            m.facts = worker.ask("facts", reference=reference)
            _summarise(m, times[m.implementation], worker.implementation.threads)
        worker.ask("release")
        say(f"    {m.implementation}: {m.note or f'{m.seconds:.3f} s, peak {(m.peak or 0) / 1e6:.0f} MB'}")
    return results


def _prepared(case: Case, name: str, worker: Worker) -> Measured:
    found = Measured(case=case, implementation=name, version=_version(worker.implementation.package))
    answer = worker.ask("prepare", settings=case.settings)
    if "missing" not in answer and "error" not in answer:
        found.peak = answer["peak"]
    if "missing" in answer:
        found.note = f"not run: {answer['missing']}"
    elif "error" in answer:
        found.note = f"failed: {answer['error']}"
    return found


def _summarise(m: Measured, taken: Sequence[dict[str, float]], threads: int) -> None:
    broken = next((t for t in (*taken, m.facts) if "error" in t), None)
    if broken is not None:
        m.note = f"failed: {broken['error']}"
        return
    cpu = sorted(t["cpu"] / threads for t in taken)
    m.seconds = statistics.median(cpu)
    m.wall = statistics.median(t["wall"] for t in taken)
    m.spread = (cpu[(3 * len(cpu)) // 4] - cpu[len(cpu) // 4]) / 2 / m.seconds


def _implementations(module: str) -> dict[str, Implementation]:
    from importlib import import_module

    return import_module(module).IMPLEMENTATIONS


def _environment(threads: int, rank: int, ranks: int, store: str) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {
        **os.environ,
        **dict.fromkeys(names, str(threads)),
        "OMP_WAIT_POLICY": "passive",
        "DS_ACCELERATOR": "cpu",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "BENCHMARK_RANK": str(rank),
        "BENCHMARK_RANKS": str(ranks),
        "BENCHMARK_STORE": store,
    }


def _version(package: str | None) -> str:
    if package is None:
        return ""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
