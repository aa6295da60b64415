# SPDX-License-Identifier: Apache-2.0
"""One row instead of many: a batch without its padding, and with a prefix that its rows share run only once.

Rows of a micro-batch differ in length and begin alike (a system prompt, or the prompt itself when several completions
are drawn for it). A causal model gives a token the same hidden state whatever stands beside its row, so the tokens
that a pair depends on can be laid behind each other in one row, each with the position it had. Nothing is
approximated; on SmolLM2 with short chats a third of the tokens of every forward and backward pass go away.

How attention is kept inside a row depends on the backend. `sdpa` and `eager` get a mask of four dimensions, which can
also show every row a shared prefix that runs once. The flash kernels get the boundaries of the rows instead. A backend
that wants each row to begin at a multiple gets padded boundaries, the *same* tensor for queries and keys, since
kernels take that for a sign that both are padded alike; where the rows really end is kept apart (`PackedSide`).

It is a detail of one forward pass: batches keep their padded form everywhere else, and predictions are found through
`pair_index`. Which rows go together is `packing.py`; whether a model computes the same this way is tried in
`teachers/packing.py`.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cohobate.align.rollout import AlignedSide
from cohobate.parallel.modules import unwrapped

MASKED = ("sdpa", "eager")  # attention backends that read a mask of one's own
BOUNDED = ("flash_attention_2", "flash_attention_3", "flash_attention_4")  # ... and boundaries of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSide(AlignedSide):
    """Rows of a batch behind each other in one row of n tokens, told apart by boundaries."""

    rows: Tensor  # [R] int64: which of the batch's rows stand here, in order; those without a pair do not
    boundaries: Tensor  # [R + 1] int32: tokens of the rows before each, without any padding that a backend asks for


def packed_side(side: AlignedSide, model: nn.Module, *, always: bool = False) -> AlignedSide:
    """The same N predictions from one row of n tokens, where `model` has less to compute that way; else `side` itself.

    `always`: also where the row's attention outweighs the saved padding, for rows planned to fit only without it.
    Ask `packing_refusals` first. The tensors should be where the model is.
    """
    needed = _needed(side)
    if not needed.any():
        return side
    if attention_backend(model) in BOUNDED:
        return bounded_rows(side)
    layout = _layout(side, needed)
    num_rows, width = needed.shape
    if not always and not _pays(layout[0].numel(), num_rows, width, model):
        return side
    return _masked(side, layout, _dtype(model, needed.device.type))


def masked_rows(side: AlignedSide, *, dtype: torch.dtype = torch.float32) -> AlignedSide:
    """One row for backends that read a mask: a prefix that all rows share stands first, once.

    `model_inputs`: `input_ids`, `position_ids` `[1, n]`, an additive `attention_mask [1, 1, n, n]` of `dtype`.
    """
    needed = _needed(side)
    return _masked(side, _layout(side, needed), dtype) if needed.any() else side


def bounded_rows(side: AlignedSide, *, row_multiple: int = 1) -> AlignedSide:
    """One row for backends that read boundaries; each row of it takes up a multiple of `row_multiple` tokens.

    `model_inputs`: `input_ids`, `position_ids` `[1, n]`; `cu_seq_lens_q` and `cu_seq_lens_k`, one tensor `[R + 1]`
    int32, padding included; `max_length_q` and `max_length_k`, one number on the CPU. The padding stands behind its
    row, so nothing that counts attends to it.
    """
    needed = _needed(side)
    if not needed.any():
        return side
    ids, positions = side.model_inputs["input_ids"], side.model_inputs["position_ids"]
    rows = torch.nonzero(needed.any(1))[:, 0]  # [R]
    lengths = needed.sum(1)[rows]
    taken = (lengths + row_multiple - 1) // row_multiple * row_multiple
    ends = taken.cumsum(0)
    tokens = torch.nonzero(needed.flatten())[:, 0]  # the rows' own, one row after the other
    shift = (ends - taken) - (lengths.cumsum(0) - lengths)  # of each row by the padding before it
    places = torch.arange(len(tokens), device=ids.device) + shift.repeat_interleave(lengths)
    place_of = torch.full((needed.numel(),), -1, dtype=torch.int64, device=ids.device)
    place_of[tokens] = places
    padded = _bounds(taken)
    longest = taken.max().to("cpu", torch.int32)
    # A padding token repeats the last token before it, position included: always an id and a position there is.
    source = torch.zeros(int(ends[-1]), dtype=torch.int64, device=ids.device)
    source[places] = torch.arange(len(tokens), device=ids.device)
    source = tokens[source.cummax(0).values]
    return PackedSide(
        model_inputs={
            "input_ids": ids.flatten()[source][None],
            "position_ids": positions.flatten()[source][None],
            "cu_seq_lens_q": padded,
            "cu_seq_lens_k": padded,
            "max_length_q": longest,
            "max_length_k": longest,
        },
        pair_index=place_of[side.pair_index],
        rows=rows,
        boundaries=_bounds(lengths),
    )


def packing_refusals(model: nn.Module) -> list[str]:
    """Why rows of `model` cannot be laid into one, a clause each; empty where nothing speaks against it.

    Told from config and signature alone, the same on every rank and on sharded weights.
    """
    base: Any = unwrapped(model)
    config = _text_config(getattr(base, "config", None))
    if config is None:
        return ["it has no config that tells how it attends"]
    backend, reasons = attention_backend(base), []
    if backend not in (*MASKED, *BOUNDED):
        reasons.append(
            f"its attention backend is {backend!r}, and rows can be packed for {', '.join(MASKED + BOUNDED)}"
        )
    inner: Any = base.get_base_model() if hasattr(base, "get_base_model") else base
    parameters = inspect.signature(inner.forward).parameters
    if "position_ids" not in parameters:
        reasons.append("its forward takes no position_ids, so rows behind each other would not all begin at 0")
    if backend in BOUNDED and all(p.kind != inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        reasons.append("its forward hands no cu_seq_lens_q on to the attention")
    if getattr(inner, "_is_stateful", False):
        reasons.append("it carries a state from token to token, which would run on into the next row")
    if kinds := _other_layers(config, backend):
        reasons.append(f"it has layers of other kinds than full attention ({', '.join(kinds)})")
    return reasons


def attention_backend(model: nn.Module) -> str | None:
    """What the model's config calls the kernels that its attention runs on; None without one."""
    return getattr(_text_config(getattr(unwrapped(model), "config", None)), "_attn_implementation", None)


