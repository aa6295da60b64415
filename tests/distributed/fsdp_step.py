# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of the trainer whose student is sharded by FSDP2: the arrangements of `one_step.py`, that way.

transformers shards the student while it loads it (`DistributedConfig(fsdp_size=2)`), which works without a GPU.
accelerate's own FSDP2 does not: on a CPU it is silently DDP.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from one_step import Arrangement, trainer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import tiny

ARRANGEMENTS = [
    Arrangement(method="gkd", empty=empty, accumulation=accumulation, world=2)
    for empty, accumulation in (("none", 1), ("none", 2), ("late", 1), ("late", 4))
]


def student(*, tie: bool) -> Any:
    return tiny.llama(1, layers=2, tie=tie)


@contextmanager
def student_is(model: Any) -> Iterator[None]:
    """Inside, `tiny.llama(1, ...)` is `model`."""
    original = tiny.llama
    tiny.llama = lambda seed=0, **options: model if seed == 1 else original(seed, **options)
    try:
        yield
    finally:
        tiny.llama = original


def one_step_of(model: Any, arrangement: Arrangement, folder: Path) -> dict[str, Any]:
    """The log of one step, and the sum of every weight after it."""
    with student_is(model):
        run = trainer(arrangement, str(folder))
    run.train()
    log = next(entry for entry in run.state.log_history if "loss" in entry)
    weights = {}
    for name, parameter in run.accelerator.unwrap_model(run.model).named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        weights[name] = float(whole.detach().double().abs().sum())
    return {
        "log": log,
        "weights": weights,
        "reads head": run._reads_head,
        "is sharded": isinstance(model, FSDPModule),
    }


def main(folders: list[str]) -> None:
    torch.set_num_threads(1)
    results = []
    for folder in folders:
        for arrangement in ARRANGEMENTS:
            model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
            found = one_step_of(model, arrangement, Path(folder, "run"))
            results.append([folder, asdict(arrangement), found])
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
