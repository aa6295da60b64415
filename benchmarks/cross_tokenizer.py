# SPDX-License-Identifier: Apache-2.0
"""Two tokenizers: what alignment adds to tokenizing, how long tables take, and P-KL beside its one-hot formulation.

The vocabularies are published ones that `make` installs (tests/real_tokenizers.py says which). Texts of 8 kB: digits
and pictures, on which searches over token strings take longest, English (this library's licence), code (its sources),
and Chinese. P-KL is computed from drawn logits; the one-hot formulation multiplies a matrix of chunks by rows where
ours adds up runs of rows.
"""

import random
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness import OURS, Case, Implementation

ROOT = Path(__file__).resolve().parents[1]
TINY: dict[str, Any] = {}
TOKENIZING, ALIGNING = "tokenizing with both", "Cohobate, align_tokens"
FORWARD, BACK, VALIDATING = "build, first to second", "build, second to first", "validate both"
PHRASES = [
    "语言模型",
    "学生和老师",
    "每个词的概率",
    "我们可以",
    "训练数据",
    "因为",
    "所以",
    "今天天气很好",
    "，",
    "。",
]
ONE_HOT, ALL_COLUMNS = "one-hot products", "one-hot products, every column projected"


@cache
def tokenizer(name: str) -> Any:
    sys.path.append(str(ROOT / "tests"))  # the one place that knows where the vocabularies are
    import real_tokenizers

    return real_tokenizers.BY_NAME[name]()


def text(kind: str, size: int) -> str:
    """At least `size` bytes, cut to the last whole character."""
    rng = random.Random(0)
    pictures = [chr(code) for low, high in ((0x1F300, 0x1F64F), (0x2200, 0x22FF)) for code in range(low, high)]
    made = {
        "digits": lambda: "".join(rng.choices("0123456789", k=size)),
        "emoji and maths": lambda: "".join(rng.choices([*pictures, " "], k=size)),
        "English": lambda: (ROOT / "LICENSE").read_text(encoding="utf-8"),
        "code": lambda: (ROOT / "src" / "cohobate" / "align" / "spans.py").read_text(encoding="utf-8"),
        "Chinese": lambda: "".join(rng.choices(PHRASES, k=size)),
    }[kind]()
    cut = made.encode()[:size]
    assert len(cut) == size, f"{kind} has only {len(cut)} bytes"
    return cut.decode(errors="ignore")


class TextJob:
    """`repeats` times the same text, as one call a text."""

    def __init__(self, settings: Mapping[str, Any], *, align: bool) -> None:
        from cohobate.align import align_tokens

        self._sides = [tokenizer(name) for name in settings["pair"]]
        self._text, self._repeats, self._align = text(settings["kind"], settings["bytes"]), settings["repeats"], align
        self._call = align_tokens
        self._ids = [self._encoded(side) for side in self._sides]
        self._chunks: Any = None

    def _encoded(self, side: Any) -> list[int]:
        return side(self._text, add_special_tokens=False, verbose=False)["input_ids"]

    def run(self) -> None:
        for _ in range(self._repeats):
            if self._align:
                self._chunks = self._call(self._sides[0], self._ids[0], self._sides[1], self._ids[1])
            else:
                self._ids = [self._encoded(side) for side in self._sides]

    def clear(self) -> None: ...

    def facts(self, reference: str | None) -> dict[str, Any]:
        if self._chunks is not None:
            assert self._chunks.orphans(*map(len, self._ids)) == (0, 0)
        return {"tokens": [len(ids) for ids in self._ids]}


class TableJob:
    """Everything that `cohobate subtokens build` or `validate` does but the file."""

    def __init__(self, settings: Mapping[str, Any], what: str) -> None:
        from cohobate.vocab import SubtokenTables

        self._sides = [tokenizer(name) for name in settings["pair"]]
        self._what = what
        self._tables = SubtokenTables.build(*self._sides) if what == VALIDATING else None
        self._table: Any = None

    def run(self) -> None:
        from cohobate.vocab.chains import Vocabulary, build_table, shared_roles

        if self._tables is not None:
            self._tables.validate(*self._sides)
            return
        source, destination = self._sides if self._what == FORWARD else self._sides[::-1]
        roles = shared_roles(source, destination)
        self._table = build_table(Vocabulary.of(source), Vocabulary.of(destination), roles)

    def clear(self) -> None:
        self._table = None

    def facts(self, reference: str | None) -> dict[str, Any]:
        return {}


