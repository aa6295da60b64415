# SPDX-License-Identifier: Apache-2.0
"""The fused loss and the vocabulary operations on one GPU; without one, the rows say so.

Time is read from the GPU's own events, memory from its allocator. Vocabulary operations are compared with a copy that
moves as many bytes as they must: logits read once in each of the two passes, and the gradient written.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

import fused
from harness import FLOOR, OURS, Case, Implementation

TINY: dict[str, Any] = {}
COPY = "copy of the same bytes"
OPS = ("reverse KL", "entropy", "log-probs")


def _on_gpu(build: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    def checked(settings: dict[str, Any]) -> Any:
        if not torch.cuda.is_available():
            raise ImportError("no GPU on this machine")
        return build(settings)

    return checked


class VocabularyJob:
    """One operation on the whole vocabulary of one process, forward and backward."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from cohobate.parallel import vocab

        rows, width, op = settings["N"], settings["V"], settings["op"]
        self._student = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
        teacher = torch.randn_like(self._student.detach() if op == "reverse KL" else self._student[:0].detach())
        ids = torch.randint(width, (rows,), device="cuda")
        self._call = {
            "reverse KL": lambda: vocab.vocab_parallel_kl_div(self._student, teacher, None, True),
            "entropy": lambda: vocab.vocab_parallel_entropy(self._student, None),
            "log-probs": lambda: vocab.vocab_parallel_logprobs(self._student, ids),
        }[op]

    def run(self) -> None:
        self._call().sum().backward()

    def clear(self) -> None:
        self._student.grad = None

    def facts(self, reference: str | None) -> dict[str, Any]:
        return {}


class CopyJob:
    """Reads and writes as many bytes as the operation must read and write: a copy of B bytes moves 2 B."""

    def __init__(self, settings: dict[str, Any]) -> None:
        sides = 2 if settings["op"] == "reverse KL" else 1
        moved = settings["N"] * settings["V"] * (2 * sides + 1)  # elements: each side read twice, one gradient written
        self._source = torch.ones(moved // 2, device="cuda", dtype=torch.bfloat16)
        self._target = torch.empty_like(self._source)

    def run(self) -> None:
        self._target.copy_(self._source)

    def clear(self) -> None: ...
    def facts(self, reference: str | None) -> dict[str, Any]:
        return {}


_FUSED = (FLOOR, OURS, fused.TRL, fused.LIGER, fused.LIGER_COMPILED)
IMPLEMENTATIONS = {
    name: Implementation(
        build=_on_gpu(fused.IMPLEMENTATIONS[name].build), package=fused.IMPLEMENTATIONS[name].package, warm_first=True
    )
    for name in _FUSED
} | {f"{OURS}, {op}": Implementation(build=_on_gpu(VocabularyJob), package="cohobate", warm_first=True) for op in OPS}
IMPLEMENTATIONS[COPY] = Implementation(build=_on_gpu(CopyJob), package="torch", warm_first=True)


def cases(*, quick: bool = False) -> list[Case]:
    if quick:
        return []
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found = []
    for beta, name in ((0.0, "forward KL"), (0.5, "JSD 0.5")):
        found.append(
            Case(
                name=f"{name}, bfloat16, N=8192, H=4096, V=151936",
                settings={
                    "beta": beta,
                    "N": 8192,
                    "H": 4096,
                    "V": 151936,
                    "dtype": "bfloat16",
                    "device": "cuda",
                    "reference": False,
                },
                implementations=_FUSED,
                targets={
                    OURS: "≤ 1.15×, workspace ≤ 512 MB",
                    fused.TRL: "≥ 1.8× ours",
                    fused.LIGER: "≥ 1.5× ours",
                },
            )
        )
    for op in OPS:
        found.append(
            Case(
                name=f"{op}, bfloat16, T=8192, V=32064",
                settings={"op": op, "N": 8192, "V": 32064, "device": "cuda"},
                implementations=(COPY, f"{OURS}, {op}"),
                targets={f"{OURS}, {op}": "≤ 1.43× (70 % of copy bandwidth)"},
                base=COPY,
            )
        )
    return found
