# SPDX-License-Identifier: Apache-2.0
"""One row instead of many: a batch without its padding, and with a prefix that its rows share run only once.

Rows of a micro-batch differ in length and begin alike (a system prompt, or the prompt itself when several completions
are drawn for it). A causal model gives a token the same hidden state whatever stands beside its row, so the tokens
that a pair depends on can be laid behind each other in one row: the shared prefix first, then what is each row's own,
with the row's positions, under a mask that shows every token its own row and the prefix. Nothing is approximated; on
SmolLM2 with short chats a third of the tokens of every forward and backward pass go away.

It is a detail of one forward pass: batches keep their padded form everywhere else. Used on a CPU only: on a GPU a
mask of its own keeps attention from the flash kernels. Whether a model takes such a mask is tried once, not believed.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from cohobate.align.rollout import AlignedSide
from cohobate.parallel.modules import eval_mode, is_sharded, unwrapped
from cohobate.teachers.forward import dense_pair_scores, pair_scores

# What models raise that cannot read a mask of four dimensions; `HeadNotReadable` is a ValueError too.
_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError)


def packed_side(side: AlignedSide, model: nn.Module) -> AlignedSide:
    """The same N predictions from one row of n tokens, where `model` has less to compute that way; else `side` itself.

    `model_inputs` of the result: `input_ids`, `position_ids` `[1, n]`, an additive `attention_mask [1, 1, n, n]`.
    Ask `can_pack` first.
    """
    ids = side.model_inputs["input_ids"]
    needed = _needed(side)
    if not needed.any():
        return side
    tokens, segment, place_of = _layout(side, needed)
    num_rows, width = ids.shape
    if not _pays(tokens.numel(), num_rows, width, model):
        return side
    order = torch.arange(tokens.numel(), device=ids.device)
    seen = (segment[None, :] == segment[:, None]) | (segment[None, :] < 0)
    seen &= order[None, :] <= order[:, None]
    dtype = _dtype(model)
    hidden = torch.zeros(seen.shape, dtype=dtype, device=ids.device).masked_fill_(~seen, torch.finfo(dtype).min)
    return AlignedSide(
        model_inputs={
            "input_ids": ids.flatten()[tokens][None],
            "position_ids": side.model_inputs["position_ids"].flatten()[tokens][None],
            "attention_mask": hidden[None, None],
        },
        pair_index=place_of[side.pair_index],
    )


def can_pack(model: nn.Module) -> bool:
    """Whether `model` computes the same from a packed row, tried on two short ones; False wherever in doubt.

    Costs two tiny forward passes, in eval mode and without gradients. Windowed attention is told from the config,
    since short rows would not show it. Half precision is left alone, since it could not show a small difference, and
    so are weights that are sharded when this is asked: every rank would have to ask.
    """
    base: Any = unwrapped(model)
    if is_sharded(base):
        return False
    weight = next(base.parameters())
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.float64) or not _attends_freely(base):
        return False
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    inputs = {
        "input_ids": torch.tensor([[0, 1, 0, 1], [0, 1, 1, 0]]),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }
    side = AlignedSide(model_inputs=inputs, pair_index=torch.nonzero(mask.flatten())[:, 0])
    with torch.no_grad(), eval_mode(base):
        wanted, found = (_states(base, s) for s in (side, packed_side(side, base)))
    if wanted is None or found is None or wanted.shape != found.shape:
        return False
    return bool(((wanted - found).abs().amax(-1) <= 1e-4 * wanted.abs().amax(-1).clamp(min=1e-6)).all())


def _needed(side: AlignedSide) -> Tensor:
    """`[B, T]` bool: attended tokens up to the last one of their row that predicts something."""
    mask = side.model_inputs["attention_mask"] != 0
    num_rows, width = mask.shape
    last = torch.full((num_rows,), -1, dtype=torch.int64, device=mask.device)
    last.scatter_reduce_(0, side.pair_index // width, side.pair_index % width, "amax")
    return mask & (torch.arange(width, device=mask.device) <= last[:, None])


def _layout(side: AlignedSide, needed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flat indices `[n]` of the tokens to run, the row `[n]` of each (-1: shared), and where each token `[B T]` is."""
    num_rows, width = needed.shape
    rows = torch.nonzero(needed.any(1))[:, 0]
    begin = needed.int().argmax(1)
    place = torch.arange(width, device=needed.device) - begin[:, None]  # [B, T] from the row's first token on
    shared = _shared_length(side, rows, begin[rows], needed[rows].sum(1))
    is_shared = needed & (place >= 0) & (place < shared)
    first = int(rows[0])
    kept = needed & ~is_shared
    kept[first] |= is_shared[first]
    tokens = torch.nonzero(kept.flatten())[:, 0]
    place_of = torch.full((num_rows * width,), -1, dtype=torch.int64, device=needed.device)
    place_of[tokens] = torch.arange(tokens.numel(), device=needed.device)
    # A shared token is where the first row's is: the prefix stands first, in order.
    place_of = torch.where(is_shared.flatten(), place.flatten(), place_of)
    segment = torch.where(is_shared.flatten()[tokens], -1, tokens // width)
    return tokens, segment, place_of


def _shared_length(side: AlignedSide, rows: Tensor, begin: Tensor, lengths: Tensor) -> int:
    """How many tokens, from the first on, are the same in all of `rows`."""
    if len(rows) < 2:
        return 0
    columns = begin[:, None] + torch.arange(int(lengths.min()), device=begin.device)  # [R, shortest]
    same = torch.ones(columns.shape[1], dtype=torch.bool, device=begin.device)
    for name in ("input_ids", "position_ids"):
        values = side.model_inputs[name][rows[:, None], columns]
        same &= (values == values[:1]).all(0)
    return int(same.int().cumprod(0).sum())


def _pays(num_tokens: int, num_rows: int, width: int, model: nn.Module) -> bool:
    """Compares multiplications of a layer: about 12 H^2 a token outside attention, 2 H for a pair inside it."""
    config = getattr(unwrapped(model), "config", None)
    size = getattr(_text_config(config), "hidden_size", 0) or 0
    return 12 * size * (num_rows * width - num_tokens) > 2 * (num_tokens**2 - num_rows * width**2)


def _attends_freely(base: Any) -> bool:
    """Whether the config tells of full attention through kernels that take a mask of one's own."""
    config: Any = _text_config(getattr(base, "config", None))
    if config is None or getattr(config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False
    layers = getattr(config, "layer_types", None)
    if layers is not None:
        return all(kind == "full_attention" for kind in layers)
    return not any(getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _dtype(model: nn.Module) -> torch.dtype:
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return next(unwrapped(model).parameters()).dtype


def _states(base: nn.Module, side: AlignedSide) -> Tensor | None:
    """Hidden states, or logits where the head is no plain one, of every pair; None where the model refuses."""
    with contextlib.suppress(*_REFUSALS):
        return pair_scores(base, side.model_inputs, side.pair_index).hidden
    with contextlib.suppress(*_REFUSALS):
        return dense_pair_scores(base, side.model_inputs, side.pair_index).dense
    return None
