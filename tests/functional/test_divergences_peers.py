# SPDX-License-Identifier: Apache-2.0
"""The same numbers as two other libraries, in value and gradient, where they are right; and where they are not, ours.

TRL 1.16 and DeepSpeed 0.19.8 weight the teacher with beta, as we do. Neither widens half precision, so both are
compared in float64 and float32. Their imports warn, which is theirs to mend: warnings are not errors in this file.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cohobate import generalized_jsd_loss

from . import oracle
from .oracle import BETAS

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

MASK = torch.tensor([[True, True, False], [False, True, True]])
TOLERANCE = {torch.float64: {"rtol": 1e-9, "atol": 1e-11}, torch.float32: {"rtol": 1e-4, "atol": 1e-6}}


def trl_loss() -> Callable[..., Any]:
    trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer", reason="needs trl==1.16.0", exc_type=ImportError)
    return trainer.GKDTrainer.generalized_jsd_loss


def deepspeed_loss() -> Callable[..., Any]:
    module = pytest.importorskip(
        "deepspeed.runtime.rollout.opsd", reason="needs deepspeed==0.19.8", exc_type=ImportError
    )
    return module.generalized_jsd_loss


def pair(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return oracle.draw(2, 3, 9, seed=seed, dtype=dtype), oracle.draw(2, 3, 9, seed=seed + 1, dtype=dtype)


def value_and_gradient(loss: Callable[[Tensor], Tensor], student: Tensor) -> tuple[Tensor, Tensor]:
    leaf = student.clone().requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trl_gkd_gives_the_same_loss_and_gradient(beta: float, temperature: float, dtype: torch.dtype):
    theirs = trl_loss()
    student, teacher = pair(1, dtype)
    labels = torch.where(MASK, 0, -100)
    want = value_and_gradient(lambda s: theirs(s, teacher, labels=labels, beta=beta, temperature=temperature), student)
    got = value_and_gradient(
        lambda s: generalized_jsd_loss(s, teacher, MASK, beta=beta, temperature=temperature).loss, student
    )
    torch.testing.assert_close(got, want, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"teacher_top_k": 4}, {"pointwise_clip": 0.02}])
def test_deepspeed_gives_the_same_loss_count_and_gradient(beta: float, options: dict[str, Any], dtype: torch.dtype):
    theirs = deepspeed_loss()
    student, teacher = pair(3, dtype)
    want = value_and_gradient(lambda s: theirs(s, teacher, MASK, beta=beta, **options).loss, student)
    got = value_and_gradient(lambda s: generalized_jsd_loss(s, teacher, MASK, beta=beta, **options).loss, student)
    torch.testing.assert_close(got, want, **TOLERANCE[dtype])
    ours, other = generalized_jsd_loss(student, teacher, MASK), theirs(student, teacher, MASK)
    assert ours.valid_token_count.item() == other.valid_token_count.item() == 4
    assert ours.valid_token_count.dtype == other.valid_token_count.dtype
    torch.testing.assert_close(ours.loss_sum, other.loss_sum, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_equal_half_precision_logits_are_zero_here(beta: float):
    """Where we differ on purpose: they normalise in bfloat16, and their mixture does not cancel."""
    logits = oracle.draw(2, 3, 500, seed=5, scale=4.0, dtype=torch.bfloat16)
    assert generalized_jsd_loss(logits, logits, MASK, beta=beta).loss_sum.item() == 0.0
    labels = torch.where(MASK, 0, -100)
    assert trl_loss()(logits, logits, labels=labels, beta=beta).item() != 0.0
    assert deepspeed_loss()(logits, logits, MASK, beta=beta).loss_sum.item() != 0.0
