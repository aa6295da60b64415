# SPDX-License-Identifier: Apache-2.0
"""How the divergences of several teachers and the student's cross-entropy become one loss: one place for all methods.

    loss = scale * sum_i w_i KD_i + CE                 dynamic: scale = |CE| / |KD|, a constant to the gradient
    loss = kd_weight * sum_i w_i KD_i + ce_weight * CE fixed

Where every teacher reads every row, each KD_i is divided by its own count: it is that teacher's mean. Where each row
is routed to one teacher, all KD_i are divided by the count of all of them, so that every token counts once, however
many rows each teacher answers: with two teachers that are one, the loss is that of this one.

Each value is *complete* before anything nonlinear is done with it: summed over all ranks of the group that is passed
in, and over everything that a ratio is to speak of. A ratio of one rank's shares is wrong by the number of ranks, and
each rank would have another one.

Which group that is, is the caller's to say; nothing here remembers one. Every rank must reach every call, also a rank
without a row. What a divergence is, is not known here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from cohobate.errors import ConfigError
from cohobate.objectives.cross_entropy import CE_TOKENS
from cohobate.parallel.world import World, all_reduce_sum

KdMode = Literal["sum", "averaged_logits", "select_teacher"]
TeacherMetric = Literal["ce", "entropy", "max_prob"]
DynamicScaling = Literal["previous_step", "call", "off"]

CE = "ce"
CHUNKS = "chunks"  # of all teachers together


def kd_term(teacher: int) -> str:
    """The name of a teacher's term."""
    return f"kd/{teacher}"


def chunk_count(teacher: int) -> str:
    """The name of the count that a teacher's term is divided by."""
    return f"chunks/{teacher}"


def count_of(term: str, *, routed: bool = False) -> str:
    """The name of the count that a term is divided by; `routed`: each row is one teacher's."""
    if term == CE:
        return CE_TOKENS
    return CHUNKS if routed else term.replace("kd/", "chunks/")


