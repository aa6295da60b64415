# SPDX-License-Identifier: Apache-2.0
"""A whole recipe, and the keys that each of its sections has."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator

from cohobate.cli.schema.data import Data, Evaluation
from cohobate.cli.schema.models import ServerTeacher, Student, Teacher, TeacherEntry
from cohobate.cli.schema.objectives import Objective, OfTeachers
from cohobate.cli.schema.rollouts import LocalRollouts, Rollouts
from cohobate.cli.schema.section import Section
from cohobate.cli.schema.settings import config_dict, config_section
from cohobate.teachers.ensemble import Routing


class Recipe(Section):
    """A whole run."""

    method: str
    student: Student
    teacher: Teacher | None = None
    # several, or one with a tokenizer of its own (objectives csd, xtoken and multi_teacher)
    teachers: list[TeacherEntry] = Field(default_factory=list)
    route_by: str | None = None  # a column of the rows, whose value says which of `teachers` answers a row
    objective: Objective
    data: Data
    rollouts: Rollouts = LocalRollouts()
    sampling: Annotated[dict[str, Any], config_dict("sampling")] = Field(default_factory=dict)
    training: Annotated[dict[str, Any], config_dict("training")] = Field(default_factory=dict)
    eval: Evaluation = Evaluation()
    output_dir: str
    seed: int = 42

    @model_validator(mode="after")
    def _teachers_fit(self) -> "Recipe":
        several = isinstance(self.objective, OfTeachers)
        if several and (self.teacher is not None or not self.teachers):
            raise ValueError(
                f"objective.kind {self.objective.kind} reads `teachers`, a list with an entry for each. Write "
                "teachers.0.model=DIR, and leave `teacher` out."
            )
        if self.teachers and not several:
            raise ValueError(
                f"`teachers` goes with objective.kind csd, xtoken or multi_teacher, not with {self.objective.kind}, "
                "which takes one `teacher` with the student's tokenizer."
            )
        if self.route_by is not None and not several:
            raise ValueError(
                f"route_by={self.route_by} chooses between several `teachers`, but objective.kind "
                f"{self.objective.kind} takes one. Leave it out, or take objective.kind multi_teacher, csd or xtoken."
            )
        if isinstance(self.teacher, ServerTeacher) and getattr(self.objective, "tail", "bucket") != "bucket":
            raise ValueError(
                "objective.tail: with a server, teacher.loss_add_tail says what becomes of the other ids."
            )
        if several:
            for i, entry in enumerate(self.teachers):
                entry.check(self.objective.kind, i)
                if entry.routes is not None and self.route_by is None:
                    raise ValueError(
                        f"teachers[{i}].routes has values of a column that is not named. Write route_by=COLUMN, or "
                        "leave routes out, so that every teacher reads every row."
                    )
        _ = self.routing  # its own checks
        return self

    @property
    def routing(self) -> Routing | None:
        """Which teacher answers a row; None: every one does."""
        if self.route_by is None:
            return None
        routes = tuple(None if entry.routes is None else tuple(entry.routes) for entry in self.teachers)
        return Routing(column=self.route_by, routes=routes)


def section_keys() -> dict[tuple[str, ...], tuple[str, ...]]:
    """The keys of every section by its place; as in pydantic's errors, a tagged union's kind is a step of the place.

    So `("teacher", "ema")` has `kind` and `decay`, `("student", "lora")` has `rank` and others. "#" is any entry of a
    list: `("teachers", "#")`.
    """
    keys = dict(_walk(Recipe, ()))
    for part in ("sampling", "training"):
        keys[part,] = tuple(config_section(part).model_fields)
    return keys


def _walk(section: type, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    hints = typing.get_type_hints(section)
    names = [f.name for f in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else None
    names = list(typing.cast(type[Section], section).model_fields) if names is None else names
    yield place, tuple(names)
    for name in names:
        members = [m for m in _members(hints[name]) if isinstance(m, type) and _has_keys(m)]
        if typing.get_origin(hints[name]) is list:
            for member in typing.get_args(hints[name]):
                if isinstance(member, type) and _has_keys(member):
                    yield from _walk(member, (*place, name, "#"))
        for member in members:
            kind = getattr(member, "model_fields", {}).get("kind")
            tag = () if kind is None else typing.get_args(kind.annotation)
            yield from _walk(member, (*place, name, *tag))


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union (also inside `Annotated`), or the one type."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _members(typing.get_args(hint)[0])
    return typing.get_args(hint) if origin in (types.UnionType, typing.Union) else (hint,)


def _has_keys(hint: type) -> bool:
    return dataclasses.is_dataclass(hint) or issubclass(hint, Section)
