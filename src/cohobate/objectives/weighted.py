# SPDX-License-Identifier: Apache-2.0
"""Objectives made of objectives: a weighted sum of named parts, and one that trains where there is something to learn.

Neither changes a denominator. A sum keeps every part's own count; selection multiplies the weights of the pairs, so
the pairs that were left out are still counted, and keeping half of them does not double the step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ConfigError
from cohobate.functional.estimators import min_max, tip_scores
from cohobate.functional.scores import DenseScores, HiddenScores, TeacherScores, TopKScores
from cohobate.objectives.cross_entropy import target_logprobs
from cohobate.objectives.divergence import DivergenceObjective
from cohobate.objectives.pair_divergences import read_pairs
from cohobate.objectives.protocol import (
    Metric,
    Objective,
    ObjectiveOutput,
    StepObjective,
    StudentScores,
    Term,
    check_scores,
)

_WITH_DIVERGENCE: tuple[type, ...] = (HiddenScores, DenseScores, TopKScores)


@dataclass(frozen=True, slots=True)
class SumObjective:
    """A weighted sum of objectives in nats, each term with its own count: `{"kd": (1.0, ...), "ce": (0.1, ...)}`.

    A part with one term gives its name to it. If two parts have a metric of one name, the later one is logged under
    `part/name`.
    """

    parts: Mapping[str, tuple[float, Objective]]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("SumObjective needs at least one part, got none.")
        for name, (weight, part) in self.parts.items():
            if not math.isfinite(weight):
                raise ConfigError(f"the weight of part {name!r} must be a finite number, got {weight}.")
            if isinstance(part, StepObjective):
                raise ConfigError(
                    f"part {name!r} ({type(part).__name__}) looks at the whole step and cannot stand inside a sum. A "
                    "selection goes around it: TokenSelectionObjective(objective=SumObjective(...)); CSD and X-Token "
                    "have a cross-entropy of their own (ce_weight, ce_rows)."
                )
        if not self.accepts and any(part.accepts for _, part in self.parts.values()):
            wishes = "; ".join(
                f"{name}: {' or '.join(kind.__name__ for kind in part.accepts)}"
                for name, (_, part) in self.parts.items()
                if part.accepts
            )
            raise ConfigError(f"no kind of teacher scores serves every part of the sum ({wishes}).")

    @property
    def accepts(self) -> tuple[type, ...]:
        """What every part with a teacher can use."""
        wishes = [part.accepts for _, part in self.parts.values() if part.accepts]
        return tuple(kind for kind in wishes[0] if all(kind in wish for wish in wishes)) if wishes else ()

    @property
    def temperature(self) -> float:
        """Of the parts that read the probability at the draw, else of all; 1 if they differ."""
        drawn = [part for _, part in self.parts.values() if _own(part, "needs_sampler_logprobs", False)]
        asked = drawn or [part for _, part in self.parts.values()]
        found = {_own(part, "temperature", None) for part in asked} - {None}
        return found.pop() if len(found) == 1 else 1.0

    @property
    def needs_sampler_logprobs(self) -> bool:
        return any(_own(part, "needs_sampler_logprobs", False) for _, part in self.parts.values())

    @property
    def needs_fresh_rollouts(self) -> bool:
        return any(_own(part, "needs_fresh_rollouts", True) for _, part in self.parts.values())

    def counts(self, batch: AlignedBatch) -> dict[str, float]:
        joined: dict[str, float] = {}
        for name, (_, part) in self.parts.items():
            for count, value in part.counts(batch).items():
                if joined.setdefault(count, value) != value:
                    raise ConfigError(
                        f"part {name!r} counts {value} {count!r}, an earlier part {joined[count]}: one name must have "
                        "one meaning."
                    )
        return joined

    def __call__(
        self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch, /
    ) -> ObjectiveOutput:
        terms: dict[str, Term] = {}
        metrics: dict[str, Metric] = {}
        pair_loss: Tensor | None = None
        for name, (weight, part) in self.parts.items():
            out = part(student, teacher if part.accepts else None, batch)
            for term_name, term in out.terms.items():
                label = name if len(out.terms) == 1 else f"{name}/{term_name}"
                terms[label] = replace(term, sum=weight * term.sum)
            for metric_name, metric in out.metrics.items():
                metrics[metric_name if metric_name not in metrics else f"{name}/{metric_name}"] = metric
            if out.pair_loss is not None:
                own = weight * out.pair_loss
                pair_loss = own if pair_loss is None else pair_loss + own
        return ObjectiveOutput(terms=terms, metrics=metrics, pair_loss=pair_loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSelectionObjective:
    """Another objective, on the pairs of the step where the student is unsure or far from the teacher.

    The score of a pair is `1 - (1 - h)(1 - d)`, with h the student's entropy and d the KL(student || teacher), each
    scaled to [0, 1] by its least and largest value in the whole optimizer step. `keep` is the share of the pairs with
    the highest scores that is trained, at full weight; pairs that tie with the last of them are kept too. `keep=None`
    weights every pair by its score. A quantity that is the same everywhere tells no pair from another and takes no
    part; if none is left, every pair is kept. A pair without a finite score is kept, so that it shows in the loss.

    A reconstruction of TIP (arXiv 2604.14084) from its description: the scale, the direction of the KL and the
    treatment of ties are choices made here.
    """

    objective: Objective
    signal: Literal["soft_or", "entropy", "divergence"] = "soft_or"
    keep: float | None = 0.5

    def __post_init__(self) -> None:
        if self.signal not in ("soft_or", "entropy", "divergence"):
            raise ConfigError(f"signal must be 'soft_or', 'entropy' or 'divergence', got {self.signal!r}.")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ConfigError(f"keep must be a share in (0, 1], or None for soft weights, got {self.keep}.")
        if isinstance(self.objective, StepObjective):
            raise ConfigError(f"{type(self.objective).__name__} already chooses from the step; do not wrap it again.")
        if self.signal != "entropy" and not self.accepts:
            raise ConfigError(
                f"signal={self.signal!r} needs a teacher's distribution, and {type(self.objective).__name__} accepts "
                "none of HiddenScores, DenseScores, TopKScores. Use signal='entropy'."
            )

    @property
    def accepts(self) -> tuple[type, ...]:
        wish = self.objective.accepts
        return wish if self.signal == "entropy" else tuple(kind for kind in wish if kind in _WITH_DIVERGENCE)

    @property
    def refusals(self) -> dict[type, str]:
        return _own(self.objective, "refusals", {})

    @property
    def held_out(self) -> Objective:
        """Held-out rows are not selected: their loss is over every pair."""
        return self.objective

    @property
    def temperature(self) -> float:
        """That of the objective it wraps; the entropy and the KL are taken at it too."""
        return _own(self.objective, "temperature", 1.0)

    @property
    def needs_sampler_logprobs(self) -> bool:
        return _own(self.objective, "needs_sampler_logprobs", False)

    @property
    def needs_fresh_rollouts(self) -> bool:
        return _own(self.objective, "needs_fresh_rollouts", True)

    def counts(self, batch: AlignedBatch) -> dict[str, float]:
        return self.objective.counts(batch)

    def __call__(
        self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch, /
    ) -> ObjectiveOutput:
        raise ConfigError(
            "TokenSelectionObjective ranks the pairs of a whole optimizer step and cannot score one micro-batch alone."
            " Use cohobate.objectives.for_step(objective, micro_batches), and what it returns for this step."
        )

    def measure(self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch, /) -> Tensor:
        """`[N, 2]` float32: the student's entropy and KL(student || teacher), 0 for the one that is not used."""
        check_scores(self, student, teacher, batch)
        with torch.no_grad():
            if self.signal == "entropy":
                _, unsure = target_logprobs(student, batch.target_ids, temperature=self.temperature)
                far = torch.zeros_like(unsure)
            else:
                probe = DivergenceObjective(beta=1.0, temperature=self.temperature)
                read, _ = read_pairs(probe, student, teacher, weights=batch.weights)
                far = read.divergence
                unsure = read.student_entropy if self.signal == "soft_or" else torch.zeros_like(far)
            return torch.stack([unsure, far], dim=-1).float()

    def prepared(self, step_measures: Tensor, /) -> "StepSelection":
        """The objective of the step whose pairs measured `step_measures [N_step, 2]`."""
        known = step_measures[torch.isfinite(step_measures).all(-1)]
        ranges = (min_max(known[:, 0]), min_max(known[:, 1]))
        constant = not any(bool(high > low) for low, high in ranges)
        threshold: float | None = None
        if constant:
            threshold = -math.inf
        elif self.keep is not None:
            threshold = _threshold(_scores(known, *ranges), self.keep)
        return StepSelection(source=self, entropy_range=ranges[0], divergence_range=ranges[1], threshold=threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSelection:
    """A `TokenSelectionObjective` that knows its step."""

    source: TokenSelectionObjective
    entropy_range: tuple[Tensor, Tensor]
    divergence_range: tuple[Tensor, Tensor]
    threshold: float | None  # the least score that is kept; None weights by the score

    @property
    def accepts(self) -> tuple[type, ...]:
        return self.source.accepts

    def counts(self, batch: AlignedBatch) -> dict[str, float]:
        return self.source.counts(batch)

    def __call__(
        self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch, /
    ) -> ObjectiveOutput:
        scores = _scores(self.source.measure(student, teacher, batch), self.entropy_range, self.divergence_range)
        chosen = scores if self.threshold is None else (scores >= self.threshold).to(scores.dtype)
        out = self.source.objective(student, teacher, replace(batch, weights=batch.weights * chosen))
        share = Metric(sum=chosen.sum(), count=float(batch.num_pairs))
        return replace(out, metrics=out.metrics | {"selection/mean_weight": share})


def _own(objective: Objective, name: str, default: Any) -> Any:
    """What an objective says of itself beyond the protocol."""
    return getattr(objective, name, default)


def _scores(measures: Tensor, entropy_range: tuple[Tensor, Tensor], divergence_range: tuple[Tensor, Tensor]) -> Tensor:
    """`[N]` in [0, 1]; 1 where a measure is not finite."""
    finite = torch.isfinite(measures).all(-1)
    unsure, far = torch.where(finite[:, None], measures, 0.0).unbind(-1)
    scores = tip_scores(unsure, far, entropy_range=entropy_range, divergence_range=divergence_range)
    return torch.where(finite, scores, 1.0)


def _threshold(scores: Tensor, keep: float) -> float:
    """A score between the last that is kept and the first that is not: rounding in a second pass moves neither."""
    ranked = scores.sort(descending=True).values
    num_kept = math.ceil(keep * ranked.numel())
    if num_kept >= ranked.numel():
        return -math.inf
    last, following = float(ranked[num_kept - 1]), float(ranked[num_kept])
    return (last + following) / 2
