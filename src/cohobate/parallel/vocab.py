# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities, entropy and divergences of logits whose vocabulary is split over a tensor-parallel group.

Each rank holds some columns, `[..., V_local]`, and gathering them would make the largest tensor of a training step on
every rank. What a softmax needs of the other ranks is a few numbers per row: so one MAX and one SUM all-reduce of
per-token statistics (a JSD takes a second SUM) stand in for the gather, and each rank goes on to the gradient of its
own columns alone. The formulas are those of one process (`functional.moments`, `functional.kernels`): tp_group=None,
or a group of one, is that process, without a collective.

Values are `[...]` in nats, float32 (float64 for float64 logits), equal on every rank, whose losses must be the same
too. Not here: the mask, the mean and the temperature (divide the logits), which are the caller's. Every rank must make
every call, in the same order and with the same rows. An error that one rank finds is raised on all.

Saved for the backward pass: the logits as they came and some numbers per row (`vocab_functions.py`). With
`inplace_backward` the gradient is written over the logits, which nobody may read afterwards.
"""

import torch
from torch import Tensor

from cohobate.parallel.layout import ShardSpan
from cohobate.parallel.shards import Group
from cohobate.parallel.tiles import check_logits
from cohobate.parallel.vocab_functions import Divergence, Entropy, IndexOptions, Logprobs, PairOptions


def vocab_parallel_logprobs(
    logits: Tensor,
    index: Tensor,
    tp_group: Group = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    *,
    inplace_backward: bool = False,
) -> Tensor:
    """Log-probability in nats of each of `index`, global ids `[...]` or `[..., k]`: of its shape.

    Args:
        logits: `[..., V_local]`, this rank's columns, any float dtype.
        index: int64, the same on every rank. `ignore_index` gives 0.0 and no gradient, whatever the row holds.
        vocab_start_index, vocab_end_index: the global ids of this rank's columns, `[start, end)`. By default the
            shards lie in rank order, of whatever widths.
        global_vocab_size: ids from here on are padding of the head, and outside the softmax.

    Raises:
        ValueError: on every rank alike: an id that is not in the vocabulary, shards that leave a gap or overlap.
    """
    span = ShardSpan(start=vocab_start_index, stop=vocab_end_index, vocab_size=global_vocab_size)
    check_logits("logits", logits)
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(f"index must hold integers, got {index.dtype}.")
    options = IndexOptions(tp_group, span, ignore_index, inplace_backward)
    return Logprobs.apply(logits, index, options)  # pyright: ignore[reportReturnType]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    tp_group: Group = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    *,
    inplace_backward: bool = False,
) -> Tensor:
    """Cross-entropy in nats of `target [...]`, 0.0 where it is `ignore_index`: `-> [...]`, neither masked nor reduced.

    `vocab_parallel_logprobs` negated, and so are its arguments and errors.
    """
    return 0.0 - vocab_parallel_logprobs(
        logits,
        target,
        tp_group,
        vocab_start_index,
        vocab_end_index,
        global_vocab_size,
        ignore_index,
        inplace_backward=inplace_backward,
    )


def vocab_parallel_entropy(logits: Tensor, tp_group: Group = None, *, inplace_backward: bool = False) -> Tensor:
    """Entropy in nats of the distribution of `logits [..., V_local]`: `-> [...]`. A token at -inf adds 0.

    Columns of padding must be cut off or at -inf; the order of the shards does not matter.
    """
    check_logits("logits", logits)
    return Entropy.apply(logits, tp_group, inplace_backward)  # pyright: ignore[reportReturnType]


def vocab_parallel_kl_div(
    student: Tensor,
    teacher: Tensor,
    tp_group: Group = None,
    reverse: bool = False,
    *,
    inplace_backward: bool = False,
) -> Tensor:
    """KL(teacher || student) in nats of two sets of logits `[..., V_local]`, or KL(student || teacher): `-> [...]`.

    The second if `reverse`. Both sides are differentiable: detach a frozen teacher. +inf where the weighting side
    allows a token that the other forbids. `inplace_backward` overwrites the student's logits, not the teacher's.

    Raises:
        ValueError: on every rank alike, if on one of them the sides hold columns of different number: they must be
            split over the same ranks in the same way.
    """
    return _divergence(student, teacher, tp_group, 1.0 if reverse else 0.0, inplace_backward)


def vocab_parallel_jsd(
    student: Tensor, teacher: Tensor, tp_group: Group = None, *, beta: float, inplace_backward: bool = False
) -> Tensor:
    """Generalised Jensen-Shannon divergence in nats of two sets of logits `[..., V_local]`: `-> [...]`.

    `beta KL(t || m) + (1 - beta) KL(s || m)` with `m = beta p_t + (1 - beta) p_s`, where 0 < beta < 1 weights the
    teacher (`functional.jsd`). Both sides are differentiable. Errors and `inplace_backward`: `vocab_parallel_kl_div`.
    """
    if not 0 < beta < 1:
        raise ValueError(
            f"vocab_parallel_jsd needs 0 < beta < 1, got {beta}. At 0 and 1 it vanishes; for a KL use "
            "vocab_parallel_kl_div."
        )
    return _divergence(student, teacher, tp_group, beta, inplace_backward)


def _divergence(student: Tensor, teacher: Tensor, group: Group, beta: float, inplace: bool) -> Tensor:
    check_logits("student", student)
    check_logits("teacher", teacher)
    return Divergence.apply(student, teacher, PairOptions(group, beta, inplace))  # pyright: ignore[reportReturnType]
