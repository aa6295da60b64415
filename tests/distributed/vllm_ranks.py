# SPDX-License-Identifier: Apache-2.0
"""Two ranks and one server: a run of two steps, one that fails on one rank alone, and weights that FSDP2 splits."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tiny
from cohobate.align import SamplingConfig
from cohobate.errors import CohobateError
from cohobate.rollouts import VLLMRolloutsConfig
from cohobate.rollouts.vllm_weights import whole_state
from cohobate.trainer import DistillationConfig, DistillationTrainer
from vllm_cases import EOS, PROMPTS, completions, request

ROWS = [{"prompt": f"{i}+{i * 7}="} for i in range(8)]


def config(url: str, folder: str) -> VLLMRolloutsConfig:
    return VLLMRolloutsConfig(url=url, sync_folder=str(Path(folder, "sync")))


def trained(url: str, folder: str, world: int) -> dict[str, Any]:
    """Two steps over the same four rows each, however many ranks there are."""
    args = DistillationConfig(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=4 // world,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        train_sampling_strategy="sequential",
        max_completion_length=6,
        seed=3,
    )
    run = DistillationTrainer(
        model=tiny.llama(1, layers=2),
        teacher=tiny.llama(5, hidden=12),
        args=args,
        train_dataset=ROWS,
        processing_class=tiny.char_tokenizer(),
        rollouts=config(url, folder),
    )
    run.train()
    run.rollouts.close()
    model = run.accelerator.unwrap_model(run.model)
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    names = ("loss", "completion/mean_length", "rollouts/canary_gap", "rollouts/policy_lag", "rollouts/stale_rows")
    return {
        "logs": [{name: log[name] for name in names} for log in logs],
        "weights": sum(float(p.detach().double().abs().sum()) for p in model.parameters()),
    }


def failing(url: str, folder: str) -> str:
    """Rank 1 alone asks for a row that the server cannot take; what each rank raises."""
    rollouts = config(url, folder).build(tiny.llama(1, layers=2), eos_token_ids=EOS, pad_token_id=0)
    rollouts.prepare(tiny.llama(1, layers=2), 0)
    prompts = PROMPTS if dist.get_rank() == 0 else [[5] * 125]
    try:
        rollouts.sample(request(prompts), SamplingConfig(max_new_tokens=8))
    except CohobateError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        rollouts.close()
    return ""


def sharded(url: str, folder: str) -> dict[str, Any]:
    """Weights that no rank has whole are written whole, twice, and sampled from; a rank may have no row."""
    model: Any = tiny.llama(1, layers=2)
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    rollouts = config(url, folder).build(model, eos_token_ids=EOS, pad_token_id=0, canary_prompts=PROMPTS)
    found: dict[str, Any] = {"equal": [], "split": []}
    for step in range(2):
        rollouts.prepare(model, step)
        found["gap"] = rollouts.metrics()["rollouts/canary_gap"]
        batch = rollouts.sample(request(PROMPTS if dist.get_rank() == 0 else []), SamplingConfig(max_new_tokens=8))
        found[f"completions {step}"] = completions(batch)
        whole = tiny.llama(1, layers=2)
        if step == 1:
            with torch.no_grad():
                for parameter in whole.parameters():
                    parameter.mul_(1.25)
        state = whole_state(model)
        found["equal"].append(all(torch.equal(state[name], value) for name, value in whole.state_dict().items()))
        found["split"].append(all(isinstance(p, DTensor) for p in model.parameters()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
    rollouts.close()
    return found


def main(urls: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {
        "trained": trained(urls[0], f"{folder}/trained", dist.get_world_size()),
        "failing": failing(urls[1], f"{folder}/failing"),
        "sharded": sharded(urls[2], f"{folder}/sharded"),
    }
    print("RESULT", json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:4], sys.argv[4])
