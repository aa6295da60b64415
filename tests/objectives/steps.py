# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps as the trainer makes them, of any arrangement of the same rows; a script for several ranks, too.

`test_several_teachers.py` calls `steps` in its own process and starts this file on gloo ranks: all run the same lines.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cohobate.objectives import CommonSupportObjective, ProjectedObjective, for_step
from cohobate.objectives.aggregate import complete_values, dynamic_scale
from cohobate.parallel.gather import gather_rows
from cohobate.parallel.world import all_reduce_sum, current_world
from objectives import chunk_cases as cases
from objectives.chunk_cases import SAME

LENGTHS = [14, 9, 0, 11, 6]
RANKS = ([0, 2], [1, 3, 4], [])  # which rows each of three ranks has; the last has none

# Everything that joins teachers, each for both methods where it is not the method's own.
MODES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    f"{method} {name}": (method, teachers, options)
    for method in ("csd", "xtoken")
    for name, (teachers, options) in {
        "one teacher": ((0,), {}),
        "static": ((0, 1, SAME), {"weights": (0.3, 1.0, 0.5), "same_vocab_top_k": None}),
        "columns": ((0, SAME), {"same_vocab_top_k": 4}),
        "selected": ((1, 0, SAME), {"kd_mode": "select_teacher"}),
        "by ce": ((0, 1), {"sum_weights_metric": "ce", "alpha": 2.0}),
        "by entropy": ((0, SAME), {"sum_weights_metric": "entropy", "normalize_teacher_by_vocab": True}),
        "by max_prob": ((0, 1, SAME), {"sum_weights_metric": "max_prob"}),
        "averaged": ((SAME, SAME), {"kd_mode": "averaged_logits", "weights": (0.3, 0.5)}),
    }.items()
} | {
    "csd tempered": ("csd", (0,), {"temperature": 1.5}),
    "xtoken few columns": ("xtoken", (0, 1), {"vocab_top_k": 4, "temperature": 1.5}),
    "xtoken gold": ("xtoken", (0, 1), {"modes": ("gold", "hkl")}),
}

# What runs on ranks: every mode, and every way to scale and to choose where it makes a difference.
ARRANGEMENTS: dict[str, tuple[str, dict[str, Any]]] = (
    {mode: (mode, {}) for mode in MODES}
    | {
        f"{mode}, {scaling}": (mode, {"dynamic_scaling": scaling})
        for mode in ("csd static", "csd selected", "xtoken columns")
        for scaling in ("call", "off")
    }
    | {
        f"{mode}, chosen in a call": (mode, {"dynamic_scaling": "call", "chosen_over": "call"})
        for mode in ("csd columns", "csd selected", "csd by entropy", "xtoken few columns")
    }
)


def objective_of(mode: str, **more: Any) -> Any:
    method, teachers, options = MODES[mode]
    kind, of_each = {
        "csd": (CommonSupportObjective, cases.tables),
        "xtoken": (ProjectedObjective, cases.projections),
    }[method]
    parts = (*of_each(), None)
    return kind(parts=tuple(parts[i] for i in teachers), **options, **more)


def steps(mode: str, micro_batches: Sequence[Sequence[int]], *, number: int = 2, **more: Any) -> dict[str, Any]:
    """So many steps on the same rows, in these micro-batches of this rank: losses, gradients and metrics of all ranks.

    The weights do not move between the steps; what is carried over is the objective's alone. In the trainer
    `StepValues` calls the verbs.
    """
    rows, made = cases.rows_of_text(LENGTHS), cases.heads()
    teachers = MODES[mode][1]
    objective, found = objective_of(mode, **more), {}
    for step in range(number):
        batches = [(some, cases.batch_of(some, teachers)) for some in ([rows[i] for i in m] for m in micro_batches)]
        own = [objective.counts(batch) for _, batch in batches]
        counts = all_reduce_sum({name: sum(c[name] for c in own) for name in own[0]})

        def scored(some: Any, batch: Any) -> tuple[Any, Any, Any]:
            return cases.student_of(some, made), cases.teachers_of(some, made, teachers), batch

        of_step = for_step(objective.with_counts(counts), (scored(*one) for one in batches), join_ranks=gather_rows)
        loss, sums, values = torch.zeros((), dtype=torch.float64), {}, {}
        for one in batches:
            out = of_step(*scored(*one))
            values = {name: values.get(name, 0.0) + value for name, value in out.step_values.items()}
            loss = loss + cases.loss_of(out, counts)
            for name, metric in out.metrics.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(metric.sum), before[1] + float(metric.count))
        grads = torch.autograd.grad(loss, made.leaves)
        objective = objective.after_step(all_reduce_sum(values), counts)
        found[f"step {step}"] = {
            "loss": all_reduce_sum({"loss": loss})["loss"],
            "gradient": joined(torch.cat([g.flatten() for g in grads])).tolist(),
            "metrics": means(sums),
            "state": {name: float(value) for name, value in objective.state_dict().items()},
        }
    return found


def joined(values: Tensor) -> Tensor:
    """Added up over ranks."""
    if current_world().size > 1:
        dist.all_reduce(values)
    return values


def means(sums: dict[str, tuple[float, float]]) -> dict[str, float]:
    flat = {f"{name} {i}": value for name, pair in sums.items() for i, value in enumerate(pair)}
    total = all_reduce_sum(flat)
    return {n: total[f"{n} 0"] / total[f"{n} 1"] for n in sums if total[f"{n} 1"]}


def group_of_two(rank: int) -> dict[str, Any]:
    """Ranks 0 and 1 are one group and rank 2 another, which at the same time reaches collectives of its own."""
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    rows, made = cases.rows_of_text(LENGTHS), cases.heads()
    mine = [rows[i] for i in RANKS[rank]] if rank < 2 else [rows[0]]
    objective = replace(
        objective_of("csd selected", dynamic_scaling="call", chosen_over="call"), group=pair if rank < 2 else single
    )
    teachers = MODES["csd selected"][1]
    known = cases.teachers_of(mine, made, teachers)
    out = objective(cases.student_of(mine, made), known, cases.batch_of(mine, teachers))
    # The worked example's shares of two ranks that hold parts of one text; each rank's own ratio would be another.
    shares = {"kd/0": [4 * 0.018305837262, 4 * 0.009449904843, 1.0][rank], "ce": [3.0, 2.509038397866, 1.0][rank]}
    counts = {"chunks/0": 4.0, "ce_tokens": 6.0}
    values = complete_values(shares, counts, world=current_world(objective.group))
    return {"scale": cases.metric(out, "kd/scale"), "of shares": dynamic_scale(*values)}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {"group": group_of_two(rank)}
    for name, (mode, options) in ARRANGEMENTS.items():
        found[name] = steps(mode, [RANKS[rank]], ce_rows="all", **options)
    found["two calls"] = steps("csd by ce", [RANKS[rank][:1], RANKS[rank][1:]], ce_rows="all")
    print("RESULT", json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
