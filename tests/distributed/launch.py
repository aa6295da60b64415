# SPDX-License-Identifier: Apache-2.0
"""Starts a script on several gloo ranks on this machine, collects what each prints, and never waits for ever."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(script: Path, arguments: list[str], *, world: int, timeout: float = 120.0) -> list[Any]:
    """The JSON value after `RESULT` of each rank, by rank. A hang or a failed rank is an error with its output."""
    port = str(free_port())
    processes = []
    for rank in range(world):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), str(Path(__file__).parent)]),
        }
        if world > 1:
            environment |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        finished = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, error) in zip(processes, finished, strict=True):
        assert process.returncode == 0, f"exit {process.returncode}\n{out}\n{error}"
    lines = [next(line for line in out.splitlines() if line.startswith("RESULT ")) for out, _ in finished]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]
