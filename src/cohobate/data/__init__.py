# SPDX-License-Identifier: Apache-2.0
"""Rows to prompts: what a row means, chat rendering, what the teacher sees more, and collation."""

from cohobate.data.collate import rollout_request, teacher_context
from cohobate.data.draws import draw_on_policy
from cohobate.data.lessons import DEFAULT_LESSON_TEMPLATE, Lesson, LessonConfig
from cohobate.data.load import load_rows
from cohobate.data.privileged import DEFAULT_TEMPLATE, CompletionView, PrivilegedConfig, PrivilegedContext
from cohobate.data.prompts import EncodedRows, PromptConfig, PromptEncoder, PromptRow, PromptSource, PromptTooLong
from cohobate.data.retokenize import TeacherReader
from cohobate.data.rows import dataset_fingerprint

__all__ = [
    "DEFAULT_LESSON_TEMPLATE",
    "DEFAULT_TEMPLATE",
    "CompletionView",
    "EncodedRows",
    "Lesson",
    "LessonConfig",
    "PrivilegedConfig",
    "PrivilegedContext",
    "PromptConfig",
    "PromptEncoder",
    "PromptRow",
    "PromptSource",
    "PromptTooLong",
    "TeacherReader",
    "dataset_fingerprint",
    "draw_on_policy",
    "load_rows",
    "rollout_request",
    "teacher_context",
]
