# SPDX-License-Identifier: Apache-2.0
"""Rows written as lists of token ids, turned into padded tensors by plain Python, not by `cohobate.align`."""

from collections.abc import Callable, Sequence

import pytest
import torch

from cohobate.align import RolloutBatch, TeacherContext

PAD = 99


def _padded(rows: Sequence[Sequence[int]], offsets: Sequence[int], width: int, pad: int):
    ids = [[pad] * o + list(r) + [pad] * (width - o - len(r)) for o, r in zip(offsets, rows, strict=True)]
    mask = [[0] * o + [1] * len(r) + [0] * (width - o - len(r)) for o, r in zip(offsets, rows, strict=True)]
    shape = (len(rows), width)
    return torch.tensor(ids, dtype=torch.int64).reshape(shape), torch.tensor(mask, dtype=torch.int64).reshape(shape)


@pytest.fixture(scope="session")
def make_rollout() -> Callable[..., RolloutBatch]:
    """`make_rollout([(prompt, completion), ...], offsets=[left padding of each row], width=)`."""

    def make(rows, offsets=None, width=None, pad=PAD, **fields) -> RolloutBatch:
        offsets = [0] * len(rows) if offsets is None else offsets
        joined = [list(prompt) + list(completion) for prompt, completion in rows]
        width = max(o + len(r) for o, r in zip(offsets, joined, strict=True)) if width is None else width
        ids, mask = _padded(joined, offsets, width, pad)
        start = [max(1, o + len(prompt)) for o, (prompt, _) in zip(offsets, rows, strict=True)]
        return RolloutBatch(
            input_ids=ids, attention_mask=mask, response_start_idx=torch.tensor(start, dtype=torch.int64), **fields
        )

    return make


@pytest.fixture(scope="session")
def make_context() -> Callable[..., TeacherContext]:
    """`make_context([prefix, ...], offsets=, width=)`."""

    def make(prefixes, offsets=None, width=None, pad=PAD) -> TeacherContext:
        offsets = [0] * len(prefixes) if offsets is None else offsets
        width = max(o + len(p) for o, p in zip(offsets, prefixes, strict=True)) if width is None else width
        ids, mask = _padded(prefixes, offsets, width, pad)
        return TeacherContext(input_ids=ids, attention_mask=mask)

    return make
