# SPDX-License-Identifier: Apache-2.0
"""What must be known of the teachers' rows before anything can be compared: who is surest, and which columns matter.

Both are choices that all micro-batches and ranks of a step must make alike, so what one micro-batch knows is written
as rows of three numbers that can be put below each other in any order, and the choice is a function of all of them:

    (teacher, id, logit)           an id among the k most important of this micro-batch, and its largest logit there
    (-1 - teacher, sum, rows)      a score of the teacher's own text, added up over its rows

The k most important of all rows are among the k most important of each part of them, so no `[V]` travels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cohobate.errors import ConfigError
from cohobate.functional.chunked_head import row_chunks
from cohobate.functional.head_blocks import rows_per_block
from cohobate.functional.logprobs import upcast
from cohobate.functional.same_support import important_columns
from cohobate.functional.scores import DenseScores, HiddenScores, TopKScores
from cohobate.objectives.aggregate import TeacherMetric
from cohobate.objectives.compared import Compared, RowScores
from cohobate.objectives.cross_entropy import target_logprobs
from cohobate.objectives.pair_divergences import rows_of

WholeScores = HiddenScores | DenseScores


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen from the teachers' rows, alike on all ranks."""

    weights: tuple[float, ...]  # what multiplies each teacher's divergence; 0: it is not compared
    columns: tuple[Tensor | None, ...]  # [I] of each teacher, ascending; None: all, or a loss without columns


def known_rows(
    sides: Sequence[Compared],
    scores: Sequence[RowScores],
    metric: TeacherMetric | None,
    num_columns: Sequence[int | None],
) -> Tensor:
    """`[n, 3]`: what a call's rows say for its choices: each teacher's `metric`, and so many columns of it."""
    found = [torch.zeros(0, 3, dtype=torch.float64, device=sides[0].rows.device)]
    with torch.no_grad():
        for i, (side, said, number) in enumerate(zip(sides, scores, num_columns, strict=True)):
            if metric is not None:
                found.append(score_row(i, said, side.text.target_ids, side.spoken, metric))
            if number is not None:
                assert not isinstance(said, TopKScores)
                found.append(column_rows(i, said, side.rows, number))
    return torch.cat(found)


def score_row(
    teacher: int, scores: WholeScores | TopKScores, target_ids: Tensor, live: Tensor, metric: TeacherMetric
) -> Tensor:
    """`[1, 3]`: the `metric` of a teacher at temperature 1, added up over the rows numbered `live`; larger is better.

    `"ce"` is minus the cross-entropy of `target_ids [M]`, `"entropy"` minus the entropy, `"max_prob"` the probability
    of the likeliest token.

    Raises:
        ConfigError: top-k scores that cannot say it.
    """
    some, ids = rows_of(scores, live), target_ids[live]
    if isinstance(some, TopKScores):
        values = _of_kept(teacher, some, metric)
    elif metric == "max_prob":
        values = _largest_probability(some)
    else:
        logprobs, entropies = target_logprobs(some, ids)
        values = logprobs if metric == "ce" else -entropies
    return _stacked(values.new_tensor([-1.0 - teacher]), values.sum()[None], values.new_tensor([values.numel()]))


def column_rows(teacher: int, scores: WholeScores, live: Tensor, k: int) -> Tensor:
    """`[k, 3]`: the teacher's `k` most important ids over the rows numbered `live`; none if there are no rows."""
    some = rows_of(scores, live)
    ids, values = live.new_zeros(0), None
    for rows in _blocks(some):
        found, largest = important_columns(rows_of(some, rows).logits(), k)
        if values is None:
            ids, values = found, largest
        else:
            ids, values = _best(torch.cat([ids, found]), torch.cat([values, largest]), k)
    if values is None:
        return torch.zeros(0, 3, dtype=torch.float64, device=live.device)
    return _stacked(torch.full_like(values, teacher), ids, values)


