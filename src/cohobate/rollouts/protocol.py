# SPDX-License-Identifier: Apache-2.0
"""What every source of completions can do: one verb, tokens in and tokens out."""

from collections.abc import Mapping
from typing import Protocol

from torch import nn

from cohobate.align.rollout import RolloutBatch, RolloutRequest, SamplingConfig


class RolloutSource(Protocol):
    """Writes completions to prompts; needs no base class.

    The rows that come back are prompt-major: sample j of prompt i is row `i * n + j`, on the device of the request. A
    request without any row gives a batch without any row, and still joins the collectives that other ranks reach.
    """

    def sample(self, request: RolloutRequest, sampling: SamplingConfig, /) -> RolloutBatch: ...


class RemoteRollouts(RolloutSource, Protocol):
    """Optional verbs of a source that has weights of its own, found by their names.

    `prepare` comes before the sampling of a step or an evaluation, on every rank: `policy_version` is the number of
    optimizer steps that `model` (the student as it is trained: wrapped, maybe with an adapter) has taken. Rollouts
    then say which version wrote them. `metrics` gives what happened since it was last asked, each as a sum and a count
    that are added up over ranks, under the same names on every rank. `close` ends what is kept open.
    """

    def prepare(self, model: nn.Module, policy_version: int, /) -> None: ...

    def metrics(self) -> Mapping[str, tuple[float, float]]: ...

    def close(self) -> None: ...
