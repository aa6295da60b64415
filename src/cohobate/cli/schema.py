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

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import core_schema

from cohobate.data import PrivilegedConfig, PromptConfig
from cohobate.data.graders import grader_named
from cohobate.functional.divergences import Clip
from cohobate.functional.projection import Mode
from cohobate.functional.support_events import ForcedMode
from cohobate.functional.topk import Tail
from cohobate.objectives.aggregate import DynamicScaling, KdMode, TeacherMetric
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


class StoredTeacher(Section):
    """Scores that `cohobate score` wrote for the recorded completions of these very rows."""

    kind: Literal["stored"]
    path: str
    model: str | None = None  # what `cohobate score --recipe` asks; the run itself needs none
    tokenizer: str | None = None  # None: the student's
    top_k: int | None = Field(default=None, ge=1)  # fewer ids than the store has


class ServerTeacher(Section):
    """A teacher on a vLLM server. Which ids are compared follows from these settings and `objective.beta`."""

    kind: Literal["server"]
    teacher_model_server_url: str
    model: str | None = None  # its name there, if the server has several
    loss_top_k: int = 1
    loss_add_tail: bool = True
    reverse_kl_top_1_mode: Literal["sampled", "argmax"] = "sampled"
    head_size: int | None = Field(default=None, ge=1)  # rows of the teacher's head, if more than the tokenizer's ids
    token_env: str | None = None  # the environment variable that holds the API token
    allow_insecure: bool = False
    ca_file: str | None = None
    concurrency: int = Field(default=8, ge=1)


Teacher = Annotated[
    LocalTeacher | FrozenTeacher | EMATeacher | AdapterOffTeacher | LiveTeacher | StoredTeacher | ServerTeacher,
    Field(discriminator="kind"),
]


class Aligner(Section):
    """How a teacher's tokenizer relates to the student's. Built at the start, or read from what the commands wrote."""

    subtokens: str | None = None  # for objective.kind csd: "auto", or what `cohobate subtokens build` wrote
    teacher_to_student: str | None = None  # the second file, if each direction was built as a file of its own
    projection: str | None = None  # for objective.kind xtoken: "auto", or what `cohobate projection build` wrote
    special_roles: dict[str, str] = {}  # student's special -> the teacher's that does the same, e.g. an end of turn

    def check(self, method: str, place: str) -> None:
        """Raise ValueError unless exactly what `method` needs is given."""
        wanted, other, command = (
            ("subtokens", "projection", "subtokens") if method == "csd" else ("projection", "subtokens", "projection")
        )
        if getattr(self, wanted) is None:
            given = f", got {other}, which is for another method" if getattr(self, other) is not None else ""
            raise ValueError(
                f"objective.kind {method} needs {place}.{wanted}{given}: write auto, or what `cohobate {command} "
                "build` wrote."
            )
        if getattr(self, other) is not None:
            raise ValueError(f"{place}.{other} is not read by objective.kind {method}. Leave it out.")
        if self.teacher_to_student is not None and (method != "csd" or self.subtokens == "auto"):
            raise ValueError(
                f"{place}.teacher_to_student is the second of two files of sub-token tables; give the first as "
                f"{place}.subtokens."
            )


