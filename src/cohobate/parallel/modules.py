# SPDX-License-Identifier: Apache-2.0
"""What a wrapper for many processes hides: the model inside, whether its weights are whole, and a mode to give back.

Rollouts and teachers both run a model that belongs to the trainer. They reach the module below DDP and its like, and
they leave every `training` flag as they found it: a model is rarely in one mode throughout (frozen parts often stay in
eval), so `model.train()` afterwards would not do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def unwrapped(model: nn.Module) -> nn.Module:
    """The model below DDP, FSDP, DeepSpeed and `torch.compile`; adapters and mixed precision stay."""
    return extract_model_from_parallel(model, keep_torch_compile=False)


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of the weights (FSDP, ZeRO-3), so that every forward pass is a collective."""
    # An FSDP2 root keeps its parameters whole, and plain, between a forward pass and the next resharding.
    if any(isinstance(module, FullyShardedDataParallel | FSDPModule) for module in model.modules()):
        return True
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())


def is_whole_only_inside(model: nn.Module) -> bool:
    """Whether weights are whole only while their module runs, and nobody else can hold them: FSDP1 and ZeRO-3.

    FSDP2 can be asked to wait (`keep_gathered`), and tensor-parallel weights can be gathered (`gathered`).
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return True
    return any(hasattr(p, "ds_id") for p in model.parameters())


def keep_gathered(model: nn.Module, part: nn.Module) -> bool:
    """Whether FSDP2 gathers the weights of `part`; if so, they now stay gathered from a forward pass to its backward.

    A loss that reads these weights after `part` has run would else find them freed, or gather them a second time.
    Without a backward pass (a teacher) they stay gathered until the next one. Set once, it holds.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return False
    weights = {id(weight) for weight in part.parameters()}
    owner: dict[str, FSDPModule] = {}  # name of a module -> who gathers its weights
    found: list[FSDPModule] = []
    for name, module in model.named_modules():
        # A tied weight belongs to another module too, whose owner may be the one that gathers.
        has_weight = module is part or any(id(weight) in weights for weight in module.parameters(recurse=False))
        nearest = module if isinstance(module, FSDPModule) else owner.get(name.rpartition(".")[0])
        if nearest is not None:
            owner[name] = nearest
            found += [nearest] if has_weight else []
    for module in found:
        module.set_reshard_after_forward(False, recurse=False)
    return bool(found)


def release_gathered(model: nn.Module) -> None:
    """Give back what FSDP2 still holds gathered after a forward pass: parameters are shards again, in their places."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reaching(values: Tensor, output: Tensor) -> Tensor:
    """`values`, with a wrapped module's `output` in the graph beside them, which gets no gradient.

    FSDP2 begins the backward pass of a module with the gradients of its outputs. A loss that reads only from inside
    the outermost module would never begin it, and its gradients would never be reduced. An undefined gradient is
    enough to begin, and costs no product.
    """
    return _Reaching.apply(values, output)  # pyright: ignore[reportReturnType]


class _Reaching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, output: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(ctx: Any, grad_values: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_values, None  # output: only there to be reached


def gathered(weight: Tensor) -> Tensor:
    """`weight`, whole: of one that is split over a tensor-parallel mesh, by one all-gather.

    Its gradient is cut to the shard and not summed, as every rank of the mesh computes the same loss.
    """
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, every module's own `training` flag back afterwards, also after an exception."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
