# SPDX-License-Identifier: Apache-2.0
"""The part of a checkpoint that transformers does not know: what a teacher and an objective carry, and rollouts still
to be reused.

safetensors for tensors, JSON in their headers for the rest.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cohobate.align.rollout import AlignedBatch, AlignedSide
from cohobate.errors import ConfigError
from cohobate.files import written_whole
from cohobate.objectives import Objective
from cohobate.parallel.world import World
from cohobate.trainer.step import Window

FORMAT = 1
OBJECTIVE_STATE = "objective_state.safetensors"
Held = tuple[Window, int] | None


def save_state(folder: Path, *, teacher: Any, held: Held, world: World) -> None:
    """Write the teacher's state (rank 0) and this rank's held window into a checkpoint folder."""
    state_dict = getattr(teacher, "state_dict", None)
    if world.rank == 0 and state_dict is not None:
        write_tensors(folder / "teacher_state.safetensors", state_dict(), {"format": FORMAT})
    path = _window_path(folder, world.rank)
    if held is None:
        path.unlink(missing_ok=True)  # of an earlier run that saved into the same folder
        return
    window, uses = held
    tensors, header = _pack_window(window)
    write_tensors(path, tensors, {**header, "uses": uses, "num_ranks": world.size})


def load_state(folder: Path, *, teacher: Any, world: World) -> Held:
    """Restore what `save_state` wrote; a teacher with state that finds none is an error, not a fresh start.

    Raises `ConfigError` for that, and on every rank for a window that was dealt to another number of ranks.
    """
    load = getattr(teacher, "load_state_dict", None)
    if load is not None:
        path = folder / "teacher_state.safetensors"
        if not path.exists():
            raise ConfigError(
                f"{folder.name} has no teacher_state.safetensors, but {type(teacher).__name__} carries state: resuming"
                " would restart the teacher. Resume from a checkpoint of the same recipe."
            )
        load(read_tensors(path)[0])
    found = [path for rank in (world.rank, 0) if (path := _window_path(folder, rank)).exists()]
    if not found:
        return None
    tensors, header = read_tensors(found[0])
    if header["num_ranks"] != world.size:
        raise ConfigError(
            f"{folder.name} holds rollouts that {header['num_ranks']} processes were still to train on, and there are "
            f"{world.size} now. Resume with {header['num_ranks']}, or from a checkpoint at the end of a window."
        )
    return _unpack_window(tensors, header), int(header["uses"])


def save_objective(folder: Path, objective: Objective, *, world: World) -> None:
    """Write (on rank 0) what the objective carries from step to step into a checkpoint folder, if it does."""
    carried = _carried(objective)
    if world.rank == 0 and carried:
        write_tensors(folder / OBJECTIVE_STATE, carried, {"format": FORMAT})


def load_objective(folder: Path, objective: Objective) -> Objective:
    """The objective that goes on from what `save_objective` wrote; itself if it carries nothing from step to step."""
    carried = _carried(objective)
    if not carried:
        return objective
    path = folder / OBJECTIVE_STATE
    if not path.exists():
        raise ConfigError(
            f"{folder.name} has no {OBJECTIVE_STATE}, but {type(objective).__name__} carries {', '.join(carried)} from"
            " step to step: resuming would begin it anew. Resume from a checkpoint of the same recipe."
        )
    restored: Any = objective
    return restored.with_state_dict(read_tensors(path)[0])


def _carried(objective: Objective) -> dict[str, Tensor]:
    state_dict = getattr(objective, "state_dict", None)
    return {} if state_dict is None else state_dict()


def _window_path(folder: Path, rank: int) -> Path:
    return folder / f"rollout_window_rank{rank}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """One safetensors file with a JSON header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {k: v.contiguous() for k, v in tensors.items()}
    with written_whole(path) as temporary:
        save_file(plain, temporary, metadata={"cohobate": json.dumps(header)})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file that `write_tensors` wrote; another format number is refused."""
    with safe_open(path, framework="pt") as file:
        header = json.loads((file.metadata() or {}).get("cohobate", "{}"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    if header.get("format") != FORMAT:
        raise ConfigError(f"{path.name} has format {header.get('format')}, this version reads format {FORMAT}.")
    return tensors, header


def _pack_window(window: Window) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    names: list[list[list[str]]] = []
    for g, group in enumerate(window.groups):
        names.append([])
        for m, batch in enumerate(group):
            assert not batch.teachers  # what compares their chunks has no importance ratio, so no window is held
            names[-1].append(list(batch.sample_ids))
            _pack(tensors, f"{g}.{m}", batch)
    return tensors, {"format": FORMAT, "sample_ids": names}


def _pack(tensors: dict[str, Tensor], prefix: str, batch: AlignedBatch | AlignedSide) -> None:
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, Tensor):
            tensors[f"{prefix}.{f.name}"] = value.clone()
        elif isinstance(value, AlignedSide):
            _pack(tensors, f"{prefix}.{f.name}", value)
        elif isinstance(value, dict):
            tensors |= {f"{prefix}.{f.name}.{k}": v.clone() for k, v in value.items()}


def _unpack_window(tensors: dict[str, Tensor], header: dict[str, Any]) -> Window:
    groups = tuple(
        tuple(_unpack_batch(tensors, f"{g}.{m}", tuple(ids)) for m, ids in enumerate(group))
        for g, group in enumerate(header["sample_ids"])
    )
    return Window(groups=groups)


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    inside = {k.removeprefix(prefix + "."): v for k, v in tensors.items() if k.startswith(prefix + ".")}
    return {k: v for k, v in inside.items() if "." not in k}


def _unpack_batch(tensors: dict[str, Tensor], prefix: str, sample_ids: tuple[str, ...]) -> AlignedBatch:
    def side(name: str) -> AlignedSide:
        return AlignedSide(
            model_inputs=_named(tensors, f"{prefix}.{name}.model_inputs"),
            pair_index=tensors[f"{prefix}.{name}.pair_index"],
        )

    named: dict[str, Any] = dict(_named(tensors, prefix))
    return AlignedBatch(student=side("student"), teacher=side("teacher"), sample_ids=sample_ids, **named)
