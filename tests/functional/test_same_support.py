# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from cohobate.functional.divergences import divergence
from cohobate.functional.same_support import important_columns, same_support_divergence

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
    forward = same_support_divergence(s, known, columns=chosen, temperature=temperature)
    reverse = same_support_divergence(s, known, columns=chosen, temperature=temperature, beta=1.0)
    used = columns or list(range(7))
    for i in range(3):
        a, b = s[i].tolist(), t[i].tolist()
        assert math.isclose(forward[i], kl_by_hand(a, b, used, temperature), rel_tol=1e-9)
        assert math.isclose(reverse[i], kl_by_hand(b, a, used, temperature), rel_tol=1e-9)


def test_on_all_columns_it_is_the_ordinary_kl_and_nothing_else_gets_a_gradient():
    s, t = oracle.draw(4, 9, seed=1).requires_grad_(), oracle.draw(4, 9, seed=2).requires_grad_()
    value = same_support_divergence(s, t)
    torch.testing.assert_close(value, divergence(s.log_softmax(-1), t.log_softmax(-1), beta=0.0))
    (grad,) = torch.autograd.grad(value.sum(), s)
    torch.testing.assert_close(grad, s.softmax(-1) - t.softmax(-1))
    some = torch.tensor([2, 5])
    (grad,) = torch.autograd.grad(same_support_divergence(s, t[:, some], columns=some).sum(), s)
    assert (grad != 0).any(0).tolist() == [c in (2, 5) for c in range(9)]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("width", "dtype", "rtol"), [(9, torch.float64, 1e-10), (2100, torch.float32, 1e-3)], ids=["plain", "kernel"]
)
def test_value_and_gradient_are_those_of_both_sides_log_softmax(
    beta: float, width: int, dtype: torch.dtype, rtol: float
):
    s, t = (oracle.draw(4, width, seed=seed).to(dtype) for seed in (1, 2))
    upstream = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=dtype)
    found, wanted = s.clone().requires_grad_(), s.double().requires_grad_()
    value = same_support_divergence(found, t, temperature=1.7, beta=beta)
    plain = divergence(*((x / 1.7).log_softmax(-1) for x in (wanted, t.double())), beta=beta)
    torch.testing.assert_close(value.double(), plain, rtol=rtol, atol=1e-6 * rtol)
    ours, theirs = (
        torch.autograd.grad(value, found, upstream)[0],
        torch.autograd.grad(plain, wanted, upstream.double())[0],
    )
    torch.testing.assert_close(ours.double(), theirs, rtol=rtol, atol=1e-3 * rtol)
    with torch.no_grad():  # without the gradient's tile
        torch.testing.assert_close(same_support_divergence(s, t, temperature=1.7, beta=beta), value.detach())


def test_a_row_whose_value_gets_no_gradient_gets_none_whatever_it_holds():
    s, t = oracle.draw(3, 9, seed=1), oracle.draw(3, 9, seed=2)
    s[1] = math.nan
    s.requires_grad_()
    (grad,) = torch.autograd.grad(same_support_divergence(s, t, beta=0.5), s, torch.tensor([1.0, 0.0, 2.0]).double())
    assert torch.equal(grad[1], torch.zeros(9).double())
    assert grad.isfinite().all()


def test_sides_of_another_width_and_numbers_that_do_not_fit_are_refused():
    s, t = oracle.draw(3, 9, seed=1), oracle.draw(3, 8, seed=2)
    with pytest.raises(ValueError, match="the same rows and columns"):
        same_support_divergence(s, t)
    with pytest.raises(ValueError, match="beta"):
        same_support_divergence(s, s, beta=1.1)
    with pytest.raises(ValueError, match="temperature"):
        same_support_divergence(s, s, temperature=0.0)


def test_important_columns_are_the_largest_of_any_row_ties_to_the_lower_id():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, -1.0, 3.0, 0.0]])
    ids, values = important_columns(logits, 3)
    assert ids.tolist() == [1, 2, 3]
    assert values.tolist() == [3.0, 3.0, 3.0]
    assert important_columns(logits, 9)[0].tolist() == [1, 2, 3, 0]
    none, _ = important_columns(logits[:0], 3)
    assert none.tolist() == []
