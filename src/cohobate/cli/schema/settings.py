# SPDX-License-Identifier: Apache-2.0
"""`sampling` and `training`: the fields of `DistillationConfig`, declared there and only put in their place here."""

import dataclasses
import re
import typing
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, GetPydanticSchema, create_model
from pydantic_core import core_schema

from cohobate.cli.schema.section import Section
from cohobate.trainer.config import DistillationConfig

SAMPLING_FIELDS = (
    "sampling_temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_completion_length",
    "num_generations",
    "on_policy_fraction",
    "num_iterations",
    "max_staleness",
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


def as_in_recipe(text: str) -> str:
    """A message about fields of `DistillationConfig` with their places in a recipe: `packing` is `training.packing`.

    A field's name is known by its underscores. One that is also a plain word, or another part's setting (`packing`,
    `top_k`), only where the message is about that field: begins with `packing fills`, or `top_k must be`.
    """

    def placed(found: re.Match[str]) -> str:
        name = found[0]
        place = MOVED.get(name, f"training.{name}") if name in _fields() else name
        return place if "." in place else name

    text = re.sub(r"^\w+(?= must be| fills)", placed, text)
    return re.sub(r"(?<![\w.'-])(?!top_k)[a-z0-9]+(?:_[a-z0-9]+)+(?![\w'(-])", placed, text)


@cache
def _fields() -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(DistillationConfig) if f.init)


@cache
def config_section(part: Literal["sampling", "training"]) -> type[BaseModel]:
    """The fields of `DistillationConfig` that belong to a section, with their types and without their defaults."""
    hints = typing.get_type_hints(DistillationConfig)
    names = [f.name for f in dataclasses.fields(DistillationConfig) if f.init and not f.name.startswith("_")]
    wanted = [n for n in names if (n in SAMPLING_FIELDS if part == "sampling" else n not in MOVED)]
    fields: dict[str, Any] = {name: (hints[name], None) for name in wanted}
    return create_model(part.capitalize(), __base__=Section, **fields)


def config_dict(part: Literal["sampling", "training"]) -> GetPydanticSchema:
    """Validates as `config_section(part)`, gives a dict of the keys that were set."""

    def schema(_source: Any, handler: Any) -> core_schema.CoreSchema:
        def keys_that_were_set(section: BaseModel) -> dict[str, Any]:
            return {name: getattr(section, name) for name in section.model_fields_set}

        return core_schema.no_info_after_validator_function(
            keys_that_were_set, handler.generate_schema(config_section(part))
        )

    return GetPydanticSchema(schema)
