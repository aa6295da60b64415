# SPDX-License-Identifier: Apache-2.0
"""`cohobate score`: what a teacher says of a data set, once, for all runs that ask."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cohobate.errors import ConfigError

if TYPE_CHECKING:
    from cohobate.cli.store import StoreSettings
    from cohobate.teachers.store_writer import Written


def score(
    changes: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, dotted.", metavar="KEY=VALUE")
    ] = None,
    teacher: Annotated[str | None, typer.Option("--teacher", "-t", help="Folder or name of the model.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", help="Rows: .jsonl, .json, .parquet, .csv or a folder. Once for each file."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the store.")] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Take data, prompts, student and teacher from a recipe.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", "-k", min=1, help="Ids kept of each prediction.", show_default="128")
    ] = None,
    distill_temperature: Annotated[
        float | None, typer.Option("--distill-temperature", help="Of the loss that will read it.", show_default="1")
    ] = None,
    compact: Annotated[bool, typer.Option("--compact", help="16 bits for each log-probability.")] = False,
    student: Annotated[
        str | None, typer.Option("--student", "-s", help="Whose tokenizer writes the rows; default: the teacher's.")
    ] = None,
    own_tokenizer: Annotated[
        bool, typer.Option("--own-tokenizer", help="The teacher reads its own tokens (for csd).")
    ] = False,
    role: Annotated[
        list[str] | None, typer.Option("--role", help="With it: pair two specials, '<|im_end|>=<|eot_id|>'.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=2, help="With it: tokens that the teacher reads of a row.")
    ] = None,
    split: Annotated[str | None, typer.Option("--split", help="Which split, where the data has several.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many rows.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="A prompt that is a string becomes a user's turn of a conversation.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; default: the file's.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Commit of a cached hub model.")] = None,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=1, help="Tokens scored together.")] = 8192,
    shard_rows: Annotated[
        int, typer.Option("--shard-rows", min=1, help="Predictions of a file, and what a kill costs.")
    ] = 65_536,
    launcher: Annotated[
        Literal["local", "ray"], typer.Option("--launcher", help="Where: in this process, or on a Ray cluster.")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="With ray: models at a time; default: one a GPU.")
    ] = None,
) -> None:
    """Score the recorded completions of a data set with a teacher, into a store.

    A run with [cyan]teacher.kind: stored[/cyan] then needs no teacher model. Of each predicted
    token the store keeps the K likeliest ids with their logits, the exact
    normaliser and the token's own logit: 0.78 kB at K=128, or 0.53 kB with
    [cyan]--compact[/cyan], which is off by at most 1/65534 of a row's range of logits.

    Rows are [cyan]prompt[/cyan] + [cyan]completion[/cyan], [cyan]messages[/cyan] that end with the assistant's turn,
    or [cyan]text[/cyan]; what a student would sample cannot be stored. A score belongs
    to one row and to all tokens that the teacher read: with a recipe
    ([cyan]--recipe[/cyan]) prompts are written as the run will write them, evaluation
    rows included. Change the data, the chat template or the prompts, and the
    run stops with the name of the row and the command to type.

    Stopped? Type the same command again. It keeps what is whole, makes what is
    missing or damaged, and the files are those of a run that was not stopped.

    [bold]Examples[/bold]

    [cyan]cohobate score -t BIG -d rows.jsonl -o store/[/cyan]
    [cyan]cohobate score -t BIG -s SMALL -d rows.jsonl -o store/ -k 64 --compact[/cyan]
    [cyan]cohobate score -r my.yaml -t BIG -o store/ data.train=rows.jsonl[/cyan]
    [cyan]cohobate score -t OTHER -s SMALL --own-tokenizer -d rows.jsonl -o store/[/cyan]
    [cyan]cohobate score -t BIG -d rows.jsonl -o /shared/store --launcher ray[/cyan]
    """
    if workers is not None and launcher != "ray":
        raise ConfigError("--workers counts models on a Ray cluster; add --launcher ray, or leave it out.")
    given: dict[str, Any] = {
        "teacher": teacher,
        "top_k": top_k,
        "temperature": _temperature(distill_temperature),
        "student": student,
        "own_tokenizer": own_tokenizer or None,
        "special_roles": _roles(role),
        "max_length": max_length,
        "dtype": dtype,
        "revision": revision,
        "values": "compact" if compact else None,
        "output": output,
    }
    given = {name: value for name, value in given.items() if value is not None}
    given |= {"batch_tokens": batch_tokens, "shard_rows": shard_rows, "launcher": launcher, "num_workers": workers}
    if recipe is not None:
        _refuse_beside_recipe(data=data, split=split, chat=chat or None)
        settings = _of_recipe(recipe, changes or [], given, limit)
    else:
        if changes:
            raise ConfigError(f"{' '.join(changes)}: changes are of a recipe. Give one with --recipe.")
        settings = _of_options(given, data, split=split, limit=limit, chat=chat)
    _report(settings)


def _report(settings: "StoreSettings") -> None:
    from cohobate.cli.store import build_store

    written = build_store(settings)
    print(_summary(settings.output, written))


def _of_options(
    given: dict[str, Any], data: list[str] | None, *, split: str | None, limit: int | None, chat: bool
) -> "StoreSettings":
    missing = [f"--{name}" for name in ("teacher", "output") if name not in given] + ([] if data else ["--data"])
    if missing:
        raise ConfigError(f"{', '.join(missing)}: needed, unless a recipe (--recipe) says it.")

    from cohobate.cli.store import StoreSettings
    from cohobate.data import PromptConfig, load_rows

    _check_folder(given["output"])
    options = {"--data": data, "--split": split, "--limit": limit, "--chat": chat or None}
    return StoreSettings(
        **{"student": given["teacher"], **given},
        datasets=tuple(load_rows(source, split=split, limit=limit) for source in data or ()),
        prompts=PromptConfig(string_prompts="user_turn" if chat else "text"),
        command=_command(given, options),
    )


def _of_recipe(recipe: str, changes: Sequence[str], given: dict[str, Any], limit: int | None) -> "StoreSettings":
    """The recipe's data, prompts and student; its teacher, K and temperature where no option says otherwise."""
    from cohobate.cli.build import rows
    from cohobate.cli.recipe import load_recipe
    from cohobate.cli.store import StoreSettings

    loaded = load_recipe(recipe, changes).recipe
    found = _recipe_sides(loaded, given.get("teacher")) | given
    for name, how in (("teacher", "the recipe names no model to score with"), ("output", "no folder is named")):
        if name not in found:
            raise ConfigError(f"--{name} is needed: {how}.")
    _check_folder(Path(found["output"]))
    datasets = [part for part in rows(loaded) if part is not None]
    return StoreSettings(
        **{**found, "output": Path(found["output"])},
        datasets=tuple(part if limit is None else part.select(range(min(limit, len(part)))) for part in datasets),
        prompts=loaded.data.prompts,
        privileged=loaded.data.privileged,
        command=_command(given, {"--recipe": recipe, "--limit": limit}, changes),
    )


