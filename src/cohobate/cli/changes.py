# SPDX-License-Identifier: Apache-2.0
"""What of a recipe may be another when a run goes on.

A longer run, another learning rate or a server that has moved is the same experiment further on. Another student,
teacher, loss or data is not, although every checkpoint would load: half of such a run would be of the one and half of
the other, and nothing in its results would say so. These need the user's word (reliability: no silent change).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohobate.cli.recipe import LoadedRecipe, load_recipe
from cohobate.cli.schema import Recipe
from cohobate.errors import ConfigError

_OF_EXPERIMENT = ("student", "teacher", "teachers", "route_by", "objective", "data")
_FREE = ("data.eval", "data.eval_split", "data.eval_size")  # what a run is measured on
_OF_PLACE = ("teacher_model_server_url", "served_model_name", "token_env", "allow_insecure", "ca_file", "concurrency")
"""How a teacher is reached; that it is the one of before is found by its canary (`teachers/server_canary.py`)."""
_SHOWN = 80  # characters of a value


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key of a recipe, and its values before and now; None where it was or is not there."""

    key: str
    old: Any
    new: Any

    @property
    def matters(self) -> bool:
        """Whether the run becomes another experiment by it."""
        first, _, _ = self.key.partition(".")
        return first in _OF_EXPERIMENT and self.key not in _FREE and self.key.rpartition(".")[2] not in _OF_PLACE

    def allowed_by(self, names: Sequence[str]) -> bool:
        """Whether the key, or a section that it is in, is among `names`."""
        return any(self.key == name or self.key.startswith(f"{name}.") for name in names)

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.old)} -> {_shown(self.new)}"


def changes_since(before: Path, loaded: LoadedRecipe) -> list[Change]:
    """What differs from the recipe in `before`, by key; nothing if there is no such file."""
    if not before.is_file():
        return []
    try:
        begun = load_recipe(str(before)).recipe
    except ConfigError as problem:
        raise ConfigError(f"{before}, the recipe that the run was begun with, cannot be read: {problem}") from problem
    return list(_differing(_plain(begun), _plain(loaded.recipe)))


def check_allowed(changes: Sequence[Change], allowed: Sequence[str], folder: Path) -> None:
    """Raise ConfigError for changes that make the run in `folder` another experiment and are not `allowed`."""
    refused = [change for change in changes if change.matters and not change.allowed_by(allowed)]
    if refused:
        raise ConfigError(
            f"the run in {folder} was begun with other settings, and with these it would be another experiment from "
            f"here on: {'; '.join(map(str, refused))}. Give the old ones ({folder / 'recipe.yaml'}), begin a new run "
            "(output_dir=FOLDER), or say that it is meant: --allow-change "
            f"{','.join(change.key for change in refused)}"
        )


def named_keys(given: Sequence[str] | None) -> list[str]:
    """`--allow-change a,b --allow-change c` as a list; places in a list may be written `teachers[0]`."""
    parts = (part.strip() for text in given or () for part in text.split(","))
    return [part.replace("[", ".").replace("]", "") for part in parts if part]


def _plain(recipe: Recipe) -> dict[str, Any]:
    """Sections with their defaults; `sampling` and `training` are plain already."""
    plain = {"sampling", "training"}
    return recipe.model_dump(exclude=plain) | {name: getattr(recipe, name) for name in plain}


def _differing(old: Any, new: Any, place: tuple[str, ...] = ()) -> Iterator[Change]:
    """Each setting that differs; a section that came, went or is of another kind now is one change."""
    old, new = (value if value not in ({}, []) else None for value in (old, new))
    if isinstance(old, list) and isinstance(new, list):
        old, new = (dict(enumerate(values)) for values in (old, new))
    if isinstance(old, dict) and isinstance(new, dict) and old.get("kind") == new.get("kind"):
        for key in dict.fromkeys((*old, *new)):
            yield from _differing(old.get(key), new.get(key), (*place, str(key)))
    elif old != new:
        yield Change(key=".".join(place), old=old, new=new)


def _shown(value: Any) -> str:
    """A value, or what is set of a section, on a part of a line."""
    if isinstance(value, dict):
        value = "{" + ", ".join(f"{key}: {_shown(one)}" for key, one in value.items() if one is not None) + "}"
    text = "(not set)" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
