# SPDX-License-Identifier: Apache-2.0
"""From a recipe's name and `key=value` changes to a checked `Recipe`, or to one paragraph that says what is wrong.

OmegaConf reads and merges, pydantic checks; what is added here is the text of the errors, since "extra inputs are not
permitted" helps nobody.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from cohobate.cli.schema import MOVED, Recipe, section_keys
from cohobate.errors import ConfigError, did_you_mean

_SHOWN_PROBLEMS = 4
_LISTED_KEYS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe:
    """A recipe, and the text it was made from (interpolations not yet filled in), to be written beside the results."""

    recipe: Recipe
    text: str  # YAML with the changes merged in
    words: tuple[str, ...] = ()  # as it was named on the command line, and its changes

    def plain(self) -> dict[str, Any]:
        """The recipe as the user wrote it, for a model card."""
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(self.text), resolve=False))


def shipped_recipes() -> dict[str, str]:
    """Name -> first line of every recipe in the package."""
    folder = files("cohobate").joinpath("recipes")
    found = {p.name.removesuffix(".yaml"): p for p in folder.iterdir() if p.name.endswith(".yaml")}
    heads = {name: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for name, path in found.items()}
    return dict(sorted(heads.items()))


def load_recipe(name_or_path: str, overrides: Sequence[str] = (), *, to_read: bool = False) -> LoadedRecipe:
    """The recipe with its changes, checked.

    Args:
        name_or_path: a shipped recipe's name, or the path of a YAML file.
        overrides: `dotted.key=value` each; values are read as YAML. A new `kind` of a section drops what the recipe
            had set there for the old kind.

    Raises:
        ConfigError: naming the key, what was wanted, and the nearest valid name.
    """
    config = _changed(merged_config(name_or_path), overrides)
    if unclear := _bare_temperature(config):
        raise ConfigError(unclear)
    if config.get("teachers") and config.get("teacher"):
        raise ConfigError("this recipe has `teachers`, a list: write teachers.0.model=DIR, and leave `teacher` out.")
    text = OmegaConf.to_yaml(config, resolve=False)
    try:
        missing = sorted(key.replace("[", ".").replace("]", "") for key in OmegaConf.missing_keys(config))
        content = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as problem:
        raise ConfigError(f"recipe {name_or_path}: {_first_line(problem)}") from None
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise ConfigError(_explanation(error, missing)) from None
    if missing and not to_read:
        raise ConfigError(_missing_text(name_or_path, missing))
    return LoadedRecipe(recipe=recipe, text=text, words=(name_or_path, *overrides))


def merged_config(name_or_path: str) -> DictConfig:
    """The recipe's own content; a name is looked up among the shipped ones."""
    if name_or_path.endswith((".yaml", ".yml")) or Path(name_or_path).is_file():
        path = Path(name_or_path).expanduser()
        if not path.is_file():
            raise ConfigError(f"no recipe file {path} (looked in {Path.cwd()}).{_neighbour(path)}")
        text = path.read_text(encoding="utf-8")
    else:
        shipped = shipped_recipes()
        if name_or_path not in shipped:
            hint = did_you_mean(name_or_path, shipped)
            raise ConfigError(
                f"no recipe is called {name_or_path!r}.{hint} Shipped: {', '.join(shipped)}. A recipe of your own is "
                "given as a path that ends in .yaml."
            )
        text = files("cohobate").joinpath("recipes", f"{name_or_path}.yaml").read_text(encoding="utf-8")
    try:
        config = OmegaConf.create(text)
    except (YAMLError, OmegaConfBaseException, ValueError) as problem:
        raise ConfigError(f"recipe {name_or_path} is not readable YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(config, DictConfig):
        raise ConfigError(f"recipe {name_or_path} must be a mapping of sections, got a list.")
    return config


def _changed(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The recipe with its changes; a new `kind` of a section first drops what was set there for the old one."""
    changes = dict(_change(override) for override in overrides)
    try:
        for key, value in changes.items():
            for place, inner in [((), value), *_nodes(value)]:
                _drop_old_kind(config, ".".join((key, *place)), inner)
        for key, value in changes.items():
            _lengthen(config, key)
            OmegaConf.update(config, key, value, merge=True, force_add=True)
    except ConfigError:
        raise
    except (OmegaConfBaseException, ValueError, TypeError) as problem:
        raise ConfigError(f"cannot read the changes {' '.join(overrides)}: {_first_line(problem)}") from None
    return config


def _change(override: str) -> tuple[str, Any]:
    """`key=value` as the dotted key and what YAML makes of the value."""
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"changes to a recipe are written key=value, got {override!r}.")
    try:
        return key.strip(), OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))["value"]  # pyright: ignore
    except (OmegaConfBaseException, YAMLError, ValueError) as problem:
        raise ConfigError(f"cannot read the changes {override}: {_first_line(problem)}") from None


def _drop_old_kind(config: DictConfig, key: str, value: Any) -> None:
    section, _, last = key.rpartition(".")
    if isinstance(value, dict) and "kind" in value:
        section, last, value = key, "kind", value["kind"]
    if last != "kind" or not section:
        return
    before = OmegaConf.select(config, section)
    if isinstance(before, DictConfig) and before.get("kind") != value:
        OmegaConf.update(config, section, OmegaConf.create({}), merge=False)


def _lengthen(config: DictConfig, key: str) -> None:
    """Room for one more entry where `key` names the place after the last one of a list, as in `teachers.1.model`."""
    parts = key.replace("[", ".").replace("]", "").split(".")
    for i, part in enumerate(parts):
        entries = OmegaConf.select(config, ".".join(parts[:i])) if i else None
        if not isinstance(entries, ListConfig) or not part.isdigit():
            continue
        if int(part) > len(entries):
            raise ConfigError(f"{key} names entry {part} of a list of {len(entries)}: the next one is {len(entries)}.")
        if int(part) == len(entries):
            entries.append({})


def _bare_temperature(config: DictConfig) -> str:
    """Refused before anything else: it is the one key that everybody writes and that means two things."""
    found = [place for place, _ in _nodes(OmegaConf.to_container(config, resolve=False)) if place[-1] == "temperature"]
    if not found:
        return ""
    return (
        f"{'.'.join(found[0])} could mean two things. Use sampling.sampling_temperature (how completions are drawn) "
        "or objective.distill_temperature (what divides both sides' logits in the loss)."
    )


def _nodes(node: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key of nested sections with its value, outer ones first; not into mappings whose keys are not ours."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*place, str(key)), value
            if key not in ("options", "template_args", "rename", "special_roles"):
                yield from _nodes(value, (*place, str(key)))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _nodes(value, (*place, str(i)))


def _missing_text(name: str, missing: Sequence[str]) -> str:
    shown = " ".join(f"{key}=..." for key in missing)
    return f"recipe {name} leaves {', '.join(missing)} to you. Add to the command: {shown}"


def _explanation(error: ValidationError, missing: Sequence[str]) -> str:
    """What is wrong, one sentence a problem; a `???` that was also left open is named with the rest."""
    texts: list[str] = []
    for problem in error.errors(include_url=False):
        place = tuple(str(part) for part in problem["loc"])
        keys = _at_entries(place)
        if problem["input"] == "???" or ".".join(_without_kinds(place, keys)) in missing:
            continue
        text = _problem(cast(dict[str, Any], problem), place, keys)
        if text not in texts:
            texts.append(text)
    if not texts:
        return _missing_text("this", missing)
    left_out = f" ({len(texts) - _SHOWN_PROBLEMS} more.)" if len(texts) > _SHOWN_PROBLEMS else ""
    return " ".join(texts[:_SHOWN_PROBLEMS]) + left_out


def _at_entries(place: tuple[str, ...]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """`section_keys`, with the entry of a list that `place` names in place of "#", which is any."""
    number = next((part for part in place if part.isdigit()), "0")
    return {
        tuple(number if part == "#" else part for part in section): names for section, names in section_keys().items()
    }


def _problem(problem: dict[str, Any], place: tuple[str, ...], keys: dict[tuple[str, ...], tuple[str, ...]]) -> str:
    shown = ".".join(_without_kinds(place, keys))
    context = problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            return _unknown_key(place, keys)
        case "missing" | "missing_keyword_only_argument":
            return f"{shown} is missing."
        case "union_tag_not_found":
            return f"{shown}.kind is missing: one of {', '.join(_kinds(place, keys))}."
        case "union_tag_invalid":
            kinds = _kinds(place, keys)
            return (
                f"{shown}.kind is {context['tag']!r}.{did_you_mean(context['tag'], kinds)} Valid: {', '.join(kinds)}."
            )
        case "model_type" | "dict_type" | "model_attributes_type" | "dataclass_type":
            return f"{shown} must be a section of keys, got {_got(problem['input'])}."
        case "value_error":
            return f"{shown}: {context['error']}" if shown else str(context["error"])
    message = problem["msg"].removeprefix("Input should be ").split(", unable")[0]
    return f"{shown} must be {message}, got {_got(problem['input'])}."


def _unknown_key(place: tuple[str, ...], keys: dict[tuple[str, ...], tuple[str, ...]]) -> str:
    *section, name = place
    shown = ".".join(_without_kinds(place, keys))
    if moved := _moved(tuple(section), name):
        return moved
    siblings = keys.get(tuple(section), ())
    if hint := did_you_mean(name, siblings):
        return f"Unknown key {shown}.{hint}"
    others = [other[-1] for other in keys if other[:-1] == tuple(section[:-1]) and name in keys[other]]
    dotted = {".".join(_without_kinds((*s, n), keys)): n for s, names in keys.items() for n in names}
    same_name = [full for full, last in dotted.items() if last == name]
    if "kind" in siblings and section and (others or not same_name):
        home = f" ({name} goes with kind {' or '.join(others)})" if others else ""
        return f"Unknown key {shown}: kind {section[-1]} takes {', '.join(siblings)}{home}."
    near = did_you_mean(name, dotted.values())
    wanted = same_name or [full for full, last in dotted.items() if near and repr(last) in near]
    if wanted:
        return f"Unknown key {shown}. Did you mean {wanted[0]!r}?"
    few = len(siblings) <= _LISTED_KEYS
    return f"Unknown key {shown}. Valid here: {', '.join(siblings) if few else 'the fields of DistillationConfig'}."


def _moved(section: tuple[str, ...], name: str) -> str:
    """A field of `DistillationConfig` that a recipe sets elsewhere, or not at all."""
    if name not in MOVED or section not in ((), ("training",), ("sampling",)):
        return ""
    shown = ".".join((*section, name))
    target = MOVED[name]
    if not target:
        return f"{shown} cannot be set in a recipe, only in Python (DistillationConfig)."
    return f"Unknown key {shown}. Write {target} instead."


def _without_kinds(place: tuple[str, ...], keys: dict[tuple[str, ...], tuple[str, ...]]) -> tuple[str, ...]:
    """The place as the user wrote it: pydantic's places have a step for the kind of a tagged union."""
    written, seen = [], ()
    for part in place:
        parent, seen = seen, (*seen, part)
        if part.isdigit() or seen not in keys or part in keys.get(parent, ()):
            written.append(part)
    return tuple(written)


def _kinds(place: tuple[str, ...], keys: dict[tuple[str, ...], tuple[str, ...]]) -> list[str]:
    return [section[-1] for section in keys if section[:-1] == place and "kind" in keys[section]]


def _got(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _neighbour(path: Path) -> str:
    names = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    return did_you_mean(path.name, names)


def _first_line(problem: BaseException) -> str:
    return str(problem).strip().splitlines()[0]
