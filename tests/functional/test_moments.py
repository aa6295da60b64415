# SPDX-License-Identifier: Apache-2.0
"""Normalisers, entropies and divergences from sums of one tile, and of its shards, whatever each one's maximum."""

import math

import pytest
import torch
from torch import Tensor

from cohobate.functional.kernels import plain
from cohobate.functional.moments import WHOLE, Shards, pair_moments, side_moments

from . import oracle
from .oracle import draw
from .thread_shards import ThreadShards, on_shards

N, V = 3, 12
CUTS = pytest.mark.parametrize("cuts", [[0, V], [0, 5, V], [0, 0, 7, V]], ids=["whole", "two", "an empty one"])


def tiles(spread: float) -> tuple[Tensor, Tensor]:
    s, t = draw(N, V, seed=1, scale=spread), draw(N, V, seed=2, scale=spread)
    s[0, 7:] -= 900.0  # shards whose maxima are far apart
    return s, t


@CUTS
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_shards_add_up_to_the_definition(cuts: list[int], spread: float):
    s, t = tiles(spread)

    def run(ids: slice, shards: ThreadShards) -> list[Tensor]:
        read = pair_moments(*plain.pair_sums(s[:, ids], t[:, ids]), shards)
        side = side_moments(*plain.side_sums(s[:, ids]), shards)
        assert shards.exchanged == ["max", "sum", "max", "sum"]
        return [*read.log_z, read.student_entropy, read.teacher_entropy, read.forward_kl, read.reverse_kl, *side]

    for found in on_shards(cuts, run):
        for n in range(N):
            p, q = (oracle.softmax((x[n] - x[n].max()).tolist()) for x in (s, t))
            log_z = [torch.logsumexp(x[n], -1).item() for x in (s, t)]
            want = [*log_z, oracle.entropy(p), oracle.entropy(q)]
            assert [x[n].item() for x in found[:4]] == pytest.approx(want, rel=1e-10, abs=1e-12)
            assert [x[n].item() for x in found[6:]] == pytest.approx([log_z[0], want[2]], rel=1e-10, abs=1e-12)
            gap = s[n].log_softmax(-1) - t[n].log_softmax(-1)  # in log space: exp(-900) is no probability
            kls = [-(gap * t[n].softmax(-1)).sum().item(), (gap * s[n].softmax(-1)).sum().item()]
            assert [x[n].item() for x in found[4:6]] == pytest.approx(kls, rel=1e-9, abs=1e-11)


@CUTS
def test_forbidden_tokens_cost_infinity_only_where_the_other_side_weights_them(cuts: list[int]):
    s, t = tiles(1.0)
    s[0, 2], t[1, 9], s[2] = -math.inf, -math.inf, -math.inf

    def run(ids: slice, shards: ThreadShards) -> tuple[list[float], list[float]]:
        read = pair_moments(*plain.pair_sums(s[:, ids], t[:, ids]), shards)
        return read.forward_kl.tolist(), read.reverse_kl.tolist()

    for forward, reverse in on_shards(cuts, run):
        assert forward[0] == math.inf
        assert math.isfinite(forward[1])
        assert math.isfinite(reverse[0])
        assert reverse[1] == math.inf
        assert math.isnan(reverse[2])


def test_a_whole_vocabulary_exchanges_nothing():
    values = torch.randn(3)
    assert isinstance(WHOLE, Shards)
    assert WHOLE.max(values) is WHOLE.sum(values) is values
    assert WHOLE.largest(values, values)[0] is values
