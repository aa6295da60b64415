# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from cohobate.functional.divergences import divergence
from cohobate.functional.same_support import important_columns, same_support_kl

from . import oracle


def kl_by_hand(student: list[float], teacher: list[float], columns: list[int], temperature: float) -> float:
    """KL(teacher || student) of one row, both renormalised on the columns."""

    def probabilities(logits: list[float]) -> list[float]:
        powers = [math.exp(logits[c] / temperature) for c in columns]
        return [p / sum(powers) for p in powers]

    s, t = probabilities(student), probabilities(teacher)
    return sum(q * math.log(q / p) for p, q in zip(s, t, strict=True))


@pytest.mark.parametrize("columns", [None, [4, 1, 6]])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_it_is_the_kl_of_both_sides_renormalised_on_the_columns(columns: list[int] | None, temperature: float):
    s, t = oracle.draw(3, 7, seed=1), oracle.draw(3, 7, seed=2)
    chosen = None if columns is None else torch.tensor(columns)
    known = t if columns is None else t[:, columns]
    forward = same_support_kl(s, known, columns=chosen, temperature=temperature)
    reverse = same_support_kl(s, known, columns=chosen, temperature=temperature, reverse=True)
    used = columns or list(range(7))
    for i in range(3):
        a, b = s[i].tolist(), t[i].tolist()
        assert math.isclose(forward[i], kl_by_hand(a, b, used, temperature), rel_tol=1e-9)
        assert math.isclose(reverse[i], kl_by_hand(b, a, used, temperature), rel_tol=1e-9)


def test_on_all_columns_it_is_the_ordinary_kl_and_nothing_else_gets_a_gradient():
    s, t = oracle.draw(4, 9, seed=1).requires_grad_(), oracle.draw(4, 9, seed=2).requires_grad_()
    value = same_support_kl(s, t)
    torch.testing.assert_close(value, divergence(s.log_softmax(-1), t.log_softmax(-1), beta=0.0))
    (grad,) = torch.autograd.grad(value.sum(), s)
    torch.testing.assert_close(grad, s.softmax(-1) - t.softmax(-1))
    some = torch.tensor([2, 5])
    (grad,) = torch.autograd.grad(same_support_kl(s, t[:, some], columns=some).sum(), s)
    assert (grad != 0).any(0).tolist() == [c in (2, 5) for c in range(9)]


def test_important_columns_are_the_largest_of_any_row_ties_to_the_lower_id():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, -1.0, 3.0, 0.0]])
    ids, values = important_columns(logits, 3)
    assert ids.tolist() == [1, 2, 3]
    assert values.tolist() == [3.0, 3.0, 3.0]
    assert important_columns(logits, 9)[0].tolist() == [1, 2, 3, 0]
    none, _ = important_columns(logits[:0], 3)
    assert none.tolist() == []
