# SPDX-License-Identifier: Apache-2.0
"""Reverse KL from sampled tokens alone: the teacher scores the token that the student drew, and that is the reward.

The advantage is minus the k1 estimate, `log p_teacher - log p_student`, as a constant; times the gradient of the
token's log-probability it is, in expectation over the student's own draws, exactly the gradient of KL(student ||
teacher). It is not normalised: subtracting a batch mean would erase a teacher that dislikes everything equally. The
value that is logged is an estimate of the KL, but with far more variance than the full divergence, which is the better
choice whenever the teacher's distribution is at hand.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ConfigError
from cohobate.functional.estimators import clipped_surrogate, iw_opd_weights, k1, k3, sampled_kl_loss
from cohobate.functional.fused_logprobs import FusedTokenLoss
from cohobate.functional.logprobs import check_temperature, upcast
from cohobate.functional.reduce import weigh
from cohobate.functional.scores import DenseScores, HiddenScores, SampledScores, TeacherScores, TopKScores
from cohobate.objectives.cross_entropy import target_logprobs, token_losses
from cohobate.objectives.protocol import (
    PAIRS,
    Metric,
    ObjectiveOutput,
    StudentScores,
    Term,
    check_scores,
    config_errors,
    only_weighted,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradientObjective:
    """Policy gradient of KL(student || teacher) on tokens the student drew, in nats. One term `"pg"`, in `"pairs"`.

    `iw_gamma` adds the weights of IW-OPD (arXiv 2606.22600): `w_t = 1 + gamma (1 - sum_{i<t} |a_i| / max(sum |a_i|,
    1e-8))` over the tokens of the completion, so early tokens count more. `clip_epsilon` puts both into PPO's clipped
    surrogate: with pi_0 the policy that drew the token, `a = log p_teacher - log pi_0` stays as it was at the draw,
    and the ratio `p_student / pi_0` carries the gradient until it has moved by epsilon. It is needed as soon as one
    rollout serves more than one optimizer step, and it wants tokens drawn at `temperature` from the whole vocabulary:
    log-probabilities of a truncated draw (top-p, top-k, min-p) are renormalised, which shifts the advantage.
    """

    temperature: float = 1.0  # divides both sides' logits; leave it at the temperature the tokens were drawn at
    clip_epsilon: float | None = None
    iw_gamma: float | None = None

    def __post_init__(self) -> None:
        with config_errors():
            check_temperature(self.temperature)
        if self.clip_epsilon is not None and not 0 < self.clip_epsilon < 1:
            raise ConfigError(f"clip_epsilon must be in (0, 1) or None, got {self.clip_epsilon}.")
        if self.iw_gamma is not None and not 0 <= self.iw_gamma < math.inf:
            raise ConfigError(f"iw_gamma must be a finite number >= 0 or None, got {self.iw_gamma}.")

    @property
    def accepts(self) -> tuple[type, ...]:
        return (SampledScores, HiddenScores, DenseScores, TopKScores)

    @property
    def needs_sampler_logprobs(self) -> bool:
        """Whether the rollouts must carry the log-probabilities of the draw."""
        return self.clip_epsilon is not None

    @property
    def needs_fresh_rollouts(self) -> bool:
        """Whether a second optimizer step on the same rollouts would be wrong: without a ratio it is."""
        return self.clip_epsilon is None

    def counts(self, batch: AlignedBatch) -> dict[str, float]:
        self._check_drawn(batch)
        return {PAIRS: float(batch.num_pairs)}

    def __call__(
        self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch, /
    ) -> ObjectiveOutput:
        check_scores(self, student, teacher, batch)
        self._check_drawn(batch)
        assert teacher is not None
        with torch.no_grad():
            teacher_logprobs = upcast(_teacher_logprobs(teacher, batch.target_ids, self.temperature))
            drawn = None if self.clip_epsilon is None else batch.sampler_logprobs  # [N]
            weights = self._weights(student, teacher_logprobs, drawn, batch)

        def token_loss(logprobs: Tensor, rows: slice) -> Tensor:
            logprobs, target = only_weighted(logprobs, batch.weights[rows]), teacher_logprobs[rows].to(logprobs.dtype)
            if drawn is None or self.clip_epsilon is None:
                return weigh(sampled_kl_loss(logprobs, target, estimator="policy_gradient"), weights[rows])
            before = drawn[rows].to(logprobs.dtype)
            surrogate, _ = clipped_surrogate(logprobs, before, target - before, clip_epsilon=self.clip_epsilon)
            return weigh(surrogate, weights[rows])

        read = token_losses(student, batch.target_ids, token_loss, temperature=self.temperature)
        return ObjectiveOutput(
            terms={"pg": Term(sum=read.loss_sum, count=PAIRS)},
            metrics=self._metrics(read, teacher_logprobs.to(read.logprobs.dtype), drawn, batch),
            pair_loss=read.loss,
        )

    def _weights(
        self, student: StudentScores, teacher_logprobs: Tensor, drawn: Tensor | None, batch: AlignedBatch
    ) -> Tensor:
        """`[N]` weights of the pairs. Those of IW-OPD look at whole completions, so the student is read beforehand."""
        if self.iw_gamma is None:
            return batch.weights
        if drawn is None:
            drawn, _ = target_logprobs(student, batch.target_ids, temperature=self.temperature)
        advantages = teacher_logprobs.to(drawn.dtype) - drawn
        return batch.weights.to(drawn.dtype) * _per_pair_iw_weights(advantages, batch, self.iw_gamma)

    def _metrics(
        self, read: FusedTokenLoss, teacher_logprobs: Tensor, drawn: Tensor | None, batch: AlignedBatch
    ) -> dict[str, Metric]:
        """The ratio is over the pairs whose draw has a log-probability; it stays near 1 while the rollout is fresh."""
        now, draw = read.logprobs, batch.sampler_logprobs
        draw = torch.full_like(now, math.nan) if draw is None else draw.to(now.dtype)
        known = ~torch.isnan(draw)
        ratio = torch.where(known, now - torch.where(known, draw, 0.0), -math.inf).exp()
        advantages = teacher_logprobs - (now if drawn is None else draw)
        metrics = {
            "kl/reverse": _mean(k1(now, teacher_logprobs)),
            "kl/reverse_k3": _mean(k3(now, teacher_logprobs)),
            "entropy/student": _mean(read.entropy),
            "advantage/mean": _mean(advantages),
            "ratio/mean": Metric(sum=ratio.sum(), count=known.sum()),
        }
        if self.clip_epsilon is not None:
            _, clipped = clipped_surrogate(now, draw, advantages, clip_epsilon=self.clip_epsilon)
            metrics["ratio/clipped_share"] = _mean(clipped.to(now.dtype))
        return metrics

    def _check_drawn(self, batch: AlignedBatch) -> None:
        """Refuse tokens that no known policy drew: on them the surrogate is not an estimate of anything."""
        if self.needs_sampler_logprobs:
            draw = batch.sampler_logprobs
            missing = torch.ones_like(batch.row, dtype=torch.bool) if draw is None else torch.isnan(draw)
            if bool(missing.any()):
                raise ConfigError(
                    f"PolicyGradientObjective with clip_epsilon={self.clip_epsilon} divides by the probability at the"
                    f" draw, but {int(missing.sum())} of {batch.num_pairs} pairs have no sampler_logprobs"
                    f" ({rows_of(batch, missing)}). Use a rollout source that records them (LocalRollouts does, in"
                    " RolloutBatch.sampler_logprobs) and sampled rows only (on_policy_fraction=1, no recorded"
                    " completions); or leave clip_epsilon out and take one optimizer step per rollout."
                )
            return
        recorded = ~batch.is_sampled[batch.row]
        if bool(recorded.any()):
            raise ConfigError(
                f"PolicyGradientObjective rewards tokens that the student drew itself; {int(recorded.sum())} of "
                f"{batch.num_pairs} pairs are recorded ({rows_of(batch, recorded)}), where it estimates nothing. Set "
                "on_policy_fraction=1, or use DivergenceObjective, which needs no draw."
            )


def _mean(values: Tensor) -> Metric:
    return Metric(sum=values.sum(), count=float(values.numel()))


def rows_of(batch: AlignedBatch, chosen: Tensor) -> str:
    """The names of the first few rows with a chosen pair."""
    rows = batch.row[chosen].unique().tolist()
    names = ", ".join(repr(batch.sample_ids[row]) for row in rows[:3])
    return f"rows {names}" + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")


def _teacher_logprobs(teacher: Any, target_ids: Tensor, temperature: float) -> Tensor:
    """The teacher's log-probability `[N]` of each drawn token at `temperature`."""
    if isinstance(teacher, HiddenScores | DenseScores):
        return target_logprobs(teacher, target_ids, temperature=temperature)[0]
    if isinstance(teacher, TopKScores):
        with config_errors():
            return teacher.realized_logit / temperature - teacher.normalizer(temperature)
    if teacher.temperature != temperature:
        raise ConfigError(
            f"the teacher's log-probabilities are at temperature {teacher.temperature}, the objective is at"
            f" {temperature}. A log-probability cannot be moved to another temperature: set both to the same number."
        )
    return teacher.logprobs


def _per_pair_iw_weights(advantages: Tensor, batch: AlignedBatch, gamma: float) -> Tensor:
    """IW-OPD weights of each pair `[N]`: the pairs of a row, in order, are its valid tokens."""
    if batch.num_pairs == 0:
        return torch.ones_like(advantages)
    lengths = torch.bincount(batch.row, minlength=batch.num_rows)  # [B]
    first = lengths.cumsum(0) - lengths
    column = torch.arange(batch.num_pairs, device=batch.row.device) - first[batch.row]  # [N]
    width = int(lengths.max())
    table = advantages.new_zeros(batch.num_rows, width).index_put((batch.row, column), advantages.detach())
    mask = torch.arange(width, device=batch.row.device)[None, :] < lengths[:, None]
    return iw_opd_weights(table, mask, gamma=gamma)[batch.row, column].to(advantages.dtype)
