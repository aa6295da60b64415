# SPDX-License-Identifier: Apache-2.0
"""Operations over a vocabulary sharded on two gloo ranks of one thread each: ours, DeepSpeed's, verl's on Megatron.

One file of verl is loaded at a time, since its package imports a whole cluster stack; the collectives are Megatron's.
Megatron's cross entropy and verl's entropy overwrite their input or lean on it, so verl's logits are restored between
runs, outside the timing. The top-64 case is the forward KL over ids that the teacher kept, for verl its own function.
"""

import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness import OURS, REFERENCE, Case, Implementation

DEEPSPEED, VERL, OURS_IN_PLACE = "DeepSpeed", "verl", "Cohobate, in place"
TINY = {"T": 16, "V_local": 96, "k": 8, "checked": 8, "write": None}
CHECKED_ROWS = 512
Op = Callable[["Inputs"], Tensor]


def _group() -> Any:
    if not dist.is_initialized():
        ranks = int(os.environ["BENCHMARK_RANKS"])
        store = dist.FileStore(os.environ["BENCHMARK_STORE"], ranks)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=int(os.environ["BENCHMARK_RANK"]), world_size=ranks)
    return dist.group.WORLD


class Inputs:
    """This rank's columns of `[T, V]` logits, global ids to look up, and a teacher's top k with log-probabilities."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.group = _group()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        rows, width = settings["T"], settings["V_local"]
        draw, shared = torch.Generator().manual_seed(1 + rank), torch.Generator().manual_seed(99)
        dtype = getattr(torch, settings["dtype"])
        self.op: str = settings["op"]
        self.start, self.end, self.size = rank * width, (rank + 1) * width, ranks * width
        self.student = torch.randn(rows, width, generator=draw).mul_(3).to(dtype).requires_grad_()
        self.teacher = torch.randn(rows, width, generator=draw).mul_(3).to(dtype)
        self.ids = torch.randint(self.size, (rows,), generator=shared)
        self.top_ids = torch.randint(self.size, (rows, settings["k"]), generator=shared)
        self.top_logprobs = torch.randn(rows, settings["k"], generator=shared).log_softmax(-1) - 0.1

    def top_k_kl(self, student_logprobs: Tensor) -> Tensor:
        return (self.top_logprobs.exp() * (self.top_logprobs - student_logprobs)).sum(-1)


class OpJob:
    """`op(inputs) -> [T]`, summed and back-propagated into this rank's logits."""

    def __init__(self, settings: dict[str, Any], op: Op, *, restore: bool = False) -> None:
        self.inputs = Inputs(settings)
        self._op = op
        self._checked = settings.get("checked", CHECKED_ROWS)
        self._kept = self.inputs.student.detach().clone() if restore else None
        self._values = torch.zeros(0)
        self._grad = torch.zeros(0)

    def run(self) -> None:
        values = self._op(self.inputs)
        values.sum().backward()
        self._values = values.detach()

    def clear(self) -> None:
        self.inputs.student.grad = None
        if self._kept is not None:
            self.inputs.student.data.copy_(self._kept)
        dist.barrier()  # ranks start together

    def facts(self, reference: str | None) -> dict[str, Any]:
        from safetensors.torch import load_file

        facts: dict[str, Any] = {"loss": float(self._values.double().mean())}
        if reference is not None and self.inputs.student.grad is not None:
            want = load_file(f"{reference}.{dist.get_rank()}")
            facts["loss_error"] = _relative(self._values[: self._checked], want["values"])
            facts["gradient_error"] = _relative(self.inputs.student.grad[: self._checked], want["grad"])
        return facts


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


