# SPDX-License-Identifier: Apache-2.0
"""One forward pass that stops before the vocabulary: the hidden states of N pairs and the head that would read them.

A causal model ends in an output head, and its logits `[B, T, V]` are by far its largest tensor. So the head is met by
a hook when it is called: the hook keeps the N hidden states the loss needs, reads the head's weights as they act then,
and hands the head one position to project, so that the model's own code runs through. Teachers and student both go
through here; with gradients on, they flow into the body, the head, and an adapter on the head.

What the head's weights are and what the model does to its logits afterwards is found out in `output_head.py`, by
conventions that are no promise: `check_head` compares once with the model's own logits. A head that cannot be written
as `softcap(scale * (h W^T + b))` still works, through `dense_pair_scores`.

Under FSDP2 the head is read while it is gathered for its own call, and kept until the backward pass: one all-gather
and one reduce-scatter, as for any other layer. A tensor-parallel head (DTensor) is gathered here; one that is not to
be is a `VocabParallelLMHead`, whose loss is in `parallel.lm_head`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from cohobate.errors import ConfigError
from cohobate.functional.logprobs import real_vocabulary
from cohobate.functional.scores import DenseScores, HiddenScores, OutputHead
from cohobate.parallel.modules import (
    eval_mode,
    is_whole_only_inside,
    keep_gathered,
    reaching,
    release_gathered,
    unwrapped,
)
from cohobate.teachers.output_head import HeadNotReadable, output_head, read_head, scale_and_softcap

_LOUDER = 64.0  # makes a soft-cap show in logits near 1, and keeps trained ones (near 30) finite in float16


def pair_scores(
    model: nn.Module,
    model_inputs: Mapping[str, Tensor],
    pair_index: Tensor,
    *,
    vocab_size: int | None = None,
    call: Callable[..., Any] | None = None,
) -> HiddenScores:
    """Hidden states `[N, H]` at `pair_index [N]` of the flattened `[B * T]`, and the head, cut to `vocab_size` ids.

    `model` may be wrapped (DDP, PEFT); it is called once, as wrapped, or `call` is in its place (the same module under
    other weights). LoRA on the head widens both parts by its rank instead of being merged: `[h, s A h] [W, B]^T` is
    the same map, exact under dropout, and a small update is not rounded away in bf16. Raises `HeadNotReadable`.
    """
    return _pair_scores(model, model_inputs, pair_index, vocab_size=vocab_size, call=call)


def _pair_scores(
    model: nn.Module,
    model_inputs: Mapping[str, Tensor],
    pair_index: Tensor,
    *,
    vocab_size: int | None = None,
    call: Callable[..., Any] | None = None,
    louder: float | None = None,
) -> HiddenScores:
    """`pair_scores`; with `louder`, as if every row were twice as long, its second half multiplied by it."""
    base = unwrapped(model)
    if is_whole_only_inside(base):
        raise HeadNotReadable(
            "the model's weights are sharded over ranks by FSDP1 or ZeRO-3: its head is whole only while it is "
            "called. Use FSDP2 (fully_shard), or dense_pair_scores."
        )
    is_fsdp2 = _keep_head_gathered(base)
    scale, softcap = scale_and_softcap(base)
    read: list[tuple[Tensor, OutputHead]] = []

    def take(head: nn.Module, hidden: Tensor) -> Tensor:
        states = hidden if louder is None else torch.cat([hidden, hidden * louder], dim=1)
        rows, weight, bias = read_head(head, _rows_of(states, pair_index))
        if torch.is_autocast_enabled(rows.device.type) and weight.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows, weight = rows.to(dtype), weight.to(dtype)
        read.append((rows, OutputHead(weight=weight, bias=bias, scale=scale, softcap=softcap)))
        return hidden[:, :1]

    with _head_input(base, model_inputs, take):
        output = (call or model)(**_accepted(base, model_inputs))
    if len(read) != 1:
        raise HeadNotReadable(
            f"the output head of {type(base).__name__} was called {len(read)} times in one forward pass, not once. A "
            "compiled model may pass hooks over: pass the model before torch.compile."
        )
    rows, head = read[0]
    if is_fsdp2:
        rows = reaching(rows, output.logits)
    return HiddenScores(hidden=rows, head=head if vocab_size is None else head.cut(vocab_size))


def dense_pair_scores(
    model: nn.Module,
    model_inputs: Mapping[str, Tensor],
    pair_index: Tensor,
    *,
    vocab_size: int | None = None,
    call: Callable[..., Any] | None = None,
) -> DenseScores:
    """The model's own logits `[N, V]` at `pair_index`, whatever its head does, cut to the first `vocab_size` ids.

    Where the model has an output head, only the N rows are projected; else all its logits are made.
    """
    base = unwrapped(model)
    inputs = _accepted(base, model_inputs)
    if output_head(base) is None:
        dense = _rows_of((call or model)(**inputs).logits, pair_index)
    else:
        with _head_input(base, model_inputs, lambda head, hidden: _rows_of(hidden, pair_index)[None]):
            logits = (call or model)(**inputs).logits
        if logits.shape[:2] != (1, pair_index.shape[0]):
            raise ValueError(
                f"{type(base).__name__} gave logits {tuple(logits.shape)} for {pair_index.shape[0]} positions at its "
                "output head, so it does more there than project position by position; it cannot be used here."
            )
        dense = logits[0]
    return DenseScores(dense=dense if vocab_size is None else real_vocabulary(dense, vocab_size))


def check_head(model: nn.Module, model_inputs: Mapping[str, Tensor] | None = None) -> bool:
    """Whether `pair_scores` sees the model's logits as the model itself does, tried once on a few tokens.

    The head is asked about its real input and the same input times 64, where a soft-cap or scale that the config does
    not tell of shows. False also for a head that cannot be read. Costs two tiny forward passes (the first tokens of
    `model_inputs` if given), in eval mode and without gradients; on sharded weights every rank must call it.
    """
    base = unwrapped(model)
    inputs = _few_tokens(base, model_inputs)
    index = torch.arange(2 * inputs["input_ids"].shape[1], device=inputs["input_ids"].device)

    with torch.no_grad(), eval_mode(base):
        try:
            with _head_input(base, inputs, lambda head, hidden: torch.cat([hidden, hidden * _LOUDER], dim=1)):
                own = base(**_accepted(base, inputs)).logits[0]
            seen = _pair_scores(base, inputs, index, louder=_LOUDER).logits()
        except HeadNotReadable:
            return False
        finally:
            release_gathered(base)
    own, seen = own.to(seen.dtype), seen.to(own.device)
    if own.shape != seen.shape:
        return False
    tolerance = 1e-4 if next(base.parameters()).dtype in (torch.float32, torch.float64) else 2.0**-5
    size = own.abs().amax(-1).clamp(min=1e-6)
    return bool(((own - seen).abs().amax(-1) <= tolerance * size).all())


def logit_row_checksum(scores: HiddenScores | DenseScores, pair: int = 0) -> float:
    """One float64 number that stands for all logits of one pair.

    The same weights on the same batch give the same number; a teacher that should not move is caught moving by it.
    """
    if isinstance(scores, HiddenScores):
        row = HiddenScores(hidden=scores.hidden[pair : pair + 1], head=scores.head).logits()
    else:
        row = scores.dense[pair : pair + 1]
    if row.shape[0] != 1:
        raise ValueError(f"logit_row_checksum needs pair {pair}, but the scores hold fewer pairs; the first is 0.")
    row = row[0].detach().double()
    # Weights that no permutation or shift of the ids leaves alone: fractional parts of multiples of the golden ratio.
    weights = torch.arange(1, row.shape[0] + 1, dtype=torch.float64, device=row.device).mul(0.6180339887498949).frac()
    return float((row * weights).sum())


def _rows_of(values: Tensor, pair_index: Tensor) -> Tensor:
    """`[N, ...]` of `values [B, T, ...]`."""
    return values.flatten(0, 1).index_select(0, pair_index.to(values.device))


@contextmanager
def _head_input(
    base: nn.Module, model_inputs: Mapping[str, Tensor], replace: Callable[[nn.Module, Tensor], Tensor]
) -> Iterator[None]:
    """Inside, the head gets `replace(head, hidden)` in place of `hidden [B, T, H]`."""
    expected = model_inputs["input_ids"].shape
    head = output_head(base)
    if head is None:
        raise HeadNotReadable(f"{type(base).__name__} has no output head (get_output_embeddings() is None).")

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args or not isinstance(args[0], Tensor) or args[0].shape[:2] != expected or args[0].ndim != 3:
            found = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else "no tensor"
            raise HeadNotReadable(
                f"the output head of {type(base).__name__} was given {found} for input ids {tuple(expected)}, "
                "expected [B, T, H]."
            )
        return (replace(module, args[0]), *args[1:])

    handle = head.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _keep_head_gathered(base: nn.Module) -> bool:
    """Whether FSDP2 holds the head's weights, which then stay whole until the backward pass."""
    head = output_head(base)
    if head is None:
        return False
    if any(isinstance(module, FSDPModule) for module in head.modules() if module is not head):
        raise HeadNotReadable(
            "a part of the output head is sharded by a fully_shard of its own, so the head is not whole when it is "
            "called. Call fully_shard on the head (with its adapter) or on the model instead."
        )
    return keep_gathered(base, head)


def _accepted(base: nn.Module, model_inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inputs the model takes; without `position_ids` where it knows none, and without building a cache."""
    if getattr(getattr(base, "active_peft_config", None), "is_prompt_learning", False):
        raise ConfigError(
            "prompt and prefix tuning put positions of their own in front of every row, so no aligned position would "
            "be right. Use LoRA, or another adapter that leaves positions alone."
        )
    inner: Any = base.get_base_model() if hasattr(base, "get_base_model") else base  # pyright: ignore[reportCallIssue]
    known = inspect.signature(inner.forward).parameters
    inputs: dict[str, Any] = dict(model_inputs)
    if "position_ids" not in known:
        inputs.pop("position_ids", None)
    if "use_cache" in known:
        inputs["use_cache"] = False
    return inputs


def _few_tokens(base: nn.Module, model_inputs: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    if model_inputs is not None:
        ids = model_inputs["input_ids"][:1, :4]
    else:
        ids = torch.tensor([[0, 1, 0]], device=next(base.parameters()).device)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(ids.shape[1], device=ids.device)[None],
    }
