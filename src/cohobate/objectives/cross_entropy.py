# SPDX-License-Identifier: Apache-2.0
"""Negative log-likelihood of the tokens that stand there: plain fine-tuning, and the hard-label part of a mixture.

It needs no teacher. On completions that the student drew itself its expected gradient is zero, so only recorded rows
teach it anything; `rows="recorded"` restricts it to them and counts them apart.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ConfigError
from cohobate.functional.fused_logprobs import (
    FusedTokenLoss,
    TokenLoss,
    fused_linear_logprobs,
    fused_linear_token_loss,
)
from cohobate.functional.logprobs import entropy, gather_last, log_softmax
from cohobate.functional.reduce import weigh
from cohobate.functional.scores import DenseScores, HiddenScores, TeacherScores
from cohobate.objectives.protocol import PAIRS, Metric, ObjectiveOutput, StudentScores, Term, check_scores

CE_TOKENS = "ce_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropyObjective:
    """Negative log-likelihood in nats of the target ids at temperature 1. One term, `"ce"`.

    Counted in `"pairs"`, or in `"ce_tokens"` if only the recorded rows take part.
    """

    rows: Literal["all", "recorded"] = "all"

    def __post_init__(self) -> None:
        if self.rows not in ("all", "recorded"):
            raise ConfigError(f"rows must be 'all' or 'recorded', got {self.rows!r}.")

    @property
    def accepts(self) -> tuple[type, ...]:
        return ()

    def counts(self, batch: AlignedBatch) -> dict[str, float]:
        if self.rows == "all":
            return {PAIRS: float(batch.num_pairs)}
        return {CE_TOKENS: float(_recorded(batch).sum())}

    def __call__(
        self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch, /
    ) -> ObjectiveOutput:
        check_scores(self, student, teacher, batch)
        chosen = torch.ones_like(batch.weights, dtype=torch.bool) if self.rows == "all" else _recorded(batch)
        weights = torch.where(chosen, batch.weights, 0.0)
        read = token_losses(student, batch.target_ids, lambda logprobs, rows: weigh(-logprobs, weights[rows]))
        count = chosen.sum()
        return ObjectiveOutput(
            terms={"ce": Term(sum=read.loss_sum, count=PAIRS if self.rows == "all" else CE_TOKENS)},
            metrics={
                "nll": Metric(sum=torch.where(chosen, -read.logprobs, 0.0).sum(), count=count),
                "entropy/student": Metric(sum=torch.where(chosen, read.entropy, 0.0).sum(), count=count),
            },
            pair_loss=read.loss,
        )


def _recorded(batch: AlignedBatch) -> Tensor:
    return ~batch.is_sampled[batch.row]


def token_losses(
    student: StudentScores, target_ids: Tensor, token_loss: TokenLoss, *, temperature: float = 1.0
) -> FusedTokenLoss:
    """The sum of `token_loss` over the log-probabilities of `target_ids [N]`, and what it was made of, in nats."""
    if isinstance(student, HiddenScores):
        head = student.head
        return fused_linear_token_loss(
            student.hidden,
            head.weight,
            target_ids,
            token_loss,
            temperature=temperature,
            bias=head.bias,
            scale=head.scale,
            softcap=head.softcap,
        )
    logprobs, student_entropy = target_logprobs(student, target_ids, temperature=temperature)
    loss = token_loss(logprobs, slice(None))
    return FusedTokenLoss(loss_sum=loss.sum(), loss=loss.detach(), logprobs=logprobs.detach(), entropy=student_entropy)


def target_logprobs(
    scores: HiddenScores | DenseScores, target_ids: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[N]` of `target_ids`, differentiable, and the entropies `[N]`, detached, both in nats."""
    if isinstance(scores, HiddenScores):
        head = scores.head
        return fused_linear_logprobs(
            scores.hidden,
            head.weight,
            target_ids,
            temperature=temperature,
            bias=head.bias,
            scale=head.scale,
            softcap=head.softcap,
        )
    logprobs = log_softmax(scores.dense, temperature=temperature)
    return gather_last(logprobs, target_ids), entropy(logprobs.detach())
