# SPDX-License-Identifier: Apache-2.0
"""Where completions stand in a rollout; cutting one into micro-batches, and joining rollouts of different widths.

Whole columns of padding appear or vanish; the tokens of a row keep their order and their company (mask, log-probs), so
nothing downstream can tell the difference. B rows, T columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from cohobate.align.rollout import RolloutBatch
from cohobate.align.runs import check_pad_id


def completion_mask(rollout: RolloutBatch) -> Tensor:
    """`[B, T]` bool: the attended columns from each row's `response_start_idx` on."""
    columns = torch.arange(rollout.input_ids.shape[1], device=rollout.input_ids.device)
    return (rollout.attention_mask != 0) & (columns >= rollout.response_start_idx[:, None])


def select_rows(rollout: RolloutBatch, rows: Tensor | Sequence[int]) -> RolloutBatch:
    """The given rows in the given order, without the outer columns that are padding in all of them.

    `response_start_idx` moves with the columns. At least one column stays. Rows may be named twice; a row outside
    `[0, B)` or a bool mask is an error.
    """
    index = _row_index(rows, rollout.input_ids.shape[0], rollout.input_ids.device)
    mask = rollout.attention_mask.index_select(0, index)
    used = torch.nonzero((mask != 0).any(0))[:, 0].tolist()
    left, right = (used[0], used[-1] + 1) if used else (0, min(1, mask.shape[1]))
    logprobs, versions = rollout.sampler_logprobs, rollout.policy_version
    # A row with an empty completion may name any boundary; the clamp keeps it legal, and its completion stays empty.
    start = (rollout.response_start_idx.index_select(0, index) - left).clamp(1, max(1, right - left))
    return RolloutBatch(
        input_ids=rollout.input_ids.index_select(0, index)[:, left:right],
        attention_mask=mask[:, left:right],
        response_start_idx=start,
        sampler_logprobs=None if logprobs is None else logprobs.index_select(0, index)[:, left:right],
        policy_version=None if versions is None else versions.index_select(0, index.to(versions.device)),
    )


def concat_rollouts(rollouts: Sequence[RolloutBatch], pad_token_id: int) -> RolloutBatch:
    """All rows in order, in one buffer: each part moves as a block so that their latest completion starts coincide.

    `sampler_logprobs` is kept if any part has it; parts without (recorded completions) get NaN, so that reading them
    is seen. `policy_version` is kept if any part has it; rows of the others have -1.
    """
    if not rollouts:
        raise ValueError("concat_rollouts needs at least one rollout, got none.")
    fill = check_pad_id(pad_token_id)
    latest = [int(part.response_start_idx.max()) if len(part.response_start_idx) else 0 for part in rollouts]
    shifts = [max(latest) - start for start in latest]
    width = max(shift + part.input_ids.shape[1] for shift, part in zip(shifts, rollouts, strict=True))

    def joined(tensors: list[Tensor], value: float) -> Tensor:
        wide = [
            pad(tensor, (shift, width - shift - tensor.shape[1]), value=value)
            for tensor, shift in zip(tensors, shifts, strict=True)
        ]
        return torch.cat(wide)

    has_logprobs = any(part.sampler_logprobs is not None for part in rollouts)
    has_versions = any(part.policy_version is not None for part in rollouts)
    return RolloutBatch(
        input_ids=joined([part.input_ids for part in rollouts], fill),
        attention_mask=joined([part.attention_mask for part in rollouts], 0),
        response_start_idx=torch.cat([p.response_start_idx + s for p, s in zip(rollouts, shifts, strict=True)]),
        sampler_logprobs=joined([_logprobs(part) for part in rollouts], 0.0) if has_logprobs else None,
        policy_version=torch.cat([policy_versions(part) for part in rollouts]) if has_versions else None,
    )


def _row_index(rows: Tensor | Sequence[int], batch: int, device: torch.device) -> Tensor:
    index = torch.as_tensor(rows)
    if index.numel() == 0:
        index = index.long()
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"rows must be a 1-D list of row numbers, got {index.dtype} of shape {list(index.shape)}. Turn a bool "
            "mask into row numbers with torch.nonzero(mask)[:, 0]."
        )
    outside = [row for row in index.tolist() if not 0 <= row < batch]
    if outside:
        raise ValueError(f"rows names row {outside[0]}, but the rollout has rows 0 to {batch - 1}.")
    return index.to(device)


def policy_versions(rollout: RolloutBatch) -> Tensor:
    """`[B]` int64 optimizer steps taken by the weights that wrote each row; -1 where nobody said."""
    if rollout.policy_version is not None:
        return rollout.policy_version
    return torch.full_like(rollout.response_start_idx, -1, dtype=torch.int64)


def _logprobs(rollout: RolloutBatch) -> Tensor:
    if rollout.sampler_logprobs is not None:
        return rollout.sampler_logprobs
    return torch.full(rollout.input_ids.shape, float("nan"), device=rollout.input_ids.device)
