# SPDX-License-Identifier: Apache-2.0
"""Rows of ids to padded tensors, and nothing else: no token is added, moved inside its row, or cut.

Padding is told by the mask alone; `pad_token_id` only fills the columns that the mask leaves out, so it may be an id
that also occurs in the text (many models pad with their end-of-sequence token).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cohobate.align.opsd import TeacherContext
from cohobate.align.rollout import RolloutRequest
from cohobate.data.prompts import PromptRow
from cohobate.errors import DataError


def rollout_request(
    rows: Sequence[PromptRow], pad_token_id: int | None, *, seeds: Tensor | None = None
) -> RolloutRequest:
    """The prompts of `rows`, left-padded: `prompt_ids` and mask `[B, Tp]` int64, Tp the longest prompt.

    Args:
        seeds: `[B]` int64, the key of each row's randomness; None draws from the global generator.

    Raises:
        DataError: `pad_token_id` is None, a prompt is empty, or `seeds` has another length.
    """
    for row in rows:
        if not row.prompt_ids:
            raise DataError(f"row {row.sample_id!r} has an empty prompt: nothing would predict its first token.")
    if seeds is not None and tuple(seeds.shape) != (len(rows),):
        raise DataError(
            f"seeds must hold one number for each of the {len(rows)} rows, got shape {tuple(seeds.shape)}."
        )
    ids, mask = _pad([row.prompt_ids for row in rows], pad_token_id, left=True)
    return RolloutRequest(prompt_ids=ids, prompt_attention_mask=mask, seeds=seeds)


def teacher_context(prefixes: Sequence[Sequence[int]], pad_token_id: int | None) -> TeacherContext:
    """The complete teacher prefix of each rollout row, right-padded: `[B, P]` int64.

    Raises:
        DataError: `pad_token_id` is None.
    """
    ids, mask = _pad(prefixes, pad_token_id, left=False)
    return TeacherContext(input_ids=ids, attention_mask=mask)


def _pad(rows: Sequence[Sequence[int]], pad_token_id: int | None, *, left: bool) -> tuple[Tensor, Tensor]:
    """`[B, max(1, longest)]` ids and mask; at least one column, so that an empty batch still has a shape to send."""
    if pad_token_id is None:
        raise DataError(
            "pad_token_id is None. Any id will do, since padding is masked: set tokenizer.pad_token = "
            "tokenizer.eos_token, for example."
        )
    width = max((len(row) for row in rows), default=1) or 1
    ids = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, columns] = torch.tensor(row, dtype=torch.int64)
        mask[i, columns] = 1
    return ids, mask
