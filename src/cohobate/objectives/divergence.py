# SPDX-License-Identifier: Apache-2.0
"""The full divergence between student and teacher at every pair: GKD, OPD, OPSD and SDFT differ only in what feeds it.

The options of a run and what it logs are here; how the numbers of a pair come about is in `pair_divergences.py`.
"""

from dataclasses import dataclass

from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ConfigError
from cohobate.functional.divergences import Clip, check_beta
from cohobate.functional.logprobs import check_temperature
from cohobate.functional.reduce import weigh
from cohobate.functional.scores import DenseScores, HiddenScores, TeacherScores, TopKScores
from cohobate.functional.topk import Tail, TopKOf
from cohobate.objectives.pair_divergences import read_pairs
from cohobate.objectives.protocol import (
    PAIRS,
    Metric,
    ObjectiveOutput,
    StudentScores,
    Term,
    check_scores,
    config_errors,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceObjective:
    """Divergence per pair in nats; `beta` weights the teacher: 0 is forward KL, 1 is reverse KL, between them JSD.

    One term `"kd"`, counted in `"pairs"`. Source: GKD, arXiv 2306.13649. The metrics `kl/*` and `entropy/*` are at
    `temperature`, the loss is not multiplied by its square. A teacher's `TopKScores` are compared over its K ids and
    one entry for the rest; there the metrics of the teacher are those of that coarser view, which are lower bounds.
    """

    beta: float = 0.5
    temperature: float = 1.0  # divides both sides' logits
    clip: Clip = "none"  # "token" caps a pair's divergence; "pointwise" caps each entry, a pseudo-loss
    clip_limit: float | None = None  # nats; goes with `clip`
    top_k: int | None = None  # look only at one side's k likeliest ids although all are known
    top_k_of: TopKOf = "teacher"  # that side; the student's are chosen anew at every pair, without a gradient
    tail: Tail = "bucket"  # what becomes of the ids outside a top-k support

    def __post_init__(self) -> None:
        with config_errors():
            check_beta(self.beta)
            check_temperature(self.temperature)
        if self.clip not in ("none", "token", "pointwise"):
            raise ConfigError(f"clip must be 'none', 'token' or 'pointwise', got {self.clip!r}.")
        if (self.clip == "none") != (self.clip_limit is None):
            raise ConfigError(
                f"clip={self.clip!r} with clip_limit={self.clip_limit}: give both, or clip='none' and no clip_limit."
            )
        if self.clip_limit is not None and not self.clip_limit > 0:
            raise ConfigError(
                f"clip_limit must be > 0 nats (at 0 every pair is without gradient), got {self.clip_limit}."
            )
        if self.tail not in ("bucket", "renormalize", "drop"):
            raise ConfigError(f"tail must be 'bucket', 'renormalize' or 'drop', got {self.tail!r}.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1 or None, got {self.top_k}.")
        if self.top_k_of not in ("teacher", "student"):
            raise ConfigError(f"top_k_of must be 'teacher' or 'student', got {self.top_k_of!r}.")
        if self.top_k_of == "student" and self.top_k is None:
            raise ConfigError("top_k_of='student' without top_k chooses nothing. Set top_k, e.g. 100.")
        if self.top_k == 1 and self.tail == "renormalize":
            raise ConfigError("top_k=1 with tail='renormalize' is identically zero. Use tail='bucket', or top_k >= 2.")
        if self.clip == "pointwise" and self.top_k is not None:
            raise ConfigError("clip='pointwise' needs every vocabulary entry; leave top_k out or use clip='token'.")

    @property
    def accepts(self) -> tuple[type, ...]:
        """Only the kinds to which every option that was set applies."""
        whole, kept = (HiddenScores, DenseScores), (TopKScores,)
        if self.top_k is not None or self.clip == "pointwise":
            return whole
        return kept if self.tail != "bucket" else whole + kept

    @property
    def refusals(self) -> dict[type, str]:
        """Why a kind of scores is not among `accepts`, where that is not plain."""
        if self.top_k_of == "teacher":
            return {}
        return {
            TopKScores: "top_k_of='student' asks the teacher for the ids that the student finds likeliest, and one "
            "that is stored or on a server tells its own"
        }

    def counts(self, batch: AlignedBatch) -> dict[str, float]:
        return {PAIRS: float(batch.num_pairs)}

    def __call__(
        self, student: StudentScores, teacher: TeacherScores | None, batch: AlignedBatch, /
    ) -> ObjectiveOutput:
        check_scores(self, student, teacher, batch)
        read, clipped = read_pairs(self, student, teacher, weights=batch.weights)
        count = float(batch.num_pairs)
        metrics = {
            "kl/forward": Metric(sum=read.forward_kl.sum(), count=count),
            "kl/reverse": Metric(sum=read.reverse_kl.sum(), count=count),
            "entropy/student": Metric(sum=read.student_entropy.sum(), count=count),
            "entropy/teacher": Metric(sum=read.teacher_entropy.sum(), count=count),
            "top1_agreement": Metric(sum=read.top1_agreement.sum(), count=count),
        }
        if self.clip != "none":
            metrics["kd/clipped_share"] = Metric(sum=clipped.sum(), count=count)
        return ObjectiveOutput(
            terms={"kd": Term(sum=read.loss_sum, count=PAIRS)},
            metrics=metrics,
            pair_loss=weigh(read.divergence, batch.weights),
        )