def teacher_scores(rows: Tensor, num_teachers: int) -> list[float]:
    """The mean score of each teacher over everything that `score_row` said; NaN for one without a row."""
    found = []
    for teacher in range(num_teachers):
        _, total, count = rows[rows[:, 0] == -1 - teacher].sum(0).tolist()
        found.append(total / count if count else math.nan)
    return found


def chosen_columns(rows: Tensor, teacher: int, k: int) -> Tensor:
    """The teacher's `k` most important ids, ascending: `[at most k]`."""
    _, ids, values = rows[rows[:, 0] == teacher].unbind(-1)
    return _best(ids.long(), values, k)[0].sort().values


def logits_at(scores: WholeScores, columns: Tensor | None) -> Callable[[Tensor], Tensor]:
    """From rows `[n]` to the teacher's raw logits there at `columns [I]` alone, `[n, I]`; None: all."""
    if columns is None:
        return lambda rows: rows_of(scores, rows).logits()
    if isinstance(scores, DenseScores):
        return lambda rows: scores.dense[rows][:, columns]
    head = scores.head
    narrow = replace(head, weight=head.weight[columns], bias=None if head.bias is None else head.bias[columns])
    return lambda rows: HiddenScores(hidden=scores.hidden[rows], head=narrow).logits()


def mean_logits(scores: Sequence[WholeScores | TopKScores], weights: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """From rows `[n]` to the weighted mean of all teachers' raw logits there, `[n, V]`; no weights: all alike."""
    total = sum(weights) or float(len(scores))

    def mean(rows: Tensor) -> Tensor:
        found: Tensor | None = None
        for weight, said in zip(weights or (1.0,) * len(scores), scores, strict=True):
            if weight and not isinstance(said, TopKScores):
                part = upcast(rows_of(said, rows).logits()) * (weight / total)
                found = part if found is None else found.add_(part)
        assert found is not None  # weights that are all 0 were refused
        return found

    return mean


def _best(ids: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of `values [n]`, of each id its largest, ties to the lower id; and their ids."""
    distinct, place = ids.unique(return_inverse=True)  # ascending
    largest = values.new_full(distinct.shape, -math.inf).scatter_reduce_(0, place, values, "amax")
    order = largest.argsort(descending=True, stable=True)[:k]
    return distinct[order], largest[order]


def _stacked(*columns: Tensor) -> Tensor:
    return torch.stack([column.detach().double() for column in columns], dim=-1)


def _largest_probability(scores: WholeScores) -> Tensor:
    """Of each row at temperature 1: `[n]`."""
    parts: list[Tensor] = []
    for rows in _blocks(scores):
        logits = rows_of(scores, rows).logits().detach()
        parts.append((logits.amax(-1) - logits.logsumexp(-1)).exp().double())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=_rows(scores).device)


def _of_kept(teacher: int, scores: TopKScores, metric: TeacherMetric) -> Tensor:
    if metric == "entropy":
        raise ConfigError(
            f"sum_weights_metric='entropy' cannot be known of teachers[{teacher}]'s top-k scores: the ids that were"
            " not kept are part of it. Use 'ce' or 'max_prob', or leave top_k out for this teacher."
        )
    at_one: Tensor | None = scores.log_normalizer_t1
    if at_one is None:
        raise ConfigError(
            f"teachers[{teacher}]'s top-k scores lack log_normalizer_t1, the normaliser at temperature 1 by which "
            f"teachers are compared ({metric}). Score again with cohobate.top_k_scores, which keeps it, or leave top_k"
            " out for this teacher."
        )
    if metric == "ce":
        return scores.realized_logit - at_one
    return (scores.logits.amax(-1) - at_one).exp()


def _blocks(scores: WholeScores) -> Sequence[slice]:
    first = _rows(scores)
    return list(row_chunks(first.shape[0], rows_per_block(first, scores.vocab_size)))


def _rows(scores: WholeScores) -> Tensor:
    return scores.hidden if isinstance(scores, HiddenScores) else scores.dense
