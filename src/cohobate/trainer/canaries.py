# SPDX-License-Identifier: Apache-2.0
"""Checks that run beside the training: most faults of distillation leave a plausible loss, so look where they show."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.utils import logging

from cohobate.align.rollout import AlignedBatch
from cohobate.errors import NonFiniteError
from cohobate.objectives import ObjectiveOutput
from cohobate.parallel.world import current_world

logger = logging.get_logger(__name__)


class FiniteCheck:
    """Remembers the pair losses of one optimizer step so that a NaN or infinity can be traced to its rows."""

    def __init__(self) -> None:
        self._seen: list[tuple[AlignedBatch, Tensor | None]] = []
        self.loss_sum: Tensor | float = 0.0

    def see(self, batch: AlignedBatch, output: ObjectiveOutput, loss: Tensor) -> None:
        self._seen.append((batch, output.pair_loss))
        self.loss_sum = self.loss_sum + loss.detach()

    def loss_is_finite(self) -> bool:
        return math.isfinite(float(self.loss_sum))

    def bad_rows(self) -> list[str]:
        """Sample ids of this rank's rows with a pair loss that is NaN or infinite, in order of appearance."""
        found: dict[str, None] = {}
        for batch, pair_loss in self._seen:
            if pair_loss is None:
                continue
            for row in batch.row[~torch.isfinite(pair_loss)].unique().tolist():
                found[batch.sample_ids[row]] = None
        return list(found)

    def refuse(self, *, step: int, grad_norm: float) -> None:
        """Raise `NonFiniteError`; called on every rank of a step that is not finite on any, before the optimizer."""
        rows = self.bad_rows()
        if rows:
            shown = ", ".join(repr(r) for r in rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
            where = f"rows with a non-finite loss on this rank: {shown}."
        elif self.loss_is_finite() and not math.isfinite(grad_norm):
            where = "every row's loss on this rank is finite: the gradient overflowed, or another rank is the cause."
        else:
            where = "no single row of this rank is the cause."
        raise NonFiniteError(
            f"step {step}: loss {float(self.loss_sum):g}, gradient norm {grad_norm:g}; {where} The optimizer step was"
            " not taken and the weights are those of the step before. Look at these rows (an empty or forbidden token,"
            " a teacher that gives it probability 0), or lower learning_rate; resume from the last checkpoint."
        )

    def clear(self) -> None:
        self._seen.clear()
        self.loss_sum = 0.0


_EQUAL = 1e-6  # nats a pair; a hundred times what rounding leaves of two passes of one model in float32


def teacher_notice(metrics: dict[str, float], *, vocab_size: int | None) -> str | None:
    """What the teacher's numbers give away, or None.

    A teacher without weights is uniform: its entropy is ln V, and a loss of about ln 2 looks normal. A teacher that
    equals the student gives zero, which looks like a finished run; some processors round two equal passes differently.
    """
    entropy = metrics.get("entropy/teacher")
    if vocab_size is not None and entropy is not None and abs(entropy - math.log(vocab_size)) < 1e-3:
        return (
            f"the teacher's entropy is {entropy:.4f} = ln {vocab_size}: it predicts every token alike, as a model"
            " without its weights does. Check how the teacher was loaded."
        )
    if max(abs(metrics.get(name, math.inf)) for name in ("kl/reverse", "kl/forward")) < _EQUAL:
        return (
            "teacher equals student: both KL are 0 but for rounding, so there is nothing to learn."
            " A same-weights teacher needs a privileged context, an adapter, or other weights."
        )
    return None


def alignment_notice(metrics: Mapping[str, float]) -> str | None:
    """What the share of unaligned tokens gives away, or None: such a run looks like any other."""
    share = metrics.get("align/unaligned_student_share", 0.0)
    if share <= 0.5:
        return None
    return (
        f"{share:.0%} of the student's tokens are in no chunk, so the teacher says nothing of them: look at the"
        " completions (bytes that are no text, control tokens without a counterpart) and at the teacher's max_length."
    )


def lessons_notice(metrics: Mapping[str, float]) -> str | None:
    """That nothing was learnt for want of a lesson, or None: the loss of such steps is 0, as if all were well."""
    if metrics.get("lessons/without_share", 0.0) < 1:
        return None
    return (
        "no completion of the last steps had a lesson: none of its group was successful, so there was nothing to show "
        "and nothing was learnt. Take easier rows, more num_generations, a lower success_threshold, or set feedback."
    )


def warn_once(said: set[str], message: str | None) -> None:
    """Log a notice the first time it appears; every rank has the same one, and the first logs it."""
    if message is not None and message not in said:
        said.add(message)
        if current_world().rank == 0:
            logger.warning(message)
