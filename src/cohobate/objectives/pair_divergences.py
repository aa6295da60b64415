# SPDX-License-Identifier: Apache-2.0
"""How the divergence of N pairs is read: which fused function serves which kinds of scores, and what does without.

A student that arrives as hidden states is compared by the fused functions, which keep no `[N, V]`. Where one side
arrives as logits, and for a clip of single entries, a few rows of logits are made at a time, and again in the backward
pass, so that none are kept either. What the numbers mean for a loss is in `divergence.py`.

N pairs, n pairs of one chunk, V vocabulary, K kept ids.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cohobate.errors import ConfigError
from cohobate.functional.chunked_head import row_chunks
from cohobate.functional.divergences import Clip, clip_divergence, divergence_terms, forward_kl, reverse_kl
from cohobate.functional.fused_linear import FusedDivergence, fused_linear_divergence
from cohobate.functional.fused_topk import fused_linear_topk
from cohobate.functional.kernels import kernels_for
from cohobate.functional.largest import largest_entries
from cohobate.functional.logprobs import entropy, gather_last, log_softmax
from cohobate.functional.reduce import weigh
from cohobate.functional.scores import DenseScores, HiddenScores, TeacherScores, TopKScores
from cohobate.functional.topk import Tail, TopKOf, bucketed_view, logprobs_at, topk_divergence
from cohobate.objectives.protocol import StudentScores, config_errors, only_weighted

_CHUNK_ENTRIES = 1 << 24  # logits held at once outside the fused function: 64 MiB of float32 a tensor

_Rows = TypeVar("_Rows", bound=HiddenScores | DenseScores | TopKScores)


@runtime_checkable
class DivergenceOptions(Protocol):
    """What decides how pairs are read: the fields of `DivergenceObjective`, where they are explained and checked."""

    @property
    def beta(self) -> float: ...
    @property
    def temperature(self) -> float: ...
    @property
    def clip(self) -> Clip: ...
    @property
    def clip_limit(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_k_of(self) -> TopKOf: ...
    @property
    def tail(self) -> Tail: ...


class _Pairs(NamedTuple):
    """What is known of each pair, `[n]` in nats; only `divergence` has a gradient."""

    divergence: Tensor
    clipped: Tensor  # a share in [0, 1], of the pair or of its entries
    student_entropy: Tensor
    teacher_entropy: Tensor
    top1_agreement: Tensor
    forward_kl: Tensor
    reverse_kl: Tensor


def read_pairs(
    options: DivergenceOptions, student: StudentScores, teacher: TeacherScores | None, *, weights: Tensor
) -> tuple[FusedDivergence, Tensor]:
    """The weighted loss and what is known of each pair, and the share `[N]` of each pair that the clip holds."""
    assert isinstance(teacher, HiddenScores | DenseScores | TopKScores)
    if isinstance(student, HiddenScores) and options.clip != "pointwise":
        if isinstance(teacher, TopKScores):
            with config_errors():
                kept = teacher.logprobs(options.temperature)
            return _held(options, weights, lambda w: _fused_top_k(options, student, teacher.ids, kept, w))
        if options.top_k is not None:
            return _read_cut(options, student, teacher, weights)
        if isinstance(teacher, HiddenScores):
            return _held(options, weights, lambda w: _fused(options, student, teacher, w))
    pairs = _in_chunks(lambda s, t, w: _read_rows(options, s, t, w), student, teacher, weights)
    loss_sum = weigh(pairs.divergence, weights).sum()
    known = pairs._replace(divergence=pairs.divergence.detach())._asdict()
    del known["clipped"]
    return FusedDivergence(loss_sum=loss_sum, **known), pairs.clipped


def _fused(
    options: DivergenceOptions, student: HiddenScores, teacher: HiddenScores, weights: Tensor
) -> FusedDivergence:
    return fused_linear_divergence(
        student.hidden,
        student.head.weight,
        teacher.hidden,
        teacher.head.weight,
        beta=options.beta,
        temperature=options.temperature,
        weights=weights,
        student_bias=student.head.bias,
        teacher_bias=teacher.head.bias,
        student_scale=student.head.scale,
        teacher_scale=teacher.head.scale,
        student_softcap=student.head.softcap,
        teacher_softcap=teacher.head.softcap,
    )


def _fused_top_k(
    options: DivergenceOptions, student: HiddenScores, ids: Tensor, logprobs: Tensor, weights: Tensor
) -> FusedDivergence:
    return fused_linear_topk(
        student.hidden,
        student.head.weight,
        ids,
        logprobs,
        beta=options.beta,
        tail=options.tail,
        temperature=options.temperature,
        weights=weights,
        bias=student.head.bias,
        scale=student.head.scale,
        softcap=student.head.softcap,
    )


def _held(
    options: DivergenceOptions, weights: Tensor, fused: Callable[[Tensor], FusedDivergence]
) -> tuple[FusedDivergence, Tensor]:
    """`fused(weights)` under the clip. A token clip costs one more pass, without gradient, to find whom to hold."""
    if options.clip == "none":
        read = fused(weights)
        return read, torch.zeros_like(read.divergence)
    limit = options.clip_limit
    assert limit is not None
    with torch.no_grad():
        held = fused(weights).divergence > limit  # False for NaN, which must stay visible
    read = fused(torch.where(held, 0.0, weights))
    constant = limit * torch.where(held, weights, 0.0).to(read.loss_sum.dtype).sum()
    divergence = torch.where(held, limit, read.divergence)
    return replace(read, loss_sum=read.loss_sum + constant, divergence=divergence), held.to(divergence.dtype)


def _read_cut(
    options: DivergenceOptions, student: HiddenScores, teacher: HiddenScores | DenseScores, weights: Tensor
) -> tuple[FusedDivergence, Tensor]:
    """The loss over one side's k likeliest ids, where both know all; the metrics are those of the whole vocabulary."""
    temperature, num_pairs = options.temperature, student.hidden.shape[0]
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        for rows in row_chunks(num_pairs, max(1, _CHUNK_ENTRIES // student.vocab_size)) if num_pairs else [slice(0)]:
            s, t = rows_of(student, rows).logits(), rows_of(teacher, rows).logits()  # [n, V]
            scales = (1 / temperature, 1 / temperature)
            whole = kernels_for(s).divergence_rows(s, t, options.beta, scales=scales)  # [6, n]
            parts.append((*_support(options, s, t), whole))
    ids, logprobs = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    _, _, teacher_entropy, agreement, forward, reverse = torch.cat([part[2] for part in parts], dim=-1)
    read, clipped = _held(options, weights, lambda w: _fused_top_k(options, student, ids, logprobs, w))
    whole = {"top1_agreement": agreement, "forward_kl": forward, "reverse_kl": reverse}
    return replace(read, teacher_entropy=teacher_entropy, **whole), clipped


def _support(options: DivergenceOptions, student_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The ids `[n, k]` that are compared, ascending, and the teacher's true log-probabilities of them, both constant.

    A temperature orders no two logits anew, so the k likeliest are the k largest, ties to the lower id.
    """
    chooser = student_logits if options.top_k_of == "student" else teacher_logits
    k, vocab_size = options.top_k, chooser.shape[-1]
    assert k is not None
    if k > vocab_size:
        raise ConfigError(f"top_k={k} is more than the {vocab_size} ids of the vocabulary. Lower it, or leave it out.")
    ids = largest_entries(chooser, k)[1].sort(dim=-1).values
    return ids, logprobs_at(teacher_logits, ids, temperature=options.temperature)


def _read_rows(
    options: DivergenceOptions,
    student: StudentScores,
    teacher: HiddenScores | DenseScores | TopKScores,
    weights: Tensor,
) -> _Pairs:
    """A few rows through logits: the plain twin of the fused functions, and the only way where logits arrive."""
    temperature = options.temperature
    logits = only_weighted(student.logits(), weights)  # [n, V]
    s = log_softmax(logits, temperature=temperature)
    if isinstance(teacher, TopKScores):
        with config_errors():
            ids, kept = teacher.ids, teacher.logprobs(temperature)
        best = gather_last(ids, teacher.logits.argmax(-1))  # [n]
        seen_s, seen_t = bucketed_view(s.detach(), ids, kept)
    else:
        with torch.no_grad():
            teacher_logits = teacher.logits().detach()
            t = log_softmax(teacher_logits, temperature=temperature)
        best, seen_s, seen_t = t.argmax(-1), s.detach(), t
        if options.top_k is None:
            value, clipped = clip_divergence(
                divergence_terms(s, t, beta=options.beta), clip=options.clip, limit=options.clip_limit
            )
            return _pairs(value, clipped, s, best, seen_s, seen_t)
        ids, kept = _support(options, logits, teacher_logits)
    value = topk_divergence(logits, ids, kept, beta=options.beta, tail=options.tail, temperature=temperature)
    value, clipped = clip_divergence(value[:, None], clip=options.clip, limit=options.clip_limit)
    return _pairs(value, clipped, s, best, seen_s, seen_t)


def _pairs(value: Tensor, clipped: Tensor, s: Tensor, best: Tensor, seen_s: Tensor, seen_t: Tensor) -> _Pairs:
    """Of the student's log-probabilities `s [n, V]`, the teacher's likeliest id `best [n]`, and what both are compared
    by for the metrics: log-probabilities `seen_s`, `seen_t` `[n, V]`, or `[n, K + 1]` with a bucket.
    """
    with torch.no_grad():
        return _Pairs(
            divergence=value,
            clipped=clipped,
            student_entropy=entropy(s.detach()),
            teacher_entropy=entropy(seen_t),
            top1_agreement=(s.detach().argmax(-1) == best).to(s.dtype),
            forward_kl=forward_kl(seen_s, seen_t),
            reverse_kl=reverse_kl(seen_s, seen_t),
        )


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
    for rows in row_chunks(num_pairs, size):
        some = rows_of(student, rows), rows_of(teacher, rows), weights[rows]
        parts.append(checkpoint(read, *some, use_reentrant=False, preserve_rng_state=False))
    return _Pairs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def rows_of(scores: _Rows, rows: slice | Tensor) -> _Rows:
    """The scores of some rows: a slice of them, or their numbers."""
    own = {f.name: getattr(scores, f.name) for f in fields(scores)}
    return replace(scores, **{name: v[rows] for name, v in own.items() if isinstance(v, Tensor)})
