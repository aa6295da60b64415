# SPDX-License-Identifier: Apache-2.0
"""`cohobate demo`: all methods, all seeds, two processes at a time; a table and whole curves, not the best checkpoint.

Two workers with one thread each take the jobs: on small tensors two processes beat two threads. The parent reads each
job's `metrics.jsonl` to show how far it is, so nothing travels between processes but files.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from cohobate.demo.methods import LABELS, METHODS, Method, Setting
from cohobate.errors import CohobateError

WORKERS = 2
_POLL_SECONDS = 0.5

FULL = Setting()
QUICK = Setting(warmup_steps=1, num_prompts=32, batch_size=16, num_steps=4, eval_every=2, num_heldout=32)

Progress = Callable[[int, int, str], None]  # (steps done, steps in all, what happened)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One method with one seed, in a folder of its own."""

    method: Method
    seed: int
    folder: Path

    @property
    def result(self) -> Path:
        """Written, whole, when the job is done."""
        return self.folder / "result.json"

    def steps_done(self) -> int:
        """The last step in the job's log; 0 before the first."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return 0
        lines = path.read_text(encoding="utf-8").splitlines()
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def run_jobs(jobs: Sequence[Job], setting_name: str, *, num_steps: int, progress: Progress) -> list[dict[str, Any]]:
    """Run all jobs in `WORKERS` processes; one that fails ends the rest and shows the end of its output."""
    for job in jobs:
        _clear(job.folder)
    folder, total = jobs[0].folder.parent, len(jobs) * num_steps
    workers = {number: _start(number, folder, jobs, setting_name) for number in range(min(WORKERS, len(jobs)))}
    results: dict[Job, dict[str, Any]] = {}
    try:
        while len(results) < len(jobs):
            time.sleep(_POLL_SECONDS)
            failed = [number for number, process in workers.items() if process.poll() not in (None, 0)]
            for job in jobs:
                if job not in results and job.result.exists():
                    results[job] = json.loads(job.result.read_text(encoding="utf-8"))
                    progress(_done(jobs, results, num_steps), total, _line(results[job]))
            if failed or (len(results) < len(jobs) and all(p.poll() is not None for p in workers.values())):
                tail = _output(folder, failed[0] if failed else 0).read_text(encoding="utf-8")[-2000:]
                raise CohobateError(f"a demo job failed:\n{tail}")
            progress(_done(jobs, results, num_steps), total, "")
    finally:
        for process in workers.values():
            process.kill()
            process.wait()
    return [results[job] for job in jobs]


def work(jobs: Sequence[Job], setting: Setting) -> None:
    """What a worker does: take the next job that nobody has taken, until none is left."""
    from cohobate.demo.methods import run_job

    for job in jobs:
        try:
            (job.folder / "taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        run_job(job.method, job.seed, job.folder, setting)


def _clear(folder: Path) -> None:
    """An empty job folder: what an earlier demo left there must not count as this one's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("taken", "result.json", "metrics.jsonl"):
        (folder / name).unlink(missing_ok=True)


def _done(jobs: Sequence[Job], results: Mapping[Job, Any], num_steps: int) -> int:
    return sum(num_steps if job in results else job.steps_done() for job in jobs)


def _line(result: dict[str, Any]) -> str:
    first, last = result["curve"][0], result["curve"][-1]
    label = LABELS[result["method"]]
    return f"{label:<33} seed {result['seed']}  {first['accuracy']:6.1%} → {last['accuracy']:6.1%}"


def _output(folder: Path, number: int) -> Path:
    return folder / f"worker-{number}.txt"


def _start(number: int, folder: Path, jobs: Sequence[Job], setting_name: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    names = [f"{job.method}:{job.seed}" for job in jobs]
    command = [sys.executable, "-m", "cohobate.demo.run", str(folder), setting_name, *names]
    with _output(folder, number).open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def run_demo(*, output_dir: Path, seeds: int = 3, quick: bool = False, progress: Progress) -> dict[str, Any]:
    """Run the comparison and write `results.json` and the plots under `output_dir`.

    Returns what `results.json` holds: setting, load average, seconds, and every curve.
    """
    from cohobate.demo.plots import draw

    setting_name, setting = ("quick", QUICK) if quick else ("full", FULL)
    seeds = 1 if quick else seeds
    started = time.perf_counter()
    jobs = [_job(method, seed, output_dir) for seed in range(seeds) for method in METHODS]
    load_before = load_average()
    results = run_jobs(jobs, setting_name, num_steps=setting.num_steps, progress=progress)
    report = {
        "setting": setting_name,
        "seeds": seeds,
        "seconds": time.perf_counter() - started,
        "load_average_before": load_before,
        "methods": {method: [r for r in results if r["method"] == method] for method in METHODS},
    }
    (output_dir / "results.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    draw(report, output_dir)
    return report


def _job(method: Method, seed: int, output_dir: Path) -> Job:
    return Job(method=method, seed=seed, folder=output_dir / f"{method}-seed{seed}")


def load_average() -> float | None:
    """Processes that wanted a core in the last minute, where the system says so."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def table(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the before/after table: method, start, each evaluated step, seconds; mean and range over the seeds."""
    for method, runs in report["methods"].items():
        if not runs:
            continue
        curves = [run["curve"] for run in runs]
        cells = [_spread([curve[i]["accuracy"] for curve in curves]) for i in range(len(curves[0]))]
        seconds = mean(curve[-1]["seconds"] for curve in curves)
        yield (LABELS[method], *cells, f"{seconds:.0f} s")


def steps_of(report: dict[str, Any]) -> list[int]:
    """The evaluated steps, the same for every method."""
    return [point["step"] for point in next(iter(report["methods"].values()))[0]["curve"]]


def _spread(values: Sequence[float]) -> str:
    """`66 (64-69)`: mean and range in per cent."""
    low, high = min(values), max(values)
    middle = f"{100 * mean(values):.0f}"
    return middle if len(values) == 1 else f"{middle} ({100 * low:.0f}–{100 * high:.0f})"


if __name__ == "__main__":
    base, name = Path(sys.argv[1]), sys.argv[2]
    pairs = [argument.split(":") for argument in sys.argv[3:]]
    todo: list[Any] = [_job(method, int(seed), base) for method, seed in pairs]  # pyright: ignore[reportArgumentType]
    work(todo, {"full": FULL, "quick": QUICK}[name])
