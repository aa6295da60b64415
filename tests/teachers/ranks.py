# SPDX-License-Identifier: Apache-2.0
"""Two ranks that hold halves of one model's weights (FSDP2) score their own batches and train on them.

`train` is what both worlds run: the ranks on sharded models, the test on whole ones, over the pairs of all ranks.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import tiny
from cohobate.align import AlignedBatch, AlignedSide
from cohobate.errors import ConfigError
from cohobate.functional.fused_linear import fused_linear_divergence
from cohobate.functional.scores import HiddenScores
from cohobate.teachers import FrozenTeacher, HeadNotReadable, LocalTeacher, check_head, dense_pair_scores, pair_scores

PAIRS = [[1, 4, 9], [0, 2, 3, 10]]  # of rank 0 and 1, into [2, 6]
CASES: dict[str, dict[str, Any]] = {
    "every part": {"parts": "layers head"},
    "only the root": {"parts": ""},
    "tied": {"tie": True, "parts": "layers"},
    "tied, a root that reshards": {"tie": True, "parts": "layers", "reshard": True},
    "tied, in one group with the norm": {"tie": True, "parts": "layers group"},
    "adapter on the head": {"lora": True, "parts": "layers head"},
    "a rank without pairs": {"parts": "layers head", "pairs": [PAIRS[0], []]},
    "tied, a rank without pairs": {"tie": True, "parts": "", "pairs": [[], PAIRS[1]]},
    "two micro-batches": {"parts": "layers head", "micro": 2},
}


def make(*, tie: bool = False, lora: bool = False, seed: int = 1, vocab_size: int = 23) -> Any:
    model: Any = tiny.llama(seed, tie=tie, vocab_size=vocab_size).train()
    if lora:
        config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = get_peft_model(model, config)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # starts at 0, where A would get no gradient
                    parameter.data = 0.1 * torch.randn_like(parameter)
    return model


def batch(rank: int, pairs: list[int]) -> AlignedBatch:
    """Two rows of six tokens; the teacher reads others than the student."""

    def side(ids: Tensor) -> AlignedSide:
        position_ids = torch.arange(6).expand(2, 6)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": position_ids}
        return AlignedSide(model_inputs=inputs, pair_index=torch.tensor(pairs, dtype=torch.int64))

    ids = torch.arange(2, 14).reshape(2, 6) + rank
    none = torch.zeros(len(pairs), dtype=torch.int64)
    return AlignedBatch(
        student=side(ids),
        teacher=side(ids.flip(1)),
        target_ids=none,
        weights=torch.ones(len(pairs)),
        row=none,
        is_sampled=torch.ones(2, dtype=torch.bool),
        sample_ids=("a", "b"),
    )


def loss_of(model: nn.Module, teacher: LocalTeacher, batch: AlignedBatch) -> Tensor:
    theirs = teacher.score(batch)
    ours = pair_scores(model, batch.student.model_inputs, batch.student.pair_index)
    assert isinstance(theirs, HiddenScores)
    return fused_linear_divergence(ours.hidden, ours.head.weight, theirs.hidden, theirs.head.weight, beta=0.5).loss_sum


def train(model: nn.Module, teacher: LocalTeacher, batches: list[AlignedBatch], *, factor: float) -> dict[str, Any]:
    """Two steps of plain gradient descent on `factor` times the sum over `batches`, each after an evaluation."""
    assert check_head(model)  # leaves sharded parameters in their places, or the optimizer would get others
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses, gradients = [], []
    with collectives() as seen:
        for _ in range(2):
            with torch.no_grad():
                loss_of(model, teacher, batches[0])
            for i, one in enumerate(batches):
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(i == len(batches) - 1)  # pyright: ignore[reportCallIssue]
                loss = loss_of(model, teacher, one)
                losses.append(loss.item())
                (loss * factor).backward()
            gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    return {
        "loss": sum(losses),
        "gradients": {
            f"{n} {i}": whole(g).tolist() for i, by_name in enumerate(gradients) for n, g in by_name.items()
        },
        "values": {n: whole(p.detach()).tolist() for n, p in model.named_parameters()},
        "collectives": seen,
    }


def whole(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def shard(model: Any, parts: str, *, reshard: bool | None = None, **options: Any) -> Any:
    """`fully_shard` on the named parts, then on the model, whose own weights go after a forward if `reshard`."""
    options["mesh"] = init_device_mesh("cpu", (2,))
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for part in base.model.layers if "layers" in parts else ():
        fully_shard(part, **options)
    if "head" in parts:
        fully_shard(base.lm_head, reshard_after_forward=True, **options)
    if "group" in parts:
        fully_shard([base.model.embed_tokens, base.model.norm, base.lm_head], reshard_after_forward=True, **options)
    return fully_shard(model, reshard_after_forward=reshard, **options)


@contextmanager
def collectives() -> Iterator[list[tuple[str, int]]]:
    """The name and the number of elements of every gather and scatter inside."""
    seen: list[tuple[str, int]] = []
    names = ("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor")
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sizes = [x.numel() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            seen.append((name.split("_")[1], max(sizes)))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counted(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def run_case(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    pairs = case.get("pairs", PAIRS)[rank]
    model = make(tie=case.get("tie", False), lora=case.get("lora", False))
    shard(model, case["parts"], reshard=case.get("reshard"))
    teacher = LocalTeacher(shard(make(seed=7), "layers head"))
    batches = [batch(rank + 2 * i, pairs) for i in range(case.get("micro", 1))]
    return train(model, teacher, batches, factor=2.0)  # FSDP takes the mean over ranks


def refusals(model: Any) -> dict[str, str]:
    found = {}
    try:
        FrozenTeacher().build(model)
    except ConfigError as error:
        found["frozen"] = str(error)
    adapted = make(lora=True)
    fully_shard(adapted.get_base_model().lm_head.base_layer, mesh=init_device_mesh("cpu", (2,)))
    try:
        pair_scores(adapted, batch(0, [1]).student.model_inputs, torch.tensor([1]))
    except HeadNotReadable as error:
        found["part"] = str(error)
    return found


def own_logits(rank: int) -> dict[str, Any]:
    """The sharded model's logits through both ways to read it, in float32 and in bfloat16 under FSDP's own policy."""
    one = batch(rank, PAIRS[0] if rank == 0 else [])
    found = {}
    for name, options in {
        "float32": {},
        "bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    }.items():
        model = shard(make(), "layers head", **options)
        logits, dtypes = [], []
        for read in (dense_pair_scores, pair_scores):
            scores = read(model, one.student.model_inputs, one.student.pair_index)
            logits.append(scores.logits().tolist())
            dtypes.append(str(scores.hidden.dtype if isinstance(scores, HiddenScores) else scores.dense.dtype))
            scores.logits().square().sum().backward()
        gradients = {n: whole(p.grad).tolist() for n, p in model.named_parameters()}  # of both
        found[name] = {"logits": logits, "dtypes": dtypes, "gradients": gradients}
    return found


def tensor_parallel(folder: str) -> dict[str, Any]:
    """A model that transformers splits over both ranks, which read the same batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    one = batch(0, PAIRS[0])
    seen = pair_scores(model, one.student.model_inputs, one.student.pair_index)
    seen.logits().square().sum().backward()
    return {
        "readable": check_head(model),
        "placements": str(model.lm_head.weight.placements),
        "logits": seen.logits().tolist(),
        "gradients": {n: whole(p.grad).tolist() for n, p in model.named_parameters()},
    }


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = shard(make(), "layers head")
    result = {
        "readable": check_head(model),
        "refusals": refusals(model),
        "logits": own_logits(rank),
        "tensor parallel": {folder: tensor_parallel(folder) for folder in sys.argv[1:]},
        "cases": {name: run_case(rank, case) for name, case in CASES.items()},
    }
    print("RESULT", json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
