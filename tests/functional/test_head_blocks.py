# SPDX-License-Identifier: Apache-2.0
"""Block by block equals all at once, in value and gradient, for every head; and no `[N, V]` is ever made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cohobate.functional.head_blocks import blocked_head_loss, rows_per_block
from cohobate.functional.logprobs import head_logits

from .heads import Watch, products_of
from .memory import NewMemory

N, V, H = 11, 13, 5
BLOCKS = [slice(0, 4), slice(4, 4), slice(4, 5), slice(5, 11)]
HEADS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"softcap": 2.0},
    {"scale": 1.7, "softcap": 1.5, "bias": True},
    {"bias": True},
]


def leaves(seed: int = 0, *, dtype: torch.dtype = torch.float64, bias: bool = False, rows: int = N) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(rows, H), (V, H), *([(V,)] if bias else [])]
    return [torch.randn(*s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def ragged(logits: Tensor, block: int) -> Tensor:
    """As many values as the block has rows, and one more that depends on all of them and on the block's number."""
    logp = logits.log_softmax(-1)
    return torch.cat([logp[:, 1] * logp[:, 3], (logp.exp() * logits).sum()[None] * (block + 1)])


def whole(hidden: Tensor, weight: Tensor, bias: Tensor | None, blocks: list[slice], **head: Any) -> list[Tensor]:
    logits = head_logits(hidden, weight, bias=bias, **head)
    return [ragged(logits[rows], number) for number, rows in enumerate(blocks)]


def weighted(values: Any) -> Tensor:
    """Every value with a coefficient of its own, as upstream gives them."""
    flat = torch.cat(list(values))
    return (flat * torch.linspace(-1, 2, flat.numel(), dtype=flat.dtype)).sum()


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_value_and_gradient_are_those_of_whole_logits(head: dict[str, Any]):
    options = dict(head)
    own = leaves(bias=bool(options.pop("bias", False)))
    bias = own[2] if len(own) == 3 else None
    found = blocked_head_loss(own[0], own[1], BLOCKS, ragged, bias=bias, **options)
    wanted = whole(own[0], own[1], bias, BLOCKS, **options)
    assert [x.shape for x in found] == [(5,), (1,), (2,), (7,)]
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    got, want = (torch.autograd.grad(weighted(x), own) for x in (found, wanted))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_gradcheck_with_everything_a_head_can_have():
    own = leaves(3, bias=True)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return blocked_head_loss(hidden, weight, [slice(0, 3), slice(3, 7)], ragged, bias=bias, scale=0.7, softcap=2.0)

    assert torch.autograd.gradcheck(run, own)


def test_rows_between_blocks_are_not_read_and_get_no_gradient():
    hidden, weight = leaves()
    with torch.no_grad():
        hidden[4:6] = float("nan")
    blocks = [slice(1, 4), slice(6, 9)]
    found = blocked_head_loss(hidden, weight, blocks, ragged)
    grad_hidden, grad_weight = torch.autograd.grad(weighted(found), [hidden, weight])
    assert not grad_hidden[[0, 4, 5, 9, 10]].any()
    assert grad_hidden[[1, 2, 3, 6, 7, 8]].any(-1).all()
    assert grad_weight.isfinite().all()


