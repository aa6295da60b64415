# SPDX-License-Identifier: Apache-2.0
"""Two ranks that hold halves of one model's weights score their own batches and train on them."""

import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tiny
from cohobate.errors import ConfigError
from cohobate.teachers import FrozenTeacher, check_head, dense_pair_scores


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = tiny.llama(1, tie=False).train()
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.model.layers, model.lm_head, model):
        fully_shard(part, mesh=mesh)
    result = {"readable": check_head(model)}
    try:
        FrozenTeacher().build(model)
    except ConfigError as error:
        result["frozen"] = str(error)
    ids = torch.arange(2, 14).reshape(2, 6) + rank
    pairs = torch.tensor([1, 4, 9]) if rank == 0 else torch.zeros(0, dtype=torch.int64)
    logits = dense_pair_scores(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, pairs).logits()
    result["logits"] = logits.tolist()
    logits.square().sum().backward()
    result["gradients"] = {name: p.grad.full_tensor().tolist() for name, p in model.named_parameters()}
    print("RESULT", json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
