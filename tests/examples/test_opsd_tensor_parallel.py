# SPDX-License-Identifier: Apache-2.0
"""The example of split heads, as a reader runs it: on two ranks, then on three and in one process with its cache."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import free_port

SCRIPT = Path(__file__).parents[2] / "examples" / "opsd_tensor_parallel.py"
ROW = re.compile(r"(forward|reverse) KL +(shards|fused|gather) +(\S+) +(\S+) +(\S+) +(\S+)")

pytestmark = pytest.mark.distributed


def printed(ranks: int, cache: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    command += ["--master_port", str(free_port()), str(SCRIPT), str(cache)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(text: str) -> dict[tuple[str, str], list[float]]:
    """Loss, its distance from one process, that of the gradients, and peak memory, by direction and way."""
    return {(kl, way): [float(x) for x in numbers] for kl, way, *numbers in ROW.findall(text)}


def top_k_loss(text: str) -> str:
    return re.findall(r"^top-8 forward KL, student over \d rank\(s\): (\S+)$", text, re.MULTILINE)[0]


def in_this_process(cache: Path, capsys: pytest.CaptureFixture[str]) -> str:
    spec = importlib.util.spec_from_file_location("opsd_tensor_parallel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([str(cache)])
    return capsys.readouterr().out


def test_shards_give_the_loss_of_one_process_and_a_top_k_cache_fits_any_split(tmp_path, capsys):
    cache = tmp_path / "top-k.safetensors"
    two = printed(2, cache)
    assert "made on 2 ranks" in two
    three, one = printed(3, cache), in_this_process(cache, capsys)
    assert "made on" not in three + one
    assert top_k_loss(two) == top_k_loss(three) == top_k_loss(one)
    assert 0 < float(top_k_loss(two)) < rows(two)["forward", "shards"][0]  # a coarser view of the same two sides
    for text in (two, three, one):
        assert len(rows(text)) == 6
        for (kl, _), (loss, off, gradients_off, _) in rows(text).items():
            assert loss == pytest.approx(rows(one)[kl, "shards"][0], abs=2e-6)
            assert off < 1e-5
            assert gradients_off < 1e-4
    for ranks, text in ((2, two), (3, three)):
        mine, whole = map(float, re.findall(r"cache of a rank: (\S+) MiB; gathered it would be (\S+) MiB", text)[0])
        assert mine == pytest.approx(whole / ranks, abs=0.011)
        for kl in ("forward", "reverse"):
            peak = {way: rows(text)[kl, way][3] for way in ("shards", "fused", "gather")}
            assert peak["shards"] < 3 * mine  # the logits, their gradient, and a little
            assert peak["fused"] < peak["shards"]
            assert peak["gather"] > 6 * whole
