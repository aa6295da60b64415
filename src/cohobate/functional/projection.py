# SPDX-License-Identifier: Apache-2.0
"""X-Token: the student's distribution pushed onto the teacher's vocabulary, compared chunk by chunk.

Rows are projected onto the few columns that take part and then averaged over their chunk (both are linear), and chunks
are sums over runs of rows, so no one-hot matrix of chunks by rows is ever multiplied. Three losses:

    pkl     projected student against the teacher's most important columns, both normalised there
    gold    the tokens that both have, compared one by one; what is left, compared by rank (a distance of sorted
            probabilities, which knows nothing of what the tokens mean)
    hkl     gold with more pairs: also those that the projection holds for almost the same

`common_support.py` compares events instead and is exact where this approximates: a chunk's average row is no event.
As there, what may be wrong with the arguments is found before anything is computed, and the student's logits may be
one part of a text's rows and of a vocabulary's columns; a chunk belongs to the part that has its last row.

S student tokens, N teacher tokens, Vs and Vt vocabularies, C chunks, M of them mine, I columns.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cohobate.functional.chunked_head import row_chunks
from cohobate.functional.divergences import divergence
from cohobate.functional.largest import largest_entries
from cohobate.functional.logprobs import check_temperature, log_softmax, other_ids, upcast, upcast_pair, wide_dtype
from cohobate.functional.moments import WHOLE, together
from cohobate.functional.projected_rows import EPS, Entries, MassDivergence, ProjectedRows, RowLogprobs
from cohobate.functional.runs import Ints, joined_runs
from cohobate.functional.scores import Rows, predictor_offset
from cohobate.functional.student_shards import StudentShards, added, check_positions, row_places, rows_here
from cohobate.functional.support_events import check_chunks, check_ids

Mode = Literal["pkl", "gold", "hkl"]
_ROWS_AT_ONCE = 64  # of the teacher's logits whose largest is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedOutput:
    """What `projected_kl` says of each chunk."""

    divergence: Tensor  # [C] nats, float32 or float64; 0 where not valid; differentiable
    valid: Tensor  # [C] bool: both sides keep a row, and the chunk passes `exact_only`


def projected_kl(
    student_logits: Tensor,
    student_ids: Tensor,
    teacher_logits: Tensor,
    teacher_ids: Tensor,
    chunks: Any,
    projection: Any,
    *,
    temperature: float = 1.0,
    vocab_top_k: int = 8192,
    reverse: bool = False,
    exact_only: bool = False,
    mode: Mode = "pkl",
    uncommon_top_k: int = 8192,
    drop_unreachable: bool = True,
    columns: Tensor | None = None,
    rows: Rows = "text",
) -> ProjectedOutput:
    """X-Token's divergence in nats of each chunk of one text; not multiplied by the temperature's square.

    Args:
        student_logits, teacher_logits: `[S, Vs]`, `[N, Vt]` raw, over the real ids; row p predicts token p + 1. The
            teacher is a constant. A token at position 0 has no row; a chunk needs one row on each side.
        student_ids, teacher_ids: `[S]`, `[N]` the text as each side's tokens.
        chunks: what `align_tokens` gives.
        projection: `Projection` of the two vocabularies.
        reverse: KL(student || teacher) instead of KL(teacher || student).
        exact_only: only 1:1 chunks whose student token is exactly the teacher's.
        vocab_top_k: (pkl) so many columns: those with the largest teacher logit in any row that takes part.
        columns: (pkl) teacher ids `[I]` to use instead, when several texts or ranks must share them.
        drop_unreachable: (pkl) leave out columns that no student token projects to. Kept, as published, each adds the
            teacher's mass there times 23 nats, whatever the student does.
        uncommon_top_k: (gold, hkl) so many of the sorted probabilities are compared.
        rows: `"pairs"` if row p predicts id p instead: S and N are predictions then, of one text or of several end to
            end, and chunks are ranges of them.

    Raises:
        ValueError: shapes or options that do not fit.
    """
    _check_width("student", student_logits.shape[-1], projection.student_vocab_size)
    prepared = prepare_projected(
        student_logits,
        student_ids,
        teacher_logits,
        teacher_ids,
        chunks,
        projection,
        columns=columns,
        exact_only=exact_only,
        rows=rows,
        temperature=temperature,
        vocab_top_k=vocab_top_k,
        reverse=reverse,
        mode=mode,
        uncommon_top_k=uncommon_top_k,
        drop_unreachable=drop_unreachable,
    )
    return prepared.evaluate(StudentShards(width=student_logits.shape[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedOptions:
    """How chunks are compared; see `projected_kl`."""

    temperature: float = 1.0
    vocab_top_k: int = 8192
    reverse: bool = False
    mode: Mode = "pkl"
    uncommon_top_k: int = 8192
    drop_unreachable: bool = True

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.mode not in ("pkl", "gold", "hkl"):
            raise ValueError(f"mode must be 'pkl', 'gold' or 'hkl', got {self.mode!r}.")
        if self.uncommon_top_k < 0:
            raise ValueError(f"uncommon_top_k must be >= 0, got {self.uncommon_top_k}.")
        if self.vocab_top_k < 1:
            raise ValueError(f"vocab_top_k must be >= 1, got {self.vocab_top_k}.")

    @property
    def beta(self) -> float:
        return 1.0 if self.reverse else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedProjection:
    """Arguments that fit, and all that is known before anything is exchanged."""

    student_logits: Tensor  # [S, W] the rows and columns that are here
    teacher_logits: Tensor  # [N, Vt]
    ours: "ChunkMean"  # the rows that are here, over the chunks that have any
    theirs: "ChunkMean"  # over the chunks that are mine
    valid: NDArray[np.bool_]  # [C]
    student_rows: Ints  # every row that a valid chunk reads, wherever it is
    projection: Any
    columns: Tensor | None
    options: ProjectedOptions

    @property
    def vocab_size(self) -> int:
        """Of the student."""
        return self.projection.student_vocab_size

    def evaluate(self, shards: StudentShards) -> ProjectedOutput:
        """The divergence of the chunks whose last student row is here, 0 for the others.

        Exchanges over the vocabulary a maximum and two sums, over the sequence a maximum and a sum, and a sum in
        backward; modes gold and hkl besides candidates over the vocabulary, and a sum in backward.
        """
        important, split = self._agreed_maxima(shards)
        student, options = self.student_logits, self.options
        scale = 1 / options.temperature
        if options.mode == "pkl":
            columns = self._columns(important).to(student.device)
            entries = _entries(self.projection, columns, options.drop_unreachable)
            projected: Any = ProjectedRows.apply(student, self.ours.rows, entries, scale, shards)  # [R, I]
            mass = self._over_chunks(projected, split, shards)  # [M, I]
            pair = upcast_pair(mass, self._teacher_means(entries.columns))
            value: Any = MassDivergence.apply(*pair, options.reverse)
        else:
            logprobs: Any = RowLogprobs.apply(student, self.ours.rows, scale, shards)  # [R, W]
            s = self._over_chunks(logprobs, split, shards)  # [M, W]
            t = self.theirs(log_softmax(self.teacher_logits[self.theirs.rows], temperature=options.temperature))
            value = self._by_pairs(s, t, shards)
        divergences = value.new_zeros(len(self.valid)).index_copy(0, self.theirs.chunk, value)
        return ProjectedOutput(divergence=divergences, valid=torch.from_numpy(self.valid).to(student.device))

    def _agreed_maxima(self, shards: StudentShards) -> tuple[Tensor, Tensor]:
        """The largest teacher logit of each id in any row that takes part, `[Vt]`, of all parts; and the chunks `[X]`
        whose student rows lie on more than one part."""
        wide = wide_dtype(self.teacher_logits)
        device = self.teacher_logits.device
        wanted = self.options.mode == "pkl" and self.columns is None
        important = torch.full((self.teacher_logits.shape[1] if wanted else 0,), -torch.inf, dtype=wide, device=device)
        if wanted:
            for part in row_chunks(self.theirs.rows.shape[0], _ROWS_AT_ONCE):
                important = torch.maximum(important, upcast(self.theirs.read(self.teacher_logits, part).amax(0)))
        some = torch.zeros(len(self.valid), dtype=wide)  # [C] 1 where a part has some rows of a chunk and not all
        some[self.ours.chunk.cpu()] = (self.ours.held < self.ours.count).to(wide).cpu()
        important, some = together(shards.sequence.max, important, some.to(device))
        return important, some.nonzero().squeeze(-1)

    def _teacher_means(self, columns: Tensor) -> Tensor:
        """Mean over each of my chunks of the teacher's log-probabilities, normalised over `columns [I]`: `[M, I]`."""
        total = torch.zeros(
            self.theirs.chunk.shape[0],
            columns.shape[0],
            dtype=wide_dtype(self.teacher_logits),
            device=self.teacher_logits.device,
        )
        for part in row_chunks(self.theirs.rows.shape[0], _ROWS_AT_ONCE):
            chosen = self.theirs.read(self.teacher_logits, part).index_select(1, columns)
            total.index_add_(0, self.theirs.slot[part], log_softmax(chosen, temperature=self.options.temperature))
        return total.div_(self.theirs.count.to(total.dtype)[:, None] + EPS)

    def _columns(self, important: Tensor) -> Tensor:
        """The ids that take part, ascending: `[I]`."""
        if self.columns is not None:
            return self.columns
        if not self.valid.any():
            return torch.zeros(0, dtype=torch.int64, device=important.device)
        _, ids = largest_entries(important[None], min(self.options.vocab_top_k, important.shape[0]))
        return ids[0].sort().values

    def _over_chunks(self, values: Tensor, split: Tensor, shards: StudentShards) -> Tensor:
        """Mean of `values [R, X]`, those of the rows here, over each chunk that is mine: `[M, X]`.

        Of a chunk that is split each part has a share of the mean, and the shares are added up.
        """
        means = self.ours(values)  # [H, X]
        if shards.sequence is WHOLE:
            return means  # every chunk with rows here is mine
        place = torch.full((len(self.valid),), -1, device=means.device)
        place[split] = torch.arange(len(split), device=means.device)
        of_split = place[self.ours.chunk] >= 0
        shares = means.new_zeros(len(split), means.shape[1])
        shares = shares.index_add(0, place[self.ours.chunk[of_split]], means[of_split])
        place[split] += len(means)
        alone = self.ours.chunk[~of_split]
        place[alone] = torch.arange(len(means), device=means.device)[~of_split]
        return torch.cat([means, added(shares, shards.sequence, both_ways=True)])[place[self.theirs.chunk]]

    def _by_pairs(self, s: Tensor, t: Tensor, shards: StudentShards) -> Tensor:
        """KL over the paired ids, not normalised there, plus the distance of the sorted rest: `[M]`."""
        pairs = self.projection.strict_pairs if self.options.mode == "gold" else self.projection.relaxed_pairs
        student, teacher = (torch.from_numpy(ids).to(s.device) for ids in pairs)
        column, here = shards.place(student)
        kl = divergence(s[:, column[here]], t[:, teacher[here]], beta=self.options.beta)  # [M]
        rest_s = s[:, other_ids(column[here], s.shape[1])].exp()
        rest_t = t[:, other_ids(teacher, t.shape[1])].exp()
        k = min(self.projection.student_vocab_size - len(student), rest_t.shape[1], self.options.uncommon_top_k)
        by_rank = (shards.largest(rest_s, k) - rest_t.topk(k).values).abs().sum(-1)
        return added(kl, shards.vocabulary, both_ways=False) + by_rank


