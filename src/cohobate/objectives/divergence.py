# SPDX-License-Identifier: Apache-2.0
"""The full divergence between student and teacher at every pair: GKD, OPD, OPSD and SDFT differ only in what feeds it.

A student that arrives as hidden states is compared by the fused functions, which keep no `[N, V]`. Where one side
arrives as logits, and for a clip of single entries, a few rows of logits are made at a time, and again in the backward
pass, so that none are kept either.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ConfigError
from cohobate.functional.chunked_head import row_chunks
from cohobate.functional.divergences import Clip, clip_divergence, divergence_terms
from cohobate.functional.fused_linear import FusedDivergence, fused_linear_divergence
from cohobate.functional.fused_topk import fused_linear_topk
from cohobate.functional.kernels import kernels_for
from cohobate.functional.logprobs import entropy, log_softmax
from cohobate.functional.reduce import weigh
from cohobate.functional.scores import DenseScores, HiddenScores, TeacherScores, TopKScores, top_k_scores
from cohobate.functional.topk import Tail, bucketed_view, topk_divergence
from cohobate.objectives.protocol import (
    PAIRS,
    Metric,
    ObjectiveOutput,
    StudentScores,
    Term,
    check_scores,
    only_weighted,
)

_CHUNK_ENTRIES = 1 << 24  # logits held at once outside the fused function: 64 MiB of float32 a tensor

_Rows = TypeVar("_Rows", bound=HiddenScores | DenseScores | TopKScores)


class _Pairs(NamedTuple):
    """What is known of each pair `[n]`; only `divergence` has a gradient."""

    divergence: Tensor
    clipped: Tensor
    student_entropy: Tensor
    teacher_entropy: Tensor
    top1_agreement: Tensor
    forward_kl: Tensor
    reverse_kl: Tensor


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
    top_k: int | None = None  # look only at the teacher's k likeliest ids although all are known
    tail: Tail = "bucket"  # what becomes of the ids outside a top-k support

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"beta must be in [0, 1] (0 forward KL, 1 reverse KL), got {self.beta}.")
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


def read_pairs(
    objective: DivergenceObjective, student: StudentScores, teacher: TeacherScores | None, *, weights: Tensor
) -> tuple[FusedDivergence, Tensor]:
    """The weighted loss and what is known of each pair, and the share `[N]` of each pair that the clip holds."""
    assert isinstance(teacher, HiddenScores | DenseScores | TopKScores)
    if isinstance(student, HiddenScores) and objective.clip != "pointwise":
        if isinstance(teacher, TopKScores):
            kept = top_k_logprobs(teacher, objective.temperature)
            return _held(objective, weights, lambda w: _fused_top_k(objective, student, teacher.ids, kept, w))
        if objective.top_k is not None:
            return _read_cut(objective, student, teacher, weights)
        if isinstance(teacher, HiddenScores):
            return _held(objective, weights, lambda w: _fused(objective, student, teacher, w))
    pairs = _in_chunks(lambda s, t, w: _read_rows(objective, s, t, w), student, teacher, weights)
    loss_sum = weigh(pairs.divergence, weights).sum()
    known = pairs._replace(divergence=pairs.divergence.detach())._asdict()
    del known["clipped"]
    return FusedDivergence(loss_sum=loss_sum, **known), pairs.clipped


def _fused(
    objective: DivergenceObjective, student: HiddenScores, teacher: HiddenScores, weights: Tensor
) -> FusedDivergence:
    return fused_linear_divergence(
        student.hidden,
        student.head.weight,
        teacher.hidden,
        teacher.head.weight,
        beta=objective.beta,
        temperature=objective.temperature,
        weights=weights,
        student_bias=student.head.bias,
        teacher_bias=teacher.head.bias,
        student_scale=student.head.scale,
        teacher_scale=teacher.head.scale,
        student_softcap=student.head.softcap,
        teacher_softcap=teacher.head.softcap,
    )


def _fused_top_k(
    objective: DivergenceObjective, student: HiddenScores, ids: Tensor, logprobs: Tensor, weights: Tensor
) -> FusedDivergence:
    return fused_linear_topk(
        student.hidden,
        student.head.weight,
        ids,
        logprobs,
        beta=objective.beta,
        tail=objective.tail,
        temperature=objective.temperature,
        weights=weights,
        bias=student.head.bias,
        scale=student.head.scale,
        softcap=student.head.softcap,
    )


def _held(
    objective: DivergenceObjective, weights: Tensor, fused: Callable[[Tensor], FusedDivergence]
) -> tuple[FusedDivergence, Tensor]:
    """`fused(weights)` under the clip. A token clip costs one more pass, without gradient, to find whom to hold."""
    if objective.clip == "none":
        read = fused(weights)
        return read, torch.zeros_like(read.divergence)
    limit = objective.clip_limit
    assert limit is not None
    with torch.no_grad():
        held = fused(weights).divergence > limit  # False for NaN, which must stay visible
    read = fused(torch.where(held, 0.0, weights))
    constant = limit * torch.where(held, weights, 0.0).to(read.loss_sum.dtype).sum()
    divergence = torch.where(held, limit, read.divergence)
    return replace(read, loss_sum=read.loss_sum + constant, divergence=divergence), held.to(divergence.dtype)


def _read_cut(
    objective: DivergenceObjective, student: HiddenScores, teacher: HiddenScores | DenseScores, weights: Tensor
) -> tuple[FusedDivergence, Tensor]:
    """The loss over the k likeliest ids of a teacher that knows all; the metrics are those of the whole vocabulary."""
    assert objective.top_k is not None
    temperature, num_pairs = objective.temperature, student.hidden.shape[0]
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        for rows in row_chunks(num_pairs, max(1, _CHUNK_ENTRIES // student.vocab_size)) if num_pairs else [slice(0)]:
            logits, told = _select(student, rows).logits(), _select(teacher, rows).logits()  # [n, V]
            scales = (1 / temperature, 1 / temperature)
            whole = kernels_for(logits).divergence_rows(logits, told, objective.beta, scales=scales)  # [6, n]
            scores = top_k_scores(told, objective.top_k, told.argmax(-1), temperature=temperature)
            parts.append((scores.ids, scores.logprobs(), whole))
    ids, logprobs = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    _, _, teacher_entropy, _, forward, reverse = torch.cat([part[2] for part in parts], dim=-1)
    read, clipped = _held(objective, weights, lambda w: _fused_top_k(objective, student, ids, logprobs, w))
    return replace(read, teacher_entropy=teacher_entropy, forward_kl=forward, reverse_kl=reverse), clipped


def _read_rows(
    objective: DivergenceObjective,
    student: StudentScores,
    teacher: HiddenScores | DenseScores | TopKScores,
    weights: Tensor,
) -> _Pairs:
    """A few rows through logits: the plain twin of the fused functions, and the only way where logits arrive."""
    temperature = objective.temperature
    logits = only_weighted(student.logits(), weights)  # [n, V]
    s = log_softmax(logits, temperature=temperature)
    if isinstance(teacher, TopKScores):
        ids, kept = teacher.ids, top_k_logprobs(teacher, temperature)
        best = teacher.ids.gather(-1, teacher.logits.argmax(-1, keepdim=True)).squeeze(-1)
        seen_s, seen_t = bucketed_view(s.detach(), ids, kept)
    else:
        with torch.no_grad():
            teacher_logits = teacher.logits().detach()
            t = log_softmax(teacher_logits, temperature=temperature)
        best, seen_s, seen_t = t.argmax(-1), s.detach(), t
        if objective.top_k is None:
            value, clipped = clip_divergence(
                divergence_terms(s, t, beta=objective.beta), clip=objective.clip, limit=objective.clip_limit
            )
            return _pairs(value, clipped, s, best, seen_s, seen_t)
        scores = top_k_scores(teacher_logits, objective.top_k, best, temperature=temperature)
        ids, kept = scores.ids, scores.logprobs()
    value = topk_divergence(logits, ids, kept, beta=objective.beta, tail=objective.tail, temperature=temperature)
    value, clipped = clip_divergence(value[:, None], clip=objective.clip, limit=objective.clip_limit)
    return _pairs(value, clipped, s, best, seen_s, seen_t)


def _pairs(value: Tensor, clipped: Tensor, s: Tensor, best: Tensor, seen_s: Tensor, seen_t: Tensor) -> _Pairs:
    with torch.no_grad():
        return _Pairs(
            divergence=value,
            clipped=clipped,
            student_entropy=entropy(s.detach()),
            teacher_entropy=entropy(seen_t),
            top1_agreement=(s.detach().argmax(-1) == best).to(s.dtype),
            forward_kl=divergence_terms(seen_s, seen_t, beta=0.0).sum(-1),
            reverse_kl=divergence_terms(seen_s, seen_t, beta=1.0).sum(-1),
        )


def top_k_logprobs(scores: TopKScores, temperature: float) -> Tensor:
    """`[N, K]` true log-probabilities at `temperature`, which must be the scores' own, or 1."""
    return scores.logits / temperature - top_k_normalizer(scores, temperature)[:, None]


