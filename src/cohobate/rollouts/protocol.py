# SPDX-License-Identifier: Apache-2.0
"""What every source of completions can do: one verb, tokens in and tokens out."""

from typing import Protocol

from cohobate.align.rollout import RolloutBatch, RolloutRequest, SamplingConfig


class RolloutSource(Protocol):
    """Writes completions to prompts; needs no base class.

    The rows that come back are prompt-major: sample j of prompt i is row `i * n + j`, on the device of the request. A
    request without any row gives a batch without any row, and still joins the collectives that other ranks reach.
    """

    def sample(self, request: RolloutRequest, sampling: SamplingConfig, /) -> RolloutBatch: ...
