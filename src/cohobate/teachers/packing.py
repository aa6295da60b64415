# SPDX-License-Identifier: Apache-2.0
"""Whether a model computes from one packed row what it computes from many padded ones: tried, not believed.

What a config tells of a model's attention rules some models out (`packing_refusals`), and no config rules one in. So a
model is shown two short rows both ways before its batches are packed. How rows are packed is `align/packed_rows.py`.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from cohobate.align.packed_rows import MASKED, attention_backend, packed_side, packing_refusals
from cohobate.align.rollout import AlignedSide
from cohobate.errors import ConfigError
from cohobate.parallel.modules import eval_mode, is_sharded, unwrapped
from cohobate.teachers.forward import dense_pair_scores, pair_scores

__all__ = ["can_pack", "check_packing", "packed_side"]

# What models raise that cannot read a mask of four dimensions; `HeadNotReadable` is a ValueError too.
_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError)


def can_pack(model: nn.Module) -> bool:
    """Whether to pack the batches of `model` unasked; False wherever in doubt.

    On a CPU only: on a GPU a mask of its own keeps attention from the flash kernels. Half precision is left alone,
    since it could not show a small difference, and so are weights that are sharded when this is asked: every rank
    would have to ask. Costs two tiny forward passes, in eval mode and without gradients.
    """
    base: Any = unwrapped(model)
    if is_sharded(base) or packing_refusals(base):
        return False
    weight = next(base.parameters())
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.float64):
        return False
    return attention_backend(base) in MASKED and _computes_the_same(base, tolerance=1e-4)


def check_packing(model: nn.Module, side: str) -> None:
    """Raise unless the rows of `model`, the student or a teacher as `side` says, can be packed when that is asked for.

    Windowed attention is told from the config, since short rows would not show it; the rest is tried, within what the
    weights' precision can show, unless they are sharded.

    Raises:
        ConfigError: with every reason, and the attention backend.
    """
    base: Any = unwrapped(model)
    reasons = packing_refusals(base)
    if not reasons and not is_sharded(base):
        exact = next(base.parameters()).dtype in (torch.float32, torch.float64)
        if not _computes_the_same(base, tolerance=1e-4 if exact else 2.0**-4):
            reasons = ["it gave other hidden states for two short rows packed than for the same rows padded"]
    if reasons:
        raise ConfigError(
            f"rows of the {side} ({type(base).__name__}, attention backend {attention_backend(base)!r}) cannot be "
            f"packed: {'; '.join(reasons)}. Turn packing off, or load the model with another attention backend "
            "(attn_implementation='sdpa' suits most)."
        )


def _computes_the_same(base: Any, *, tolerance: float) -> bool:
    """Whether two short rows give the same states packed as padded, up to `tolerance` of each state's size."""
    device = next(base.parameters()).device
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], device=device)
    inputs = {
        # The token before the second row's own part is another one packed (0) than in its row (1).
        "input_ids": torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]], device=device),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }
    side = AlignedSide(model_inputs=inputs, pair_index=torch.nonzero(mask.flatten())[:, 0])
    with torch.no_grad(), eval_mode(base):
        wanted, found = (_states(base, s) for s in (side, packed_side(side, base, always=True)))
    if wanted is None or found is None or wanted.shape != found.shape:
        return False
    difference, size = (wanted - found).abs().amax(-1), wanted.abs().amax(-1).clamp(min=1e-6)
    return bool((difference <= tolerance * size).all())


def _states(base: nn.Module, side: AlignedSide) -> Tensor | None:
    """Hidden states, or logits where the head is no plain one, of every pair; None where the model refuses."""
    with contextlib.suppress(*_REFUSALS):
        return pair_scores(base, side.model_inputs, side.pair_index).hidden
    with contextlib.suppress(*_REFUSALS):
        return dense_pair_scores(base, side.model_inputs, side.pair_index).dense
    return None