def top_k_normalizer(scores: TopKScores, temperature: float) -> Tensor:
    """`[N]` logsumexp over the teacher's whole vocabulary at `temperature`, known at two temperatures only."""
    if temperature == scores.temperature:
        return scores.log_normalizer
    if temperature == 1.0:
        return scores.log_normalizer_t1
    raise ConfigError(
        f"the teacher's top-k scores know their normaliser at temperature {scores.temperature} and 1, not at the "
        f"objective's {temperature}. Set the objective's temperature to one of them, or score again."
    )


def check_temperature(temperature: float) -> None:
    """Raise `ConfigError` unless it is a finite number above 0."""
    if not 0 < temperature < math.inf:
        raise ConfigError(f"temperature must be a finite number > 0, got {temperature}.")


def _in_chunks(
    read: Callable[[StudentScores, HiddenScores | DenseScores | TopKScores, Tensor], _Pairs],
    student: StudentScores,
    teacher: HiddenScores | DenseScores | TopKScores,
    weights: Tensor,
) -> _Pairs:
    """`read` over consecutive rows; with more than one chunk each is recomputed in the backward pass."""
    num_pairs = student.hidden.shape[0] if isinstance(student, HiddenScores) else student.dense.shape[0]
    size = max(1, _CHUNK_ENTRIES // student.vocab_size)
    if num_pairs <= size:
        return read(student, teacher, weights)
    parts = []
    for start in range(0, num_pairs, size):
        rows = slice(start, start + size)
        some = _select(student, rows), _select(teacher, rows), weights[rows]
        parts.append(checkpoint(read, *some, use_reentrant=False, preserve_rng_state=False))
    return _Pairs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _select(scores: _Rows, rows: slice) -> _Rows:
    """The scores of some rows."""
    own = {f.name: getattr(scores, f.name) for f in fields(scores)}
    return replace(scores, **{name: v[rows] for name, v in own.items() if isinstance(v, Tensor)})
