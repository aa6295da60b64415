# SPDX-License-Identifier: Apache-2.0
"""Prompts, what was sampled from them, and the list of aligned pairs that every later part works on.

Tokens in, tokens out: nothing here is decoded and re-encoded. Padding is known from masks alone, never from `ids ==
pad`. Shapes are checked once, at birth, which needs no value and so no device transfer; values (masks of 0 and 1, one
contiguous run, boundaries) are checked where they first decide something, in the alignment. B rows, Tp/T columns, N
aligned pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def check_shapes(owner: str, **fields: tuple[Tensor | None, str]) -> None:
    """Each field is `(tensor, "B T")`; a letter stands for one size in all fields, fixed by the first to name it."""
    size_of: dict[str, int] = {}
    for name, (value, letters) in fields.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{owner}.{name} must be a tensor [{', '.join(letters.split())}], got {type(value).__name__}."
            )
        dims = letters.split()
        wanted = [size_of.get(letter, letter) for letter in dims]
        fits = len(dims) == value.dim() and all(
            size_of.setdefault(letter, size) == size for letter, size in zip(dims, value.shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"{owner}.{name} must have shape [{', '.join(dims)}] = [{', '.join(map(str, wanted))}], got "
                f"{list(value.shape)}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Prompts to continue, left-padded so that generation starts in the same column for every row."""

    prompt_ids: Tensor  # [B, Tp] int64
    prompt_attention_mask: Tensor  # [B, Tp] 0/1
    seeds: Tensor | None = None  # [B] int64: the key of each row's randomness; None draws from the global generator

    def __post_init__(self) -> None:
        check_shapes(
            "RolloutRequest",
            prompt_ids=(self.prompt_ids, "B Tp"),
            prompt_attention_mask=(self.prompt_attention_mask, "B Tp"),
            seeds=(self.seeds, "B"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How completions are drawn. None of it enters a loss: the loss has `distill_temperature`."""

    max_new_tokens: int = 256
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps every token
    min_p: float = 0.0
    n_samples_per_prompt: int = 1

    def __post_init__(self) -> None:
        for name, fits, wanted in (
            ("max_new_tokens", self.max_new_tokens >= 1, ">= 1"),
            ("temperature", self.temperature >= 0, ">= 0 (0 is greedy)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1] (1 keeps every token)"),
            ("top_k", self.top_k >= 0, ">= 0 (0 keeps every token)"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1] (0 keeps every token)"),
            ("n_samples_per_prompt", self.n_samples_per_prompt >= 1, ">= 1"),
        ):
            if not fits:
                raise ValueError(f"SamplingConfig.{name} must be {wanted}, got {getattr(self, name)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Prompts with their completions. Rows are prompt-major: sample j of prompt i is row `i * n + j`."""

    input_ids: Tensor  # [B, T] int64 or int32, one contiguous attended run per row
    attention_mask: Tensor  # [B, T] 0/1 or bool
    response_start_idx: Tensor  # [B] int64: column of the first completion token, in [1, T]
    sampler_logprobs: Tensor | None = None  # [B, T] float32, column t describes `input_ids[:, t]`
    policy_version: int | None = None  # optimizer steps taken by the weights that sampled

    def __post_init__(self) -> None:
        check_shapes(
            "RolloutBatch",
            input_ids=(self.input_ids, "B T"),
            attention_mask=(self.attention_mask, "B T"),
            response_start_idx=(self.response_start_idx, "B"),
            sampler_logprobs=(self.sampler_logprobs, "B T"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedSide:
    """One side's forward pass and where its N predictions stand."""

    model_inputs: dict[str, Tensor]  # input_ids, attention_mask, position_ids, each [B, T]
    pair_index: Tensor  # [N] int64 into the flattened [B * T]

    def __post_init__(self) -> None:
        check_shapes("AlignedSide", pair_index=(self.pair_index, "N"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedBatch:
    """N aligned pairs: student position i and teacher position i predict the same token."""

    student: AlignedSide
    teacher: AlignedSide
    target_ids: Tensor  # [N] int64: the token that both sides predict
    weights: Tensor  # [N] float32: multiplies the pair's loss, never its count
    row: Tensor  # [N] int64 in [0, B), non-decreasing
    is_sampled: Tensor  # [B] bool: the completion is the student's own, not recorded
    sample_ids: tuple[str, ...]  # [B] durable names of the rows, for messages and logs
    sampler_logprobs: Tensor | None = None  # [N] float32 under the policy that drew the token
    chunks: Sequence[Any] | None = field(default=None)  # per row, for two vocabularies

    def __post_init__(self) -> None:
        # With two vocabularies the sides hold different numbers of predictions, and chunks say which belong together.
        same_tokens = self.chunks is None
        check_shapes(
            "AlignedBatch",
            target_ids=(self.target_ids, "N"),
            weights=(self.weights, "N"),
            row=(self.row, "N"),
            sampler_logprobs=(self.sampler_logprobs, "N"),
            is_sampled=(self.is_sampled, "B"),
            **{"student.pair_index": (self.student.pair_index, "N" if same_tokens else "Ns")},
            **{"teacher.pair_index": (self.teacher.pair_index, "N" if same_tokens else "Nt")},
        )
        if len(self.sample_ids) != self.is_sampled.shape[0]:
            raise ValueError(
                f"AlignedBatch.sample_ids must name every row: {self.is_sampled.shape[0]} rows, "
                f"{len(self.sample_ids)} names."
            )

    @property
    def num_pairs(self) -> int:
        return self.target_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return len(self.sample_ids)

    def to(self, device: torch.device | str) -> "AlignedBatch":
        """The same batch with every tensor on `device`."""

        def side(s: AlignedSide) -> AlignedSide:
            inputs = {name: value.to(device) for name, value in s.model_inputs.items()}
            return AlignedSide(model_inputs=inputs, pair_index=s.pair_index.to(device))

        return AlignedBatch(
            student=side(self.student),
            teacher=side(self.teacher),
            target_ids=self.target_ids.to(device),
            weights=self.weights.to(device),
            row=self.row.to(device),
            is_sampled=self.is_sampled.to(device),
            sample_ids=self.sample_ids,
            sampler_logprobs=None if self.sampler_logprobs is None else self.sampler_logprobs.to(device),
            chunks=self.chunks,
        )
