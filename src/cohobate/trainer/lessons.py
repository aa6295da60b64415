# SPDX-License-Identifier: Apache-2.0
"""A step whose teacher sees something of each completion's group: graded once, and cut to what has a lesson.

The completions of one row are on one rank, so a group is whole wherever it is. A completion without a lesson leaves
the step here, before anything is aligned or counted, and so is in no denominator.
"""

from dataclasses import replace
from typing import Any

from cohobate.data import Lesson, LessonConfig
from cohobate.trainer.metrics import MetricSums
from cohobate.trainer.rolled_out import RolledOut, completion_ids


def with_lessons(rolled: RolledOut, config: LessonConfig, decode: Any) -> RolledOut:
    """Each completion with what its group teaches. Special tokens are no part of the text that is graded or shown."""
    texts = [decode(ids, skip_special_tokens=True) for ids in completion_ids(rolled.rollout)]
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rolled.rows):
        groups.setdefault(row.sample_id, []).append(i)
    lessons: dict[int, Lesson] = {}
    for members in groups.values():
        found = config.of_group(rolled.rows[members[0]].row, [texts[i] for i in members])
        lessons.update(zip(members, found, strict=True))
    return replace(rolled, lessons=tuple(lessons[i] for i in range(len(rolled.rows))))


def taught(rolled: RolledOut) -> list[int] | None:
    """The rows that there is something to learn for; None if that is so for all, as in a run without lessons."""
    rows = [i for i, lesson in enumerate(rolled.lessons or ()) if not lesson.is_empty]
    return None if rolled.lessons is None or len(rows) == len(rolled.rows) else rows


def add_lesson_metrics(sums: MetricSums, rolled: RolledOut, config: LessonConfig) -> None:
    """Shares of all completions of a step, those that are left out among them. All names appear on every rank."""
    lessons = rolled.lessons or ()
    for name, marks in (
        ("success", [lesson.score >= config.success_threshold for lesson in lessons]),
        ("demonstration", [lesson.demonstration is not None for lesson in lessons]),
        ("feedback", [lesson.feedback is not None for lesson in lessons]),
        ("without", [lesson.is_empty for lesson in lessons]),
    ):
        sums.add(f"lessons/{name}_share", sum(marks), len(marks))