def term_counts(ce_tokens: float, chunks: Sequence[float], *, routed: bool = False) -> dict[str, float]:
    """The counts of all terms by their names, from those of each teacher."""
    of_teachers = {CHUNKS: sum(chunks)} if routed else {chunk_count(i): number for i, number in enumerate(chunks)}
    return {CE_TOKENS: ce_tokens, **of_teachers}


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """How teachers and cross-entropy are joined. Settings that cannot go together are a `ConfigError` at birth."""

    num_teachers: int
    weights: tuple[float, ...] = ()  # of each teacher; empty: 1 each
    kd_mode: KdMode = "sum"
    sum_weights_metric: TeacherMetric | None = None  # weights by softmax of how sure each teacher is of the text
    alpha: float = 1.0  # multiplies that score
    normalize_teacher_by_vocab: bool = False  # by log V_i / log of the smallest V
    kd_weight: float = 1.0
    ce_weight: float = 0.1
    dynamic_scaling: DynamicScaling = "previous_step"
    routed: bool = False  # each row is read by one teacher, so no two can be held against each other

    def __post_init__(self) -> None:
        for name, value, valid in (
            ("kd_mode", self.kd_mode, ("sum", "averaged_logits", "select_teacher")),
            ("sum_weights_metric", self.sum_weights_metric, (None, "ce", "entropy", "max_prob")),
            ("dynamic_scaling", self.dynamic_scaling, ("previous_step", "call", "off")),
        ):
            if value not in valid:
                raise ConfigError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}.")
        self._check_weights()
        if not math.isfinite(self.alpha):
            raise ConfigError(f"alpha must be a finite number, got {self.alpha}.")
        if self.kd_mode != "sum":
            for name, used in (
                ("sum_weights_metric", self.sum_weights_metric is not None),
                ("normalize_teacher_by_vocab", self.normalize_teacher_by_vocab),
            ):
                if used:
                    raise ConfigError(
                        f"{name} weighs the terms of kd_mode='sum' and means nothing with kd_mode={self.kd_mode!r}. "
                        "Leave one of them out."
                    )
        if self.routed:
            self._check_routed()
        self._check_scaling()

    def _check_routed(self) -> None:
        for name, usual in (("kd_mode", "sum"), ("sum_weights_metric", None)):
            if getattr(self, name) != usual:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} compares what several teachers say of the same rows, but with "
                    f"routing each row is read by one teacher alone. Leave {name} out, or leave route_by and routes "
                    "out, so that every teacher reads every row."
                )

    def _check_weights(self) -> None:
        given = self.weights
        if given and len(given) != self.num_teachers:
            raise ConfigError(f"weights must be one for each of {self.num_teachers} teachers, got {len(given)}.")
        if not all(math.isfinite(w) and w >= 0 for w in given):
            raise ConfigError(f"weights must be finite numbers >= 0, got {given}.")
        if given and sum(given) == 0:
            raise ConfigError(f"weights add up to 0, so no teacher is listened to: {given}.")
        unused = "kd_mode='select_teacher'" if self.kd_mode == "select_teacher" else "sum_weights_metric"
        if (self.kd_mode == "select_teacher" or self.sum_weights_metric is not None) and len(set(given)) > 1:
            raise ConfigError(f"weights={given} have no effect with {unused}, which finds its own. Leave one out.")

    def _check_scaling(self) -> None:
        for name, value in (("kd_weight", self.kd_weight), ("ce_weight", self.ce_weight)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be a finite number >= 0, got {value}.")
        if self.dynamic_scaling == "off":
            if self.kd_weight == self.ce_weight == 0:
                raise ConfigError("kd_weight and ce_weight are both 0, so there is nothing to learn.")
            return
        if self.kd_weight == 0 or self.ce_weight == 0:
            raise ConfigError(
                f"dynamic_scaling={self.dynamic_scaling!r} makes KD count as much as CE, so neither can have weight 0 "
                f"(kd_weight={self.kd_weight}, ce_weight={self.ce_weight}). Set dynamic_scaling='off'."
            )

    @property
    def score(self) -> TeacherMetric | None:
        """What must be known of each teacher's own text before its weight is: None if nothing."""
        return "ce" if self.kd_mode == "select_teacher" else self.sum_weights_metric

    @property
    def first_scale(self) -> float:
        """The scale of KD beside a CE of weight 1 before any step has ended: the two fixed weights' ratio."""
        return self.kd_weight / self.ce_weight

    def teacher_weights(self, scores: Sequence[float] | None, vocab_sizes: Sequence[int]) -> tuple[float, ...]:
        """What multiplies each KD_i: `[number of teachers]`, 0 for one that was not selected.

        Args:
            scores: mean of each teacher's `score` over all rows of the group, larger is better (minus the CE); NaN
                for a teacher that has no row. Unread if there is no such score.
            vocab_sizes: real ids of each teacher.
        """
        if self.kd_mode == "select_teacher":
            assert scores is not None
            known = [-math.inf if math.isnan(score) else score for score in scores]
            best = known.index(max(known))  # of equal ones the first
            return tuple(float(i == best) for i in range(self.num_teachers))
        sizes = [1.0] * self.num_teachers
        if self.normalize_teacher_by_vocab:
            sizes = [math.log(size) / math.log(min(vocab_sizes)) for size in vocab_sizes]
        if self.sum_weights_metric is None:
            weights = self.weights or (1.0,) * self.num_teachers
        else:
            assert scores is not None
            weights = _softmax([self.alpha * v * score for v, score in zip(sizes, scores, strict=True)])
        return tuple(w * v for w, v in zip(weights, sizes, strict=True))


def dynamic_scale(kd: float, ce: float) -> float:
    """What makes KD as large as CE, from complete values; 1 where one of them is 0, since 0 would erase the KD."""
    return 1.0 if kd == 0 or ce == 0 else abs(ce) / abs(kd)


def complete_values(
    sums: Mapping[str, Tensor | float],
    counts: Mapping[str, float],
    *,
    routed: bool = False,
    world: World | None = None,
) -> tuple[float, float]:
    """KD and CE of all ranks, each term divided by its count. One collective, which every rank of `world` must reach.

    Args:
        sums: this rank's share of each term, `kd/0`, `kd/1`, ..., `ce`: they add up over the group. A rank that
            evaluated what others evaluated too gives its part of it.
        counts: `chunks/0`, ..., `ce_tokens`, of all ranks already; with `routed` `chunks` and `ce_tokens`.
    """
    return joined_values(all_reduce_sum(sums, world=world), counts, routed=routed)


def joined_values(
    sums: Mapping[str, float], counts: Mapping[str, float], *, routed: bool = False
) -> tuple[float, float]:
    """KD and CE from the sums of all ranks; a term without a count is 0."""

    def mean(term: str) -> float:
        count = counts[count_of(term, routed=routed)]
        return sums[term] / count if count else 0.0

    return sum(mean(term) for term in sums if term != CE), mean(CE)


def _softmax(scores: Sequence[float]) -> list[float]:
    """Of the scores that are known; a teacher without one gets no weight, and without any all are equal."""
    known = [score for score in scores if not math.isnan(score)]
    if not known:
        return [1.0 / len(scores)] * len(scores)
    powers = [0.0 if math.isnan(score) else math.exp(score - max(known)) for score in scores]
    return [power / sum(powers) for power in powers]
