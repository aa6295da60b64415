# SPDX-License-Identifier: Apache-2.0
"""Sampling from a sharded vocabulary, the same token on every rank, with nothing gathered but sums.

A draw is the inverse of the distribution function: a uniform number u per row, the mass of each shard exchanged, and
the shard in which u falls walks through its own columns. So one number decides a row, the result does not depend on
how many ranks share the vocabulary, and all ranks take rank 0's u: a generator that ran ahead elsewhere cannot split
them.

Top-k and top-p keep the smallest set of most likely tokens whose weight reaches a target (each token weighs 1, or its
probability), which is a threshold on the logits and a number of ties at it. The threshold is found digit by digit, as
in a radix sort: the weight of each of 256 values of the next 8 bits, summed over the ranks, says in which one the
target falls. That is exact, ties go to the lower ids, and 4 rounds serve float32 (2 serve 16-bit logits, 8 float64).

Masses are float64. N rows, W columns of this rank.
"""

import torch
from torch import Tensor

from cohobate.functional.chunked_head import row_chunks
from cohobate.functional.logprobs import check_temperature
from cohobate.functional.ordered import ordered_bits
from cohobate.parallel.layout import Layout, ShardSpan, agreed_layout
from cohobate.parallel.shards import CheckedShards, Group, rank_and_size
from cohobate.parallel.tiles import check_logits, num_rows

_CHUNK_BYTES = 64 * 2**20
_BYTES_PER_ENTRY = 48  # of all temporaries together
_DIGIT = 8  # bits
_VALUES = 1 << _DIGIT