@pytest.mark.parametrize("head", [{}, {"softcap": 2.0, "scale": 0.5}], ids=str)
def test_a_row_without_gradient_may_hold_anything(head: dict[str, float]):
    hidden, weight = leaves()
    clean = hidden.detach().clone()
    with torch.no_grad():
        hidden[2], clean[2] = float("nan"), 0.0

    def others(logits: Tensor, block: int) -> Tensor:
        return logits[torch.arange(logits.shape[0]) != 2].log_softmax(-1)[:, 0]

    found = blocked_head_loss(hidden, weight, [slice(0, 5)], others, **head)
    got = torch.autograd.grad(weighted(found), [hidden, weight])
    clean.requires_grad_()
    want = torch.autograd.grad(
        weighted([others(head_logits(clean[:5], weight, **head), 0)]),
        [clean, weight],
    )
    torch.testing.assert_close(got[1], want[1], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(got[0], want[0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_weights_add_up_in_float32(dtype: torch.dtype):
    """4096 rows, each of which adds a 4096th: a bfloat16 sum would stop growing long before the end."""
    rows = 4096
    hidden = torch.ones(rows, 2, dtype=dtype, requires_grad=True)
    weight = torch.zeros(4, 2, dtype=dtype, requires_grad=True)
    blocks = [slice(i, i + 8) for i in range(0, rows, 8)]
    seen = []

    def first(logits: Tensor, block: int) -> Tensor:
        seen.append(logits.dtype)
        return logits[:, 1]

    values = blocked_head_loss(hidden, weight, blocks, first)
    (grad,) = torch.autograd.grad(torch.cat(values).sum() / rows, weight)
    assert set(seen) == {torch.float32}
    assert grad.dtype == dtype
    assert grad.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


def test_bfloat16_logits_are_as_exact_as_float32():
    own = leaves(5, dtype=torch.bfloat16)
    (values,) = blocked_head_loss(own[0], own[1], [slice(0, N)], lambda z, _: z.flatten())
    exact = (own[0].double() @ own[1].double().T).flatten()
    torch.testing.assert_close(values.double(), exact, rtol=2e-5, atol=2e-5)


def test_a_value_that_is_a_view_of_the_logits_outlives_the_next_block():
    hidden, weight = leaves()
    values = blocked_head_loss(hidden, weight, [slice(0, 3), slice(3, 6)], lambda z, _: z[:, 2])
    torch.testing.assert_close(torch.cat(values), (hidden @ weight.T)[:6, 2])


def test_no_rows_give_no_values_and_zeros_that_hang_on_the_graph():
    own = leaves(rows=0, bias=True)
    (values,) = blocked_head_loss(own[0], own[1], [slice(0, 0)], lambda z, _: z.sum(-1), bias=own[2])
    assert values.shape == (0,)
    grads = torch.autograd.grad(values.sum(), own)
    assert [g.shape for g in grads] == [(0, H), (V, H), (V,)]
    assert not any(g.any() for g in grads)


def test_without_gradient_only_the_forward_pass_is_made():
    calls = []

    def counted(logits: Tensor, block: int) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return ragged(logits, block)

    own = leaves()
    with torch.no_grad():
        values = blocked_head_loss(own[0], own[1], BLOCKS, counted)
    assert not any(x.requires_grad for x in values)
    assert calls == [False] * 4
    assert products_of(lambda: blocked_head_loss(own[0], own[1], [slice(0, N)], ragged)) == 1


def test_four_products_with_a_gradient_and_only_what_is_asked_for():
    own = leaves()

    def run(wanted: list[Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(weighted(blocked_head_loss(own[0], own[1], [slice(0, N)], ragged)), wanted)

    assert products_of(run(own)) == 4
    own[1].requires_grad_(False)
    assert products_of(run(own[:1])) == 3


def test_a_loss_that_does_not_hang_on_the_logits_gives_zero_gradients():
    own = leaves()
    values = blocked_head_loss(own[0], own[1], [slice(0, N)], lambda z, _: z.detach()[:, 0])
    grads = torch.autograd.grad(values[0].sum(), own)
    assert not any(g.any() for g in grads)


def test_nothing_as_large_as_all_logits_is_ever_made():
    rows, vocab = 600, 800
    hidden, weight = torch.randn(rows, 4).requires_grad_(), torch.randn(vocab, 4).requires_grad_()
    blocks = [slice(i, i + 40) for i in range(0, rows, 40)]
    with NewMemory(hidden, weight) as memory, Watch() as watch:
        values = blocked_head_loss(hidden, weight, blocks, lambda z, _: z.log_softmax(-1)[:, 0])
        torch.autograd.grad(torch.cat(values).sum(), [hidden, weight])
    assert watch.largest <= 40 * vocab
    assert memory.larger_than(40 * vocab * 4 + 64) == 0


def test_a_block_keeps_to_the_budget_of_the_device():
    wide, narrow = (rows_per_block(torch.zeros(1, 8), vocab) for vocab in (150_000, 1_000))
    assert 100 <= wide <= 512
    assert narrow == 512


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], r"at least one slice.*got \[\]"),
        ([slice(0, 4), slice(3, 5)], "ascending and disjoint"),
        ([slice(4, 6), slice(0, 2)], "ascending and disjoint"),
        ([slice(0, 6, 2)], "neighbouring rows"),
    ],
)
def test_blocks_that_cannot_be_are_refused(blocks: list[slice], message: str):
    own = leaves()
    with pytest.raises(ValueError, match=message):
        blocked_head_loss(own[0], own[1], blocks, ragged)


def test_a_loss_that_gives_no_list_of_values_is_refused_with_its_block():
    own = leaves()
    with pytest.raises(ValueError, match=r"values \[m\], got \[4, 13\] for block 0"):
        blocked_head_loss(own[0], own[1], BLOCKS, lambda z, _: z)
