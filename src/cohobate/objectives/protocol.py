# SPDX-License-Identifier: Apache-2.0
"""What an objective is: a function from two predictions to named sums, each with the name of its denominator.

An objective never divides. A mean taken here would be a mean over one micro-batch, and means of means depend on how
the step was split; so a term carries its sum and the *name* of its count, and the trainer divides once, by that count
over the whole optimizer step and all ranks. The counts are known from masks and geometry before anything is scored.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ConfigError, VocabularyMismatch
from cohobate.functional.scores import (
    DenseScores,
    HiddenScores,
    OneTeacherScores,
    SampledScores,
    SeveralScores,
    TeacherScores,
    TopKScores,
)

PAIRS = "pairs"  # the count of aligned pairs, the denominator of nearly every term

StudentScores = HiddenScores | DenseScores


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One differentiable sum of the loss, in nats, and the name of the count it is divided by."""

    sum: Tensor  # scalar; includes `batch.weights` and the term's own coefficient
    count: str  # a key of `Objective.counts(batch)`


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A logged mean, kept as its two halves; both are added over the step and all ranks before the division."""

    sum: Tensor  # detached scalar
    count: Tensor | float


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput:
    """What one call gives. The names in `terms` and `metrics` depend on the objective alone, never on the batch."""

    terms: dict[str, Term]
    metrics: dict[str, Metric] = field(default_factory=dict)
    pair_loss: Tensor | None = None  # [N] detached, weights included; NaN where a row must be named
    step_values: dict[str, Tensor] = field(default_factory=dict)  # detached scalars for `after_step`: `StepMemory`


@runtime_checkable
class Objective(Protocol):
    """The one verb is the call. A class of your own needs no import from here."""

    @property
    def accepts(self) -> tuple[type, ...]:
        """The kinds of teacher scores it can use; empty when it needs no teacher."""
        ...

    def counts(self, batch: AlignedBatch) -> dict[str, float]:
        """Every denominator of this batch, from masks and geometry alone, before any scoring."""
        ...

    def __call__(
        self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch, /
    ) -> ObjectiveOutput: ...


@runtime_checkable
class StepObjective(Objective, Protocol):
    """An objective that must see the whole optimizer step before it can score one of its micro-batches.

    `for_step` makes of it the objective of one step; called as it is, it refuses. On held-out rows there is no step:
    there `held_out` is used.
    """

    @property
    def held_out(self) -> Objective:
        """The objective of evaluation, over every pair."""
        ...

    def measure(self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch, /) -> Tensor:
        """`[n, M]` detached numbers, of each pair or of whatever the choice is made from."""
        ...

    def prepared(self, step_measures: Tensor, /) -> Objective:
        """The objective of the step whose micro-batches measured `step_measures [n_step, M]`, in any order."""
        ...


class StepMemory(Protocol):
    """Optional verbs by which one step's numbers reach the next: found by their names, and none changes the object.

    `with_counts` gives the objective of the step with these counts, which are of all ranks, before anything is scored.
    `after_step` is called once the step's gradients are known to be finite, with what its micro-batches gave as
    `step_values`, added up over all ranks; what it returns is the objective from there on. `state_dict` is saved with
    a checkpoint unless it is empty, and `with_state_dict` gives the objective that goes on from it.
    """

    def with_counts(self, counts: Mapping[str, float]) -> Objective: ...

    def after_step(self, values: Mapping[str, float], counts: Mapping[str, float]) -> Objective: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def with_state_dict(self, state: Mapping[str, Tensor]) -> Objective: ...


_FITTING: dict[type, str] = {
    HiddenScores: "DivergenceObjective or PolicyGradientObjective",
    DenseScores: "DivergenceObjective or PolicyGradientObjective",
    TopKScores: "DivergenceObjective with top_k=None or CommonSupportObjective",
    SampledScores: "PolicyGradientObjective",
    SeveralScores: "CommonSupportObjective or ProjectedObjective with one part for each teacher",
}


@contextmanager
def config_errors() -> Iterator[None]:
    """A `ValueError` of a check of `functional` becomes a `ConfigError` with the same words: it is a setting here."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_accepts(objective: Objective, teacher: Any | None) -> None:
    """Refuse at build an objective that cannot use what the teacher says; `teacher=None` is a run without one.

    Raises `ConfigError` naming both and the objective that fits.
    """
    name = type(objective).__name__
    accepts: Sequence[type] = objective.accepts
    wanted = " or ".join(kind.__name__ for kind in accepts)
    if teacher is None:
        if accepts:
            raise ConfigError(
                f"{name} compares the student with a teacher ({wanted}), but no teacher was given. Give one, or use "
                "CrossEntropyObjective, which trains on the recorded tokens alone."
            )
        return
    provides = getattr(teacher, "provides", None)
    if not isinstance(provides, type):
        raise ConfigError(
            f"the teacher {type(teacher).__name__} does not say which kind of scores it gives: its attribute "
            f"`provides` must be a type such as HiddenScores, got {provides!r}."
        )
    if not accepts:
        raise ConfigError(
            f"{name} uses no teacher, so {type(teacher).__name__} would be run and thrown away. Leave the teacher out,"
            f" or use {_FITTING.get(provides, 'an objective that accepts ' + provides.__name__)}."
        )
    if not issubclass(provides, tuple(accepts)):
        fitting = _FITTING.get(provides, f"an objective whose `accepts` has {provides.__name__}")
        why = getattr(objective, "refusals", {}).get(provides)
        raise ConfigError(
            f"{name} accepts {wanted}, but the teacher {type(teacher).__name__} provides {provides.__name__}"
            f"{'' if why is None else ': ' + why}. For this teacher use {fitting}."
        )
    _check_tokenizers(objective, teacher)
    _check_routing(objective, teacher)