class TeacherEntry(Section):
    """One of `teachers`: a model in this process, or one that was or is asked elsewhere; with any tokenizer."""

    model: str
    path: str | None = None  # a store that `cohobate score` wrote: the model is not loaded
    teacher_model_server_url: str | None = None  # a vLLM server: the model is not loaded
    tokenizer: str | None = None
    dtype: Dtype | None = None
    attn_implementation: str | None = None
    aligner: Aligner | None = None  # None: the student's tokenizer, which is proven, not believed
    weight: float = Field(default=1.0, ge=0)
    top_k: int | None = Field(default=None, ge=1)  # ids kept of each row; fewer than all is another loss
    max_length: int | None = Field(default=None, ge=2)  # tokens that this teacher reads of a row

    def check(self, method: str, i: int) -> None:
        """Raise ValueError unless the entry, number `i`, has what `method` needs."""
        if self.aligner is not None:
            self.aligner.check(method, f"teachers[{i}].aligner")
        elif self.path is None and (self.top_k is not None or self.max_length is not None):
            raise ValueError(
                f"teachers[{i}] without an aligner reads the student's own tokens, whole rows: leave top_k and "
                "max_length out, or name its aligner."
            )
        if self.path is not None and self.teacher_model_server_url is not None:
            raise ValueError(f"teachers[{i}] has a path and a teacher_model_server_url: a teacher is in one place.")
        if self.teacher_model_server_url is not None and (self.aligner is None or self.top_k is None):
            raise ValueError(f"teachers[{i}] on a server needs an aligner, and top_k: a server never says whole rows.")
        if self.path is not None and self.max_length is not None:
            raise ValueError(f"teachers[{i}].max_length: the store at its path has one of its own. Leave it out.")
        if method == "xtoken" and (self.path or self.teacher_model_server_url):
            raise ValueError(f"teachers[{i}]: X-Token reads whole rows, which neither a store nor a server has.")
        if method == "xtoken" and self.top_k is not None:
            raise ValueError(
                f"teachers[{i}].top_k: X-Token reads whole rows. Leave it out, or use objective.kind=csd."
            )


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


def _off(value: Any) -> Any:
    """YAML reads a bare `off` as False."""
    return "off" if value is False else value


class _OfTeachers(Section):
    """What the objectives over `teachers` have in common; defaults are the objectives' own, which a test compares."""

    distill_temperature: float = Field(default=1.0, gt=0)
    kd_mode: KdMode = "sum"
    sum_weights_metric: TeacherMetric | None = None
    alpha: float = 1.0
    normalize_teacher_by_vocab: bool = False
    same_vocab_top_k: int | None = 8192
    dynamic_scaling: Annotated[DynamicScaling, BeforeValidator(_off)] = "previous_step"
    kd_weight: float = 1.0
    ce_weight: float = 0.1
    ce_rows: Literal["recorded", "all"] = "recorded"
    chosen_over: Literal["step", "call"] = "step"


class CommonSupport(_OfTeachers):
    """CSD: what the vocabularies share is compared chunk by chunk, the rest as one event."""

    kind: Literal["csd"]
    beta: float = Field(default=0.5, ge=0, le=1)
    mismatch_weight: float = 5.0
    realized_only_mismatch: bool = False
    keep_realized: bool = True
    min_support: int = 1
    forced_mode: ForcedMode = "union"


class Projected(_OfTeachers):
    """X-Token: the student's distribution is projected onto each teacher's vocabulary."""

    kind: Literal["xtoken"]
    mode: Mode = "pkl"
    reverse: bool = False
    exact_only: bool = False
    vocab_top_k: int | None = 8192
    uncommon_top_k: int = 8192
    drop_unreachable: bool = True


Objective = Annotated[
    Divergence | PolicyGradient | CrossEntropy | CommonSupport | Projected, Field(discriminator="kind")
]


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
    teachers: list[TeacherEntry] = []  # several, or one with a tokenizer of its own (objectives csd and xtoken)
    objective: Objective
    data: Data
    sampling: Annotated[dict[str, Any], _config_dict("sampling")] = {}
    training: Annotated[dict[str, Any], _config_dict("training")] = {}
    eval: Evaluation = Evaluation()
    output_dir: str
    seed: int = 42

    @model_validator(mode="after")
    def _teachers_fit(self) -> "Recipe":
        several = isinstance(self.objective, _OfTeachers)
        if several and (self.teacher is not None or not self.teachers):
            raise ValueError(
                f"objective.kind {self.objective.kind} reads `teachers`, a list with an entry for each. Write "
                "teachers.0.model=DIR, and leave `teacher` out."
            )
        if self.teachers and not several:
            raise ValueError(
                f"`teachers` goes with objective.kind csd or xtoken, not with {self.objective.kind}, which takes one "
                "`teacher` with the student's tokenizer."
            )
        if isinstance(self.teacher, ServerTeacher) and getattr(self.objective, "tail", "bucket") != "bucket":
            raise ValueError(
                "objective.tail: with a server, teacher.loss_add_tail says what becomes of the other ids."
            )
        if several:
            for i, entry in enumerate(self.teachers):
                entry.check(self.objective.kind, i)
        return self


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
