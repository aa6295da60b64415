# SPDX-License-Identifier: Apache-2.0
"""The divergence of CSD over events that are known, and its closed gradient.

With p, q of student and teacher, D over the support and REST, and delta_i = dD/d(log p_i), REST being 1 - sum p, the
gradient of a row is closed: on a chunk's last row delta_i at the support minus (sum delta) times the row's softmax; on
a prefix row (sum delta) times (the realized token minus the row's softmax). So the backward pass needs one scaled
softmax of each row and a few scattered numbers: nothing of size [S, V] is kept for it.

The logits may be one part of a text's rows and of the vocabulary's columns (`StudentShards`). A row's normaliser and
the logits that a chunk names are added up over the vocabulary; log-probabilities of prefix rows, over the sequence,
and on the way back what the last row's owner knows goes to the owners of the prefix rows.

S student tokens, N teacher tokens, Vs and Vt vocabularies, C chunks, M of them mine, D of those 1:1 against whole
rows of n common tokens, E events, P prefix rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.chunked_head import row_chunks
from cohobate.functional.kernels import kernels_for
from cohobate.functional.logprobs import other_ids, upcast
from cohobate.functional.moments import side_moments, together
from cohobate.functional.student_shards import StudentShards
from cohobate.functional.support_plan import Plan, WholeRows

_REST_FLOOR = 1e-12
_TILE_ENTRIES = 1 << 22  # of one [d, n] tensor


class CommonSupport(torch.autograd.Function):
    """D of each chunk whose last row is here.   Twin: the oracle of the tests, step by step from the definition.

    With h_i = p_i dD/dp_i (`_term`) and REST r: delta_i = h_i - p_i dD/dr (dD/dr is 0 where r is floored), and
    d D / d z_row = scale (delta scattered - (sum delta) softmax(z_row)) on the last row of the chunk,
    scale (sum delta) (onehot(realized) - softmax(z_row)) on the rows before it.
    Saved: the logits (an input), log Z [S], delta [E], sum delta [C] (0 for chunks that are not mine), dD/dr [D].
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, plan: Plan, shards: StudentShards) -> Tensor:
        real = logits[:, : shards.width]
        log_z, _ = side_moments(*kernels_for(real).side_sums(real, plan.scale), shards=shards.vocabulary)  # [S]
        rows = torch.cat([plan.prefix_row, plan.last_row[plan.event_chunk]])  # [P + E]
        picked = shards.pick(real, rows, torch.cat([plan.prefix_id, plan.event_id]))
        whole, teacher_rest = _whole_sums(real, log_z, plan, shards)  # [4, D], [D]
        picked, whole = together(shards.vocabulary.sum, picked, whole)
        realized, logprob = (picked * plan.scale - log_z[rows]).tensor_split([plan.prefix_row.shape[0]])
        prefix = log_z.new_zeros(plan.last_row.shape[0]).index_add_(0, plan.prefix_chunk, realized)  # [C]
        prefix = shards.sequence.sum(prefix)
        rest_slope = log_z.new_zeros(0)
        value, delta, total = _listed(logprob + prefix[plan.event_chunk], plan, prefix.shape[0])
        if plan.dense is not None:
            term, slope, mass, rest_mass = whole
            rest, rest_slope = _rest(rest_mass, teacher_rest, plan.beta)
            value[plan.dense.chunk], total[plan.dense.chunk] = term + rest, slope - mass * rest_slope
        ctx.save_for_backward(logits, log_z, delta, total, rest_slope)
        ctx.plan, ctx.shards = plan, shards
        return value

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(ctx: Any, grad_value: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, log_z, delta, total, rest_slope = ctx.saved_tensors
        plan: Plan = ctx.plan
        shards: StudentShards = ctx.shards
        upstream = grad_value * plan.scale  # [C]
        mine = torch.where(upstream == 0, 0.0, upstream * total)  # [C] an unused chunk may hold NaN
        softmax_part = torch.zeros_like(log_z).index_add_(0, plan.last_row[plan.mine], mine[plan.mine])  # [S]
        pull = shards.sequence.sum(mine)
        softmax_part.index_add_(0, plan.prefix_row, pull[plan.prefix_chunk])
        grad = torch.empty_like(logits)  # [S, W]
        grad[:, shards.width :] = 0  # padding
        real = (logits[:, : shards.width], grad[:, : shards.width])
        kernels_for(real[0]).softmax_gradient(real[0], log_z, -softmax_part, None, real[1], plan.scale)
        of_event = upstream[plan.event_chunk]  # [E]
        scattered = torch.where(of_event == 0, 0.0, of_event * delta)
        shards.add_at(grad, plan.last_row[plan.event_chunk], plan.event_id, scattered)
        shards.add_at(grad, plan.prefix_row, plan.prefix_id, pull[plan.prefix_chunk])
        if plan.dense is not None:
            _add_whole(grad, real[0], log_z, upstream, rest_slope, plan, plan.dense, shards)
        return grad, None, None  # plan: the teacher and the supports are constants; shards


def _listed(log_p: Tensor, plan: Plan, num_chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Value `[C]`, delta `[E]` and its sum `[C]` of the chunks whose events are listed."""
    log_q = plan.event_teacher
    p = log_p.exp()
    zeros = p.new_zeros(num_chunks)

    def add_up(values: Tensor) -> Tensor:
        return zeros.index_add(0, plan.event_chunk, values)

    rest, rest_slope = _rest(1 - add_up(p), 1 - add_up(log_q.exp()), plan.beta)
    term, slope = _term(log_p, log_q, plan.beta)
    some = add_up(torch.ones_like(p)) > 0
    value = torch.where(some, add_up(term) + rest, 0.0)
    delta = slope - p * rest_slope[plan.event_chunk]
    return value, delta, add_up(delta)


def _whole_sums(real: Tensor, log_z: Tensor, plan: Plan, shards: StudentShards) -> tuple[Tensor, Tensor]:
    """What 1:1 chunks against whole rows add up over the columns here: D's terms, their slopes, the student's mass on
    common tokens and beside them, `[4, D]`; and the teacher's mass beside them, which needs no other shard: `[D]`."""
    whole = plan.dense
    if whole is None:
        return log_z.new_zeros(4, 0), log_z.new_zeros(0)
    ours, theirs = _common_here(whole, shards)
    others = other_ids(ours, shards.width)
    sums, teacher_rest = log_z.new_zeros(4, whole.chunk.shape[0]), log_z.new_zeros(whole.chunk.shape[0])
    for part, s, t in _tiles(real, log_z, plan, whole):
        log_p = s[:, ours]
        term, slope = _term(log_p, t[:, theirs], plan.beta)
        found = (term, slope, log_p.exp(), s[:, others].exp())
        sums[:, part] = torch.stack([x.sum(-1) for x in found])
        teacher_rest[part] = t[:, whole.teacher_other].exp().sum(-1)
    return sums, teacher_rest


def _add_whole(
    grad: Tensor,
    real: Tensor,
    log_z: Tensor,
    upstream: Tensor,
    rest_slope: Tensor,
    plan: Plan,
    whole: WholeRows,
    shards: StudentShards,
) -> None:
    """Add `upstream [C]` times delta of the 1:1 chunks against whole rows to `grad [S, W]`."""
    ours, theirs = _common_here(whole, shards)
    for part, s, t in _tiles(real, log_z, plan, whole):
        log_p, factor = s[:, ours], upstream[whole.chunk[part], None]
        _, slope = _term(log_p, t[:, theirs], plan.beta)
        delta = slope - log_p.exp() * rest_slope[part, None]
        scaled = torch.where(factor == 0, 0.0, factor * delta)
        at = (plan.last_row[whole.chunk[part], None], ours[None])
        grad.index_put_(at, scaled.to(grad.dtype), accumulate=True)


def _common_here(whole: WholeRows, shards: StudentShards) -> tuple[Tensor, Tensor]:
    """The columns of the common tokens that are here, and the teacher's ids of the same: `[n]` each."""
    column, here = shards.place(whole.student_common)
    return column[here], whole.teacher_common[here]


def _tiles(real: Tensor, log_z: Tensor, plan: Plan, whole: WholeRows) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The 1:1 chunks against whole rows, d at a time: log-probabilities of student `[d, W]`, teacher `[d, Vt]`."""
    for part in row_chunks(whole.chunk.shape[0], max(1, _TILE_ENTRIES // max(1, real.shape[1]))):
        row_s, row_t = plan.last_row[whole.chunk[part]], whole.teacher_row[part]
        s = upcast(real[row_s]) * plan.scale - log_z[row_s, None]
        t = upcast(whole.teacher_logits[row_t]) * plan.scale - whole.teacher_log_z[row_t, None]
        yield part, s, t


def _rest(p: Tensor, q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """What REST adds to D where it has masses `p`, `q` `[C]`, and dD/dp, which is 0 where `p` is floored."""
    floored_p = p.clamp(min=_REST_FLOOR)
    log_p, log_q = floored_p.log(), q.clamp(min=_REST_FLOOR).log()
    term, slope = _term(log_p, log_q, beta)
    return term, torch.where(p < _REST_FLOOR, 0.0, slope / floored_p)


def _term(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """What each event adds to D, and the derivative of that by log p; p student, q teacher.   Twin: `divergence_terms`

    In probability space, where one pass gives both: a third of the time of the twin, which is exact near equality.
    """
    p, q = log_p.exp(), log_q.exp()
    if beta == 0.0:
        return torch.where(q == 0, 0.0, q * (log_q - log_p)), -q
    if beta == 1.0:
        term = torch.where(p == 0, 0.0, p * (log_p - log_q))
        return term, term + p
    mixture = torch.lerp(p, q, beta).clamp(min=torch.finfo(p.dtype).tiny)
    student = (1 - beta) * torch.xlogy(p, p / mixture)
    return student + beta * torch.xlogy(q, q / mixture), student
