# SPDX-License-Identifier: Apache-2.0
"""What each rank of the CSD and X-Token tests does: every case in one launch; one JSON line to standard output.

A rank makes the whole problem, which every rank can, and compares its share of values and gradients with it.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cohobate.align import Chunks
from cohobate.functional.common_support import common_support_divergence, common_support_loss_sum
from cohobate.functional.projection import projected_kl
from cohobate.functional.same_support import important_columns, same_support_divergence
from cohobate.functional.scores import TopKScores, top_k_scores
from cohobate.objectives.aggregate import Aggregation, dynamic_scale
from cohobate.parallel.cross_tokenizer import vocab_parallel_common_support, vocab_parallel_projected_kl
from cohobate.parallel.vocab import vocab_parallel_cross_entropy, vocab_parallel_logprobs
from functional import csd_oracle
from functional.csd_oracle import World
from functional.test_common_support import (
    EXAMPLE,
    STUDENT_ROWS,
    TEACHER_ROWS,
    case,
    example_chunks,
    ids,
    in_pairs,
    logs,
    tables_of,
)
from functional.test_projection import example_projection, spread

IGNORE = -100
NAN = float("nan")
MISMATCH = 5.0


# ------------------------------------------------------------------ where things lie


@dataclass(frozen=True)
class Layout:
    """This rank's place in a grid of `cp` by `tp` ranks."""

    tp: Any
    cp: Any

    @property
    def tp_place(self) -> tuple[int, int]:
        return (dist.get_rank(self.tp), dist.get_world_size(self.tp)) if self.tp else (0, 1)

    @property
    def cp_place(self) -> tuple[int, int]:
        return (dist.get_rank(self.cp), dist.get_world_size(self.cp)) if self.cp else (0, 1)

    def complete(self, share: Tensor) -> Tensor:
        """The sum of what the ranks of the sequence have."""
        total = share.detach().clone()
        if self.cp:
            dist.all_reduce(total, group=self.cp)
        return total


def layouts() -> dict[str, Layout]:
    world = dist.group.WORLD
    if dist.get_world_size() == 2:
        return {"TP2": Layout(world, None), "CP2": Layout(None, world)}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    return {"TP2xCP2": Layout(mesh.get_group("tp"), mesh.get_group("cp"))}