def _other_layers(config: Any, backend: str | None) -> list[str]:
    """Kinds of layers that a packed row would change. A mask of one's own takes a window away; boundaries keep it."""
    fits = {"full_attention"} | ({"sliding_attention"} if backend in BOUNDED else set())
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windows = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}
        kinds = [kind for name, kind in windows.items() if getattr(config, name, None)]
    return sorted(set(kinds) - fits)


def _needed(side: AlignedSide) -> Tensor:
    """`[B, T]` bool: attended tokens up to the last one of their row that predicts something."""
    mask = side.model_inputs["attention_mask"] != 0
    num_rows, width = mask.shape
    last = torch.full((num_rows,), -1, dtype=torch.int64, device=mask.device)
    last.scatter_reduce_(0, side.pair_index // width, side.pair_index % width, "amax")
    return mask & (torch.arange(width, device=mask.device) <= last[:, None])


def _masked(side: AlignedSide, layout: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> AlignedSide:
    tokens, segment, place_of = layout
    order = torch.arange(tokens.numel(), device=tokens.device)
    seen = (segment[None, :] == segment[:, None]) | (segment[None, :] < 0)
    seen &= order[None, :] <= order[:, None]
    hidden = torch.zeros(seen.shape, dtype=dtype, device=tokens.device).masked_fill_(~seen, torch.finfo(dtype).min)
    return AlignedSide(
        model_inputs={
            "input_ids": side.model_inputs["input_ids"].flatten()[tokens][None],
            "position_ids": side.model_inputs["position_ids"].flatten()[tokens][None],
            "attention_mask": hidden[None, None],
        },
        pair_index=place_of[side.pair_index],
    )


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


def _bounds(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def _pays(num_tokens: int, num_rows: int, width: int, model: nn.Module) -> bool:
    """Compares multiplications of a layer: about 12 H^2 a token outside attention, 2 H for a pair inside it."""
    config = getattr(unwrapped(model), "config", None)
    size = getattr(_text_config(config), "hidden_size", 0) or 0
    return 12 * size * (num_rows * width - num_tokens) > 2 * (num_tokens**2 - num_rows * width**2)


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _dtype(model: nn.Module, device: str) -> torch.dtype:
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return next(unwrapped(model).parameters()).dtype
