# SPDX-License-Identifier: Apache-2.0
"""What each rank of the sharded-head tests does; one JSON line to standard output.

A rank compares what it holds with the whole problem, which every rank can make, and reports what differs.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from cohobate.functional.fused_linear import FusedDivergence
from cohobate.parallel.lm_head import VocabParallelLMHead, shard_lm_head, vocab_parallel_fused_divergence
from cohobate.parallel.vocab import vocab_parallel_kl_div
from cohobate.teachers import check_head
from functional import heads, oracle

BETAS = (0.0, 0.1, 0.5, 1.0)


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    head = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
    head.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        head.bias = nn.Parameter(bias.detach().clone())
    return head


def split(p: heads.Problem) -> tuple[VocabParallelLMHead, VocabParallelLMHead]:
    group = dist.group.WORLD
    student = VocabParallelLMHead.from_linear(linear(p.weight, p.bias), group)
    teacher = VocabParallelLMHead.from_linear(linear(p.teacher_weight, p.teacher_bias), group)
    return student, teacher.requires_grad_(False)


def problems() -> dict[str, heads.Problem]:
    found = {}
    for dtype in (torch.float64, torch.float32):
        for full in (False, True):
            p = heads.problem(1, dtype, full=full)
            if p.weights is not None:
                p.weights[2] = 0.0
            found[f"{dtype}, {full}"] = p
    whole = heads.problem(2)
    found["two ids"] = replace(  # so one of three ranks has none
        whole,
        weight=whole.weight.detach()[:2].requires_grad_(),
        bias=None if whole.bias is None else whole.bias.detach()[:2].requires_grad_(),
        teacher_weight=whole.teacher_weight[:2],
        teacher_bias=None if whole.teacher_bias is None else whole.teacher_bias[:2],
    )
    return found | {"no rows": heads.problem(3, rows=0)}


def differs(name: str, got: Tensor | None, want: Tensor, dtype: torch.dtype) -> list[str]:
    exact = dtype == torch.float64
    try:
        torch.testing.assert_close(got, want, rtol=1e-10 if exact else 2e-4, atol=1e-12 if exact else 2e-5)
    except AssertionError as error:
        return [f"{name}: {error}"]
    return []


def compare_fused() -> tuple[list[str], int]:
    wrong, count = [], 0
    for name, p in problems().items():
        for beta in BETAS:
            for chunk_size in (3, None):
                want = heads.plain(p, beta)
                wanted = torch.autograd.grad(want.loss_sum * 0.37, p.student)
                student, teacher = split(p)
                hidden = p.hidden.detach().clone().requires_grad_()
                got = vocab_parallel_fused_divergence(
                    hidden,
                    student,
                    p.teacher_hidden,
                    teacher,
                    beta=beta,
                    weights=p.weights,
                    chunk_size=chunk_size,
                    **p.options,
                )
                (got.loss_sum * 0.37).backward()
                mine = slice(student.vocab_start_index, student.vocab_end_index)
                pairs = {f.name: (getattr(got, f.name), getattr(want, f.name)) for f in fields(FusedDivergence)}
                pairs["dX"], pairs["dW"] = (hidden.grad, wanted[0]), (student.weight.grad, wanted[1][mine])
                if p.bias is not None:
                    assert student.bias is not None
                    pairs["db"] = (student.bias.grad, wanted[2][mine])
                for part, (a, b) in pairs.items():
                    count += 1
                    wrong += differs(f"{name}, beta {beta}, {chunk_size}, {part}", a, b, p.hidden.dtype)
    return wrong, count


def compare_logits() -> list[str]:
    """Through logits shards: `[2, 3, H]` hidden states, the op over shards, and one sum in the backward pass."""
    p = heads.problem(4)
    student, teacher = split(p)
    hidden = p.hidden.detach()[:6].reshape(2, 3, -1).requires_grad_()
    values = vocab_parallel_kl_div(student(hidden), teacher(p.teacher_hidden[:6].reshape(2, 3, -1)), dist.group.WORLD)
    values.sum().backward()
    whole = replace(p, hidden=p.hidden.detach()[:6].requires_grad_(), weights=None, options={})
    whole = replace(whole, teacher_hidden=p.teacher_hidden[:6])
    want = heads.plain(whole, 0.0)
    wanted = torch.autograd.grad(want.loss_sum, whole.student)
    mine = slice(student.vocab_start_index, student.vocab_end_index)
    assert student.bias is not None
    assert hidden.grad is not None
    return [
        *differs("logits, value", values.flatten(), want.divergence, torch.float64),
        *differs("logits, dX", hidden.grad.flatten(0, 1), wanted[0], torch.float64),
        *differs("logits, dW", student.weight.grad, wanted[1][mine], torch.float64),
        *differs("logits, db", student.bias.grad, wanted[2][mine], torch.float64),
    ]


class Largest(TorchDispatchMode):
    """The size in bytes of the largest tensor made or read inside."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in (*args, *(out if isinstance(out, tuple | list) else (out,))):
            if isinstance(x, Tensor):
                self.nbytes = max(self.nbytes, x.nbytes)
        return out


