# SPDX-License-Identifier: Apache-2.0
"""Several teachers of one student, each with the student's tokenizer or with its own.

They are only asked one after the other; how their opinions are weighed, mixed or chosen between is the objective's
matter, so nothing is averaged here.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor

from cohobate.align.cross_tokenizer import TeacherText
from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ConfigError
from cohobate.functional.scores import SeveralScores
from cohobate.teachers.own_tokenizer import load_member_state
from cohobate.teachers.protocol import Teacher


class SeveralTeachers:
    """`teachers` in their order; one without `texts` reads the student's tokens."""

    def __init__(self, teachers: Sequence[Teacher]) -> None:
        """A teacher that itself is several cannot be one of them."""
        if not teachers:
            raise ConfigError("SeveralTeachers needs at least one teacher, got none.")
        self.teachers = tuple(teachers)
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

    def check_rows(self, sample_ids: Iterable[str]) -> None:
        """Every teacher's that knows only some rows."""
        names = list(sample_ids)
        for teacher in self.teachers:
            check = getattr(teacher, "check_rows", None)
            if check is not None:
                check(names)

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
