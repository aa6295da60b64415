# SPDX-License-Identifier: Apache-2.0
"""Completions from a model in this process, through `model.generate`.

Three things are taken out of `generate`'s hands. The randomness: each row draws from its own key (`keyed_draw.py`), so
a row does not depend on its neighbours or the number of processes. The settings: only what `SamplingConfig` says
counts; a repetition penalty or a stop id that came with the checkpoint would make the sampler another policy than the
one that is trained. The ends: where a completion stops is read from the index of its first end-of-sequence token,
never from padding, because a pad id may be that very token.

On a CPU the output head gets few rows and many columns, for which the matrix library is slow (`_head_in_blocks`).
Measured on two CPU cores, `generate` costs no more per token than a bare loop over a `DynamicCache` (64 rows, 40
tokens, a Llama of 2 layers and width 64: 3.3 and 4.4 ms), so there is no decoding loop of our own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cohobate.align.rollout import RolloutBatch, RolloutRequest, SamplingConfig
from cohobate.align.runs import attended_runs, check_ids
from cohobate.errors import AlignmentError, ConfigError, NonFiniteError
from cohobate.parallel.modules import eval_mode, is_sharded, unwrapped
from cohobate.parallel.world import all_reduce_max, current_world
from cohobate.rollouts.keyed_draw import KeyedDraw, sample_keys

_HEAD_BLOCK = 1024  # columns of the head in one product while decoding on a CPU


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What one call of `generate` gave; R columns, as many as the longest row took."""

    ids: Tensor  # [B, R] int64, pad id after each row's end
    lengths: Tensor  # [B] int64, the end-of-sequence token included
    logprobs: Tensor  # [B, R] float32, 0 after each row's end


