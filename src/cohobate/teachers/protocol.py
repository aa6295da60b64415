# SPDX-License-Identifier: Apache-2.0
"""What every teacher can do: say what it thinks of N aligned pairs.

A teacher runs under `no_grad` and in eval mode, and leaves the student's mode, adapters, flags and gradients as they
were. Scores may share storage with live weights: they speak until the next optimizer step, not beyond it.
"""

from typing import Protocol

from torch import Tensor, nn

from cohobate.align.rollout import AlignedBatch
from cohobate.functional.scores import TeacherScores


class Teacher(Protocol):
    """One verb, `score`; needs no base class.

    Further verbs are called where a teacher has them: `after_optimizer_step()`; `state_dict()` with
    `load_state_dict(...)` (`StatefulTeacher`), which travel in checkpoints; `pack_rows(name)`, once, where rows are
    packed; `prefetch(batch)`, for every micro-batch of a step before the first is scored; `close()`, at the end of a
    command. One that knows recorded completions alone says so, `recorded_only = True`, and has `check_batch(batch)`,
    which is called with all rows before the first step.
    """

    @property
    def provides(self) -> type:
        """The kind of scores, known before the first step so that an objective can refuse it when the run is built."""
        ...

    def score(self, batch: AlignedBatch, /) -> TeacherScores:
        """The scores of the batch's N pairs, in their order, on the device of the teacher."""
        ...


class StatefulTeacher(Teacher, Protocol):
    """A teacher that follows the student and resumes exactly."""

    def after_optimizer_step(self) -> None: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor], /) -> None: ...


class SameWeightsConfig(Protocol):
    """A frozen description of a teacher made from the student's own weights, as a recipe names it."""

    def build(self, student_model: nn.Module, vocab_size: int | None = None) -> Teacher: ...
