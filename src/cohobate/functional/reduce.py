# SPDX-License-Identifier: Apache-2.0
"""The one reduction: a sum over the selected slots, divided once by a count that somebody else has taken.

Means of means depend on how a step was cut into micro-batches and ranks; a sum divided by the step's global count does
not. So losses are sums, counts come from masks before any scoring, and only `divide_by_count` divides. An empty
selection gives a zero that still hangs on the graph, so a rank without a valid token takes part in every backward and
collective.
"""

import torch
from torch import Tensor


def as_mask(mask: Tensor) -> Tensor:
    """`mask` as bool. 0/1 of another dtype is accepted; any other value is a ValueError: a weight is not a mask."""
    if mask.dtype == torch.bool:
        return mask
    chosen = mask == 1
    if not bool((chosen | (mask == 0)).all()):
        raise ValueError("a mask holds only 0 and 1 (or False and True); multiply weights into the loss instead.")
    return chosen


def select_valid(values: Tensor, mask: Tensor) -> Tensor:
    """The slots of `values [..., *tail]` where `mask [...]` holds: `-> [N, *tail]`, in order.

    Selection, not multiplication: 0 x NaN is NaN, and so is its gradient. Unselected slots get a gradient of exactly
    0.
    """
    return values[as_mask(mask)]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of `values [...]` over `mask [...]`: a scalar, a connected zero where nothing is selected."""
    if values.shape != mask.shape:
        raise ValueError(f"values and mask must have one shape, got {tuple(values.shape)} and {tuple(mask.shape)}.")
    return torch.where(as_mask(mask), values, 0.0).sum()


def weigh(values: Tensor, weights: Tensor) -> Tensor:
    """`values * weights`, both `[N]`, and exactly 0 where the weight is 0, whatever the value is."""
    return torch.where(weights == 0, 0.0, values * weights.to(values.dtype))


def divide_by_count(total: Tensor, count: Tensor | float) -> Tensor:
    """`total / count`, a zero with a gradient path for a count of 0. The count is the whole step's, over all ranks."""
    counts = torch.as_tensor(count, dtype=total.dtype, device=total.device)
    return torch.where(counts == 0, total * 0.0, total / torch.where(counts == 0, 1.0, counts))
