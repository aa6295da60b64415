# SPDX-License-Identifier: Apache-2.0
"""CSD: the divergence of two models with two tokenizers over events that both can express.

For each chunk of bytes that both sides spell (`align_bytes`) the support is a list of pairs (student token, teacher
token) that end the same bytes (`support_events.py`); whatever else a side could have written is one more event, REST.
Both partitions sum to one, so a Jensen-Shannon divergence or a KL between them is exact: no vocabulary is projected
onto another, no strings are compared.

A pair's log-probability is that of the realized prefix plus that of the final token, all read from rows of the
ordinary forward pass. With p, q of student and teacher, D over the support and REST, and delta_i = dD/d(log p_i),
REST being 1 - sum p, the gradient of a row is closed: on a chunk's last row delta_i at the support minus (sum delta)
times the row's softmax; on a prefix row (sum delta) times (the realized token minus the row's softmax). So the
backward pass needs one scaled softmax of each row and a few scattered numbers: nothing of size [S, V] is kept for it.

S student tokens, N teacher tokens, Vs and Vt vocabularies, C chunks, K kept ids of a sparse teacher, E events.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohobate.functional.divergences import check_beta
from cohobate.functional.kernels import kernels_for
from cohobate.functional.logprobs import check_temperature, upcast
from cohobate.functional.moments import side_moments
from cohobate.functional.scores import TopKScores
from cohobate.functional.support_events import ONE_TO_ONE, ForcedMode, SupportOptions, check_ids
from cohobate.functional.support_plan import Plan, WholeRows, build_plan, read_teacher

_REST_FLOOR = 1e-12
_TILE_ENTRIES = 1 << 22  # of one [d, n] tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSupportOutput:
    """What `common_support_divergence` says of each chunk."""

    divergence: Tensor  # [C] nats, float32 or float64; 0 where nothing could be compared; differentiable
    scorable: Tensor  # [C] bool: geometry alone, so it is known before any model runs; what counts
    kind: Tensor  # [C] int64: 0 = 1:1, 1 = 1:n, 2 = n:1, 3 = m:n


def common_support_divergence(
    student_logits: Tensor,
    student_ids: Tensor,
    teacher_scores: Tensor | TopKScores,
    teacher_ids: Tensor,
    chunks: Any,
    tables: Any,
    *,
    temperature: float = 1.0,
    beta: float = 0.5,
    realized_only_mismatch: bool = False,
    keep_realized: bool = True,
    min_support: int = 1,
    forced_mode: ForcedMode = "union",
) -> CommonSupportOutput:
    """Divergence in nats over the common support of each chunk of one text; `beta` 0 forward KL, 1 reverse KL.

    Args:
        student_logits: `[S, Vs]` raw, over the real ids; row p predicts token p + 1. All that gets gradients.
        student_ids, teacher_ids: `[S]`, `[N]` the text as each side's tokens.
        teacher_scores: `[N, Vt]` raw logits, or `TopKScores` of N rows. A pair whose teacher token is not among the
            kept ids leaves the support on both sides. K < Vt is another loss than K = Vt, which equals dense logits.
        chunks: what `align_tokens` gives: `student_start`, `student_end`, `teacher_start`, `teacher_end` `[C]`.
        tables: `SubtokenTables` of the two vocabularies.
        temperature: divides both sides' logits. Above or below 1 the product along a chain is no tempered joint
            probability; keep it at 1.
        realized_only_mismatch: chunks that are not 1:1 compare the realized pair only.
        keep_realized: the realized pair is in the support even if the tables or the kept ids lack it.
        min_support: a 1:n or n:1 chunk with fewer pairs is skipped (divergence 0, still scorable).
        forced_mode: how a sparse row makes room for the realized token: `"union"` beside the K kept ids, `"evict"` in
            place of the lowest of them.

    Raises:
        ValueError: shapes, chunks or options that do not fit, and sparse scores of another temperature.
    """
    check_beta(beta)
    check_temperature(temperature)
    options = SupportOptions(
        realized_only_mismatch=realized_only_mismatch,
        keep_realized=keep_realized,
        min_support=min_support,
        forced_mode=forced_mode,
    )
    _check_shapes(student_logits, student_ids, teacher_scores, teacher_ids, tables)
    if isinstance(teacher_scores, TopKScores) and teacher_scores.temperature != temperature:
        raise ValueError(
            f"the teacher's scores were normalised at temperature {teacher_scores.temperature}, not {temperature}. "
            "Score again, or use that temperature."
        )
    student_ids, teacher_ids = student_ids.long(), teacher_ids.long()
    student_logits, teacher_scores = _of_one_width(student_logits, teacher_scores)
    with torch.no_grad():
        teacher = read_teacher(teacher_scores, teacher_ids, temperature, options)
        plan, rows = build_plan(student_ids, teacher_ids, teacher, chunks, tables, options, beta)
    divergence: Any = _CommonSupport.apply(student_logits, plan)
    device = student_logits.device
    return CommonSupportOutput(
        divergence=divergence,
        scorable=torch.from_numpy(rows.scorable).to(device),
        kind=torch.from_numpy(rows.kind).to(device),
    )


def common_support_loss_sum(output: CommonSupportOutput, *, mismatch_weight: float = 5.0) -> Tensor:
    """Sum of D over 1:1 chunks + `mismatch_weight` * the sum over the others, nats; divide by the step's chunks."""
    weights = torch.where(output.kind == ONE_TO_ONE, 1.0, mismatch_weight).to(output.divergence.dtype)
    return (output.divergence * weights).sum()