def prepare_projected(
    student_logits: Tensor,
    student_ids: Tensor,
    teacher_logits: Tensor,
    teacher_ids: Tensor,
    chunks: Any,
    projection: Any,
    *,
    positions: Ints | None = None,
    columns: Tensor | None = None,
    exact_only: bool = False,
    rows: Rows = "text",
    **options: Any,
) -> PreparedProjection:
    """Check the arguments of `projected_kl` and find the rows that it reads; nothing is exchanged.

    Args:
        student_logits: `[S_here, W]` some rows and columns, the columns not checked.
        positions: `[S_here]` the row of the text that each is, outside 0 to S - 1 for padding; None: all, in order.
        options: the fields of `ProjectedOptions`.
    """
    found = ProjectedOptions(**options)
    _check_sides(student_logits, student_ids, positions, teacher_logits, teacher_ids, projection)
    if columns is not None:
        _check_columns(columns, teacher_logits.shape[1])
    offset = predictor_offset(rows)
    s0, s1, t0, t1 = check_chunks(chunks, len(student_ids), len(teacher_ids))
    (first_s, count_s), (first_t, count_t) = _runs(s0, s1, offset), _runs(t0, t1, offset)
    valid = (count_s > 0) & (count_t > 0)
    if exact_only:
        valid &= _exact(s0, s1, t0, t1, student_ids, teacher_ids, projection)
    row_of = None if positions is None else row_places(positions, len(student_ids))
    row_s, chunk_s = joined_runs(first_s, np.where(valid, count_s, 0))
    here = rows_here(row_s, row_of)
    mine = np.flatnonzero(valid)
    mine = mine[rows_here((s1 - 1 - offset)[mine], row_of) >= 0]
    row_t, chunk_t = joined_runs(first_t[mine], count_t[mine])
    device = student_logits.device
    return PreparedProjection(
        student_logits=student_logits,
        teacher_logits=teacher_logits.detach(),
        ours=ChunkMean.of(here[here >= 0], chunk_s[here >= 0], count_s, device),
        theirs=ChunkMean.of(row_t, mine[chunk_t], count_t, device),
        valid=valid,
        student_rows=row_s,
        projection=projection,
        columns=columns,
        options=found,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMean:
    """Some rows of H chunks on one side, and what they add to the mean over each chunk."""

    rows: Tensor  # [R] places in the logits, chunk after chunk
    slot: Tensor  # [R] the chunk of each, as a place in the next three
    chunk: Tensor  # [H] ascending
    held: Tensor  # [H] how many of `rows`
    count: Tensor  # [H] of how many in all
    first: int | None  # where `rows` are neighbours, the first of them: what is read of them is then no copy

    @classmethod
    def of(cls, rows: Ints, chunk: Ints, count: Ints, device: torch.device) -> "ChunkMean":
        """From `rows [R]`, the `chunk [R]` of each, and the number of rows `count [C]` of every chunk."""
        chunks, slot, held = np.unique(chunk, return_inverse=True, return_counts=True)
        found = (rows, slot, chunks, held, count[chunks])
        names = ("rows", "slot", "chunk", "held", "count")
        first = int(rows[0]) if len(rows) and (np.diff(rows) == 1).all() else None
        tensors = {name: torch.from_numpy(x).to(device) for name, x in zip(names, found, strict=True)}
        return cls(**tensors, first=first)

    def read(self, logits: Tensor, part: slice) -> Tensor:
        """The `part` of the rows of `logits`: `[r, V]`."""
        return logits[self.rows[part]] if self.first is None else logits[self.first :][part]

    def __call__(self, values: Tensor) -> Tensor:
        """Sum of `values [R, X]`, those of the rows, over each chunk, by the number of all its rows: `[H, X]`."""
        total = values.new_zeros(self.chunk.shape[0], values.shape[1]).index_add(0, self.slot, values)
        return total / (self.count.to(total.dtype)[:, None] + EPS)


def _runs(start: Ints, end: Ints, offset: int) -> tuple[Ints, Ints]:
    """First row and number of rows of each chunk, without the row before the first: `[C]` twice."""
    first = np.maximum(start - offset, 0)
    return first, np.maximum(end - offset - first, 0)


def _entries(projection: Any, columns: Tensor, drop_unreachable: bool) -> Entries:
    """The projection on `columns [I]`, or on those of them that it reaches."""
    place = np.full(projection.teacher_vocab_size, -1, dtype=np.int64)
    wanted = columns.cpu().numpy()
    if drop_unreachable:
        reachable = np.zeros(projection.teacher_vocab_size, dtype=np.bool_)
        reachable[projection.indices[projection.indices >= 0]] = True
        wanted = wanted[reachable[wanted]]
    place[wanted] = np.arange(len(wanted))
    student, slot = np.nonzero((projection.indices >= 0) & (place[projection.indices] >= 0))
    column = place[projection.indices[student, slot]]
    arrays = (student, column, projection.weights[student, slot], wanted)
    found = [torch.from_numpy(np.ascontiguousarray(x)).to(columns.device) for x in arrays]
    return Entries(student=found[0], column=found[1], weight=found[2], columns=found[3])


def _exact(
    s0: Ints, s1: Ints, t0: Ints, t1: Ints, student_ids: Tensor, teacher_ids: Tensor, projection: Any
) -> NDArray[np.bool_]:
    """`[C]`: one token on each side, and the student's stands exactly for the teacher's."""
    exact = (s1 - s0 == 1) & (t1 - t0 == 1)
    ours, theirs = student_ids.cpu().numpy()[s0[exact]], teacher_ids.cpu().numpy()[t0[exact]]
    exact[exact] = projection.exact[ours] & (projection.indices[ours, 0] == theirs)
    return exact


def _check_columns(columns: Tensor, vocab_size: int) -> None:
    if columns.dim() != 1 or columns.is_floating_point() or columns.dtype in (torch.bool, torch.uint8):
        raise ValueError(f"columns must be [I] signed integers, got {list(columns.shape)} of {columns.dtype}.")
    ids = np.sort(columns.cpu().numpy())
    if len(ids) and (ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) == 0).any()):
        raise ValueError(f"columns must be distinct teacher ids of 0 to {vocab_size - 1}, got {columns.tolist()[:8]}.")


def _check_sides(
    student_logits: Tensor,
    student_ids: Tensor,
    positions: Ints | None,
    teacher_logits: Tensor,
    teacher_ids: Tensor,
    projection: Any,
) -> None:
    for side, logits, ids, width in (
        ("student", student_logits, student_ids, projection.student_vocab_size),
        ("teacher", teacher_logits, teacher_ids, projection.teacher_vocab_size),
    ):
        wanted = len(ids) if side == "student" and positions is not None else len(logits)
        if logits.dim() != 2 or ids.shape != (wanted,):
            raise ValueError(
                f"the {side} has ids {list(ids.shape)} and logits {list(logits.shape)}; wanted [S], [S, V]."
            )
        check_ids(side, ids, width)
    _check_width("teacher", teacher_logits.shape[1], projection.teacher_vocab_size)
    check_positions(positions, student_logits)


def _check_width(side: str, width: int, wanted: int) -> None:
    if width != wanted:
        raise ValueError(
            f"the {side}'s logits have {width} columns, the projection {wanted} ids. Cut padded heads to "
            "the real ids, and check that the projection is that of this pair, not swapped."
        )