def costs(beta: float) -> dict[str, Any]:
    """Collectives forwards and backwards, of 60 rows in three chunks; the largest tensor made, and what is saved.

    Sizes are in bytes.
    """
    group = dist.group.WORLD
    draw = {"dtype": torch.float32, "seed": 1}
    student = VocabParallelLMHead.from_linear(linear(oracle.draw(500, 4, **draw), None), group)
    teacher = VocabParallelLMHead.from_linear(linear(oracle.draw(500, 6, **draw), None), group)
    hidden, teacher_hidden = oracle.draw(60, 4, **draw).requires_grad_(), oracle.draw(60, 6, **draw)
    saved = []

    def note(x: Tensor) -> Tensor:
        saved.append(x.nbytes)
        return x

    calls: list[str] = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast")}
    for name, original in originals.items():

        def counted(*args: Any, name: str = name, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        setattr(dist, name, counted)
    try:
        with Largest() as made, torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = vocab_parallel_fused_divergence(hidden, student, teacher_hidden, teacher, beta=beta, chunk_size=20)
        forward, calls = calls, []
        out.loss_sum.backward()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return {"forward": forward, "backward": calls, "largest": made.nbytes, "saved": saved}


def round_trips() -> dict[str, bool]:
    """What comes back of a head that was split: bit for bit, padded, biased, tied."""
    p, group = heads.problem(5), dist.group.WORLD
    whole = linear(p.weight, p.bias)
    padded = linear(torch.cat([p.weight.detach(), torch.full((3, heads.HS), 7.0).double()]), None)
    cut = VocabParallelLMHead.from_linear(padded, group, vocab_size=heads.V)
    back = VocabParallelLMHead.from_linear(whole, group).to_linear()
    target = linear(torch.full_like(padded.weight, 9.0), None)
    cut.to_linear(target)
    tied = VocabParallelLMHead.from_linear(padded, group, vocab_size=heads.V, tied=True)
    copied = copy.deepcopy(cut)
    same = torch.equal(copied.full_weight(), p.weight) and copied.tp_group is group
    with torch.no_grad():
        copied.weight.zero_()
    return {
        "deep copy": same,
        "weight": torch.equal(back.weight, whole.weight),
        "bias": torch.equal(back.bias, whole.bias),
        "cut": torch.equal(cut.full_weight(), p.weight),
        "into a padded head": torch.equal(target.weight[: heads.V], p.weight),
        "whose padding stays": bool((target.weight[heads.V :] == 9).all()),
        "tied": tied.weight is padded.weight and torch.equal(tied.full_weight(), p.weight),
        "the shard is a copy": cut.weight.untyped_storage().nbytes() == cut.weight.numel() * 8,
    }


def tied_model(*, tied: bool) -> dict[str, Any]:
    """Gradient of a tied model's embedding where the head is a shard of it, or a copy of a shard."""
    model = tiny.llama(3, vocab_size=23)
    if tied:
        head = shard_lm_head(model, dist.group.WORLD, vocab_size=21)
    else:
        head = VocabParallelLMHead.from_linear(model.lm_head, dist.group.WORLD, vocab_size=21)
        model.set_output_embeddings(head)
    ids = torch.arange(2, 14).reshape(2, 6)
    logits = model(input_ids=ids).logits
    teacher = oracle.draw(2, 6, 21, seed=1, dtype=torch.float32)[..., head.vocab_start_index : head.vocab_end_index]
    vocab_parallel_kl_div(logits, teacher, dist.group.WORLD).sum().backward()
    result = {name: p.grad.tolist() for name, p in model.named_parameters() if p.grad is not None}
    return {"gradients": result, "keys": sorted(k for k in model.state_dict() if "lm_head" in k)}


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return "nothing was raised"


def refusals() -> dict[str, str]:
    """Mistakes that every rank must see: an exception on one alone would leave the others waiting."""
    group, p = dist.group.WORLD, heads.problem(6)
    student, teacher = split(p)
    whole = VocabParallelLMHead.from_linear(linear(p.teacher_weight, p.teacher_bias))
    cut = VocabParallelLMHead.from_linear(linear(p.teacher_weight, p.teacher_bias), group, vocab_size=heads.V - 1)

    def fused(head: VocabParallelLMHead) -> Callable[[], Any]:
        return lambda: vocab_parallel_fused_divergence(p.hidden, student, p.teacher_hidden, head, beta=0.5)

    states: list[Any] = [None] * dist.get_world_size()
    state = teacher.state_dict()
    dist.all_gather(states_of := [torch.empty_like(state["vocab_range"]) for _ in states], state["vocab_range"])
    other = {**state, "vocab_range": states_of[1 - min(dist.get_rank(), 1)]}
    teacher.load_state_dict(state)
    model = tiny.llama(3)
    shard_lm_head(model, group)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spread = linear(p.weight, None)
    spread.weight = nn.Parameter(distribute_tensor(spread.weight.detach(), mesh, [Shard(0)]))
    taken = VocabParallelLMHead.from_linear(spread, group)
    return {
        "tied DTensor": message(lambda: VocabParallelLMHead.from_linear(spread, group, tied=True)),
        "DTensor": "taken" if torch.equal(taken.weight, student.weight) else "wrong",
        "readers": message(lambda: check_head(model)),
        "generate": message(lambda: model.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=1)),
        "degree": message(fused(whole)),
        "width": message(fused(cut)),
        "state": message(lambda: teacher.load_state_dict(other)),
    }


def main() -> None:
    dist.init_process_group("gloo")
    wrong, count = compare_fused()
    result = {
        "wrong": wrong + compare_logits(),
        "count": count,
        "costs": {str(beta): costs(beta) for beta in (0.0, 0.5, 1.0)},
        "round trips": round_trips(),
        "tied": {str(tied): tied_model(tied=tied) for tied in (True, False)},
        "refusals": refusals(),
    }
    print("RESULT", json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
