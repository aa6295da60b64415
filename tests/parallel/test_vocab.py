# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel operations in one process: no group, every float dtype, any strides, memory, gradcheck.

Many ranks are in `test_vocab_ranks.py`.
"""

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import vocab_oracle as oracle
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cohobate.parallel import (
    tiles,
    vocab_index,
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_jsd,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
)

V = oracle.V
PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "forward": (vocab_parallel_kl_div, oracle.forward_kl),
    "reverse": (lambda s, t, **kw: vocab_parallel_kl_div(s, t, None, True, **kw), oracle.reverse_kl),
    "jsd .1": (lambda s, t, **kw: vocab_parallel_jsd(s, t, beta=0.1, **kw), lambda s, t: oracle.jsd(s, t, 0.1)),
    "jsd .5": (lambda s, t, **kw: vocab_parallel_jsd(s, t, beta=0.5, **kw), lambda s, t: oracle.jsd(s, t, 0.5)),
    "jsd .9": (lambda s, t, **kw: vocab_parallel_jsd(s, t, beta=0.9, **kw), lambda s, t: oracle.jsd(s, t, 0.9)),
}
TOKENS = torch.tensor([[0, V - 1, -100], [5, 5, 30]])
SEVERAL = torch.stack([TOKENS, TOKENS, TOKENS.flip(1)], dim=-1)
SINGLES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "entropy": (vocab_parallel_entropy, oracle.entropy),
    "token": (
        lambda x, **kw: vocab_parallel_logprobs(x, TOKENS, **kw),
        lambda x: oracle.logprobs(x, TOKENS[..., None])[..., 0],
    ),
    "tokens": (
        lambda x, **kw: vocab_parallel_logprobs(x, SEVERAL, **kw).sum(-1),
        lambda x: oracle.logprobs(x, SEVERAL).sum(-1),
    ),
    "cross entropy": (
        lambda x, **kw: vocab_parallel_cross_entropy(x, TOKENS, **kw),
        lambda x: -oracle.logprobs(x, TOKENS[..., None])[..., 0],
    ),
}
ALL = PAIRS | SINGLES
WEIGHTS = oracle.draw(2, 3, seed=9, dtype=torch.float64)


def inputs_of(name: str, *, dtype: torch.dtype = torch.float32, width: int = V, scale: float = 2.0) -> list[Tensor]:
    """Logits `[2, 3, V]` for the operation `name`: a pair or one."""
    seeds = (1, 2) if name in PAIRS else (1,)
    return [oracle.draw(2, 3, width, seed=seed, dtype=dtype, scale=scale) for seed in seeds]


def assert_is_oracle(name: str, inputs: list[Tensor], dtype: torch.dtype, **options: Any) -> None:
    operation, truth = ALL[name]
    got = oracle.value_and_gradients(lambda *x: operation(*x, **options), *inputs, weights=WEIGHTS)
    want = oracle.value_and_gradients(truth, *[x.double() for x in inputs], weights=WEIGHTS)
    for part, (a, b) in enumerate(zip(got, want, strict=True)):
        assert oracle.differs(a, b, dtype, gradient=part > 0, scale=2.0) == "", f"output {part}"
        assert a.dtype == (inputs[0].dtype if part else torch.promote_types(torch.float32, dtype))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_a_group_it_is_the_whole_vocabulary(name: str, dtype: torch.dtype):
    assert_is_oracle(name, inputs_of(name, dtype=dtype), dtype)


@pytest.mark.parametrize("name", ALL)
def test_rows_of_thousands_of_ids_are_no_other_thing(name: str):
    assert_is_oracle(name, inputs_of(name, width=9001), torch.float32)


@pytest.mark.parametrize("name", ALL)
def test_float16_is_widened_first(name: str):
    assert_is_oracle(name, inputs_of(name, dtype=torch.float16), torch.bfloat16)  # bf16's tolerance is the wider one


@pytest.mark.parametrize("name", ALL)
def test_gradients_pass_gradcheck(name: str):
    operation, _ = ALL[name]
    leaves = [x.requires_grad_() for x in inputs_of(name, dtype=torch.float64)]
    assert torch.autograd.gradcheck(operation, leaves)


@pytest.mark.parametrize("name", ALL)
def test_chunks_of_rows_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "CHUNK_BYTES", 4 * 10 * V * 2)  # two float32 rows at a time
    monkeypatch.setattr(vocab_index, "_SCRATCH_BYTES", 4 * V)  # one
    assert_is_oracle(name, inputs_of(name), torch.float32)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice of positions": lambda x: torch.cat([x, x[:, :1]], dim=1)[:, :-1],
    "a slice of columns": lambda x: torch.cat([x, x], dim=-1)[..., :V],
    "leading axes swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "vocabulary first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("inplace", [False, True], ids=["fresh", "in place"])
def test_strides_do_not_matter(name: str, strides: str, inplace: bool):
    operation, truth = ALL[name]
    first, *rest = inputs_of(name)
    leaf = first.clone().requires_grad_()
    view = STRIDES[strides](leaf)
    assert not view.is_contiguous()
    (grad,) = torch.autograd.grad((operation(view, *rest, inplace_backward=inplace) * WEIGHTS.float()).sum(), leaf)
    want = oracle.value_and_gradients(truth, first.double(), *[x.double() for x in rest], weights=WEIGHTS)[1]
    assert oracle.differs(grad, want, torch.float32, gradient=True, scale=2.0) == ""


def test_one_row_without_leading_axes_is_a_number():
    x = oracle.draw(V, seed=1, dtype=torch.float32)
    assert vocab_parallel_entropy(x).shape == ()
    assert vocab_parallel_logprobs(x, torch.tensor(3)) == pytest.approx(float(x.log_softmax(-1)[3]), rel=1e-6)
    assert vocab_parallel_logprobs(x, torch.tensor([3, 4])).shape == (2,)


@pytest.mark.parametrize("name", ALL)
def test_no_rows_give_no_values_and_an_empty_gradient(name: str):
    operation = {"token": vocab_parallel_logprobs, "cross entropy": vocab_parallel_cross_entropy}.get(name)
    leaf = torch.zeros(0, V, requires_grad=True)
    if operation is not None:
        value = operation(leaf, torch.zeros(0, dtype=torch.int64))
    elif name == "tokens":
        value = vocab_parallel_logprobs(leaf, torch.zeros(0, 4, dtype=torch.int64))
    else:
        value = ALL[name][0](leaf, *[torch.zeros(0, V)] * (name in PAIRS))
    value.sum().backward()
    assert value.numel() == 0
    assert leaf.grad is not None


@pytest.mark.parametrize("name", PAIRS)
def test_sides_of_unlike_dtype_meet_in_the_wider(name: str):
    student, teacher = inputs_of(name, dtype=torch.bfloat16)
    operation, truth = PAIRS[name]
    got = oracle.value_and_gradients(operation, student, teacher.float(), weights=WEIGHTS)
    want = oracle.value_and_gradients(truth, student.double(), teacher.double(), weights=WEIGHTS)
    assert [x.dtype for x in got] == [torch.float32, torch.bfloat16, torch.float32]
    assert oracle.differs(got[0], want[0], torch.float32, gradient=False) == ""
    assert oracle.differs(got[2], want[2], torch.float32, gradient=True, scale=2.0) == ""


@pytest.mark.parametrize("name", PAIRS)
def test_equal_logits_cost_exactly_nothing(name: str):
    student, _ = inputs_of(name)
    value = PAIRS[name][0](student, student.clone())
    assert bool((value.abs() <= 1e-6).all())


@pytest.mark.parametrize("name", PAIRS)
def test_a_detached_teacher_gets_no_gradient_and_a_detached_student_none(name: str):
    student, teacher = inputs_of(name)
    student.requires_grad_()
    PAIRS[name][0](student, teacher).sum().backward()
    assert student.grad is not None
    assert teacher.grad is None
    frozen, learner = student.detach(), teacher.requires_grad_()
    PAIRS[name][0](frozen, learner).sum().backward()
    assert learner.grad is not None


def test_padding_is_cut_before_the_softmax_and_has_no_gradient():
    x = oracle.draw(4, V, seed=1, dtype=torch.float32)
    x[:, 30:] = 50.0
    x.requires_grad_()
    index = torch.tensor([0, 29, -100, 7])
    value = vocab_parallel_logprobs(x, index, global_vocab_size=30)
    want = oracle.logprobs(x.detach()[:, :30].double(), index[:, None])[:, 0]
    assert oracle.differs(value.detach(), want, torch.float32, gradient=False) == ""
    value.sum().backward()
    assert x.grad is not None
    assert x.grad[:, 30:].abs().max() == 0
    assert x.grad[:, :30].sum(-1).abs().max() < 1e-6  # each row's slopes add up to 0


def test_positions_are_those_of_the_request_for_comments():
    x = oracle.draw(2, V, seed=1, dtype=torch.float32)
    index = torch.tensor([1, -7])
    by_position = vocab_parallel_logprobs(x, index, None, 0, V, ignore_index=-7)
    assert by_position[1] == 0
    assert torch.equal(-by_position, vocab_parallel_cross_entropy(x, index, None, 0, V, ignore_index=-7))


def test_an_ignored_row_may_hold_anything():
    x = oracle.draw(3, V, seed=1, dtype=torch.float32)
    x[1], x[2, 4] = -torch.inf, torch.nan
    x.requires_grad_()
    value = vocab_parallel_logprobs(x, torch.tensor([3, -100, -100]))
    value.sum().backward()
    assert value[1:].tolist() == [0.0, 0.0]
    assert x.grad is not None
    assert x.grad[1:].abs().max() == 0
    assert x.grad[0].abs().max() > 0


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_can_take_the_place_of_the_logits(name: str):
    operation, truth = ALL[name]
    first, *rest = inputs_of(name)
    leaf = first.clone().requires_grad_()
    logits = leaf * 1.0
    value = operation(logits, *rest, inplace_backward=True)
    logits.register_hook(lambda grad: addresses.append(grad.data_ptr()))
    addresses: list[int] = []
    (value * WEIGHTS.float()).sum().backward()
    want = oracle.value_and_gradients(truth, first.double(), *[x.double() for x in rest], weights=WEIGHTS)[1]
    assert addresses == [logits.data_ptr()]
    assert leaf.grad is not None
    assert oracle.differs(leaf.grad, want, torch.float32, gradient=True, scale=2.0) == ""


@pytest.mark.parametrize("width", [V, 5000])  # the plain kernels' and the CPU's, which write past autograd
def test_logits_that_were_written_over_are_not_read_again(width: int):
    leaf = oracle.draw(3, width, seed=1, dtype=torch.float32).requires_grad_()
    logits = leaf * 1.0
    first = vocab_parallel_entropy(logits)
    second = vocab_parallel_entropy(logits, inplace_backward=True)  # autograd goes backwards from the latest call
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + second).sum().backward()


def test_the_teacher_is_read_before_the_student_is_written_over():
    student, teacher = (x.requires_grad_() for x in inputs_of("jsd .1"))
    value = vocab_parallel_jsd(student * 1.0, teacher, beta=0.1, inplace_backward=True)
    got = torch.autograd.grad((value * WEIGHTS.float()).sum(), (student, teacher))
    want = oracle.value_and_gradients(
        lambda s, t: oracle.jsd(s, t, 0.1), student.detach().double(), teacher.detach().double(), weights=WEIGHTS
    )
    for a, b in zip(got, want[1:], strict=True):
        assert oracle.differs(a, b, torch.float32, gradient=True, scale=2.0) == ""


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5, 2.0, float("nan")])
def test_jsd_refuses_the_ends_and_what_lies_beyond(beta: float):
    with pytest.raises(ValueError, match="0 < beta < 1"):
        vocab_parallel_jsd(torch.zeros(2, V), torch.zeros(2, V), beta=beta)


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match=r"teacher must be floating .* got torch.int64"):
        vocab_parallel_kl_div(torch.zeros(2, V), torch.zeros(2, V, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"index must hold integers, got torch.float32"):
        vocab_parallel_logprobs(torch.zeros(2, V), torch.zeros(2))


def test_one_process_checks_its_ids_as_well():
    with pytest.raises(ValueError, match=r"in \[0, 37\), got 37 on rank 0"):
        vocab_parallel_logprobs(torch.zeros(2, V), torch.tensor([0, V]))
    with pytest.raises(ValueError, match=r"got -1 on rank 0"):
        vocab_parallel_cross_entropy(torch.zeros(2, V), torch.tensor([-1, 0]))
    with pytest.raises(ValueError, match=r"13 columns of the student and 12 of the teacher"):
        vocab_parallel_kl_div(torch.zeros(2, 13), torch.zeros(2, 12))


class Largest(TorchDispatchMode):
    """The largest tensor that any torch operation makes, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor) and not func.is_view:
                known = [y for y in args if isinstance(y, Tensor)]
                if all(x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr() for y in known):
                    self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("name", ["forward", "reverse", "jsd .5", "entropy", "token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [500, 8192])  # the plain kernels' and the CPU's
def test_nothing_of_the_logits_size_is_made_but_the_gradient(
    name: str, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tiles, "CHUNK_BYTES", 2**19)
    rows = 2**21 // width
    logits = oracle.draw(rows, width, seed=1, dtype=dtype).requires_grad_()  # 4 or 8 MiB
    teacher = oracle.draw(rows, width, seed=2, dtype=dtype)
    operation = ALL[name][0] if name != "token" else lambda x: vocab_parallel_logprobs(x, torch.zeros(rows).long())
    with Largest():  # what torch imports for this is not the call's
        vocab_parallel_kl_div(logits[:1], teacher[:1]).sum().backward()
    saved: list[Tensor] = []
    tracemalloc.start()  # numpy's memory, also the gradient's
    try:
        with Largest() as largest:
            with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
                value = operation(logits, *[teacher] * (name in PAIRS))
            value.sum().backward()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    inputs = {logits.data_ptr(), teacher.data_ptr()}
    kept = sum(x.nbytes for x in saved if x.data_ptr() not in inputs)
    assert kept <= 4 * 8 * rows  # eight numbers a row
    assert largest.bytes <= 2**20
    assert peak <= logits.nbytes + 3 * 2**20


def test_an_expanded_tensor_is_not_written_over():
    row = torch.randn(1, V)
    gradients = []
    for inplace in (False, True):
        leaf = row.clone().requires_grad_()
        value = vocab_parallel_entropy((leaf * 1.0).expand(4, V), inplace_backward=inplace)
        (value * torch.arange(4.0)).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, atol=0, rtol=0)
