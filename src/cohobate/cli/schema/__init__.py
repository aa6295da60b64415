# SPDX-License-Identifier: Apache-2.0
"""What a recipe may say. A part's options are declared once, beside the part: here they are only put in their place.

Sections are strict: a key that nobody reads is an error, because a misspelt setting that is silently ignored costs a
whole run. Closed choices are tagged unions on `kind`, so an option that belongs to one kind cannot be set for another.
"""

from cohobate.cli.schema.data import Data, Evaluation, ReasoningGymData, RowData
from cohobate.cli.schema.models import (
    AdapterOffTeacher,
    Aligner,
    EMATeacher,
    FrozenTeacher,
    LiveTeacher,
    LocalTeacher,
    Lora,
    ServerTeacher,
    StoredTeacher,
    Student,
    Teacher,
    TeacherEntry,
)
from cohobate.cli.schema.objectives import (
    CommonSupport,
    CrossEntropy,
    Divergence,
    MultiTeacher,
    Objective,
    OfTeachers,
    PolicyGradient,
    Projected,
    TokenSelection,
)
from cohobate.cli.schema.recipe import Recipe, section_keys
from cohobate.cli.schema.rollouts import LocalRollouts, Rollouts, VLLMRollouts
from cohobate.cli.schema.settings import MOVED, SAMPLING_FIELDS, as_in_recipe, config_section

__all__ = [
    "MOVED",
    "SAMPLING_FIELDS",
    "AdapterOffTeacher",
    "Aligner",
    "CommonSupport",
    "CrossEntropy",
    "Data",
    "Divergence",
    "EMATeacher",
    "Evaluation",
    "FrozenTeacher",
    "LiveTeacher",
    "LocalRollouts",
    "LocalTeacher",
    "Lora",
    "MultiTeacher",
    "Objective",
    "OfTeachers",
    "PolicyGradient",
    "Projected",
    "ReasoningGymData",
    "Recipe",
    "Rollouts",
    "RowData",
    "ServerTeacher",
    "StoredTeacher",
    "Student",
    "Teacher",
    "TeacherEntry",
    "TokenSelection",
    "VLLMRollouts",
    "as_in_recipe",
    "config_section",
    "section_keys",
]