def rows_of(kind: str, num_rows: int, rank: int, size: int) -> list[int]:
    """Which rows of a text a rank has, -1 for padding."""
    if size == 1:
        return list(range(num_rows))
    if kind == "contiguous":
        each = -(-num_rows // size)
        return list(range(num_rows))[rank * each : (rank + 1) * each]
    if kind == "zigzag":
        block = -(-num_rows // (2 * size))
        padded = [*range(num_rows), *[-1] * (2 * size * block - num_rows)]
        last = 2 * size - 1 - rank
        return padded[rank * block : (rank + 1) * block] + padded[last * block : (last + 1) * block]
    if kind == "first rank has none":
        return [] if rank == 0 else rows_of("contiguous", num_rows, rank - 1, size - 1)
    assert kind == "last rank is padding"
    return [-1] * 3 if rank == size - 1 else rows_of("contiguous", num_rows, rank, size - 1)


def columns_of(kind: str, width: int, rank: int, size: int) -> tuple[int, int, int | None]:
    """First and last column of a rank, of a vocabulary that may be padded, and what the rank says of the first."""
    if size == 1:
        return 0, width, None
    if kind == "even":
        return rank * width // size, (rank + 1) * width // size, None
    if kind == "padded":
        each = -(-(width + 5) // size)
        return rank * each, (rank + 1) * each, None
    if kind == "uneven":
        bounds = [0, 1, *[width] * (size - 1)]
        return bounds[rank], bounds[rank + 1], bounds[rank]
    assert kind == "none on the first"
    bounds = [0, 0, *[width] * (size - 1)]
    return bounds[rank], bounds[rank + 1], None


@dataclass(frozen=True)
class Problem:
    """One text and both sides' logits, whole."""

    made: World
    student: Tensor  # [S, Vs]
    teacher: Tensor  # [N, Vt]
    chunks: Chunks
    student_ids: Tensor
    teacher_ids: Tensor
    rows: Any

    @classmethod
    def draw(cls, seed: int, dtype: torch.dtype, rows: str, length: int = 24) -> "Problem":
        made = csd_oracle.world(seed, length=length)
        student, teacher, chunks = case(seed, made, dtype)
        whole = cls(made, student, teacher, chunks, ids(made.student_ids), ids(made.teacher_ids), "text")
        if rows == "text":
            return whole
        return replace(
            whole,
            student=student[:-1],
            teacher=teacher[:-1],
            chunks=in_pairs(chunks),
            student_ids=whole.student_ids[1:],
            teacher_ids=whole.teacher_ids[1:],
            rows=rows,
        )

    @property
    def targets(self) -> Tensor:
        """The token that each row predicts, or `IGNORE`."""
        if self.rows == "pairs":
            return self.student_ids
        return torch.cat([self.student_ids[1:], torch.tensor([IGNORE])])

    def scores(self, k: int | None) -> Any:
        return self.teacher if k is None else top_k_scores(self.teacher, self.teacher_ids, k, rows=self.rows)


@dataclass(frozen=True)
class Part:
    """A rank's part of a problem: rows and columns, with NaN where padding is."""

    problem: Problem
    layout: Layout
    row_kind: str
    column_kind: str

    @property
    def positions(self) -> list[int]:
        return rows_of(self.row_kind, len(self.problem.student), *self.layout.cp_place)

    @property
    def columns(self) -> tuple[int, int, int | None]:
        return columns_of(self.column_kind, self.problem.student.shape[1], *self.layout.tp_place)

    def cut(self, whole: Tensor, padding: float = NAN) -> Tensor:
        start, stop, _ = self.columns
        width = whole.shape[1]
        wide = torch.nn.functional.pad(whole, (0, max(0, stop - width), 0, 1), value=padding)
        return wide[self.positions or torch.zeros(0, dtype=torch.int64), start:stop].clone()

    @property
    def place(self) -> dict[str, Any]:
        positions = None if self.layout.cp is None else torch.tensor(self.positions, dtype=torch.int64)
        return {
            "tp_group": self.layout.tp,
            "vocab_start_index": self.columns[2],
            "cp_group": self.layout.cp,
            "positions": positions,
            "rows": self.problem.rows,
        }

    def per_row(self, values: Tensor, padding: Any) -> Tensor:
        return torch.cat([values, torch.tensor([padding], dtype=values.dtype)])[self.positions]

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """The sum over the rows here, each divided by their number in the text."""
        targets = self.problem.targets
        here = vocab_parallel_cross_entropy(
            logits, self.per_row(targets, IGNORE), self.layout.tp, self.columns[2], global_vocab_size=self.real
        )
        return here.sum() / (targets != IGNORE).sum()

    @property
    def real(self) -> int | None:
        """What the operations on single rows must be told where the vocabulary is padded."""
        return self.problem.student.shape[1] if self.column_kind == "padded" else None


# ------------------------------------------------------------------ losses, in one process and in parts


@dataclass(frozen=True)
class Loss:
    """A KD term per chunk for whole logits, and for a part of them; and what a chunk weighs."""

    whole: Callable[[Problem, Tensor], Tensor]
    part: Callable[[Part, Tensor, str], Tensor]
    weights: Callable[[Problem], Tensor]


def csd(k: int | None, **options: Any) -> Loss:
    def whole(p: Problem, logits: Tensor) -> Tensor:
        return common_support_divergence(
            logits,
            p.student_ids,
            p.scores(k),
            p.teacher_ids,
            p.chunks,
            tables_of(p.made),
            rows=p.rows,
            **options,
        ).divergence

    def part(part: Part, logits: Tensor, evaluation: Any) -> Tensor:
        p = part.problem
        return vocab_parallel_common_support(
            logits,
            p.student_ids,
            unread(part, p.scores(k)),
            p.teacher_ids,
            p.chunks,
            tables_of(p.made),
            evaluation=evaluation,
            **part.place,
            **options,
        ).divergence

    def weights(p: Problem) -> Tensor:
        single = (p.chunks.student_end - p.chunks.student_start == 1) & (
            p.chunks.teacher_end - p.chunks.teacher_start == 1
        )
        return torch.where(torch.from_numpy(single), 1.0, MISMATCH)

    return Loss(whole, part, weights)


def xtoken(**options: Any) -> Loss:
    def whole(p: Problem, logits: Tensor) -> Tensor:
        return projected_kl(
            logits, p.student_ids, p.teacher, p.teacher_ids, p.chunks, spread(p.made), rows=p.rows, **options
        ).divergence

    def part(part: Part, logits: Tensor, evaluation: Any) -> Tensor:
        p = part.problem
        return vocab_parallel_projected_kl(
            logits,
            p.student_ids,
            unread(part, p.teacher),
            p.teacher_ids,
            p.chunks,
            spread(p.made),
            evaluation=evaluation,
            **part.place,
            **options,
        ).divergence

    return Loss(whole, part, lambda p: torch.ones(len(p.chunks)))


def unread(part: Part, scores: Any) -> Any:
    """The teacher's scores with NaN in every row that only other ranks' chunks read."""
    offset = 1 if part.problem.rows == "text" else 0
    mine = set(part.positions)
    read: set[int] = set()
    for _, s1, t0, t1 in part.problem.chunks:
        if s1 - 1 - offset in mine:
            read |= set(range(max(t0 - offset, 0), t1 - offset))
    tensors = [scores] if isinstance(scores, Tensor) else [scores.logits, scores.log_normalizer, scores.realized_logit]
    poisoned = [x.clone() for x in tensors]
    for x in poisoned:
        x[[i for i in range(len(x)) if i not in read]] = NAN
    if isinstance(scores, Tensor):
        return poisoned[0]
    assert isinstance(scores, TopKScores)
    return replace(scores, logits=poisoned[0], log_normalizer=poisoned[1], realized_logit=poisoned[2])


LOSSES: dict[str, Loss] = {
    "csd, dense": csd(None),
    "csd, dense, no realized, forward": csd(None, keep_realized=False, beta=0.0),
    "csd, top 3": csd(3),
    "csd, top 3, evict, reverse": csd(3, forced_mode="evict", beta=1.0, min_support=2),
    "csd, top 12, realized only": csd(12, realized_only_mismatch=True),
    "pkl": xtoken(),
    "pkl, 5 columns, reverse": xtoken(vocab_top_k=5, reverse=True, temperature=1.5),
    "pkl, given columns": xtoken(columns=torch.tensor([0, 3, 4, 9]), drop_unreachable=False),
    "pkl, exact": xtoken(exact_only=True),
    "gold": xtoken(mode="gold"),
    "hkl, 2 uncommon, reverse": xtoken(mode="hkl", uncommon_top_k=2, reverse=True),
}


def same_tokenizer(student: Tensor, teacher: Tensor, columns: Tensor | None, targets: Tensor) -> Tensor:
    """KL to a teacher of the student's tokenizer on shared columns, a mean over the rows that predict something."""
    kept = targets != IGNORE
    of_teacher = teacher if columns is None else teacher[:, columns]
    return same_support_divergence(student[kept], of_teacher[kept], columns=columns).sum()


@dataclass(frozen=True)
class Joined:
    """How the terms become one loss."""

    mode: Literal["sum", "select_teacher"] = "sum"
    dynamic: bool = True

    def of_teachers(self, nll: list[Tensor]) -> tuple[float, ...]:
        """Weights of the teachers, whose complete cross-entropies on their own tokens are `nll`."""
        weights = (0.3, 0.5) if self.mode == "sum" else ()
        made = Aggregation(num_teachers=2, kd_mode=self.mode, weights=weights)
        return made.teacher_weights([-float(value) for value in nll], (1, 1))

    def scale(self, kd: Tensor, ce: Tensor) -> Tensor:
        """What complete values make of the KD beside a CE of weight 1."""
        return torch.tensor(dynamic_scale(float(kd), float(ce)) if self.dynamic else 10.0, dtype=ce.dtype)


def first_nll(p: Problem) -> Tensor:
    """Cross-entropy of the teacher with its own tokenizer, which every rank is given whole."""
    rows = p.teacher[:-1] if p.rows == "text" else p.teacher
    return torch.nn.functional.cross_entropy(rows, p.teacher_ids[1:] if p.rows == "text" else p.teacher_ids)


def numbers_of_one_process(p: Problem, loss: Loss, second: Tensor | None, joined: Joined) -> dict[str, Tensor]:
    """Every value of one loss call, and the gradient by the logits."""
    logits = p.student.clone().requires_grad_()
    kept = p.targets != IGNORE
    divergence = loss.whole(p, logits)
    kd = (divergence * loss.weights(p)).sum() / max(len(divergence), 1)
    values = {"divergence": divergence, "kd/0": kd}
    if second is not None:
        columns = important_columns(second[kept], 6)[0].sort().values
        values["kd/1"] = same_tokenizer(logits, second, columns, p.targets) / kept.sum()
        own = torch.nn.functional.cross_entropy(second, p.targets, ignore_index=IGNORE)
        of_first, of_second = joined.of_teachers([first_nll(p), own])
        kd = of_first * kd + of_second * values["kd/1"]
    ce = torch.nn.functional.cross_entropy(logits, p.targets, ignore_index=IGNORE)
    scale = joined.scale(kd, ce)
    total = scale * kd + ce
    (gradient,) = torch.autograd.grad(total, logits)
    return {**values, "kd": kd, "ce": ce, "scale": scale, "loss": total, "gradient": gradient}


def numbers_of_a_part(
    part: Part, loss: Loss, second: Tensor | None, joined: Joined, evaluation: str
) -> dict[str, Tensor]:
    """The same; values are those of the whole text, put together as a trainer would, the gradient is the rank's."""
    p, layout = part.problem, part.layout
    logits = part.cut(p.student).requires_grad_()
    divergence = loss.part(part, logits, evaluation)
    shares = layout.cp_place[1] if evaluation == "replicated" else 1
    kd = (divergence * loss.weights(p)).sum() / max(len(divergence), 1) / shares
    values = {"divergence": layout.complete(divergence) / shares, "kd/0": layout.complete(kd)}
    if second is not None:
        targets = part.per_row(p.targets, IGNORE)
        columns = important_columns(second[p.targets != IGNORE], 6)[0].sort().values
        at_columns = vocab_parallel_logprobs(
            logits,
            torch.where((targets == IGNORE)[:, None], IGNORE, columns),
            layout.tp,
            part.columns[2],
            global_vocab_size=part.real,
        )
        of_teacher = second[torch.tensor(part.positions, dtype=torch.int64)][:, columns]  # -1 is read and dropped
        other = same_tokenizer(at_columns, of_teacher, None, targets) / (p.targets != IGNORE).sum()
        values["kd/1"] = layout.complete(other)
        rows = second[torch.tensor(part.positions, dtype=torch.int64)]
        share = torch.nn.functional.cross_entropy(rows, targets, ignore_index=IGNORE, reduction="sum")
        own = layout.complete(share / (p.targets != IGNORE).sum())  # a rank alone would select by its own rows
        of_first, of_second = joined.of_teachers([first_nll(p), own])
        kd = of_first * kd + of_second * other
    ce = part.cross_entropy(logits)
    whole_kd, whole_ce = layout.complete(kd), layout.complete(ce)
    scale = joined.scale(whole_kd, whole_ce)
    total = scale * kd + ce
    (gradient,) = torch.autograd.grad(total, logits)
    loss_value = layout.complete(total)
    return {**values, "kd": whole_kd, "ce": whole_ce, "scale": scale, "loss": loss_value, "gradient": gradient}


def compare(name: str, part: Part, loss: Loss, second: Tensor | None, joined: Joined, evaluation: str) -> list[str]:
    wanted = numbers_of_one_process(part.problem, loss, second, joined)
    found = numbers_of_a_part(part, loss, second, joined, evaluation)
    exact = part.problem.student.dtype == torch.float64
    failures = []
    for key, want in wanted.items():
        want = part.cut(want, padding=0.0) if key == "gradient" else want
        tolerance = 1e-10 if exact else 1e-6
        size = max(1.0, float(wanted["scale"])) if key in ("gradient", "scale", "loss") else 1.0
        try:
            torch.testing.assert_close(found[key], want.detach(), atol=tolerance * size, rtol=10 * tolerance)
        except AssertionError as error:
            failures.append(f"{name}, {key}: {error}".replace("\n", " ")[:400])
    return failures


def matrix(layout: Layout) -> tuple[list[str], int]:
    """Each loss at each place; form, dtype, evaluation, number of teachers, mode and scaling go round."""
    failures, count = [], 0
    rows = ["contiguous", "zigzag", "first rank has none", "last rank is padding"] if layout.cp else ["whole"]
    columns = ["even", "padded", "uneven", "none on the first"] if layout.tp else ["whole"]
    places = list(itertools.product(rows, columns))
    if len(places) > 4:
        places = [places[i] for i in (0, 1, 4, 5, 6, 7, 10, 13)]  # every kind of each, and zigzag with every other
    settings = list(
        itertools.product(("text", "pairs"), (torch.float64, torch.float32), ("owner", "replicated"), (False, True))
    )
    for (row_kind, column_kind), (name, loss) in itertools.product(places, LOSSES.items()):
        for turn in range(1 if len(places) > 4 else 2):
            form, dtype, evaluation, two = settings[(5 * count + turn) % len(settings)]
            problem = Problem.draw(count % 7, dtype, form)
            part = Part(problem, layout, row_kind, column_kind)
            second = case(count + 100, problem.made, dtype)[0][: len(problem.student)] if two else None
            joined = Joined("select_teacher" if count % 3 == 1 else "sum", dynamic=count % 4 != 3)
            title = f"{name}, {row_kind}, {column_kind}, {form}, {dtype}, {evaluation}, two teachers: {two}, {joined}"
            failures += compare(title, part, loss, second, joined, evaluation)
            count += 1
    return failures, count


# ------------------------------------------------------------------ the published example


def example(layout: Layout) -> dict[str, Any]:
    """The first ranks of two or four have rows 0 to 2 of the published example."""
    problem = Problem(
        EXAMPLE,
        logs(STUDENT_ROWS),
        logs(TEACHER_ROWS),
        example_chunks(),
        ids(EXAMPLE.student_ids),
        ids(EXAMPLE.teacher_ids),
        "text",
    )
    first = layout.cp_place[0] == 0
    positions = [0, 1, 2] if first else [3, 4, 5, 6]
    start, stop, _ = columns_of("even", 8, *layout.tp_place)
    logits = problem.student[positions, start:stop].requires_grad_()
    place: Any = {"tp_group": layout.tp, "cp_group": layout.cp, "positions": torch.tensor(positions)}
    arguments: Any = (logits, problem.student_ids, problem.teacher, problem.teacher_ids, problem.chunks)
    output = vocab_parallel_common_support(*arguments, tables_of(EXAMPLE), keep_realized=False, **place)
    kd = common_support_loss_sum(output) / int(output.scorable.sum())
    targets = problem.targets[positions]
    ce = vocab_parallel_cross_entropy(logits, targets, layout.tp).sum() / 6
    scale = float(layout.complete(ce) / layout.complete(kd))
    (scale * kd + ce).backward()
    assert logits.grad is not None
    projected = vocab_parallel_projected_kl(*arguments, example_projection(), drop_unreachable=False, **place)
    every = torch.arange(8).expand(len(positions), 8)
    all_columns = vocab_parallel_logprobs(logits, every, layout.tp)
    same = same_tokenizer(all_columns, 0.8 * problem.student[positions], None, targets) / 6
    return {
        "share": kd.item(),
        "scale": scale,
        "scale of the share": float(layout.complete(ce)) / kd.item(),
        "gradient": logits.grad[2].tolist() if first else None,
        "columns": [start, stop],
        "projected": float(layout.complete(projected.divergence.sum())) / 4,
        "two teachers": float(layout.complete(0.3 * kd + 0.5 * same)),
    }


# ------------------------------------------------------------------ what crosses ranks


def recorded(call: Callable[[], Tensor], layout: Layout) -> tuple[list[str], list[str], int]:
    """The exchanges of a call and of its backward pass, in order, and the largest number of numbers in one."""
    names = {id(layout.tp): "tp", id(layout.cp): "cp"}
    order, sizes = [], [0]
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}

    def wrap(name: str) -> Callable[..., Any]:
        def recording(*args: Any, **kwargs: Any) -> Any:
            operation = str(kwargs.get("op", name)).removeprefix("RedOpType.")
            order.append(f"{names[id(kwargs['group'])]} {operation}")
            sizes.append(args[-1].numel())
            return originals[name](*args, **kwargs)

        return recording

    for name in originals:
        setattr(dist, name, wrap(name))
    try:
        value = call()
        forward = list(order)
        value.backward()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return forward, order[len(forward) :], max(sizes)


def exchanges(layout: Layout) -> dict[str, Any]:
    """By loss and text: what a rank exchanges. The texts are long, without a chunk, and without a row."""
    found = {}
    for name, evaluation in itertools.product(("csd, dense", "csd, top 3", "pkl", "gold"), ("owner", "replicated")):
        for text, length in (("long", 24), ("short", 3), ("empty", 0)):
            part = Part(Problem.draw(3, torch.float64, "text", length), layout, "zigzag", "even")
            logits = part.cut(part.problem.student).requires_grad_()
            forward, backward, _ = recorded(
                lambda part=part, logits=logits, name=name, evaluation=evaluation: (
                    LOSSES[name].part(part, logits, evaluation).sum()
                ),
                layout,
            )
            assert logits.grad is not None
            found[f"{name}, {evaluation}, {text}"] = [forward, backward]
    return found


# ------------------------------------------------------------------ errors


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def errors(layout: Layout) -> dict[str, str]:
    """Something is wrong on the last rank alone."""
    last = dist.get_rank() == dist.get_world_size() - 1
    problem = Problem.draw(1, torch.float64, "text")
    part = Part(problem, layout, "contiguous", "even")

    def call(*, projected: bool = False, **changes: Any) -> str:
        changes = changes if last else {}
        logits = part.cut(problem.student)
        arguments = {
            "student_logits": logits,
            "student_ids": problem.student_ids,
            "teacher_ids": problem.teacher_ids,
            "chunks": problem.chunks,
            **part.place,
        }
        if projected:
            changed = arguments | {"teacher_logits": problem.teacher, "projection": spread(problem.made)} | changes
            return message_of(lambda: vocab_parallel_projected_kl(**changed))
        changed = arguments | {"teacher_scores": problem.teacher, "tables": tables_of(problem.made)} | changes
        return message_of(lambda: vocab_parallel_common_support(**changed))

    wrong = problem.student_ids.clone()
    wrong[2] = 99
    other = problem.student_ids.clone()
    other[0] = (other[0] + 1) % 12
    shorter = Problem.draw(2, torch.float64, "text", 12)
    found = {
        "an id that is none": call(student_ids=wrong),
        "another text": call(student_ids=other),
        "a text of another length": call(student_ids=shorter.student_ids, chunks=shorter.chunks),
        "another option": call(beta=0.1),
        "an unknown option": call(tau=2.0),
        "an option that does not fit": call(beta=7.0),
        "another teacher": call(teacher_scores=problem.scores(3)),
        "no table": call(tables=None),
        "a teacher of another width": call(projected=True, teacher_logits=problem.teacher[:, :-1]),
        "other columns": call(projected=True, columns=torch.tensor([1])),
        "another evaluation": call(evaluation="replicated"),
        "no such evaluation": call(evaluation="all"),
    }
    if layout.cp:
        places = torch.tensor(part.positions)
        found |= {
            "no positions": call(positions=None),
            "positions of other rows": call(positions=places + 1),
            "positions of the first rank": call(positions=places - places.min()),
            "a row twice": call(positions=places.clamp(max=int(places[0]))),
            "too few positions": call(positions=places[1:]),
            "real positions": call(positions=places.double()),
        }
    if layout.tp:
        found |= {
            "the place of one shard": call(vocab_start_index=part.columns[0]),
            "a narrower shard": call(student_logits=part.cut(problem.student)[:, 1:]),
        }
    found["after all this"] = call()
    return found


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    result: dict[str, Any] = {"layouts": {}}
    for name, layout in layouts().items():
        failures, count = matrix(layout)
        result["layouts"][name] = {
            "failures": failures,
            "cases": count,
            "exchanges": exchanges(layout),
            "errors": errors(layout),
            "cp": layout.cp is not None,
            "tp": layout.tp is not None,
        }
        if layout.cp is not None:
            result["example"] = example(layout)
    print("RESULT", json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
