# SPDX-License-Identifier: Apache-2.0
"""A model's output head as `functional` wants it: rows, weight, bias, scale and soft-cap.

Heads come bare, with LoRA, as PEFT's trained copy, or split over ranks. What they are is seen by their attributes, so
that PEFT is not imported; scale and soft-cap are read from the config, whose names are a convention. What cannot be
written as `softcap(scale * (h W^T + b))` is refused here, not approximated. When the head is met is in `forward.py`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from cohobate.errors import CohobateError, ConfigError
from cohobate.parallel.lm_head import VocabParallelLMHead
from cohobate.parallel.modules import gathered


class HeadNotReadable(CohobateError, ValueError):
    """The model's output head is no plain (or LoRA) linear map with whole weights; use `dense_pair_scores`."""


def output_head(base: nn.Module) -> nn.Module | None:
    """The module that makes the logits, None for a model without. Raises ConfigError for one shard of a vocabulary."""
    getter = getattr(base, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if isinstance(head, VocabParallelLMHead) and not head.is_whole:
        raise ConfigError(
            f"the output head of {type(base).__name__} is one shard of its vocabulary ({head}), whose logits are no "
            "distribution. Take the hidden states of the pairs from the base model, and the loss from "
            "cohobate.parallel.lm_head.vocab_parallel_fused_divergence."
        )
    return head  # pyright: ignore[reportReturnType]


def read_head(head: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows `[N, H]`, weight `[V, H]` and bias `[V]` whose product is what the head makes of `rows [N, H]` as it acts
    now; LoRA widens H by its rank. Raises HeadNotReadable.
    """
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):  # PEFT's fully trained copy
        active = [name for name in head.active_adapters if name in head.modules_to_save]
        inner = head.original_module if head.disable_adapters or not active else head.modules_to_save[active[0]]
        return read_head(inner, rows)
    if hasattr(head, "base_layer") and hasattr(head, "lora_A"):
        return _read_lora(head, rows)
    if type(head).forward is not nn.Linear.forward:
        raise HeadNotReadable(f"an output head of type {type(head).__name__} is no plain linear layer.")
    if head.weight.is_meta:
        raise HeadNotReadable("the output head's weights are offloaded.")
    return rows, gathered(head.weight), None if head.bias is None else gathered(head.bias)


def _read_lora(head: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    inner_rows, weight, bias = read_head(head.base_layer, rows)
    if head.disable_adapters or head.merged:
        if head.disable_adapters and head.merged:
            raise HeadNotReadable("the adapter on the output head is switched off but merged into its weights.")
        return inner_rows, weight, bias
    row_parts, weight_parts = [inner_rows], [weight]
    for name in head.active_adapters:
        if name not in head.lora_A:
            continue
        if name in getattr(head, "lora_variant", {}):
            raise HeadNotReadable(f"adapter {name!r} on the output head is a variant of LoRA (such as DoRA).")
        down, up, scaling = head.lora_A[name], head.lora_B[name], head.scaling[name]
        low = down(head.lora_dropout[name](rows.to(down.weight.dtype))) * scaling
        row_parts.append(low.to(inner_rows.dtype))
        weight_parts.append(up.weight.to(weight.dtype))
        if up.bias is not None:
            shift = up.bias * scaling
            bias = shift if bias is None else bias + shift
    return torch.cat(row_parts, dim=1), torch.cat(weight_parts, dim=1), bias


def scale_and_softcap(base: nn.Module) -> tuple[float, float | None]:
    """What the model does to its logits after the head, as its config tells."""
    config: Any = getattr(base, "config", None)
    if config is None:
        return 1.0, None
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere; Falcon-H1; Muse
        scale *= _number(config, name) or 1.0
    scale /= _number(config, "logits_scaling") or 1.0  # Granite
    return scale, _number(config, "final_logit_softcapping") or _number(config, "logits_soft_cap")  # Gemma


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else None