def vocab_parallel_sample(
    logits: Tensor,
    *,
    tp_group: Group = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token for each row of `logits [..., V_local]`, drawn from their softmax: global ids `[...]` int64.

    Equal on every rank, whatever the ranks' generators: rank 0's draw counts. A generator advances on every rank.

    Args:
        temperature: divides the logits.
        top_k: only the k most likely tokens; k beyond the vocabulary keeps all.
        top_p: of those, only the fewest most likely tokens whose share of their mass is at least top_p.
        generator: draws one float64 per row; by default torch's own on rank 0.

    Raises:
        ValueError: on every rank alike: a row without an allowed token, or with NaN or +inf; shards that leave a gap
            or overlap; a number outside its range.
    """
    check_temperature(temperature)
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be >= 1 or None, got {top_k}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1] or None, got {top_p}.")
    check_logits("logits", logits)
    device = logits.device if generator is None else generator.device
    uniform = torch.rand(num_rows(logits), generator=generator, dtype=torch.float64, device=device)
    drawing = _Drawing(logits.detach(), tp_group, ShardSpan(start=vocab_start_index, stop=vocab_end_index))
    return drawing.ids(uniform.to(logits.device), temperature, top_k, top_p)


class _Drawing:
    """One call: what this rank holds, and how it meets the others; every method is a collective."""

    def __init__(self, logits: Tensor, group: Group, span: ShardSpan):
        self.logits = logits
        self.rank, self.size = rank_and_size(group)
        self.shards = CheckedShards(group, span.facts(logits.shape[-1]), agreed_layout)

    def ids(self, uniform: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
        """Global ids `[...]` for `uniform [N]`, of which rank 0's counts."""
        maximum, uniform = self._agree(uniform)
        rows = self.logits.reshape(len(uniform), self.logits.shape[-1])
        drawn = torch.empty(len(uniform), dtype=torch.int64, device=rows.device)
        at_once = max(1, _CHUNK_BYTES // (_BYTES_PER_ENTRY * max(1, *self.layout.widths)))  # the same on every rank
        for chunk in row_chunks(len(uniform), at_once):
            x = rows[chunk]
            mass = ((x.double() - maximum[chunk, None]) / temperature).exp_()  # [n, W]
            if top_k is not None:
                mass = self._most_likely(x, mass, (mass > 0).double(), torch.full_like(maximum[chunk], top_k))
            if top_p is not None:
                mass = self._most_likely(x, mass, mass, top_p * self.shards.sum(mass.sum(-1)))
            drawn[chunk] = self._inverse(mass, uniform[chunk])
        return drawn.view(self.logits.shape[:-1])

    def _agree(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's largest logit over all ranks, and rank 0's `uniform [N]`: one maximum."""
        maximum = torch.full_like(uniform, -torch.inf)
        if self.logits.shape[-1]:
            maximum = self.logits.amax(-1).reshape(-1).double().nan_to_num(torch.inf, torch.inf, -torch.inf)
        draw = uniform if self.rank == 0 else torch.full_like(uniform, -torch.inf)
        maximum, draw = self.shards.max(torch.stack([maximum, draw]))
        unfit = maximum.isinf().nonzero()[:, 0].tolist()
        if unfit:
            raise ValueError(
                f"cannot sample row {unfit[0]}, whose largest logit is {float(maximum[unfit[0]])} (inf stands for NaN "
                f"too); {len(unfit)} such rows. Each row needs an allowed token and finite logits."
            )
        return maximum, draw

    @property
    def layout(self) -> Layout:
        assert self.shards.agreed is not None
        return self.shards.agreed

    def _of_each_rank(self, own: Tensor) -> Tensor:
        """`[ranks, n]` from each rank's `[n]`: one sum."""
        table = own.new_zeros(self.size, len(own))
        table[self.rank] = own
        return self.shards.sum(table)

    def _most_likely(self, x: Tensor, mass: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """`mass [n, W]`, 0 outside the fewest largest of `x [n, W]` whose `weight` reaches `target [n]`."""
        bits = ordered_bits(x)
        num_bits = 8 * bits.element_size()
        kept, tied = torch.zeros_like(x, dtype=torch.bool), weight > 0  # surely in; equal as far as looked at
        above = torch.zeros_like(target)  # weight of what is kept, on all ranks
        level = above  # weight of what is tied
        for shift in range(num_bits - _DIGIT, -1, -_DIGIT):
            digit = (bits >> shift).long() & (_VALUES - 1)
            if shift == num_bits - _DIGIT:
                digit = digit ^ (_VALUES // 2)  # the sign bit: negative is less
            histogram = weight.new_zeros(len(x), _VALUES)
            histogram = self.shards.sum(histogram.scatter_add_(-1, digit, weight.masked_fill(~tied, 0.0)))
            from_top = histogram.flip(-1)
            reach = from_top.cumsum(-1)
            # Sums in another order may miss the target by a rounding: all there is must do.
            enough = (above[:, None] + reach >= target[:, None]) | (reach == reach[:, -1:])
            place = enough.int().argmax(-1, keepdim=True)  # the first
            level = from_top.gather(-1, place)[:, 0]
            above = above + torch.where(place == 0, 0.0, reach.gather(-1, (place - 1).clamp(min=0)))[:, 0]
            found = _VALUES - 1 - place
            kept |= tied & (digit > found)
            tied &= digit == found
        counts = self._of_each_rank(tied.sum(-1).double())  # [ranks, n]
        wanted = ((target - above) * counts.sum(0) / level).ceil().clamp(min=1)
        order = self.layout.order
        lower = counts[order[: order.index(self.rank)]].sum(0)
        kept |= tied & (tied.cumsum(-1) + lower[:, None] <= wanted[:, None])
        return mass.masked_fill(~kept, 0.0)

    def _inverse(self, mass: Tensor, uniform: Tensor) -> Tensor:
        """The id `[n]` at which the distribution function of `mass [n, W]`, in the order of ids, passes `uniform`."""
        order = self.layout.order
        ends = self._of_each_rank(mass.sum(-1))[order].cumsum(0)  # [ranks, n]
        total = ends[-1]
        target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
        owner = (ends <= target).sum(0)  # as a place in `order`; a shard without mass ends where the one before does
        own = torch.zeros_like(owner)
        if mass.shape[-1]:
            place = order.index(self.rank)
            passed = mass.cumsum(-1)
            last = (passed < passed[:, -1:]).sum(-1)  # the last column with mass
            rest = target - ends[place - 1] if place else target
            column = torch.searchsorted(passed, rest[:, None], right=True)[:, 0]
            own = (torch.minimum(column, last) + self.layout.starts[self.rank]).masked_fill(owner != place, 0)
        return self.shards.sum(own)