class ReferenceJob:
    """The first rows, gathered, in float64 from the definition; each rank writes the gradient of its own columns."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._inputs, self._settings = Inputs(settings), settings

    def run(self) -> None:
        from safetensors.torch import save_file

        inputs, rows = self._inputs, self._settings.get("checked", CHECKED_ROWS)
        student = self._gathered(inputs.student.detach()[:rows]).requires_grad_()
        values = _definition(inputs, student, self._gathered(inputs.teacher[:rows]), rows)
        (grad,) = torch.autograd.grad(values.sum(), student)
        own = grad[:, inputs.start : inputs.end].float().contiguous()
        if self._settings["write"] is not None:
            save_file({"values": values.detach(), "grad": own}, f"{self._settings['write']}.{dist.get_rank()}")

    def _gathered(self, shard: Tensor) -> Tensor:
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard.contiguous())
        return torch.cat(parts, dim=-1).double()

    def clear(self) -> None: ...
    def facts(self, reference: str | None) -> dict[str, Any]:
        return {}


def _definition(inputs: Inputs, student: Tensor, teacher: Tensor, rows: int) -> Tensor:
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    if inputs.op == "reverse KL":
        return (s.exp() * (s - t)).sum(-1)
    if inputs.op == "forward KL":
        return (t.exp() * (t - s)).sum(-1)
    if inputs.op == "entropy":
        return -(s.exp() * s).sum(-1)
    if inputs.op == "log-probs":
        return s.gather(-1, inputs.ids[:rows, None]).squeeze(-1)
    kept = inputs.top_logprobs[:rows]
    return (kept.exp() * (kept - s.gather(-1, inputs.top_ids[:rows]))).sum(-1)


def _ours(*, in_place: bool = False) -> Callable[[dict[str, Any]], OpJob]:
    def build(settings: dict[str, Any]) -> OpJob:
        from cohobate.parallel import vocab

        def options(function: Any) -> dict[str, bool]:
            if not in_place:
                return {}
            found = [n for n in inspect.signature(function).parameters if n == "inplace_backward"]
            if not found:
                raise ImportError(f"{function.__name__} has no in-place mode here")
            return {found[0]: True}

        def lookup(i: Inputs, ids: Tensor) -> Tensor:
            function = vocab.vocab_parallel_logprobs
            return function(i.student, ids, i.group, i.start, i.end, i.size, **options(function))

        def kl(i: Inputs, *, reverse: bool) -> Tensor:
            function = vocab.vocab_parallel_kl_div
            return function(i.student, i.teacher, i.group, reverse, **options(function))

        def entropy(i: Inputs) -> Tensor:
            return vocab.vocab_parallel_entropy(i.student, i.group, **options(vocab.vocab_parallel_entropy))

        ops: dict[str, Op] = {
            "reverse KL": lambda i: kl(i, reverse=True),
            "forward KL": lambda i: kl(i, reverse=False),
            "entropy": entropy,
            "log-probs": lambda i: lookup(i, i.ids),
            "top-64 KL": lambda i: i.top_k_kl(lookup(i, i.top_ids)),
        }
        return OpJob(settings, ops[settings["op"]], restore=in_place)

    return build


def _deepspeed(settings: dict[str, Any]) -> OpJob:
    import deepspeed.comm
    from deepspeed.sequence import vocab_parallel_ops as theirs

    _group()
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)

    def lookup(i: Inputs, ids: Tensor) -> Tensor:
        return theirs.vocab_parallel_logprobs(i.student, ids, i.group, i.start, i.end, i.size)

    ops: dict[str, Op] = {
        "reverse KL": lambda i: theirs.vocab_parallel_kl_div(i.student, i.teacher, True, i.group),
        "forward KL": lambda i: theirs.vocab_parallel_kl_div(i.student, i.teacher, False, i.group),
        "entropy": lambda i: theirs.vocab_parallel_entropy(i.student, i.group),
        "log-probs": lambda i: lookup(i, i.ids),
        "top-64 KL": lambda i: i.top_k_kl(lookup(i, i.top_ids)),
    }
    return OpJob(settings, ops[settings["op"]])


def _verl(settings: dict[str, Any]) -> OpJob:
    import megatron.core.parallel_state as mpu

    _group()
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(dist.get_world_size())
    for absent, names in (
        ("verl.models.mcore.util", ("preprocess_bshd_engine", "preprocess_thd_engine")),
        ("verl.workers.config", ("DistillationConfig", "DistillationLossConfig")),
    ):  # only for annotations and other functions of the files that are loaded
        module: Any = types.ModuleType(absent)
        module.__dict__.update(dict.fromkeys(names, object))
        sys.modules.setdefault(absent, module)
    shards = _verl_file("utils/megatron/tensor_parallel.py")

    def top_k(i: Inputs) -> Tensor:
        function = _verl_file("trainer/distillation/megatron/losses.py")._VocabParallelKLDivergence
        out = function.apply(i.student[None], i.top_logprobs[None], i.top_ids[None], None)
        return (out[0] if isinstance(out, tuple) else out)[0]

    # Columns [1, T, V]: Megatron wants a batch dimension, and the gradient comes back through a view.
    ops: dict[str, Op] = {
        "entropy": lambda i: shards.vocab_parallel_entropy(i.student),
        "log-probs": lambda i: shards.vocab_parallel_log_probs_from_logits(i.student, i.ids),
        "top-64 KL": top_k,
    }
    return OpJob(settings, ops[settings["op"]], restore=True)


_loaded: dict[str, Any] = {}


def _verl_file(path: str) -> Any:
    if path not in _loaded:
        found = importlib.util.find_spec("verl")
        if found is None or found.origin is None:
            raise ImportError("verl is not installed")
        spec = importlib.util.spec_from_file_location(f"verl_{Path(path).stem}", Path(found.origin).parent / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _loaded[path] = module
    return _loaded[path]


def _two_ranks(build: Callable[[dict[str, Any]], Any], package: str, **options: Any) -> Implementation:
    return Implementation(build=build, package=package, threads=1, ranks=2, **options)


IMPLEMENTATIONS = {
    OURS: _two_ranks(_ours(), "cohobate"),
    OURS_IN_PLACE: _two_ranks(_ours(in_place=True), "cohobate"),
    DEEPSPEED: _two_ranks(_deepspeed, "deepspeed"),
    VERL: _two_ranks(_verl, "verl", warm_first=True),  # its entropy compiles
    REFERENCE: _two_ranks(ReferenceJob, "torch"),
}

_FASTER = {  # how many times slower the peer is to be: bfloat16, float32
    "reverse KL": ("≥ 9×", "≥ 6.5×"),
    "forward KL": ("≥ 8×", "≥ 6×"),
    "entropy": ("≥ 8×", "≥ 4.5×"),
    "log-probs": ("≥ 5×", "≥ 3×"),
    "top-64 KL": ("≥ 4.5×", ""),
}


def cases(*, quick: bool = False) -> list[Case]:
    rows, width = (64, 256) if quick else (8192, 16032)
    found = []
    for column, dtype in enumerate(("bfloat16", "float32")):
        for op, faster in _FASTER.items():
            targets = {OURS: "≤ gradient + 10 MB", DEEPSPEED: faster[column]}
            names = [OURS, DEEPSPEED]
            if op in ("entropy", "log-probs", "top-64 KL"):
                names += [VERL, OURS_IN_PLACE]
                targets[VERL] = "≥ 1×"
            found.append(
                Case(
                    name=f"{op}, {dtype}, T={rows}, V/rank={width}",
                    settings={
                        "op": op,
                        "dtype": dtype,
                        "T": rows,
                        "V_local": width,
                        "k": 64,
                        "checked": min(rows, CHECKED_ROWS),
                    },
                    implementations=tuple(names),
                    targets=targets,
                    base=OURS,
                )
            )
    return found
