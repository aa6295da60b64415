# SPDX-License-Identifier: Apache-2.0
"""Upcast, scale, soft-cap, temperature and vocabulary cut against numbers worked out by hand or in plain floats."""

import math

import pytest
import torch

from cohobate.functional.divergences import forward_kl
from cohobate.functional.logprobs import (
    entropy,
    gather_last,
    head_logits,
    log_softmax,
    other_ids,
    put_last,
    real_vocabulary,
    scale_and_cap,
    token_logprobs,
    upcast,
    upcast_pair,
    wide_dtype,
)

from . import oracle


def test_temperature_divides_logits_and_not_log_probabilities():
    p = log_softmax(torch.tensor([1.0, 0.0]), temperature=2.0).exp()
    assert p.sum().item() == pytest.approx(1.0)
    assert p[0].log().item() == pytest.approx(-0.4741, abs=5e-5)


def test_a_softcap_changes_the_model():
    capped = log_softmax(scale_and_cap(torch.tensor([4.0, 0.0]), softcap=2.0)).exp()
    plain = log_softmax(torch.tensor([4.0, 0.0])).exp()
    assert capped[0].item() == pytest.approx(0.8730, abs=5e-5)
    assert plain[0].item() == pytest.approx(0.9820, abs=5e-5)


def test_heads_of_different_width_over_one_tokenizer_are_cut_to_the_real_ids():
    student = torch.tensor([0.0, 1.0, 2.0, 0.7])
    teacher = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, 9.0])
    cut = [log_softmax(real_vocabulary(x, 3)) for x in (student, teacher)]
    assert forward_kl(cut[0], cut[1]).item() == 0.0
    to_the_shorter = forward_kl(log_softmax(student), log_softmax(real_vocabulary(teacher, 4)))
    assert to_the_shorter.item() == pytest.approx(0.6150, abs=5e-5)  # the mistake is visible, not small


def test_a_cut_wider_than_the_logits_is_refused():
    with pytest.raises(ValueError, match="cannot cut logits of 3 ids to 4"):
        real_vocabulary(torch.zeros(2, 3), 4)


def test_half_precision_is_widened_before_the_exponential_and_float64_stays():
    assert upcast(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert upcast(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    logits = oracle.draw(5, 7, seed=0, dtype=torch.bfloat16)
    wide = [oracle.softmax(row) for row in logits.double().tolist()]
    torch.testing.assert_close(log_softmax(logits).exp().double(), torch.tensor(wide).double(), rtol=1e-6, atol=1e-7)


def test_the_wide_dtype_is_float64_if_anything_is_and_else_float32():
    half, double = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float64)
    assert wide_dtype(half, half.float()) == wide_dtype() == torch.float32
    assert wide_dtype(half, double) == torch.float64


def test_the_other_ids_are_those_that_were_not_named():
    assert other_ids(torch.tensor([4, 0]), 5).tolist() == [1, 2, 3]
    assert other_ids(torch.arange(2), 2).tolist() == []


def test_two_sides_of_different_dtype_meet_in_the_wider():
    assert [x.dtype for x in upcast_pair(torch.zeros(1).bfloat16(), torch.zeros(1))] == [torch.float32] * 2
    assert [x.dtype for x in upcast_pair(torch.zeros(1).half(), torch.zeros(1).double())] == [torch.float64] * 2


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_head_logits_are_the_capped_scaled_affine_map(softcap: float | None):
    hidden, weight, bias = oracle.draw(3, 4, seed=1), oracle.draw(5, 4, seed=2), oracle.draw(5, seed=3)
    got = head_logits(hidden, weight, bias=bias, scale=0.3, softcap=softcap)
    for n in range(3):
        for v in range(5):
            product = math.fsum(a * b for a, b in zip(hidden[n].tolist(), weight[v].tolist(), strict=True))
            x = (product + bias[v].item()) * 0.3
            want = x if softcap is None else softcap * math.tanh(x / softcap)
            assert got[n, v].item() == pytest.approx(want, abs=1e-12)


def test_head_products_follow_autocast_but_what_follows_is_float32():
    hidden, weight = oracle.draw(3, 16, seed=1, dtype=torch.float32), oracle.draw(5, 16, seed=2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = head_logits(hidden, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, (hidden.bfloat16() @ weight.bfloat16().T).float(), rtol=0, atol=0)
    assert not torch.equal(got, hidden @ weight.T)


def test_head_products_of_mixed_dtypes_run_in_the_wider():
    hidden, weight = oracle.draw(3, 4, seed=1, dtype=torch.bfloat16), oracle.draw(5, 4, seed=2, dtype=torch.float32)
    torch.testing.assert_close(head_logits(hidden, weight), hidden.float() @ weight.T, rtol=0, atol=0)


def test_token_logprobs_are_the_gathered_log_softmax():
    logits, ids = oracle.draw(4, 6, seed=4), torch.tensor([0, 5, 2, 2])
    got = token_logprobs(logits, ids, temperature=0.7)
    want = [math.log(oracle.softmax(row, 0.7)[i]) for row, i in zip(logits.tolist(), ids.tolist(), strict=True)]
    assert got.tolist() == pytest.approx(want, abs=1e-12)


def test_gather_takes_one_id_or_k_ids_for_a_position():
    values = torch.arange(12.0).reshape(2, 2, 3)
    ids = torch.tensor([[0, 2], [1, 1]])
    assert gather_last(values, ids).tolist() == [[0.0, 5.0], [7.0, 10.0]]
    assert gather_last(values, ids[..., None].expand(2, 2, 2)).tolist() == [
        [[0.0, 0.0], [5.0, 5.0]],
        [[7.0, 7.0], [10.0, 10.0]],
    ]


def test_entropy_ignores_a_forbidden_token_in_value_and_gradient():
    logits = torch.tensor([0.3, -math.inf, 1.1], dtype=torch.float64, requires_grad=True)
    value = entropy(log_softmax(logits))
    value.backward()
    assert value.item() == pytest.approx(oracle.entropy(oracle.softmax([0.3, 1.1])), abs=1e-12)
    want = oracle.numeric_gradient(lambda z: oracle.entropy(oracle.softmax(z)), [0.3, 1.1])
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([want[0], 0.0, want[1]], abs=1e-8)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_is_no_positive_number_is_refused(temperature: float):
    with pytest.raises(ValueError, match="temperature must be a finite number > 0"):
        log_softmax(torch.zeros(3), temperature=temperature)


@pytest.mark.parametrize("softcap", [0.0, -2.0, math.nan])
def test_a_softcap_that_is_no_positive_number_is_refused(softcap: float):
    with pytest.raises(ValueError, match="softcap must be"):
        scale_and_cap(torch.zeros(3), softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_is_put_at_some_ids_leaves_all_others_as_they_were(dtype: torch.dtype):
    target = oracle.draw(3, 6, seed=20, dtype=dtype)
    ids, values = torch.tensor([[5, 0], [2, 3], [4, 1]]), oracle.draw(3, 2, seed=21)
    want = target.clone()
    for n in range(3):
        for k in range(2):
            want[n, ids[n, k]] = values[n, k]
    assert torch.equal(put_last(target, ids, values), want)
    assert put_last(target, ids, -7.0).gather(-1, ids).unique().tolist() == [-7.0]