class Projected:
    """Drawn logits, a drawn projection and chunks of which a tenth has two tokens on one side."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from cohobate.align import Chunks
        from cohobate.vocab import Projection

        rng, draw = np.random.default_rng(0), torch.Generator().manual_seed(0)
        rows, vocab, teacher_vocab = settings["S"], settings["V"], settings["teacher_V"]
        sizes = rng.choice([(1, 1), (2, 1), (1, 2)], p=[0.9, 0.05, 0.05], size=rows)
        ends = 1 + sizes.cumsum(0)
        ends = ends[(ends < rows).all(1)].astype(np.int32)
        starts = np.concatenate([np.ones((1, 2), np.int32), ends[:-1]])
        self.chunks = Chunks(
            student_start=starts[:, 0], student_end=ends[:, 0], teacher_start=starts[:, 1], teacher_end=ends[:, 1]
        )
        exact = rng.random(vocab) < 0.75
        indices = np.where(exact[:, None] & (np.arange(4) > 0), -1, rng.integers(teacher_vocab, size=(vocab, 4)))
        indices[:, 3] = -1  # as a row of three ids has it
        weights = np.where(indices >= 0, 0.1 ** np.arange(4), 0.0)
        weights /= weights.sum(1, keepdims=True)
        self.projection = Projection.from_rows(indices, weights, exact, teacher_vocab_size=teacher_vocab)
        self.student = torch.randn(rows, vocab, generator=draw).mul_(3).requires_grad_()
        self.teacher = torch.randn(rows, teacher_vocab, generator=draw).mul_(3)
        self.ids = torch.randint(vocab, (rows,), generator=draw)
        self.columns: int = settings["columns"]


class ProjectedJob:
    def __init__(self, settings: Mapping[str, Any], loss: Callable[[Projected], Tensor]) -> None:
        self._inputs, self._loss = Projected(settings), loss
        self._value = torch.zeros(())

    def run(self) -> None:
        loss = self._loss(self._inputs)
        loss.backward()
        self._value = loss.detach()

    def clear(self) -> None:
        self._inputs.student.grad = None

    def facts(self, reference: str | None) -> dict[str, Any]:
        return {"loss": float(self._value)}


def _ours(i: Projected) -> Tensor:
    from cohobate.functional import projected_kl

    found = projected_kl(
        i.student, i.ids, i.teacher, i.ids, i.chunks, i.projection, vocab_top_k=i.columns, drop_unreachable=False
    )
    return found.divergence.sum()


def _one_hot(i: Projected, *, every_column: bool) -> Tensor:
    """The published formulas in their published order: rows are projected, and then averaged by a matrix product."""
    columns = i.teacher[: int(i.chunks.teacher_end[-1]) - 1].amax(0).topk(i.columns).indices.sort().values
    student_ids, slot = np.nonzero(i.projection.indices >= 0)
    entries = np.stack([i.projection.indices[student_ids, slot], student_ids])
    w = torch.sparse_coo_tensor(
        torch.from_numpy(entries),
        torch.from_numpy(i.projection.weights[student_ids, slot]).float(),
        (i.teacher.shape[1], i.student.shape[1]),
        check_invariants=False,
    )
    w = w.coalesce() if every_column else w.index_select(0, columns).coalesce()
    rows = torch.sparse.mm(w, i.student.softmax(-1).T).T  # [S, Vt], or [S, I]
    r_rows = rows[:, columns] if every_column else rows
    q_rows = i.teacher[:, columns].log_softmax(-1)
    sides = []
    for start, end, values in (
        (i.chunks.student_start, i.chunks.student_end, r_rows),
        (i.chunks.teacher_start, i.chunks.teacher_end, q_rows),
    ):
        at = torch.arange(values.shape[0])
        member = (at >= torch.from_numpy(start)[:, None] - 1) & (at < torch.from_numpy(end)[:, None] - 1)  # [C, S]
        member = member.to(values.dtype)
        sides.append(torch.bmm(member[None], values[None])[0] / (member.sum(1, keepdim=True) + 1e-10))
    r, q = sides
    r = torch.log(r / (r.sum(-1, keepdim=True) + 1e-10) + 1e-10)
    return (q.exp() * (q - r)).sum()


def _text(align: bool) -> Implementation:
    return Implementation(build=lambda settings: TextJob(settings, align=align), threads=1)


def _table(what: str) -> Implementation:
    return Implementation(build=lambda settings: TableJob(settings, what), threads=1)


def _projected(loss: Callable[[Projected], Tensor], package: str) -> Implementation:
    return Implementation(build=lambda settings: ProjectedJob(settings, loss), package=package)


IMPLEMENTATIONS = {
    TOKENIZING: _text(align=False),
    ALIGNING: _text(align=True),
    FORWARD: _table(FORWARD),
    BACK: _table(BACK),
    VALIDATING: _table(VALIDATING),
    OURS: _projected(_ours, "cohobate"),
    ONE_HOT: _projected(lambda i: _one_hot(i, every_column=False), "torch"),
    ALL_COLUMNS: _projected(lambda i: _one_hot(i, every_column=True), "torch"),
}


def cases(*, quick: bool = False) -> list[Case]:
    size, repeats = (800, 2) if quick else (8000, 50)
    rows, vocab, teacher_vocab, columns = (64, 2048, 3072, 256) if quick else (1024, 49_152, 129_280, 8192)
    texts = [
        Case(
            name=f"{kind}, {size} bytes, {pair[0]} and {pair[1]}, × {repeats}",
            settings={"kind": kind, "pair": pair, "bytes": size, "repeats": repeats},
            implementations=(TOKENIZING, ALIGNING),
            targets={ALIGNING: "≤ 0.20×"},
            base=TOKENIZING,
        )
        for pair in (["deepseek", "tekken"], ["mistral", "deepseek"])
        for kind in ("digits", "emoji and maths", "English", "code", "Chinese")
    ]
    pair = ["mistral", "deepseek"] if quick else ["deepseek", "tekken"]
    tables = Case(
        name=f"sub-token tables, {pair[0]} and {pair[1]}",
        settings={"pair": pair},
        implementations=(FORWARD, BACK, VALIDATING),
        targets=dict.fromkeys((FORWARD, BACK, VALIDATING), "≤ 3 s"),
    )
    projected = Case(
        name=f"X-Token P-KL, S={rows}, V={vocab} and {teacher_vocab}, {columns} columns",
        settings={"S": rows, "V": vocab, "teacher_V": teacher_vocab, "columns": columns},
        implementations=(OURS, ONE_HOT, ALL_COLUMNS),
        targets={ALL_COLUMNS: "≥ 10×"},
        base=OURS,
    )
    return [*texts, tables, projected]