def _check_tokenizers(objective: Objective, teacher: Any) -> None:
    """Refuse a teacher that reads tokens of its own where tokens are compared one by one, and the reverse."""
    name, who = type(objective).__name__, type(teacher).__name__
    wanted: tuple[bool, ...] | None = getattr(objective, "own_tokenizers", None)
    texts = getattr(teacher, "texts", None)
    found = None if texts is None else tuple(text is not None for text in texts)
    if wanted is None:
        if found is not None and any(found):
            raise ConfigError(
                f"{name} compares the tokens of both sides one by one, but {who} has a tokenizer of its own. Use "
                "CommonSupportObjective or ProjectedObjective."
            )
        return
    found = (False,) * len(wanted) if found is None else found
    if len(wanted) != len(found):
        raise ConfigError(
            f"{name} was made for {len(wanted)} teachers, but {who} is {len(found)}. Give one part each."
        )
    for i, (has_part, has_text) in enumerate(zip(wanted, found, strict=True)):
        if has_part and not has_text:
            raise ConfigError(
                f"{name} has a part for teachers[{i}], but that teacher reads the student's tokens. Put it into an "
                "OwnTokenizerTeacher with its tokenizer, or make the part None."
            )
        if has_text and not has_part:
            raise ConfigError(
                f"teachers[{i}] has a tokenizer of its own, but {name} takes it for one with the student's. Give it "
                "the part that relates the two vocabularies."
            )


def _check_routing(objective: Objective, teacher: Any) -> None:
    """Refuse an objective that divides by another count than the teachers answer for."""
    wanted, found = getattr(objective, "routed", False), getattr(teacher, "routing", None) is not None
    if wanted != found:
        raise ConfigError(
            f"{type(teacher).__name__} {'routes each row to one teacher' if found else 'asks every teacher'}, but "
            f"{type(objective).__name__} was made with routed={wanted}, which divides by another count. Make it with "
            f"routed={found}."
        )


def for_step(
    objective: Objective,
    scored: Iterable[tuple[StudentScores, TeacherScores | None, AlignedBatch]],
    *,
    join_ranks: Callable[[Tensor], Tensor] = lambda measures: measures,
) -> Objective:
    """The objective to use for the micro-batches of one optimizer step: itself, unless it is a `StepObjective`.

    One that has something to choose in some settings only says so in `needs_step`.

    Args:
        scored: every micro-batch of this rank with its two predictions, best a generator: it is read, one micro-batch
        at a time and under `no_grad`, only if the objective needs it.
        join_ranks: gives the rows `[n, M]` of all ranks in any order; called once by every rank, also with n = 0.
    """
    if not isinstance(objective, StepObjective) or not getattr(objective, "needs_step", True):
        return objective
    with torch.no_grad():
        measures = [objective.measure(student, teacher, batch) for student, teacher, batch in scored]
        if not measures:
            raise ValueError("a step needs at least one micro-batch (it may be empty of pairs), got none.")
        return objective.prepared(join_ranks(torch.cat(measures)))


def check_scores(
    objective: Objective, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch
) -> None:
    """Refuse scores of a kind, number or vocabulary that do not belong to this objective and batch.

    Raises `ConfigError` for the kind, `VocabularyMismatch` for the vocabulary, `ValueError` for the number of pairs.
    """
    name = type(objective).__name__
    if not isinstance(student, HiddenScores | DenseScores):
        raise ConfigError(f"{name} needs the student as HiddenScores or DenseScores, got {type(student).__name__}.")
    accepts = objective.accepts
    if accepts and not isinstance(teacher, accepts):
        wanted = " or ".join(kind.__name__ for kind in accepts)
        raise ConfigError(f"{name} accepts {wanted} of the teacher, got {type(teacher).__name__}.")
    sides: dict[str, OneTeacherScores] = {"student": student}
    if accepts and teacher is not None and not isinstance(teacher, SeveralScores):
        sides["teacher"] = teacher
    for side, scores in sides.items():
        num = num_pairs_of(scores)
        if num != batch.num_pairs:
            raise ValueError(
                f"the {side} scored {num} pairs but the batch has {batch.num_pairs}: select the rows of "
                f"`batch.{side}.pair_index` before scoring."
            )
    if not accepts or teacher is None or isinstance(teacher, SampledScores | SeveralScores):
        return
    if student.vocab_size != teacher.vocab_size:
        raise VocabularyMismatch(
            f"the student predicts {student.vocab_size} ids, the teacher {teacher.vocab_size}. Cut both heads to the "
            "real ids of the shared tokenizer first (`OutputHead.cut`); two tokenizers need another method."
        )


def only_weighted(values: Tensor, weights: Tensor) -> Tensor:
    """`values [N, ...]` with no gradient in rows of weight 0: there 0 x NaN would reach the shared head."""
    dead = (weights == 0).view(-1, *[1] * (values.dim() - 1))
    return torch.where(dead, values.detach(), values)


def num_pairs_of(scores: OneTeacherScores) -> int:
    """The predictions that some scores are of."""
    if isinstance(scores, HiddenScores):
        return scores.hidden.shape[0]
    if isinstance(scores, DenseScores):
        return scores.dense.shape[0]
    if isinstance(scores, TopKScores):
        return scores.ids.shape[0]
    return scores.logprobs.shape[0]
