# SPDX-License-Identifier: Apache-2.0
"""A few tokens whose scores are known: how a run notices that another model answers than the one it began with.

Compared are the log-probabilities of the canary's own tokens and of the likeliest id at each of them, on average over
all. A server does not repeat itself to the last bit (batches of other sizes round otherwise), so a difference is
allowed; that between two models, or between two sets of ids, is many times larger. A small change of the same weights
(a low-rank update, another quantisation) may stay below it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cohobate.errors import ServerResponseError
from cohobate.teachers.server_answers import Asked, Row

CANARY = "(canary)"  # its name among the rows of a request

_LENGTH = 16


def canary_ids(vocab_size: int) -> tuple[int, ...]:
    """Ids from the whole vocabulary, its last one included; the same for every run."""
    spread = [round(i * 0.6180339887498949 % 1 * (vocab_size - 1)) for i in range(1, _LENGTH)]
    return (*spread, vocab_size - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The tokens, and what a server said of them."""

    asked: Asked  # of every position but the first
    row: Row

    def difference(self, row: Row) -> float:
        """By how many nats `row` differs, on average."""
        gaps = [np.abs(row.realized - self.row.realized)]
        if self.row.ids.shape[1] and row.ids.shape[1]:
            best, was = self.row.ids[:, :1], self.row.logprobs[:, 0]
            found = row.ids == best
            now = np.where(found.any(1), np.where(found, row.logprobs, 0.0).sum(1), row.logprobs.min(1))
            gaps.append(np.abs(now - was))
        return float(np.concatenate(gaps).mean())

    def check(self, row: Row, tolerance: float, url: str) -> None:
        """Raise `ServerResponseError` if `row` is of another model."""
        difference = self.difference(row)
        if not difference <= tolerance:
            raise ServerResponseError(
                f"the teacher server {url} gives {len(self.asked.ids)} tokens other log-probabilities than at the "
                f"start of this run, by {difference:.3g} nats on average (allowed: {tolerance:g}): it serves another "
                "model, other weights or other ids than before. Nothing was trained on this answer. Start the teacher "
                "that the run began with, or begin a new run. If this is the same model in low precision, raise "
                "canary_tolerance."
            )

    def tensors(self) -> dict[str, Tensor]:
        k = min(1, self.row.ids.shape[1])  # the likeliest id is all that is compared
        return {
            "canary_tokens": torch.tensor(self.asked.ids, dtype=torch.int64),
            "canary_realized": torch.from_numpy(self.row.realized.copy()),
            "canary_best_ids": torch.from_numpy(self.row.ids[:, :k].copy()),
            "canary_best": torch.from_numpy(self.row.logprobs[:, :k].copy()),
        }

    @classmethod
    def from_tensors(cls, state: dict[str, Tensor]) -> "Canary":
        ids = tuple(state["canary_tokens"].tolist())
        return cls(
            asked=Asked(name=CANARY, ids=ids, positions=tuple(range(1, len(ids)))),
            row=Row(
                ids=state["canary_best_ids"].numpy(),
                logprobs=state["canary_best"].numpy(),
                realized=state["canary_realized"].numpy(),
            ),
        )
