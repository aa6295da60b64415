# SPDX-License-Identifier: Apache-2.0
"""What a wrapper for many processes hides: the model inside, whether its weights are whole, and a mode to give back.

Rollouts and teachers both run a model that belongs to the trainer. They reach the module below DDP and its like, and
they leave every `training` flag as they found it: a model is rarely in one mode throughout (frozen parts often stay in
eval), so `model.train()` afterwards would not do.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.utils import extract_model_from_parallel
from torch import nn
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
