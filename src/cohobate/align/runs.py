# SPDX-License-Identifier: Apache-2.0
"""Where each row's attended tokens stand: read once from the mask, checked once, on the host.

Every alignment needs the same few integers of a row: where its attended run begins, how long it is, where the
completion starts. They leave the device in one transfer and are checked as plain numbers, so a message can name the
row and what was found there. Token values are never looked at: a pad id may be a real token (PAD == EOS); only the
mask can tell. B rows, T columns, R completion length, V vocabulary.
"""

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from cohobate.align.rollout import RolloutBatch
from cohobate.errors import AlignmentError

_INDEX_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class Run:
    """The attended tokens of one row: columns `[begin, begin + length)`; an unattended row is `begin = length = 0`."""

    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class Split:
    """One rollout row: `prompt` attended tokens, then `completion` ones, the first of them in column `start`."""

    prompt: int
    completion: int
    start: int


def check_ids(ids: Tensor, name: str) -> None:
    """`ids` must be int64 or int32, on a device that holds values."""
    if ids.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name} must be int64 or int32, got {ids.dtype}. Convert it with .long().")
    _check_holds_values(ids, name)


def as_int(value: object, name: str, cure: str = "") -> int:
    """`value` as a plain int; bools, floats and everything else that is no integer are refused."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__}).{cure}")


def check_pad_id(pad_token_id: int | None) -> int:
    """`pad_token_id` as a plain int >= 0."""
    cure = " A tokenizer without a pad token may use its EOS id here: masks, not ids, say what is padding."
    pad = as_int(pad_token_id, "pad_token_id", cure)
    if pad < 0:
        raise ValueError(f"pad_token_id must be >= 0, got {pad}: the model embeds it even where it is masked.")
    return pad


def attended_runs(mask: Tensor, name: str) -> list[Run]:
    """The one contiguous attended run of every row of `mask [B, T]`; a hole or another value than 0/1 is an error."""
    if mask.dtype != torch.bool and mask.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name} must be bool, int64 or int32 with values 0 and 1, got {mask.dtype}. Pass mask != 0.")
    _check_holds_values(mask, name)
    rows, width = mask.shape
    if rows == 0 or width == 0:
        return [Run(0, 0)] * rows
    value = mask.long()
    column = torch.arange(width, device=mask.device)
    attended = value != 0
    first = torch.where(attended, column, width).amin(1)
    last = torch.where(attended, column, -1).amax(1)
    facts = torch.stack([attended.sum(1), first, last, value.amin(1), value.amax(1)])
    return [_run(name, row, *numbers) for row, numbers in enumerate(facts.T.tolist())]


def _run(name: str, row: int, count: int, first: int, last: int, low: int, high: int) -> Run:
    if low < 0 or high > 1:
        raise AlignmentError(
            f"{name}, row {row}: found the value {low if low < 0 else high}, but a mask holds only 0 and 1. Pass mask "
            "!= 0 if every non-zero value means attended."
        )
    if count == 0:
        return Run(0, 0)
    if last - first + 1 != count:
        raise AlignmentError(
            f"{name}, row {row}: {count} attended tokens stand between columns {first} and {last}, with "
            f"{last - first + 1 - count} unattended columns among them. A row must be one contiguous attended run: "
            "pad on the left or on the right, never between prompt and completion."
        )
    return Run(first, count)


def split_rollout(rollout: RolloutBatch) -> list[Split]:
    """Prompt and completion of every row of `rollout`, with every condition on its masks and boundaries checked."""
    ids, mask, start_idx = rollout.input_ids, rollout.attention_mask, rollout.response_start_idx
    check_ids(ids, "rollout.input_ids")
    check_ids(start_idx, "rollout.response_start_idx")
    runs = attended_runs(mask, "rollout.attention_mask")
    if mask.device != ids.device or start_idx.device != ids.device:
        raise ValueError(
            f"rollout.input_ids is on {ids.device}, attention_mask on {mask.device} and response_start_idx on "
            f"{start_idx.device}. Move them to one device."
        )
    width = ids.shape[1]
    return [
        _split(row, run, start, width) for row, (run, start) in enumerate(zip(runs, start_idx.tolist(), strict=True))
    ]


def _split(row: int, run: Run, start: int, width: int) -> Split:
    if not 1 <= start <= width:
        raise AlignmentError(
            f"rollout.response_start_idx, row {row}: {start} is outside [1, {width}]. It is the column of the first "
            f"completion token: column 0 has no predictor, and {width} (the width) says that the completion is empty."
        )
    end = run.begin + run.length
    completion = max(0, end - max(start, run.begin))
    prompt = run.length - completion
    if completion and not prompt:
        raise AlignmentError(
            f"rollout, row {row}: {completion} completion tokens, but no attended prompt token before column {start}, "
            "so nothing predicts the first of them. Give the row a prompt token (for example BOS), or count its "
            "first token as the prompt by moving response_start_idx behind it."
        )
    return Split(prompt, completion, start)


def position_ids(mask: Tensor) -> Tensor:
    """`[B, T]` int64: how many attended tokens stand before each attended one; 0 on padding."""
    attended = mask != 0
    return torch.where(attended, attended.cumsum(1) - 1, 0)


def select_positions(logits: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
    """`[B, R, V]`: `logits [B, T, V]` at `positions [B, R]`, exact zeros where `keep [B, R]` is False.

    The zeros come by selection, not by a product, so a NaN that stands at a dropped slot's position reaches neither
    the value nor the gradient. With R = 0 the result still hangs on the graph of `logits`.
    """
    batch, width, vocab = logits.shape
    flat = torch.arange(batch, device=logits.device)[:, None] * width + positions
    picked = logits.reshape(batch * width, vocab).index_select(0, flat.reshape(-1))
    return torch.where(keep[..., None], picked.view(*positions.shape, vocab), 0)


def _check_holds_values(values: Tensor, name: str) -> None:
    if values.device.type == "meta":
        raise ValueError(f"{name} is on the meta device, which holds no values. Move it to the model's device.")
