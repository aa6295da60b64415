# SPDX-License-Identifier: Apache-2.0
"""Starts a real vLLM, in a process and an environment of its own, and ends it again (`make test-server`).

`COHOBATE_VLLM_PYTHON` names the interpreter of that environment.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

STARTS_WITHIN = 420.0


@contextlib.contextmanager
def vllm(
    folder: Path, log: Path, *flags: str, port: int | None = None, dtype: str = "float32", **environment: str
) -> Iterator[str]:
    """vLLM on the model in `folder`, served as `teacher`; gives the URL once it answers."""
    python = os.environ.get("COHOBATE_VLLM_PYTHON")
    if python is None:
        pytest.fail("these tests need an environment with vLLM: run `make test-server`.")
    port = port or free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "teacher", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--enforce-eager", "--max-num-seqs", "16", *flags]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | quiet | environment,
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it starts processes of its own, which are ended with it
        )
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            end(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"vLLM ended with {process.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"vLLM did not start within {STARTS_WITHIN:.0f} s:\n{log.read_text(errors='replace')[-3000:]}")


def end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
            return
