# SPDX-License-Identifier: Apache-2.0
"""Completions that were written before: a `RolloutSource` that only lays them beside their prompts.

Nothing is drawn, so there are no sampler log-probs, and only one of the sampling settings matters: every prompt gives
`n_samples_per_prompt` rows, here equal ones, so that row `i * n + j` means prompt i whatever the source.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cohobate.align.rollout import RolloutBatch, RolloutRequest, SamplingConfig
from cohobate.errors import DataError


class RecordedRollouts:
    """Answers a request with `completions`, one list of token ids for each of its rows, end-of-turn token included."""

    def __init__(self, completions: Sequence[Sequence[int]], *, pad_token_id: int):
        self.completions = completions
        self.pad_token_id = pad_token_id

    def sample(self, request: RolloutRequest, sampling: SamplingConfig, /) -> RolloutBatch:
        """The left-padded prompts followed by their completions, padded on the right; a completion may be empty.

        A row without a prompt (plain text) has its completion's first token as the prompt: no token predicts it.
        """
        ids, mask = request.prompt_ids.long(), request.prompt_attention_mask.long()
        rows, prompt_width = ids.shape
        if len(self.completions) != rows:
            raise DataError(
                f"recorded completions for {len(self.completions)} rows, but the request has {rows} prompts."
            )
        lengths = torch.tensor([len(c) for c in self.completions], dtype=torch.int64)
        width = int(lengths.max()) if rows else 0
        new = torch.full((rows, width), self.pad_token_id, dtype=torch.int64)
        for row, completion in enumerate(self.completions):
            new[row, : len(completion)] = torch.as_tensor(completion, dtype=torch.int64)
        kept = torch.arange(width) < lengths[:, None]
        start = prompt_width + (mask.sum(1) == 0).long()

        def repeated(values: Tensor) -> Tensor:
            return values.repeat_interleave(sampling.n_samples_per_prompt, dim=0)

        return RolloutBatch(
            input_ids=repeated(torch.cat([ids, new.to(ids.device)], dim=1)),
            attention_mask=repeated(torch.cat([mask, kept.long().to(ids.device)], dim=1)),
            response_start_idx=repeated(start.clamp(max=max(prompt_width + width, 1))),
        )
