# SPDX-License-Identifier: Apache-2.0
"""Batches and scores from a seed, and oracles in plain Python floats, one pair at a time, from the definitions."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cohobate.align.rollout import AlignedBatch, AlignedSide
from cohobate.functional.scores import DenseScores, HiddenScores, OutputHead
from cohobate.objectives import Objective, ObjectiveOutput

HIDDEN = 5
VOCAB = 7


def batch_of(
    lengths: Sequence[int],
    *,
    seed: int = 0,
    sampled: Sequence[bool] | None = None,
    weights: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    target_ids: Tensor | None = None,
    vocab: int = VOCAB,
) -> AlignedBatch:
    """Rows with `lengths` pairs each. The model inputs are not read by objectives."""
    g = torch.Generator().manual_seed(seed)
    num = sum(lengths)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    side = AlignedSide(model_inputs={}, pair_index=torch.arange(num))
    return AlignedBatch(
        student=side,
        teacher=side,
        target_ids=torch.randint(vocab, (num,), generator=g) if target_ids is None else target_ids,
        weights=torch.rand(num, generator=g) + 0.5 if weights is None else weights,
        row=row,
        is_sampled=torch.tensor([True] * len(lengths) if sampled is None else list(sampled), dtype=torch.bool),
        sample_ids=tuple(f"row-{i}" for i in range(len(lengths))),
        sampler_logprobs=sampler_logprobs,
    )


def hidden_scores(
    num: int, seed: int, *, grad: bool = False, dtype: torch.dtype = torch.float64, plain: bool = False
) -> HiddenScores:
    """Random hidden states and a head, with bias, scale and soft-cap unless `plain`."""
    g = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad)

    hidden, weight, bias = leaf(num, HIDDEN), leaf(VOCAB, HIDDEN), leaf(VOCAB)
    if plain:
        return HiddenScores(hidden=hidden, head=OutputHead(weight=weight))
    return HiddenScores(hidden=hidden, head=OutputHead(weight=weight, bias=bias, scale=0.7, softcap=3.0))


def dense_scores(rows: Sequence[Sequence[float]], *, grad: bool = False) -> DenseScores:
    """Log-probabilities of the given distributions, as logits."""
    return DenseScores(dense=torch.tensor(rows, dtype=torch.float64).log().requires_grad_(grad))


def dense_of(scores: HiddenScores) -> DenseScores:
    """The same prediction as logits, cut from the graph; a leaf of its own."""
    return DenseScores(dense=scores.logits().detach().clone().requires_grad_(scores.hidden.requires_grad))


def part(batch: AlignedBatch, first_row: int, last_row: int) -> tuple[AlignedBatch, slice]:
    """Rows `first_row:last_row` as a micro-batch of their own, and where their pairs are."""
    inside = torch.nonzero((batch.row >= first_row) & (batch.row < last_row)).flatten()
    start, stop = (int(inside[0]), int(inside[-1]) + 1) if inside.numel() else (0, 0)
    pairs = slice(start, stop)
    drawn = batch.sampler_logprobs
    return (
        AlignedBatch(
            student=AlignedSide(model_inputs={}, pair_index=batch.student.pair_index[pairs]),
            teacher=AlignedSide(model_inputs={}, pair_index=batch.teacher.pair_index[pairs]),
            target_ids=batch.target_ids[pairs],
            weights=batch.weights[pairs],
            row=batch.row[pairs] - first_row,
            is_sampled=batch.is_sampled[first_row:last_row],
            sample_ids=batch.sample_ids[first_row:last_row],
            sampler_logprobs=None if drawn is None else drawn[pairs],
        ),
        pairs,
    )


def cut(scores: HiddenScores, pairs: slice) -> HiddenScores:
    return HiddenScores(hidden=scores.hidden[pairs], head=scores.head)


def metric_value(out: ObjectiveOutput, name: str) -> float:
    metric = out.metrics[name]
    return float(metric.sum) / float(metric.count)


def check_split_invariance(objective: Objective, student: HiddenScores, teacher: HiddenScores | None) -> None:
    """Sums, gradients and metrics of rows [3, 0, 2, 4] in one call equal those of two calls."""
    batch = batch_of([3, 0, 2, 4], seed=3)
    whole = objective(student, teacher, batch)
    leaves = [student.hidden, student.head.weight]
    (term,) = whole.terms.values()
    expected = torch.autograd.grad(term.sum, leaves, retain_graph=True)
    total, counts, metrics = torch.zeros((), dtype=torch.float64), 0.0, dict.fromkeys(whole.metrics, 0.0)
    for first, last in ((0, 3), (3, 4)):
        micro, pairs = part(batch, first, last)
        out = objective(cut(student, pairs), None if teacher is None else cut(teacher, pairs), micro)
        total = total + out.terms[next(iter(whole.terms))].sum
        counts += objective.counts(micro)[term.count]
        for name in metrics:
            metrics[name] += float(out.metrics[name].sum)
    assert counts == objective.counts(batch)[term.count] == 9
    torch.testing.assert_close(total, term.sum, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, leaves), expected, rtol=1e-11, atol=1e-12)
    for name, value in metrics.items():
        assert math.isclose(value, float(whole.metrics[name].sum), rel_tol=1e-9, abs_tol=1e-12), name


def check_empty(objective: Objective, teacher: HiddenScores | None) -> None:
    """No pair: a connected zero, zero gradients, and every metric present with count 0."""
    full = objective(hidden_scores(2, 0), None if teacher is None else hidden_scores(2, 1), batch_of([2]))
    student = hidden_scores(0, 0, grad=True)
    out = objective(student, teacher, batch_of([0, 0]))
    assert set(out.terms) == set(full.terms)
    assert set(out.metrics) == set(full.metrics)
    for term in out.terms.values():
        assert float(term.sum.detach()) == 0.0
        assert term.sum.requires_grad
    assert all(float(m.count) == 0 and float(m.sum) == 0 for m in out.metrics.values())
    sum(term.sum for term in out.terms.values()).backward()
    assert student.head.weight.grad is not None
    assert not student.head.weight.grad.any()
    assert all(value == 0 for value in objective.counts(batch_of([0, 0])).values())


# ------------------------------------------------------------------ oracles


def softmax(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(z / temperature) for z in logits]
    return [p / sum(powers) for p in powers]


def rows_of(scores: HiddenScores | DenseScores, temperature: float = 1.0) -> list[list[float]]:
    """Each pair's probabilities, by loops over the definition of the head."""
    if isinstance(scores, DenseScores):
        return [softmax(row, temperature) for row in scores.dense.tolist()]
    weight = scores.head.weight.tolist()
    bias = [0.0] * len(weight) if scores.head.bias is None else scores.head.bias.tolist()
    rows = []
    for h in scores.hidden.tolist():
        logits = []
        for w, b in zip(weight, bias, strict=True):
            z = (sum(x * y for x, y in zip(h, w, strict=True)) + b) * scores.head.scale
            cap = scores.head.softcap
            logits.append(z if cap is None else cap * math.tanh(z / cap))
        rows.append(softmax(logits, temperature))
    return rows


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def generalized(student: Sequence[float], teacher: Sequence[float], beta: float) -> float:
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = [beta * t + (1 - beta) * s for s, t in zip(student, teacher, strict=True)]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def entropy_of(p: Sequence[float]) -> float:
    return -sum(a * math.log(a) for a in p if a > 0)


def near(actual: float | Tensor, expected: float, *, rel: float = 1e-9) -> bool:
    return math.isclose(float(actual), expected, rel_tol=rel, abs_tol=1e-12)