class LocalRollouts:
    """A `RolloutSource` that samples from `model` as it is at the moment of the call."""

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        vocab_size: int | None = None,
        rows_per_batch: int | None = None,
        synced_gpus: bool | None = None,
    ):
        """`model` may be wrapped (DDP, PEFT). Ids from `vocab_size` on (the padding of a head) are never drawn.

        `rows_per_batch` bounds the rows decoded together, and so the memory of the cache.

        `synced_gpus` keeps all ranks decoding until the last one is done, which sharded weights need (default: when
        the weights are sharded). Every rank must then call `sample` equally often; a request may be empty.
        """
        if not hasattr(unwrapped(model), "generate"):
            raise ConfigError(f"LocalRollouts needs a model with generate(), got {type(model).__name__}.")
        if rows_per_batch is not None and rows_per_batch < 1:
            raise ConfigError(f"rows_per_batch must be at least 1, got {rows_per_batch}.")
        if pad_token_id is None:
            raise ConfigError("LocalRollouts needs a pad_token_id. Without one of its own, pass an eos_token_id.")
        self.model = model
        self.eos_token_ids = tuple(int(i) for i in eos_token_ids)
        self.pad_token_id = int(pad_token_id)
        self.vocab_size = vocab_size
        self.rows_per_batch = rows_per_batch
        self.synced_gpus = synced_gpus

    def sample(self, request: RolloutRequest, sampling: SamplingConfig, /) -> RolloutBatch:
        """`n_samples_per_prompt` completions of each prompt, prompt-major, on the device of the request.

        `input_ids` are the left-padded prompts and the completions, padded on the right after their end-of-sequence
        token, which is kept and attended. `sampler_logprobs` are under the distribution drawn from (after temperature
        and truncation; for `temperature=0` the untempered one), 0 outside completions. With `request.seeds` the result
        is a function of weights, prompts, seeds and `sampling`, and no generator is touched; without, keys come from
        torch's global one.
        """
        check_request(request)
        model, num_samples = unwrapped(self.model), sampling.n_samples_per_prompt
        device = next(model.parameters()).device
        ids = request.prompt_ids.long().to(device).repeat_interleave(num_samples, dim=0)
        mask = request.prompt_attention_mask.long().to(device).repeat_interleave(num_samples, dim=0)
        keys = None if sampling.temperature == 0 else self._keys(request, num_samples).to(device)
        synced = is_sharded(model) if self.synced_gpus is None else self.synced_gpus
        synced = synced and current_world().size > 1
        parts = []
        with torch.no_grad(), eval_mode(model), _neutral_generation_config(model), _head_in_blocks(model):
            for rows in self._batches(ids.shape[0], synced):
                if rows.numel() == 0:  # another rank still decodes: keep it company with one row, and drop it
                    width = max(ids.shape[1], 1)
                    stand_in = torch.full((1, width), self.pad_token_id, device=device)
                    self._generate(model, stand_in, torch.ones_like(stand_in), None, sampling, synced)
                    continue
                rows = rows.to(device)
                row_keys = None if keys is None else keys[rows]
                parts.append(self._generate(model, ids[rows], mask[rows], row_keys, sampling, synced))
        return self._assemble(request, ids, mask, parts)

    def _keys(self, request: RolloutRequest, num_samples: int) -> Tensor:
        seeds = request.seeds
        if seeds is None:
            seeds = torch.randint(torch.iinfo(torch.int64).max, (request.prompt_ids.shape[0],))
        return sample_keys(seeds.long(), num_samples)

    def _batches(self, num_rows: int, synced: bool) -> list[Tensor]:
        """Row indices of each `generate`; as many batches on every rank when ranks must decode in step."""
        size = self.rows_per_batch or max(num_rows, 1)
        count = -(-num_rows // size)
        if synced:
            count = all_reduce_max(count)
        return [torch.arange(min(i * size, num_rows), min((i + 1) * size, num_rows)) for i in range(count)]

    def _generate(
        self,
        model: nn.Module,
        ids: Tensor,
        mask: Tensor,
        keys: Tensor | None,
        sampling: SamplingConfig,
        synced: bool,
    ) -> _Drawn:
        draw = KeyedDraw(keys, ids.shape[1])
        sequences: Any = model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,
                eos_token_id=list(self.eos_token_ids) or None,
                pad_token_id=self.pad_token_id,
                use_cache=True,
            ),
            logits_processor=LogitsProcessorList([*self._real_ids(), *_warpers(sampling), draw]),
            synced_gpus=synced,
        )
        new = sequences[:, ids.shape[1] :]
        lengths = _lengths(new, self.eos_token_ids)
        kept = torch.arange(new.shape[1], device=new.device) < lengths[:, None]
        logprobs = draw.logprobs()
        broken = (kept & ~logprobs.isfinite()).any(1)
        if broken.any():
            rows = broken.nonzero()[:, 0].tolist()
            raise NonFiniteError(
                f"the sampling model gave NaN or infinite logits in rows {rows} of a batch of {ids.shape[0]}. Its "
                "weights are damaged (look at the last update's gradient norm; lower learning_rate) or its dtype "
                "overflows (float16: use bfloat16)."
            )
        return _Drawn(new, lengths, torch.where(kept, logprobs, 0.0))

    def _real_ids(self) -> list[Any]:
        return [] if self.vocab_size is None else [_RealIds(self.vocab_size)]

    def _assemble(self, request: RolloutRequest, ids: Tensor, mask: Tensor, parts: list[_Drawn]) -> RolloutBatch:
        width = max((part.ids.shape[1] for part in parts), default=0)
        rows, prompt_width = ids.shape

        def joined(values: list[Tensor], fill: float, empty: Tensor) -> Tensor:
            if not values:
                return empty
            return torch.cat([nn.functional.pad(v, (0, width - v.shape[1]), value=fill) for v in values])

        new = joined([part.ids for part in parts], self.pad_token_id, ids.new_zeros(rows, 0))
        logprobs = joined([part.logprobs for part in parts], 0.0, torch.zeros(rows, 0, device=ids.device))
        lengths = torch.cat([part.lengths for part in parts]) if parts else ids.new_zeros(rows)
        longest = int(lengths.max()) if rows else 0
        kept = torch.arange(longest, device=ids.device) < lengths[:, None]
        before = logprobs.new_zeros(rows, prompt_width)
        home = request.prompt_ids.device
        return RolloutBatch(
            input_ids=torch.cat([ids, new[:, :longest]], dim=1).to(home),
            attention_mask=torch.cat([mask, kept.long()], dim=1).to(home),
            response_start_idx=torch.full((rows,), prompt_width, dtype=torch.int64, device=home),
            sampler_logprobs=torch.cat([before, logprobs[:, :longest]], dim=1).to(home),
        )


