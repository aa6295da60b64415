# SPDX-License-Identifier: Apache-2.0
"""What is trained on: the kinds of `objective`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cohobate.cli.schema.section import Section
from cohobate.functional.divergences import Clip
from cohobate.functional.projection import Mode
from cohobate.functional.support_events import ForcedMode
from cohobate.functional.topk import Tail, TopKOf
from cohobate.objectives.aggregate import DynamicScaling, KdMode, TeacherMetric


class TokenSelection(Section):
    """Train on the pairs of a step where the student is unsure or far from the teacher."""

    keep: float | None = Field(default=0.5, gt=0, le=1)
    signal: Literal["soft_or", "entropy", "divergence"] = "soft_or"


class Divergence(Section):
    """The whole distributions are compared at every token."""

    kind: Literal["divergence"]
    beta: float = Field(default=0.5, ge=0, le=1)
    distill_temperature: float = Field(default=1.0, gt=0)
    clip: Clip = "none"
    clip_limit: float | None = None
    top_k: int | None = None
    top_k_of: TopKOf = "teacher"
    tail: Tail = "bucket"
    importance_clip: float | None = None  # weights each pair by min(pi(token) / pi_0(token), importance_clip)
    select: TokenSelection | None = None


class PolicyGradient(Section):
    """The teacher scores the sampled token only."""

    kind: Literal["policy_gradient"]
    distill_temperature: float = Field(default=1.0, gt=0)
    iw_gamma: float | None = None
    clip_epsilon: float | None = None
    select: TokenSelection | None = None


class CrossEntropy(Section):
    """Next-token prediction on recorded completions (SFT); takes no teacher."""

    kind: Literal["cross_entropy"]


def _off(value: Any) -> Any:
    """YAML reads a bare `off` as False."""
    return "off" if value is False else value


class OfTeachers(Section):
    """What the objectives over `teachers` have in common; defaults are the objectives' own, which a test compares."""

    distill_temperature: float = Field(default=1.0, gt=0)
    kd_mode: KdMode = "sum"
    sum_weights_metric: TeacherMetric | None = None
    alpha: float = 1.0
    same_vocab_top_k: int | None = 8192
    dynamic_scaling: Annotated[DynamicScaling, BeforeValidator(_off)] = "previous_step"
    kd_weight: float = 1.0
    ce_weight: float = 0.1
    ce_rows: Literal["recorded", "all"] = "recorded"
    chosen_over: Literal["step", "call"] = "step"


class CommonSupport(OfTeachers):
    """CSD: what the vocabularies share is compared chunk by chunk, the rest as one event."""

    kind: Literal["csd"]
    beta: float = Field(default=0.5, ge=0, le=1)
    same_vocab_beta: float = Field(default=0.0, ge=0, le=1)
    mismatch_weight: float = 5.0
    realized_only_mismatch: bool = False
    keep_realized: bool = True
    min_support: int = 1
    forced_mode: ForcedMode = "union"
    normalize_teacher_by_vocab: bool = False


class Projected(OfTeachers):
    """X-Token: the student's distribution is projected onto each teacher's vocabulary."""

    kind: Literal["xtoken"]
    mode: Mode = "pkl"
    reverse: bool = False
    exact_only: bool = False
    vocab_top_k: int | None = 8192
    uncommon_top_k: int = 8192
    drop_unreachable: bool = True
    normalize_teacher_by_vocab: bool = False


class MultiTeacher(OfTeachers):
    """Teachers with the student's own tokenizer: the whole distributions are compared at every token, nothing else."""

    kind: Literal["multi_teacher"]
    beta: float = Field(default=0.5, ge=0, le=1)
    same_vocab_top_k: int | None = None
    dynamic_scaling: Annotated[DynamicScaling, BeforeValidator(_off)] = "off"
    ce_weight: float = 0.0


Objective = Annotated[
    Divergence | PolicyGradient | CrossEntropy | CommonSupport | Projected | MultiTeacher, Field(discriminator="kind")
]
