# SPDX-License-Identifier: Apache-2.0
"""Which rows, and how they are looked at."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from cohobate.cli.schema.section import Section
from cohobate.data import PrivilegedConfig, PromptConfig
from cohobate.data.graders import grader_named


class _Data(Section):
    prompts: PromptConfig = PromptConfig()
    privileged: PrivilegedConfig | None = None


class RowData(_Data):
    """Rows from files (.jsonl, .json, .parquet, .csv), a folder of `save_to_disk`, or a hub data set."""

    kind: Literal["rows"]
    train: str
    train_split: str | None = None
    eval: str | None = None
    eval_split: str | None = None
    # column -> the name that is wanted here, e.g. {question: prompt}
    rename: dict[str, str] = Field(default_factory=dict)


class ReasoningGymData(_Data):
    """Procedural problems with worked solutions and a scorer; needs the extra `smollm2` (reasoning-gym)."""

    kind: Literal["reasoning_gym"]
    task: str
    train_size: int = Field(ge=1)
    eval_size: int = Field(default=0, ge=0)
    seed: int | None = None  # of the rows; None takes the recipe's
    options: dict[str, Any] = Field(default_factory=dict)


Data = Annotated[RowData | ReasoningGymData, Field(discriminator="kind")]


class Evaluation(Section):
    """On the student's own completions of the evaluation rows; `training.eval_strategy` adds some between."""

    grader: str | None = None  # a name of `data.graders.GRADERS`; it reads the column `answer`
    before: bool = True
    after: bool = True

    @field_validator("grader")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None:
            grader_named(name)
        return name
