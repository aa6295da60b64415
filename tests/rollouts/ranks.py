# SPDX-License-Identifier: Apache-2.0
"""Two ranks that hold halves of one model's weights and whose rows end at different steps."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tiny
from cohobate.align import RolloutRequest, SamplingConfig
from cohobate.rollouts import LocalRollouts


def main() -> None:
    dist.init_process_group("gloo")
    model = tiny.llama(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    forwards: list[int] = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    results = []
    for rows_of_ranks, rows_per_batch in json.loads(sys.argv[1]):
        forwards.clear()
        source = LocalRollouts(model, eos_token_ids=[1, 4, 15, 20], pad_token_id=0, rows_per_batch=rows_per_batch)
        ids = torch.tensor(rows_of_ranks[dist.get_rank()], dtype=torch.int64).reshape(-1, 1)
        request = RolloutRequest(prompt_ids=ids, prompt_attention_mask=torch.ones_like(ids), seeds=ids[:, 0])
        batch = source.sample(request, SamplingConfig(max_new_tokens=20))
        completions = [i[m.bool()][1:].tolist() for i, m in zip(batch.input_ids, batch.attention_mask, strict=True)]
        results.append({"forwards": len(forwards), "completions": completions})
    print("RESULT", json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
