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
from cohobate.functional.fused_logprobs import fused_linear_logprobs
from cohobate.functional.logprobs import entropy, gather_last, log_softmax
from cohobate.functional.scores import DenseScores, HiddenScores, TeacherScores
from cohobate.objectives.protocol import PAIRS, Metric, ObjectiveOutput, StudentScores, Term, check_scores, weigh

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
        logprobs, student_entropy = target_logprobs(student, batch.target_ids)
        loss = weigh(-logprobs, batch.weights)
        nll, count = -logprobs.detach(), torch.tensor(float(batch.num_pairs), device=logprobs.device)
        if self.rows == "recorded":
            chosen = _recorded(batch)
            loss, nll = torch.where(chosen, loss, 0.0), torch.where(chosen, nll, 0.0)
            student_entropy, count = torch.where(chosen, student_entropy, 0.0), chosen.sum()
        return ObjectiveOutput(
            terms={"ce": Term(sum=loss.sum(), count=PAIRS if self.rows == "all" else CE_TOKENS)},
            metrics={
                "nll": Metric(sum=nll.sum(), count=count),
                "entropy/student": Metric(sum=student_entropy.sum(), count=count),
            },
            pair_loss=loss.detach(),
        )


def _recorded(batch: AlignedBatch) -> Tensor:
    return ~batch.is_sampled[batch.row]


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
