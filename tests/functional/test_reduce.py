# SPDX-License-Identifier: Apache-2.0
"""The one reduction: sums over micro-batches and ranks divided once, and an empty one that stays on the graph."""

import math

import pytest
import torch

from cohobate.functional.reduce import as_mask, divide_by_count, masked_sum, select_valid, weigh


def test_a_step_is_one_mean_and_not_a_mean_of_means():
    micro_batches = [torch.tensor([1.0, 1.0, 1.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)]
    count = sum(x.numel() for x in micro_batches)
    losses = [divide_by_count(masked_sum(x, torch.ones_like(x)), count) for x in micro_batches]
    torch.stack(losses).sum().backward()
    assert sum(x.item() for x in losses) == 2.0
    for x in micro_batches:
        assert x.grad is not None
        assert x.grad.tolist() == [0.25] * x.numel()


def test_padding_is_neither_summed_nor_counted():
    values, mask = torch.tensor([3.0, 3.0] + [math.nan] * 6), torch.tensor([1, 1, 0, 0, 0, 0, 0, 0])
    assert divide_by_count(masked_sum(values, mask), mask.sum()).item() == 3.0


def test_a_nan_that_is_not_selected_reaches_no_gradient():
    values = torch.tensor([2.0, -math.inf, math.nan], requires_grad=True)
    masked_sum(values, torch.tensor([True, False, False])).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_nothing_over_nothing_is_a_zero_with_a_gradient_path(count):
    values = torch.tensor([4.0, math.nan], requires_grad=True)
    loss = divide_by_count(masked_sum(values, torch.tensor([False, False])), count)
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 0.0]


def test_the_count_may_be_a_number_or_a_tensor_of_any_dtype():
    total = torch.tensor(3.0, dtype=torch.float64)
    for count in (4, 4.0, torch.tensor(4), torch.tensor(4.0)):
        assert divide_by_count(total, count).item() == 0.75
    assert divide_by_count(total, 0.5).item() == 6.0  # a mean count over ranks may be below one
    assert divide_by_count(total, torch.tensor(4.0)).dtype == torch.float64


def test_selection_keeps_order_and_takes_whole_slots():
    values = torch.arange(12.0).reshape(2, 3, 2)
    picked = select_valid(values, torch.tensor([[False, True, False], [True, False, True]]))
    assert picked.tolist() == [[2.0, 3.0], [6.0, 7.0], [10.0, 11.0]]


def test_a_mask_is_zeros_and_ones():
    assert as_mask(torch.tensor([0, 1, 1])).tolist() == [False, True, True]
    for wrong in (torch.tensor([0, 2]), torch.tensor([0.5]), torch.tensor([math.nan]), torch.tensor([-1])):
        with pytest.raises(ValueError, match="only 0 and 1"):
            as_mask(wrong)


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"got \(2, 3\) and \(3,\)"):
        masked_sum(torch.zeros(2, 3), torch.ones(3))


def test_a_weight_of_zero_hides_what_it_weights_and_its_gradient():
    values = torch.tensor([2.0, math.nan, math.inf, -1.0], requires_grad=True)
    out = weigh(values, torch.tensor([0.5, 0.0, 0.0, 3.0], dtype=torch.float64))
    out.sum().backward()
    assert out.tolist() == [1.0, 0.0, 0.0, -3.0]
    assert out.dtype == torch.float32
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.0, 3.0]
