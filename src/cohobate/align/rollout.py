# SPDX-License-Identifier: Apache-2.0
"""Prompts, what was sampled from them, and the list of aligned pairs that every later part works on.

Tokens in, tokens out: nothing here is decoded and re-encoded. Padding is known from masks alone, never from `ids ==
pad`. Shapes are checked once, at birth, which needs no value and so no device transfer; values (masks of 0 and 1, one
contiguous run, boundaries) are checked where they first decide something, in the alignment. B rows, Tp/T columns, N
aligned pairs.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohobate.align.spans import Chunks


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
    policy_version: Tensor | None = None  # [B] int64: optimizer steps taken by the weights that sampled; -1: recorded

    def __post_init__(self) -> None:
        check_shapes(
            "RolloutBatch",
            input_ids=(self.input_ids, "B T"),
            attention_mask=(self.attention_mask, "B T"),
            response_start_idx=(self.response_start_idx, "B"),
            sampler_logprobs=(self.sampler_logprobs, "B T"),
            policy_version=(self.policy_version, "B"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedSide:
    """One side's forward pass and where its N predictions stand."""

    model_inputs: dict[str, Tensor]  # input_ids, attention_mask, position_ids, each [B, T]
    pair_index: Tensor  # [N] int64 into the flattened [B * T]

    def __post_init__(self) -> None:
        check_shapes("AlignedSide", pair_index=(self.pair_index, "N"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSide(AlignedSide):
    """The forward pass of one of several teachers, or of one with its own tokenizer: M predictions of its own tokens.

    A prediction is counted by what it predicts: chunk `(s0, s1, t0, t1)` says that the tokens which student pairs
    `s0 .. s1 - 1` and teacher pairs `t0 .. t1 - 1` predict spell the same bytes. Chunks never span two rows.

    A teacher that only some rows are routed to reads these alone: `model_inputs` has no place for the others. Without
    any it has one row of one token, so that its forward pass, which may be a collective, takes place.
    """

    target_ids: Tensor  # [M] int64: the teacher's own tokens
    row: Tensor  # [M] int64 in [0, B), non-decreasing
    chunks: Chunks | None = None  # [C] over both sides' pairs; None: one tokenizer, so pair by pair
    rows: tuple[int, ...] | None = None  # the batch's rows that it reads, ascending; None: all of them

    def __post_init__(self) -> None:
        check_shapes(
            "TeacherSide",
            pair_index=(self.pair_index, "M"),
            target_ids=(self.target_ids, "M"),
            row=(self.row, "M"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedBatch:
    """N aligned pairs: student position i and teacher position i predict the same token.

    Where teachers have tokenizers of their own, or are several, `teachers` holds what each of them reads, and its
    chunks say which predictions belong together; `teacher` is then the one that is to score.
    """

    student: AlignedSide
    teacher: AlignedSide
    target_ids: Tensor  # [N] int64: the token that both sides predict
    weights: Tensor  # [N] float32: multiplies the pair's loss, never its count
    row: Tensor  # [N] int64 in [0, B), non-decreasing
    is_sampled: Tensor  # [B] bool: the completion is the student's own, not recorded
    sample_ids: tuple[str, ...]  # [B] durable names of the rows, for messages and logs
    sampler_logprobs: Tensor | None = None  # [N] float32 under the policy that drew the token
    teachers: tuple[TeacherSide, ...] = ()  # in the teachers' order; empty: one teacher with the student's tokenizer

    def __post_init__(self) -> None:
        same_tokens = not self.teachers  # else the sides may hold different numbers of predictions
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
        for i, side in enumerate(self.teachers):
            if side.chunks is None and side.pair_index.shape != (wanted := self.pairs_read_by(side)).shape:
                raise ValueError(
                    f"AlignedBatch.teachers[{i}] has no chunks, so each of its predictions belongs to one of the "
                    f"student's, but it has {side.pair_index.shape[0]} and the student {len(wanted)}"
                    f"{'' if side.rows is None else f' in rows {list(side.rows)}'}."
                )

    def pairs_read_by(self, side: TeacherSide) -> Tensor:
        """`[n]` int64, ascending: the student's pairs in the rows that a side reads."""
        if side.rows is None:
            return torch.arange(self.num_pairs, device=self.row.device)
        rows = torch.tensor(side.rows, dtype=self.row.dtype, device=self.row.device)
        return torch.isin(self.row, rows).nonzero()[:, 0]

    def for_teacher(self, i: int) -> "AlignedBatch":
        """The batch as teacher `i` of several is to score it: without the rows that it does not read."""
        side = self.teachers[i]
        return replace(self, teacher=side) if side.rows is None else self._alone(side)

    def _alone(self, side: TeacherSide) -> "AlignedBatch":
        """The rows that one side reads, in its numbers; one row without a name where it reads none."""
        rows, pairs = side.rows or (), self.pairs_read_by(side)
        place = torch.zeros(self.num_rows + 1, dtype=self.row.dtype)
        place[list(rows)] = torch.arange(len(rows), dtype=self.row.dtype)
        place = place.to(self.row.device)
        own = replace(side, row=place[side.row], rows=None)
        if side.chunks is not None:
            before = np.searchsorted(pairs.cpu().numpy(), [side.chunks.student_start, side.chunks.student_end])
            start, end = before.astype(np.int32)
            own = replace(own, chunks=replace(side.chunks, student_start=start, student_end=end))
        return replace(
            self,
            student=replace(self.student, pair_index=self.student.pair_index[pairs]),
            teacher=own,
            teachers=(own,),
            target_ids=self.target_ids[pairs],
            weights=self.weights[pairs],
            row=place[self.row[pairs]],
            is_sampled=self.is_sampled[list(rows)] if rows else self.is_sampled.new_zeros(1),
            sample_ids=tuple(self.sample_ids[r] for r in rows) or ("",),
            sampler_logprobs=None if self.sampler_logprobs is None else self.sampler_logprobs[pairs],
        )

    @property
    def num_pairs(self) -> int:
        return self.target_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return len(self.sample_ids)

    def to(self, device: torch.device | str) -> "AlignedBatch":
        """The same batch with every tensor on `device`."""

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device)
            if isinstance(value, AlignedSide):
                return replace(value, **{f.name: moved(getattr(value, f.name)) for f in fields(value)})
            return {name: moved(inner) for name, inner in value.items()} if isinstance(value, dict) else value

        there = {f.name: moved(getattr(self, f.name)) for f in fields(self)}
        return replace(self, **there | {"teachers": tuple(map(moved, self.teachers))})
