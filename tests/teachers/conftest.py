# SPDX-License-Identifier: Apache-2.0
"""An aligned batch whose two sides differ, and a record of everything that a teacher must leave alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cohobate.align import AlignedBatch, AlignedSide


def _side(width: int, pairs: list[int], seed: int) -> AlignedSide:
    ids = torch.randint(2, 23, (2, width), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, -1] = 0
    positions = torch.where(mask == 1, mask.cumsum(1) - 1, 0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return AlignedSide(model_inputs=inputs, pair_index=torch.tensor(pairs))


@pytest.fixture
def batch() -> AlignedBatch:
    """Five pairs: three of row 0, two of row 1; the teacher's rows are longer and hold other ids."""
    return AlignedBatch(
        student=_side(6, [2, 3, 4, 8, 9], seed=1),
        teacher=_side(9, [5, 6, 7, 14, 15], seed=2),
        target_ids=torch.tensor([2, 3, 4, 5, 6]),
        weights=torch.ones(5),
        row=torch.tensor([0, 0, 0, 1, 1]),
        is_sampled=torch.tensor([True, True]),
        sample_ids=("a", "b"),
    )


@pytest.fixture
def state_of() -> Callable[[nn.Module], Any]:
    """Mode, gradient flags, gradients, values, adapter switches, hooks, attributes of a model, and the generator."""

    def record(model: nn.Module) -> Any:
        return {
            "training": {name: module.training for name, module in model.named_modules()},
            "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
            "grad": {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()},
            "values": {name: p.tolist() for name, p in model.named_parameters()},
            "parameters": {name: id(p) for name, p in model.named_parameters()},
            "disabled": {n: m._disable_adapters for n, m in model.named_modules() if hasattr(m, "_disable_adapters")},
            "hooks": {name: len(module._forward_pre_hooks) for name, module in model.named_modules()},
            "generator": torch.get_rng_state().tolist(),
        }

    return record
