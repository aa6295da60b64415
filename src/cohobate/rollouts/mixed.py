# SPDX-License-Identifier: Apache-2.0
"""Some rows sampled, the others recorded, in the order of the request.

Which row is which was decided before, by a draw keyed to the row (`on_policy_fraction`), so that it is the same on one
process and on many. The sampler is asked also when no row here is its own: under sharded weights it has to decode in
step with the other ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cohobate.align.rollout import RolloutBatch, RolloutRequest, SamplingConfig
from cohobate.align.rollout_ops import concat_rollouts, select_rows
from cohobate.errors import DataError
from cohobate.rollouts.protocol import RolloutSource
from cohobate.rollouts.recorded import RecordedRollouts


class MixedRollouts:
    """Answers each row of a request from `sampler` where `is_sampled`, else from `completions`."""

    def __init__(
        self,
        sampler: RolloutSource,
        *,
        is_sampled: Tensor,
        completions: Sequence[Sequence[int] | None],
        pad_token_id: int,
    ):
        """`is_sampled` bool [B]; `completions` one a row, None only where the row is sampled."""
        if is_sampled.dtype != torch.bool or is_sampled.ndim != 1:
            raise TypeError(f"is_sampled must be bool [B], got {is_sampled.dtype} {tuple(is_sampled.shape)}.")
        if len(completions) != len(is_sampled):
            raise DataError(f"is_sampled speaks of {len(is_sampled)} rows, completions of {len(completions)}.")
        self.sampler = sampler
        self.pad_token_id = pad_token_id
        self._sampled_rows = [row for row, sampled in enumerate(is_sampled.tolist()) if sampled]
        self._recorded_rows = [row for row, sampled in enumerate(is_sampled.tolist()) if not sampled]
        recorded: list[Sequence[int]] = []
        for row in self._recorded_rows:
            completion = completions[row]
            if completion is None:
                raise DataError(f"row {row} is to be taken as recorded, but it has no recorded completion.")
            recorded.append(completion)
        self._recorded = RecordedRollouts(recorded, pad_token_id=pad_token_id)

    def sample(self, request: RolloutRequest, sampling: SamplingConfig, /) -> RolloutBatch:
        """Rows in the request's order, `n_samples_per_prompt` each; recorded rows have NaN as sampler log-probs."""
        rows = len(self._sampled_rows) + len(self._recorded_rows)
        if request.prompt_ids.shape[0] != rows:
            raise DataError(f"decisions for {rows} rows, but the request has {request.prompt_ids.shape[0]} prompts.")
        sampled = self.sampler.sample(_rows_of(request, self._sampled_rows), sampling)
        if not self._recorded_rows:
            return sampled
        recorded = self._recorded.sample(_rows_of(request, self._recorded_rows), sampling)
        if not self._sampled_rows:
            return recorded
        joined = concat_rollouts([sampled, recorded], self.pad_token_id)
        place = {row: i for i, row in enumerate([*self._sampled_rows, *self._recorded_rows])}
        n = sampling.n_samples_per_prompt
        return select_rows(joined, [place[row] * n + j for row in range(rows) for j in range(n)])


def _rows_of(request: RolloutRequest, rows: list[int]) -> RolloutRequest:
    index = torch.tensor(rows, dtype=torch.int64, device=request.prompt_ids.device)
    seeds = request.seeds
    return RolloutRequest(
        prompt_ids=request.prompt_ids.index_select(0, index),
        prompt_attention_mask=request.prompt_attention_mask.index_select(0, index),
        seeds=None if seeds is None else seeds.index_select(0, index.to(seeds.device)),
    )
