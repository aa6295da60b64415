# SPDX-License-Identifier: Apache-2.0
"""Another objective, each pair weighted by how much likelier its token has become since it was drawn.

The weight is the importance ratio pi(token) / pi_0(token), of the policy that is trained to the one that drew, cut off
above: truncated importance sampling. It is a constant, so a pair's loss keeps its own gradient.

What it corrects is the draw of the token itself. A loss that reads this token (an estimate from samples) becomes, in
expectation over pi_0, the one under pi. A loss that reads whole distributions at a position does not depend on the
token drawn there: in expectation its weight is 1, cut off less than 1, and the older prefixes stay as they are. There
it only holds back tokens on which the two policies have come apart, be it by steps or by another engine's arithmetic.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ConfigError
from cohobate.functional.scores import TeacherScores
from cohobate.objectives.cross_entropy import target_logprobs
from cohobate.objectives.policy_gradient import PolicyGradientObjective, rows_of
from cohobate.objectives.protocol import Metric, Objective, ObjectiveOutput, StepObjective, StudentScores
from cohobate.objectives.weighted import SumObjective


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeightedObjective:
    """`objective` with each pair's weight times `min(pi(token) / pi_0(token), clip)`; the denominator stays the count.

    `clip=inf` cuts nothing off. Wants tokens that were drawn at the objective's temperature from the whole vocabulary,
    with their log-probabilities. Costs one product over the vocabulary more. Metrics: `ratio/mean`, before the cut,
    and `ratio/clipped_share`. A selection of tokens goes around it, not inside. Held-out rows are not weighted.

    Source: SDPO (arXiv 2601.20802) weights its divergence so, with clip 2.
    """

    objective: Objective
    clip: float = 2.0

    def __post_init__(self) -> None:
        if not self.clip >= 1:
            raise ConfigError(f"clip must be at least 1, where a fresh rollout keeps its weight, got {self.clip}.")
        _check_inner(self.objective)

    @property
    def accepts(self) -> tuple[type, ...]:
        return self.objective.accepts

    @property
    def refusals(self) -> dict[type, str]:
        return getattr(self.objective, "refusals", {})

    @property
    def temperature(self) -> float:
        """That of the objective it wraps; the ratio is taken at it too."""
        return getattr(self.objective, "temperature", 1.0)

    @property
    def needs_sampler_logprobs(self) -> bool:
        return True

    @property
    def needs_fresh_rollouts(self) -> bool:
        return False

    @property
    def held_out(self) -> Objective:
        """Held-out rows may be drawn in another way, and nothing is learnt from them."""
        return self.objective

    def counts(self, batch: AlignedBatch) -> dict[str, float]:
        return self.objective.counts(batch)

    def __call__(
        self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch, /
    ) -> ObjectiveOutput:
        drawn = self._drawn(batch)
        with torch.no_grad():
            now, _ = target_logprobs(student, batch.target_ids, temperature=self.temperature)  # [N]
            ratio = (now - drawn.to(now.dtype)).exp()
            held = ratio.clamp(max=self.clip)  # NaN stays visible
            weights = torch.where(batch.weights == 0, 0.0, batch.weights.to(held.dtype) * held)
        out = self.objective(student, teacher, replace(batch, weights=weights))
        count = float(batch.num_pairs)
        metrics = {
            "ratio/mean": Metric(sum=ratio.sum(), count=count),
            "ratio/clipped_share": Metric(sum=(ratio > self.clip).to(ratio.dtype).sum(), count=count),
        }
        return replace(out, metrics=out.metrics | metrics)

    def _drawn(self, batch: AlignedBatch) -> Tensor:
        """`[N]` log-probabilities at the draw; refuses tokens that no known policy drew."""
        draw = batch.sampler_logprobs
        missing = torch.ones_like(batch.row, dtype=torch.bool) if draw is None else torch.isnan(draw)
        if bool(missing.any()):
            raise ConfigError(
                f"the importance ratio divides by the probability at the draw, but {int(missing.sum())} of "
                f"{batch.num_pairs} pairs have no sampler_logprobs ({rows_of(batch, missing)}). Use a rollout source "
                "that records them (LocalRollouts does, in RolloutBatch.sampler_logprobs) and sampled rows only "
                "(on_policy_fraction=1, no recorded completions); or leave the ratio out (importance_clip: null)."
            )
        return missing.float() if draw is None else draw  # none of none


def _check_inner(objective: Any) -> None:
    """Refuse what has a ratio of its own, what chooses from the step, and what compares no pairs with a teacher."""
    name = type(objective).__name__
    parts = [part for _, part in objective.parts.values()] if isinstance(objective, SumObjective) else []
    for part in parts:
        _check_inner(part)
    if not objective.accepts or getattr(objective, "own_tokenizers", None) is not None:
        raise ConfigError(
            f"an importance ratio weights pairs of student and teacher; {name} has none. Put a DivergenceObjective "
            "into the ImportanceWeightedObjective."
        )
    if isinstance(objective, PolicyGradientObjective) or getattr(objective, "needs_sampler_logprobs", False):
        raise ConfigError(
            f"{name} has a ratio of its own: set its clip_epsilon instead of putting it into an "
            "ImportanceWeightedObjective."
        )
    if isinstance(objective, StepObjective):
        raise ConfigError(
            f"{name} looks at the whole step and goes around an ImportanceWeightedObjective, not inside: "
            "TokenSelectionObjective(objective=ImportanceWeightedObjective(objective=...))."
        )
