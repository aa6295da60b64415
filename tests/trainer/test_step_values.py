# SPDX-License-Identifier: Apache-2.0
"""The verbs of an objective that looks back are called in order, with the sums of the step; others are left alone."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from cohobate.errors import ConfigError
from cohobate.objectives import CommonSupportObjective, DivergenceObjective, ObjectiveOutput
from cohobate.parallel.world import World
from cohobate.trainer.state import load_objective, save_objective
from cohobate.trainer.step_values import StepValues
from cohobate.vocab import SubtokenTables

TABLES = SubtokenTables.from_chains([(0,), (1,)], [(0,), (1,)])
ALONE = World(rank=0, size=1)


@dataclass(frozen=True)
class Told:
    """Remembers in new objects what it was told."""

    heard: tuple[Any, ...] = field(default=())

    def with_counts(self, counts: dict[str, float]) -> "Told":
        return Told((*self.heard, ("counts", dict(counts))))

    def after_step(self, values: dict[str, float], counts: dict[str, float]) -> "Told":
        return Told((*self.heard, ("after", dict(values), dict(counts))))


def said(**values: float) -> ObjectiveOutput:
    return ObjectiveOutput(terms={}, step_values={name: torch.tensor(value) for name, value in values.items()})


def test_micro_batches_are_added_up_and_each_step_begins_at_nothing():
    values, objective = StepValues(), Told()
    for step in (1.0, 2.0):
        of_step: Any = values.begin(objective, {"n": step})  # pyright: ignore
        assert of_step.heard[-1] == ("counts", {"n": step})
        for share in (0.5, 0.25):
            values.see(said(kd=share * step, ce=1.0))
        objective = values.end(objective)  # pyright: ignore
    assert objective.heard == (
        ("after", {"ce": 2.0, "kd": 0.75}, {"n": 1.0}),
        ("after", {"ce": 2.0, "kd": 1.5}, {"n": 2.0}),
    )


def test_an_objective_without_the_verbs_passes_through_as_it_is():
    values, objective = StepValues(), DivergenceObjective()
    assert values.begin(objective, {"pairs": 1.0}) is objective
    values.see(said())
    assert values.end(objective) is objective
    unasked = Told()
    values.see(said())
    assert values.end(unasked) is unasked  # pyright: ignore  (it reported nothing)


def test_the_scale_of_a_checkpoint_comes_back(tmp_path: Path):
    objective = CommonSupportObjective(parts=(TABLES,))
    trained = objective.after_step({"kd/0": 1.0, "ce": 7.0}, {"chunks/0": 2.0, "ce_tokens": 4.0})
    save_objective(tmp_path, trained, world=ALONE)
    restored: Any = load_objective(tmp_path, objective)
    assert restored.scale == 3.5


def test_an_objective_that_carries_nothing_writes_no_file_and_needs_none(tmp_path: Path):
    for objective in (DivergenceObjective(), CommonSupportObjective(parts=(TABLES,), dynamic_scaling="off")):
        save_objective(tmp_path, objective, world=ALONE)
        assert load_objective(tmp_path, objective) is objective
    assert list(tmp_path.iterdir()) == []
    save_objective(tmp_path, CommonSupportObjective(parts=(TABLES,)), world=World(rank=1, size=2))
    assert list(tmp_path.iterdir()) == []  # rank 0 writes


def test_a_checkpoint_without_the_scale_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no objective_state.safetensors, but CommonSupportObj.* carries kd_scale"):
        load_objective(tmp_path, CommonSupportObjective(parts=(TABLES,)))
