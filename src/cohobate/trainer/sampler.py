# SPDX-License-Identifier: Apache-2.0
"""The order of the data: a pure function of (seed, epoch), so a resumed run sees what the first would have."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from cohobate.parallel.world import keyed_seed


class WindowSampler(Sampler[int]):
    """A fresh permutation for each epoch; with `repeats > 1` every full window of rows comes that many times in a row.

    A window is the rows of one optimizer step over all ranks. With repeats, a last window that is not full is left
    out: the steps that reuse rollouts must each see the same rows.
    """

    def __init__(self, num_rows: int, *, seed: int, window: int, repeats: int = 1, shuffle: bool = True) -> None:
        self.num_rows, self.seed, self.window, self.repeats, self.shuffle = num_rows, seed, window, repeats, shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        if self.repeats == 1:
            return self.num_rows
        return self.num_rows // self.window * self.window * self.repeats

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.num_rows))
        if self.shuffle:
            generator = torch.Generator().manual_seed(keyed_seed(self.seed, "order", self.epoch))
            order = torch.randperm(self.num_rows, generator=generator).tolist()
        if self.repeats == 1:
            yield from order
            return
        for start in range(0, self.num_rows - self.window + 1, self.window):
            for _ in range(self.repeats):
                yield from order[start : start + self.window]
