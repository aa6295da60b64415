# SPDX-License-Identifier: Apache-2.0
"""One implementation in a process of its own: reads commands from stdin, answers each with one line of JSON.

A process each, because peers bring thread pools, allocator states and import side effects that must not meet; long
lived, because the first call of anything measures start-up. Commands: `prepare` (make a case's inputs, run once for
the peak), `time` (one run), `facts` (what it computed), `release`. `harness.py` starts it; not for use by hand.
"""

import gc
import json
import os
import sys
import time
from importlib import import_module
from typing import Any, TextIO

from memory import peak_since, start_peak


def _own_channel() -> TextIO:
    """The real stdout, kept for answers; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


class _Session:
    def __init__(self, module: str, implementation: str) -> None:
        self.module = import_module(module)
        self.implementation = self.module.IMPLEMENTATIONS[implementation]
        self.is_new = True
        self.job: Any = None
        self.device = "cpu"

    def prepare(self, settings: dict[str, Any]) -> dict[str, Any]:
        self.job = None
        gc.collect()
        self.device = settings.get("device", "cpu")
        if self.is_new and self.module.TINY:  # what libraries load at their first call is not the work's either
            self.implementation.build({**settings, **self.module.TINY}).run()
            self.is_new = False
        self.job = self.implementation.build(settings)
        if self.implementation.warm_first:  # a compiler's own memory is not the work's
            self.job.run()
            self.job.clear()
        gc.collect()
        return {"peak": self._gpu_peak() if self.device == "cuda" else self._cpu_peak()}

    def _cpu_peak(self) -> int | None:
        if ours := sys.modules.get("cohobate.functional.workspace"):
            ours.release_workspace()  # tiles kept from the case before would not be counted
        base = start_peak()
        self.job.run()
        if base is not None and getattr(self.job, "whole_process", False):
            base = 0
        return peak_since(base)

    def _gpu_peak(self) -> int:
        import torch

        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.job.run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - base

    def release(self) -> dict[str, Any]:
        """Give the inputs back, so that workers that wait hold no memory."""
        self.job = None
        gc.collect()
        start_peak()
        return {}

    def facts(self, reference: str | None) -> dict[str, Any]:
        return self.job.facts(reference)

    def time(self) -> dict[str, float]:
        self.job.clear()
        if self.device == "cuda":
            return self._gpu_time()
        cpu, wall = time.process_time(), time.perf_counter()
        self.job.run()
        return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}

    def _gpu_time(self) -> dict[str, float]:
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        self.job.run()
        end.record()
        torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 1000
        return {"cpu": seconds, "wall": seconds}


def main() -> None:
    answers = _own_channel()
    module, implementation = sys.argv[1:3]
    session: _Session | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if session is None:
                session = _Session(module, implementation)
            answer = getattr(session, command.pop("do"))(**command)
        except ImportError as error:
            answer = {"missing": str(error)}
        except Exception as error:  # a peer that fails is a row of the table, not the end of the run
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
