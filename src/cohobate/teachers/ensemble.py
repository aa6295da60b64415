# SPDX-License-Identifier: Apache-2.0
"""Several teachers of one student, each with the student's tokenizer or with its own.

They are only asked one after the other; how their opinions are weighed, mixed or chosen between is the objective's
matter, so nothing is averaged here. Either every teacher is asked for every row, or each row is routed to one of them
by what stands in one of its columns. A route is a function of the row: no counter, order, rank or epoch enters it, so
a resumed run has the same.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cohobate.align.cross_tokenizer import TeacherText
from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ConfigError, DataError, did_you_mean
from cohobate.functional.scores import SeveralScores
from cohobate.teachers.own_tokenizer import load_member_state
from cohobate.teachers.protocol import Teacher

_log = logging.getLogger(__name__)

RouteValue = str | int | bool  # compared with its type: 1, True and "1" are three values


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which teacher answers a row: the one that lists the value of the row's `column`."""

    column: str
    routes: tuple[tuple[RouteValue, ...] | None, ...]  # of each teacher; None: every value that no other one lists

    def __post_init__(self) -> None:
        if not self.column:
            raise ConfigError("route_by must name a column of the rows, got an empty name.")
        seen: dict[tuple[type, RouteValue], int] = {}
        for i, values in enumerate(self.routes):
            if values is not None and not values:
                raise ConfigError(
                    f"teachers[{i}].routes lists no value, so no row would be answered by it. List some, write null "
                    "for every value that no other teacher lists, or leave the teacher out."
                )
            for value in values or ():
                first = seen.get((type(value), value))
                if first is not None:
                    raise ConfigError(
                        f"routes list the value {value!r} of {self.column} twice, for teachers[{first}] and "
                        f"teachers[{i}], but a row is answered by one teacher. Leave it in one place."
                    )
                seen[type(value), value] = i
        others = [i for i, values in enumerate(self.routes) if values is None]
        if len(others) > 1:
            raise ConfigError(
                f"{' and '.join(f'teachers[{i}]' for i in others)} have no routes, but only one teacher can answer "
                f"for every value of {self.column} that no other one lists. List the values of the others."
            )

    def __call__(self, row: Mapping[str, Any], sample_id: str) -> int:
        """The number of the teacher that answers `row`; `sample_id` names it in messages.

        Raises:
            DataError: no value, or one that nobody answers for.
        """
        value = row.get(self.column)
        for i, values in enumerate(self.routes):
            if any(type(value) is type(known) and value == known for known in values or ()):
                return i
        if None in self.routes:
            return self.routes.index(None)
        known = [one for values in self.routes for one in values or ()]
        said = "has no value" if value is None else f"has {value!r}"
        there = self.column in row
        hint = did_you_mean(str(value), map(str, known)) if there else did_you_mean(self.column, map(str, row))
        raise DataError(
            f"row {sample_id!r} {said} in the column {self.column!r}, by which rows are routed to teachers, and no "
            f"teacher answers for that; known are {', '.join(map(repr, known))}.{hint} List the value in the routes "
            "of a teacher, or let one teacher without routes answer for all others."
        )

    def check(self, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Refuse now, with a `DataError`, rows `(sample_id, row)` without a teacher, or without the column at all."""
        if rows and not any(self.column in row for _, row in rows):
            columns = sorted({str(column) for _, row in rows for column in row})
            raise DataError(
                f"no row has the column {self.column!r}, by which rows are routed to teachers; there are "
                f"{', '.join(columns)}.{did_you_mean(self.column, columns)}"
            )
        for sample_id, row in rows:
            value = row.get(self.column)
            if value is not None and not isinstance(value, RouteValue):
                raise DataError(
                    f"row {sample_id!r} has {value!r} ({type(value).__name__}) in the column {self.column!r}, by which"
                    " rows are routed to teachers; a route is a string, an integer or a truth value."
                )
            self(row, sample_id)
        there = {(type(value), value) for _, row in rows if isinstance(value := row.get(self.column), RouteValue)}
        absent = [v for values in self.routes for v in values or () if (type(v), v) not in there]
        if rows and absent:
            _log.warning(
                "Of %d rows none has %s in the column %r, so what is routed there is never asked; there are %s.",
                len(rows),
                " or ".join(map(repr, absent)),
                self.column,
                ", ".join(sorted(repr(value) for _, value in there)[:8]) or "none",
            )

    def describe(self, teacher: int) -> str:
        """The values that a teacher answers for, in words."""
        values = self.routes[teacher]
        return f"{self.column}: {'all others' if values is None else ', '.join(map(str, values))}"


class SeveralTeachers:
    """`teachers` in their order; one without `texts` reads the student's tokens.

    Without `routing` each is asked for every row, with it for the rows that are routed to it.
    """

    def __init__(self, teachers: Sequence[Teacher], routing: Routing | None = None) -> None:
        """A teacher that itself is several cannot be one of them."""
        if not teachers:
            raise ConfigError("SeveralTeachers needs at least one teacher, got none.")
        if routing is not None and len(routing.routes) != len(teachers):
            raise ConfigError(
                f"routing has the routes of {len(routing.routes)} teachers, and there are {len(teachers)}. Give the "
                "values of each teacher, in their order."
            )
        self.teachers = tuple(teachers)
        self.routing = routing
        self.texts = tuple(_text(i, teacher) for i, teacher in enumerate(self.teachers))

    @property
    def provides(self) -> type:
        return SeveralScores

    def score(self, batch: AlignedBatch, /) -> SeveralScores:
        """What each teacher says of its own side of the batch."""
        if len(batch.teachers) != len(self.teachers):
            raise ConfigError(
                f"the batch has the sides of {len(batch.teachers)} teachers, and there are {len(self.teachers)}. The "
                "trainer makes them from the attribute `texts` of the teacher that it is given."
            )
        scores = tuple(teacher.score(batch.for_teacher(i)) for i, teacher in enumerate(self.teachers))
        return SeveralScores(scores=scores)  # pyright: ignore[reportArgumentType]  (no teacher of them is several)

    @property
    def recorded_only(self) -> bool:
        """Whether one of them knows recorded completions alone."""
        return any(getattr(teacher, "recorded_only", False) for teacher in self.teachers)

    def check_batch(self, batch: AlignedBatch, /) -> None:
        """Every teacher's that knows only some rows, of the rows that it reads."""
        for i, teacher in enumerate(self.teachers):
            check = getattr(teacher, "check_batch", None)
            if check is not None:
                check(batch.for_teacher(i))

    def pack_rows(self, name: str = "teacher") -> None:
        """Every teacher's that has a model here."""
        for i, teacher in enumerate(self.teachers):
            pack = getattr(teacher, "pack_rows", None)
            if pack is not None:
                pack(f"{name} {i}")

    def prefetch(self, batch: AlignedBatch, /) -> None:
        """Let every teacher that can begin to answer."""
        for i, teacher in enumerate(self.teachers):
            begin = getattr(teacher, "prefetch", None)
            if begin is not None:
                begin(batch.for_teacher(i))

    def close(self) -> None:
        for teacher in self.teachers:
            close = getattr(teacher, "close", None)
            if close is not None:
                close()

    def after_optimizer_step(self) -> None:
        for teacher in self.teachers:
            update = getattr(teacher, "after_optimizer_step", None)
            if update is not None:
                update()

    def state_dict(self) -> dict[str, Tensor]:
        """The state of each teacher that has some, under `<number>.<name>`."""
        found: dict[str, Tensor] = {}
        for i, teacher in enumerate(self.teachers):
            state = getattr(teacher, "state_dict", None)
            found |= {} if state is None else {f"{i}.{name}": value for name, value in state().items()}
        return found

    def load_state_dict(self, state: dict[str, Tensor], /) -> None:
        """Continue exactly from `state_dict()`; another number of teachers is refused, and then nothing is changed."""
        parts: dict[int, dict[str, Tensor]] = {i: {} for i in range(len(self.teachers))}
        for name, value in state.items():
            number, _, rest = name.partition(".")
            if not number.isdigit() or int(number) not in parts:
                raise ValueError(
                    f"the state of the teachers has {name!r}, but there are {len(self.teachers)} teachers. Resume with"
                    " the teachers of the run that wrote it."
                )
            parts[int(number)][rest] = value
        for i, teacher in enumerate(self.teachers):
            load_member_state(teacher, parts[i])


def _text(number: int, teacher: Teacher) -> TeacherText | None:
    texts = getattr(teacher, "texts", None)
    if texts is None:
        return None
    if len(texts) != 1 or issubclass(teacher.provides, SeveralScores):
        raise ConfigError(f"teacher {number} is itself several. List all of them in one SeveralTeachers.")
    return texts[0]
