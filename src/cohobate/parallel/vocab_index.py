# SPDX-License-Identifier: Apache-2.0
"""Global ids on one shard of a vocabulary: whose they are, whether all ranks may go on, and their gradient.

The ids are judged inside the call's one maximum, since only there the ranks learn how long the vocabulary is, and the
logits they choose travel in its one sum. N rows, k ids a row, W columns of this rank's shard.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cohobate.functional.chunked_head import row_chunks
from cohobate.functional.logprobs import put_last, upcast
from cohobate.parallel.layout import NUM_SPAN_FACTS, Layout, ShardSpan, agreed_layout, exact
from cohobate.parallel.shards import CheckedShards, Group, rank_and_size
from cohobate.parallel.tiles import num_rows

IGNORED = -2  # as a column: ignore_index
ELSEWHERE = -1  # as a column: another rank's id
_SCRATCH_BYTES = 8 * 2**20


class ChosenIds:
    """`index` on this rank's shard. Once `shards` has exchanged maximum and sum, there are:

    columns [N, k]   of this shard, `ELSEWHERE` or `IGNORED`
    logits [N, k]    the chosen ones in the wide dtype, from whichever rank holds them; 0 for `IGNORED`
    """

    def __init__(self, logits: Tensor, index: Tensor, group: Group, span: ShardSpan, ignore_index: int):
        self._rank, _ = rank_and_size(group)
        self._ignore_index = ignore_index
        self.real = span.real_columns(logits, self._rank)  # [..., W] without padding
        lead = logits.shape[:-1]
        fits = index.shape == lead or (index.dim() == logits.dim() and index.shape[:-1] == lead)
        width = index.shape[-1] if index.dim() == logits.dim() else 1
        shape = (num_rows(logits), width if fits else 1)
        self._ids = index.reshape(shape).long() if fits else index.new_full(shape, ignore_index).long()  # [N, k]
        self._ignored = self._ids == ignore_index
        known = self._ids.masked_fill(self._ignored, 0)
        lowest, highest = torch.stack(known.aminmax()).tolist() if known.numel() else (0, 0)
        facts = [*span.facts(logits.shape[-1]), float(fits), exact(lowest), exact(highest)]
        self.shards = CheckedShards(group, facts, self._check, passenger=self._chosen)

    @property
    def logits(self) -> Tensor:
        assert self.shards.carried is not None
        return self.shards.carried

    def _chosen(self) -> Tensor:
        layout = self.shards.agreed
        assert layout is not None
        local = self._ids - layout.starts[self._rank]
        here = (local >= 0) & (local < self.real.shape[-1])
        self.columns = torch.where(here, local, ELSEWHERE).masked_fill_(self._ignored, IGNORED)
        return upcast(_at_columns(self.real, self.columns)).masked_fill(self.columns < 0, 0.0)

    def _check(self, table: Sequence[Sequence[float]]) -> Layout:
        layout = agreed_layout(table)
        for rank, (fits, lowest, highest) in enumerate(row[NUM_SPAN_FACTS:] for row in table):
            if not fits:
                raise ValueError(
                    f"index must be [...] or [..., k] for logits [..., V_local]; on rank {rank} its leading axes are "
                    "not those of the logits."
                )
            if lowest < 0 or highest >= layout.vocab_size:
                raise ValueError(
                    f"index must be ignore_index ({self._ignore_index}) or in [0, {layout.vocab_size}), got "
                    f"{int(lowest if lowest < 0 else highest)} on rank {rank}. Labels are global ids, and padding is "
                    "marked with ignore_index."
                )
        return layout


def slopes_at_columns(x: Tensor, columns: Tensor, log_z: Tensor, grad: Tensor, total: Tensor) -> Tensor:
    """`[n, k]` gradient of `sum_j grad_j log p_j` at `columns [n, k]` of the tile `x [n, W]`, in the wide dtype.

    `grad_v - p_v total`, where `grad_v` adds up all j that name v. A column that is not here stands for column 0 and
    gets the gradient of that, so that whatever is written there is right.
    """
    if x.shape[-1] == 0:
        return grad
    p = (upcast(_at_columns(x, columns)) - log_z[:, None]).exp()
    here = grad.masked_fill(columns < 0, 0.0)
    if columns.shape[-1] > 1:
        here = _added_up(here, columns.clamp(min=0), x.shape[-1])
    idle = (total == 0)[:, None]  # p may be NaN there
    return torch.where(idle, here, here - p * total[:, None])


def write_at_columns(out: Tensor, columns: Tensor, values: Tensor) -> None:
    """Write `slopes_at_columns [n, k]` into the tile `out [n, W]`; columns named twice have equal values."""
    if out.shape[-1]:
        put_last(out, columns.clamp(min=0), values)


def _at_columns(x: Tensor, columns: Tensor) -> Tensor:
    """`x [..., W]` at `columns [N, k]`, whatever a column that is not here gives: `[N, k]`."""
    if x.shape[-1] == 0:
        return x.new_zeros(columns.shape)
    place = columns.clamp(min=0).view(*x.shape[:-1], columns.shape[-1])
    return x.gather(-1, place).view(columns.shape)


def _added_up(values: Tensor, columns: Tensor, width: int) -> Tensor:
    """Each of `values [n, k]` replaced by the sum of those of its row that share its column of `width`."""
    rows = max(1, _SCRATCH_BYTES // (width * values.element_size()))
    scratch = values.new_zeros(min(rows, values.shape[0]), width)
    result = torch.empty_like(values)
    for chunk in row_chunks(values.shape[0], rows):
        place = columns[chunk]
        sums = scratch[: place.shape[0]].scatter_add_(-1, place, values[chunk])
        torch.gather(sums, -1, place, out=result[chunk])
        sums.scatter_(-1, place, 0.0)
    return result