class _RealIds(LogitsProcessor):
    """Excludes the rows that pad a head to a round width: no token stands behind them."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        width = scores.shape[1]
        return scores.masked_fill(torch.arange(width, device=scores.device) >= self._vocab_size, float("-inf"))


def _lengths(completions: Tensor, eos_token_ids: tuple[int, ...]) -> Tensor:
    """`[B]` tokens up to and including each row's first end-of-sequence token, by index; the width if it has none."""
    ends = torch.isin(completions, torch.tensor(eos_token_ids, dtype=completions.dtype, device=completions.device))
    width = completions.shape[1]
    index = torch.arange(width, device=completions.device)
    return (torch.where(ends, index, width).amin(1) + 1).clamp(max=width)


def _warpers(sampling: SamplingConfig) -> list[Any]:
    """The library's own, in the library's order, and only those that do something."""
    warpers: list[Any] = []
    if sampling.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers


@contextmanager
def _neutral_generation_config(model: nn.Module) -> Iterator[None]:
    """Hides the checkpoint's generation settings: `generate` fills whatever the caller left open from them."""
    owners: list[Any] = [m for m in (model, _base_model(model)) if hasattr(m, "generation_config")]
    found = [(owner, owner.generation_config) for owner in owners]
    for owner in owners:
        owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for owner, config in found:
            owner.generation_config = config


@contextmanager
def _head_in_blocks(model: nn.Module) -> Iterator[None]:
    """Inside, a plain float32 head on a CPU multiplies 2 to 16 rows by a few columns at a time: the same bits, sooner.

    Measured at H = 576, V = 49152 with two threads: 14.2 ms in one product of 8 rows, 7.8 ms in blocks of 1024
    columns; for 1 row, and for 32, there is nothing to gain.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear or "forward" in vars(head) or not _is_plain(head.weight):
        yield
        return

    def forward(input: Tensor) -> Tensor:
        if not 2 <= input.shape[:-1].numel() <= 16:
            return nn.Linear.forward(head, input)
        logits = torch.cat([nn.functional.linear(input, block) for block in head.weight.split(_HEAD_BLOCK)], dim=-1)
        return logits if head.bias is None else logits.add_(head.bias)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def _is_plain(weight: Tensor) -> bool:
    return type(weight.data) is Tensor and weight.device.type == "cpu" and weight.dtype == torch.float32


def _base_model(model: nn.Module) -> nn.Module:
    """The transformers model below PEFT's, which keeps generation settings of its own; else the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]


def check_request(request: RolloutRequest) -> None:
    """Raise `AlignmentError` for a prompt that is empty, or does not end in the last column."""
    ids, mask = request.prompt_ids, request.prompt_attention_mask
    check_ids(ids, "request.prompt_ids")
    for row, run in enumerate(attended_runs(mask, "request.prompt_attention_mask")):
        if run.length == 0:
            raise AlignmentError(f"request, row {row}: no attended prompt token, so nothing can be continued.")
        if run.begin + run.length != ids.shape[1]:
            raise AlignmentError(
                f"request, row {row}: attended columns {run.begin} to {run.begin + run.length - 1} of {ids.shape[1]}, "
                "but a prompt must end in the last column to be continued. Pad prompts on the left."
            )
