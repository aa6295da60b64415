# SPDX-License-Identifier: Apache-2.0
"""What a recipe may say. A part's options are declared once, beside the part: here they are only put in their place.

Sections are strict: a key that nobody reads is an error, because a misspelt setting that is silently ignored costs a
whole run. Closed choices are tagged unions on `kind`, so an option that belongs to one kind cannot be set for another.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetPydanticSchema, create_model, field_validator
from pydantic_core import core_schema

from cohobate.data import PrivilegedConfig, PromptConfig
from cohobate.data.graders import grader_named
from cohobate.functional.divergences import Clip
from cohobate.functional.topk import Tail
from cohobate.trainer.config import DistillationConfig

Dtype = Literal["float32", "bfloat16", "float16"]

SAMPLING_FIELDS = (
    "sampling_temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_completion_length",
    "num_generations",
    "on_policy_fraction",
    "num_iterations",
    "eval_temperature",
)
"""Fields of `DistillationConfig` that a recipe sets in `sampling`: who writes the completions, and how."""

MOVED = {
    **{name: f"sampling.{name}" for name in SAMPLING_FIELDS},
    "beta": "objective.beta",
    "distill_temperature": "objective.distill_temperature",
    "output_dir": "output_dir",
    "seed": "seed",
    "max_prompt_length": "data.prompts.max_prompt_length",
    "lmbda": "sampling.on_policy_fraction",
    "resume_from_checkpoint": "--resume",
    "hub_token": "",  # a secret; recipes are copied into model cards
    "remove_unused_columns": "",
    "label_names": "",
    "temperature": "",
}
"""Fields of `DistillationConfig` that `training` does not take, and where they are set instead."""


class Section(BaseModel):
    """A mapping of a recipe; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Lora(Section):
    """A LoRA adapter on the student; needs the extra `peft`."""

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: str | list[str] = "all-linear"


class Student(Section):
    """The model that is trained: a folder, or a name that `load_model` knows."""

    model: str
    tokenizer: str | None = None
    dtype: Dtype | None = None
    attn_implementation: str | None = None
    lora: Lora | None = None


class LocalTeacher(Section):
    """Another model over the same vocabulary."""

    kind: Literal["local"]
    model: str
    tokenizer: str | None = None
    dtype: Dtype | None = None
    attn_implementation: str | None = None


class FrozenTeacher(Section):
    """A copy of the student as it was at the start."""

    kind: Literal["frozen"]


class EMATeacher(Section):
    """A moving average of the student, from its initial weights."""

    kind: Literal["ema"]
    decay: float = Field(ge=0, lt=1)


class AdapterOffTeacher(Section):
    """The student with its LoRA adapter switched off: no second copy in memory."""

    kind: Literal["adapter_off"]


class LiveTeacher(Section):
    """The student itself, as it is now."""

    kind: Literal["live"]


Teacher = Annotated[
    LocalTeacher | FrozenTeacher | EMATeacher | AdapterOffTeacher | LiveTeacher, Field(discriminator="kind")
]


class TokenSelection(Section):
    """Train on the pairs of a step where the student is unsure or far from the teacher."""

    keep: float | None = Field(default=0.5, gt=0, le=1)
    signal: Literal["soft_or", "entropy", "divergence"] = "soft_or"


class Divergence(Section):
    """The whole distributions are compared at every token."""

    kind: Literal["divergence"]
    beta: float = Field(default=0.5, ge=0, le=1)
    distill_temperature: float = Field(default=1.0, gt=0)
    clip: Clip = "none"
    clip_limit: float | None = None
    top_k: int | None = None
    tail: Tail = "bucket"
    select: TokenSelection | None = None


class PolicyGradient(Section):
    """The teacher scores the sampled token only."""

    kind: Literal["policy_gradient"]
    distill_temperature: float = Field(default=1.0, gt=0)
    iw_gamma: float | None = None
    clip_epsilon: float | None = None
    select: TokenSelection | None = None


class CrossEntropy(Section):
    """Next-token prediction on recorded completions (SFT); takes no teacher."""

    kind: Literal["cross_entropy"]


Objective = Annotated[Divergence | PolicyGradient | CrossEntropy, Field(discriminator="kind")]


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
    rename: dict[str, str] = {}  # column -> the name that is wanted here, e.g. {question: prompt}


class ReasoningGymData(_Data):
    """Procedural problems with worked solutions and a scorer; needs the extra `smollm2` (reasoning-gym)."""

    kind: Literal["reasoning_gym"]
    task: str
    train_size: int = Field(ge=1)
    eval_size: int = Field(default=0, ge=0)
    seed: int | None = None  # of the rows; None takes the recipe's
    options: dict[str, Any] = {}


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


@cache
def config_section(part: Literal["sampling", "training"]) -> type[BaseModel]:
    """The fields of `DistillationConfig` that belong to a section, with their types and without their defaults."""
    hints = typing.get_type_hints(DistillationConfig)
    names = [f.name for f in dataclasses.fields(DistillationConfig) if f.init and not f.name.startswith("_")]
    wanted = [n for n in names if (n in SAMPLING_FIELDS if part == "sampling" else n not in MOVED)]
    fields: dict[str, Any] = {name: (hints[name], None) for name in wanted}
    return create_model(part.capitalize(), __base__=Section, **fields)


def _config_dict(part: Literal["sampling", "training"]) -> GetPydanticSchema:
    """Validates as `config_section(part)`, gives a dict of the keys that were set."""

    def schema(_source: Any, handler: Any) -> core_schema.CoreSchema:
        def keys_that_were_set(section: BaseModel) -> dict[str, Any]:
            return {name: getattr(section, name) for name in section.model_fields_set}

        return core_schema.no_info_after_validator_function(
            keys_that_were_set, handler.generate_schema(config_section(part))
        )

    return GetPydanticSchema(schema)


class Recipe(Section):
    """A whole run."""

    method: str
    student: Student
    teacher: Teacher | None = None
    objective: Objective
    data: Data
    sampling: Annotated[dict[str, Any], _config_dict("sampling")] = {}
    training: Annotated[dict[str, Any], _config_dict("training")] = {}
    eval: Evaluation = Evaluation()
    output_dir: str
    seed: int = 42


def section_keys() -> dict[tuple[str, ...], tuple[str, ...]]:
    """The keys of every section by its place; as in pydantic's errors, a tagged union's kind is a step of the place.

    So `("teacher", "ema")` has `kind` and `decay`, and `("student", "lora")` has `rank` and others.
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