class _CommonSupport(torch.autograd.Function):
    """D of each chunk.   Twin: the oracle of the tests, step by step from the definition.

    With h_i = p_i dD/dp_i (`_term`) and REST r: delta_i = h_i - p_i dD/dr (dD/dr is 0 where r is floored), and
    d D / d z_row = scale (delta scattered - (sum delta) softmax(z_row)) on the last row of the chunk,
    scale (sum delta) (onehot(realized) - softmax(z_row)) on the rows before it.
    Saved: the logits (an input), log Z [S], delta [E], sum delta [C].
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, plan: Plan) -> Tensor:
        log_z, _ = side_moments(*kernels_for(logits).side_sums(logits, plan.scale))  # [S]
        num_chunks = plan.last_row.shape[0]
        realized = upcast(logits[plan.prefix_row, plan.prefix_id]) * plan.scale - log_z[plan.prefix_row]  # [P]
        prefix = log_z.new_zeros(num_chunks).index_add_(0, plan.prefix_chunk, realized)  # [C]
        row = plan.last_row[plan.event_chunk]  # [E]
        logprob = upcast(logits[row, plan.event_id]) * plan.scale - log_z[row] + prefix[plan.event_chunk]
        value, delta, total = _listed(logprob, plan, num_chunks)
        if plan.dense is not None:
            for chunk, tile_value, tile_delta in _tiles(logits, log_z, plan, plan.dense):
                value[chunk], total[chunk] = tile_value, tile_delta.sum(-1)
        ctx.save_for_backward(logits, log_z, delta, total)
        ctx.plan = plan
        return value

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(ctx: Any, grad_value: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, log_z, delta, total = ctx.saved_tensors
        plan: Plan = ctx.plan
        upstream = grad_value * plan.scale  # [C]
        pull = torch.where(grad_value == 0, 0.0, upstream * total)  # [C] an unused chunk may hold NaN
        softmax_part = log_z.new_zeros(log_z.shape).index_add_(0, plan.last_row, pull)  # [S]
        softmax_part.index_add_(0, plan.prefix_row, pull[plan.prefix_chunk])
        grad = torch.empty_like(logits)  # [S, Vs]
        kernels_for(logits).softmax_gradient(logits, log_z, -softmax_part, None, grad, plan.scale)
        used = grad_value[plan.event_chunk] != 0
        row = plan.last_row[plan.event_chunk]
        scattered = torch.where(used, upstream[plan.event_chunk] * delta, 0.0)  # [E]
        grad.index_put_((row, plan.event_id), scattered.to(grad.dtype), accumulate=True)
        onto_prefix = pull[plan.prefix_chunk].to(grad.dtype)  # [P]
        grad.index_put_((plan.prefix_row, plan.prefix_id), onto_prefix, accumulate=True)
        if plan.dense is not None:
            for chunk, _, tile_delta in _tiles(logits, log_z, plan, plan.dense):
                scaled = torch.where((grad_value[chunk] == 0)[:, None], 0.0, upstream[chunk, None] * tile_delta)
                at = (plan.last_row[chunk, None], plan.dense.student_common[None])
                grad.index_put_(at, scaled.to(grad.dtype), accumulate=True)
        return grad, None  # plan: the teacher and the supports are constants


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


def _tiles(logits: Tensor, log_z: Tensor, plan: Plan, whole: WholeRows) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The 1:1 chunks against whole rows, d at a time: which they are `[d]`, their value `[d]` and delta `[d, n]`."""
    step = max(1, _TILE_ENTRIES // max(1, logits.shape[1]))
    for start in range(0, whole.chunk.shape[0], step):
        part = slice(start, start + step)
        row_s, row_t = plan.last_row[whole.chunk[part]], whole.teacher_row[part]
        s = upcast(logits[row_s]) * plan.scale - log_z[row_s, None]  # [d, Vs]
        t = upcast(whole.teacher_logits[row_t]) * plan.scale - whole.teacher_log_z[row_t, None]  # [d, Vt]
        log_p, log_q = s[:, whole.student_common], t[:, whole.teacher_common]  # [d, n]
        rest_p, rest_q = s[:, whole.student_other].exp().sum(-1), t[:, whole.teacher_other].exp().sum(-1)
        rest, rest_slope = _rest(rest_p, rest_q, plan.beta)
        term, slope = _term(log_p, log_q, plan.beta)
        yield whole.chunk[part], term.sum(-1) + rest, slope - log_p.exp() * rest_slope[:, None]


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


def _of_one_width(student: Tensor, teacher: Tensor | TopKScores) -> tuple[Tensor, Tensor | TopKScores]:
    """Both sides as they are, or in float64 if one is: their numbers are added up together."""
    of_teacher = teacher if isinstance(teacher, Tensor) else teacher.logits
    if torch.float64 not in (student.dtype, of_teacher.dtype):
        return student, teacher
    if isinstance(teacher, Tensor):
        return student.double(), teacher.double()
    names = ("logits", "log_normalizer", "log_normalizer_t1", "realized_logit")
    return student.double(), replace(teacher, **{name: getattr(teacher, name).double() for name in names})


def _check_shapes(
    student_logits: Tensor, student_ids: Tensor, teacher: Tensor | TopKScores, teacher_ids: Tensor, tables: Any
) -> None:
    wanted = {"student": len(tables.student_to_teacher), "teacher": len(tables.teacher_to_student)}
    for side, ids, rows, width in (
        ("student", student_ids, student_logits.shape[0], student_logits.shape[-1]),
        (
            "teacher",
            teacher_ids,
            teacher.shape[0] if isinstance(teacher, Tensor) else teacher.ids.shape[0],
            teacher.shape[-1] if isinstance(teacher, Tensor) else teacher.vocab_size,
        ),
    ):
        if ids.dim() != 1 or ids.shape[0] != rows:
            raise ValueError(f"the {side} has ids {list(ids.shape)} and {rows} rows of scores; wanted one row per id.")
        if width != wanted[side]:
            raise ValueError(
                f"the {side}'s scores have {width} columns, the tables {wanted[side]} ids. Cut padded heads to the "
                "real ids, and check that the tables are those of this pair, not swapped."
            )
        check_ids(side, ids, width)
