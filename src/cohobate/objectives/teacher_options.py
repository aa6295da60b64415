# SPDX-License-Identifier: Apache-2.0
"""What can be set of an objective with several teachers, and which settings cannot go together.

Everything here is known before anything is scored, and what is wrong with it is said when the objective is made. The
call is `several_teachers.py`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cohobate.align.spans import Chunks
from cohobate.errors import ConfigError
from cohobate.functional.logprobs import check_temperature
from cohobate.functional.scores import DenseScores, HiddenScores, SeveralScores, TopKScores
from cohobate.objectives.aggregate import Aggregation, DynamicScaling, KdMode, TeacherMetric
from cohobate.objectives.compared import Artefact, TeacherText, whole_chunks
from cohobate.objectives.protocol import config_errors
from cohobate.objectives.teacher_rows import Choice

_COLUMNS = 8192  # what `same_vocab_top_k` is unless it is set

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherOptions:
    """The options that both methods have, and what a method has to say beside them."""

    parts: tuple[Any, ...] = field(repr=False)  # what relates each teacher's vocabulary to the student's; None: same
    temperature: float = 1.0  # divides all logits; the square of it multiplies the divergences
    weights: tuple[float, ...] = ()  # of each teacher; empty: 1 each
    kd_mode: KdMode = "sum"
    sum_weights_metric: TeacherMetric | None = None  # weights by softmax of alpha times it, in place of `weights`
    alpha: float = 1.0
    normalize_teacher_by_vocab: bool = False  # times log V_i / log of the smallest V
    same_vocab_top_k: int | None = _COLUMNS  # columns that a same-tokenizer teacher is compared on; None: all
    routed: bool = False  # each row is read by one teacher: all terms share one count, see `aggregate.py`
    dynamic_scaling: DynamicScaling = "previous_step"
    kd_weight: float = 1.0  # the fixed weights; their ratio is the scale of "previous_step" before there was a step
    ce_weight: float = 0.1
    ce_rows: Literal["recorded", "all"] = "recorded"
    chosen_over: Literal["step", "call"] = "step"  # columns, selected teachers and their weights
    group: Any = field(default=None, repr=False)  # processes whose rows are one batch, to the objective's own sums
    scale: float | None = field(default=None, repr=False)  # of the step before, see `after_step`
    step_counts: Mapping[str, float] | None = field(default=None, repr=False)  # see `with_counts`
    choice: Choice | None = field(default=None, repr=False)  # see `prepared`

    def __post_init__(self) -> None:
        with config_errors():
            check_temperature(self.temperature)
        for name, value, valid in (
            ("ce_rows", self.ce_rows, ("recorded", "all")),
            ("chosen_over", self.chosen_over, ("step", "call")),
        ):
            if value not in valid:
                raise ConfigError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}.")
        if self.same_vocab_top_k is not None and self.same_vocab_top_k < 1:
            raise ConfigError(f"same_vocab_top_k must be at least 1, or None for all, got {self.same_vocab_top_k}.")
        self._check_parts()
        if self.same_vocab_top_k == 1 and None in self.parts:
            raise ConfigError(
                "same_vocab_top_k=1 renormalises both sides over one column, where the divergence is identically zero."
                " Set it to at least 2, or to None for all columns."
            )
        if self.averages and self.same_vocab_top_k not in (None, _COLUMNS):
            raise ConfigError(
                f"same_vocab_top_k={self.same_vocab_top_k} has no effect with kd_mode='averaged_logits', which "
                "compares with the mean of the logits on all columns. Leave it out."
            )
        _ = self.aggregation  # its own checks
        if self.normalize_teacher_by_vocab and self.student_size is None:
            raise ConfigError(
                "normalize_teacher_by_vocab weighs teachers by the sizes of their vocabularies, but all of them have "
                "the student's tokenizer. Leave it out."
            )
        if self.kd_mode == "averaged_logits" and not self.averages:
            warn_once("averaged_logits is for teachers with the student's tokenizer alone; here it is kd_mode='sum'.")

    def _check_parts(self) -> None:
        artefact = self.artefact
        if not isinstance(self.parts, tuple) or not self.parts:
            raise ConfigError(f"parts must be a tuple, one part or None for each teacher, got {self.parts!r}.")
        for i, part in enumerate(self.parts):
            if part is not None and not isinstance(part, artefact.kind):
                raise ConfigError(
                    f"parts[{i}] must be the {artefact.name} of teachers[{i}] ({artefact.kind.__name__}), or None for "
                    f"a teacher with the student's tokenizer, got {type(part).__name__}."
                )
        widths = {self.sizes(part)[0] for part in self.parts if part is not None}
        if len(widths) > 1:
            raise ConfigError(
                f"the {artefact.name} were built for students of {sorted(widths)} ids, but there is one student. "
                f"Build them again: {artefact.command} build."
            )

    # ---- what a method says, and what follows ----------------------------------------------------------------------

    @property
    def artefact(self) -> Artefact:
        """What a part is."""
        raise NotImplementedError

    @property
    def kinds(self) -> tuple[type, ...]:
        """The scores that it can use of a teacher with a tokenizer of its own."""
        raise NotImplementedError

    @property
    def pair_beta(self) -> float:
        """How a same-tokenizer teacher is compared: 0 KL(teacher || student), 1 the reverse, between them JSD."""
        return 0.0

    def sizes(self, part: Any) -> tuple[int, int]:
        """Ids of the student and of the teacher that a part was built for."""
        raise NotImplementedError

    def counted(self, student_ids: Tensor, text: TeacherText) -> NDArray[np.bool_]:
        """Which chunks `[C]` count, from geometry and ids."""
        assert text.chunks is not None
        return whole_chunks(text.chunks)

    def factors(self, mismatched: NDArray[np.bool_]) -> NDArray[np.float64]:
        """`[U]` by which chunks are weighed."""
        return np.ones(len(mismatched))

    def num_columns(self, teacher: int) -> int | None:
        """How many columns a teacher with a tokenizer of its own is compared on; None: all, or no such thing."""
        return None

    def on_all_columns(self) -> dict[str, Any]:
        """The settings with which no column is left out."""
        return {"same_vocab_top_k": None}

    def divergence(
        self,
        teacher: int,
        columns: Tensor | None,
        student: tuple[Tensor, Tensor],
        known: tuple[Tensor | TopKScores, Tensor],
        chunks: Chunks,
    ) -> Tensor:
        """Of each chunk `[C]` in nats, from logits (or scores) and the ids they predict, of student and teacher."""
        raise NotImplementedError

    @property
    def accepts(self) -> tuple[type, ...]:
        """Several teachers say `SeveralScores`; one may say its own."""
        if len(self.parts) > 1:
            return (SeveralScores,)
        return (*self.kinds_of(0), SeveralScores)

    @property
    def own_tokenizers(self) -> tuple[bool, ...]:
        """Of each teacher whether it has a tokenizer of its own."""
        return tuple(part is not None for part in self.parts)

    def kinds_of(self, teacher: int) -> tuple[type, ...]:
        """The scores that it can use of one teacher: of the student's own tokenizer, whole rows."""
        return (HiddenScores, DenseScores) if self.parts[teacher] is None else self.kinds

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation(
            num_teachers=len(self.parts),
            weights=self.weights,
            kd_mode=self.kd_mode,
            sum_weights_metric=self.sum_weights_metric,
            alpha=self.alpha,
            normalize_teacher_by_vocab=self.normalize_teacher_by_vocab,
            kd_weight=self.kd_weight,
            ce_weight=self.ce_weight,
            dynamic_scaling=self.dynamic_scaling,
            routed=self.routed,
        )

    @property
    def looks_back(self) -> bool:
        """Whether a step depends on the one before."""
        return self.dynamic_scaling == "previous_step"

    @property
    def learns_ce(self) -> bool:
        """Whether the cross-entropy is part of the loss; else it is a metric alone."""
        return self.dynamic_scaling != "off" or self.ce_weight != 0

    @property
    def last_scale(self) -> float:
        """The scale of KD by what is known of the steps before."""
        return self.aggregation.first_scale if self.scale is None else self.scale

    @property
    def averages(self) -> bool:
        """Whether the teachers' logits are averaged, in one divergence of all."""
        return self.kd_mode == "averaged_logits" and all(part is None for part in self.parts)

    @property
    def student_size(self) -> int | None:
        """The student's ids, if a part knows them."""
        return next((self.sizes(part)[0] for part in self.parts if part is not None), None)

    @property
    def chooses(self) -> bool:
        """Whether anything is to be chosen from the teachers' rows."""
        numbers = (self.chosen_number(i) for i in range(len(self.parts)))
        return self.aggregation.score is not None or any(number is not None for number in numbers)

    def chosen_number(self, teacher: int) -> int | None:
        """How many columns are to be chosen for a teacher; None: all are compared, or the loss has none."""
        part = self.parts[teacher]
        if part is None:
            number, size = (None if self.averages else self.same_vocab_top_k), self.student_size
        else:
            number, size = self.num_columns(teacher), self.sizes(part)[1]
        return None if number is None or (size is not None and number >= size) else number


@cache
def warn_once(message: str) -> None:
    """A notice for the log that is said the first time only, however often an objective is made again."""
    _logger.warning(message)