def _recipe_sides(recipe: Any, teacher: str | None) -> dict[str, Any]:
    """What a recipe says of student and teacher; of several teachers the one that `teacher` names."""
    found = {
        "student": recipe.student.model,
        "student_tokenizer": recipe.student.tokenizer,
        "temperature": getattr(recipe.objective, "distill_temperature", None),
    }
    sections = [recipe.teacher] if recipe.teacher is not None else list(recipe.teachers)
    if len(sections) > 1:
        named = [section.model for section in sections]
        sections = [section for section in sections if section.model == teacher]
        if len(sections) != 1:
            raise ConfigError(
                f"the recipe has {len(named)} teachers: {', '.join(named)}. Say which one to score with: --teacher."
            )
    for section in sections:
        names = {"path": "output", "top_k": "top_k", "max_length": "max_length"}
        if teacher in (None, getattr(section, "model", None)):  # else what follows is of the recipe's own model
            names |= {"model": "teacher", "tokenizer": "teacher_tokenizer", "dtype": "dtype", "revision": "revision"}
        found |= {ours: getattr(section, theirs, None) for theirs, ours in names.items()}
        aligner = getattr(section, "aligner", None)
        if aligner is not None:
            found |= {"own_tokenizer": True, "special_roles": dict(aligner.special_roles) or None}
    return {name: value for name, value in found.items() if value is not None}


def _refuse_beside_recipe(**options: Any) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: a recipe says that itself. Change it there: data.train=…, data.train_split=…, "
            "data.prompts.string_prompts=user_turn."
        )


def _command(given: dict[str, Any], options: dict[str, Any], changes: Sequence[str] = ()) -> tuple[str, ...]:
    """What to type to get this store again, without its folder and where it is made."""
    flags = {"values": "--compact", "temperature": "--distill-temperature"}
    roles = [f"{ours}={theirs}" for ours, theirs in (given.get("special_roles") or {}).items()]
    values = {flags.get(name, "--" + name.replace("_", "-")): value for name, value in given.items()}
    for name, usual in {"--output": None, "--launcher": None, "--num-workers": None, **_USUAL}.items():
        if usual is None or values.get(name) == usual:
            values.pop(name, None)
    values |= {"--special-roles": None, "--role": roles} | options
    words = ["cohobate", "score"]
    for flag, value in values.items():
        if flag == "--compact" or value is True:
            words.append(flag)
        elif value is not None:
            words += [word for one in (value if isinstance(value, list) else [value]) for word in (flag, str(one))]
    return (*words, *changes)


_USUAL = {"--batch-tokens": 8192, "--shard-rows": 65_536}


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder}: that is a file. A store is a folder.")
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"--output {folder}: there is no folder {folder.absolute().parent}. Make it first.")


def _temperature(given: float | None) -> float | None:
    if given is not None and not 0 < given < math.inf:
        raise ConfigError(f"--distill-temperature must be > 0 and finite, got {given}.")
    return given


def _roles(given: list[str] | None) -> dict[str, str] | None:
    pairs = {}
    for text in given or []:
        student, equals, teacher = text.partition("=")
        if not (student and equals and teacher):
            raise ConfigError(f"--role {text!r}: wanted STUDENT_SPECIAL=TEACHER_SPECIAL.")
        pairs[student] = teacher
    return pairs or None


def _summary(folder: Path, written: "Written") -> str:
    header, shards = written.index.header, written.index.shards
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    made = len(shards) - written.kept
    mended = f" ({len(written.mended)} had been damaged)" if written.mended else ""
    return (
        f"{header.num_rows} predictions of {header.num_texts} rows at K={header.top_k}, temperature "
        f"{header.temperature:g}: {size / 2**20:.1f} MiB, {size / header.num_rows:.0f} bytes each\n"
        f"shards: {made} made{mended}, {written.kept} were there and whole\n"
        f"written: {folder}"
    )
