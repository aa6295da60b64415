# SPDX-License-Identifier: Apache-2.0
"""What one optimizer step tells an objective that looks back on it: the verbs of `StepMemory`, called in their order.

An objective that has none of them passes through untouched, and nothing is exchanged for it.
"""

from collections.abc import Mapping

from torch import Tensor

from cohobate.objectives import Objective, ObjectiveOutput
from cohobate.parallel.world import all_reduce_sum


class StepValues:
    """The values of the step under way, added up over its micro-batches; of one step at a time."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}

    def begin(self, objective: Objective, counts: Mapping[str, float]) -> Objective:
        """The objective of the step with these `counts`, which are of all ranks."""
        self._sums, self._counts = {}, dict(counts)
        with_counts = getattr(objective, "with_counts", None)
        return objective if with_counts is None else with_counts(counts)

    def see(self, output: ObjectiveOutput) -> None:
        for name, value in output.step_values.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def end(self, objective: Objective) -> Objective:
        """The objective of the next step. Every rank must call it: a rank without rows has seen zeros."""
        after_step = getattr(objective, "after_step", None)
        if after_step is None or not self._sums:
            return objective
        return after_step(all_reduce_sum(self._sums), self._counts)
