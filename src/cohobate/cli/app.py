# SPDX-License-Identifier: Apache-2.0
"""The command's frame: its subcommands, and what a person sees when something is wrong.

An error that we raise on purpose is one paragraph on stderr and an exit code. A traceback means a fault of ours (or of
a library), and then it is shown whole, because hiding it would help nobody.
"""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from cohobate.cli.align import align
from cohobate.cli.demo import demo
from cohobate.cli.doctor import doctor
from cohobate.cli.evaluate import evaluate
from cohobate.cli.said import plain_warnings, say_error
from cohobate.cli.score import score
from cohobate.cli.train import train
from cohobate.cli.vocabularies import projection, subtokens
from cohobate.errors import CohobateError, ConfigError, MissingExtra, ServerUnreachable, VocabularyMismatch

FAILED, WRONG_USAGE, TRY_AGAIN = 1, 2, 75
TRACEBACK = "--traceback"
ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",  # the commands show their own
    "TOKENIZERS_PARALLELISM": "false",  # it warns when a process forks
}
"""For the libraries below; what the user has set stays."""

HELP = """Distil language models on their own rollouts.

A student writes completions, a teacher says how it would have gone on at
every token, and the student moves towards it. The teacher is a larger model,
or the student itself seeing more (a worked solution, say).

[bold]Start here[/bold]

[cyan]cohobate demo[/cyan]                see it work: minutes on two CPU cores
[cyan]cohobate train --help[/cyan]        the recipes
[cyan]cohobate train opsd --show[/cyan]   read one, with your changes in it
[cyan]cohobate doctor opsd ...[/cyan]     everything but the training
[cyan]cohobate eval DIR -d test.jsonl -g final_answer[/cyan]

[bold]Exit codes[/bold]

0 done · 1 the run or its data failed · 2 wrong usage or settings · 75 the
teacher's server is unreachable, run it again later · 130, 143 stopped by
Ctrl-C or SIGTERM with a checkpoint that --resume goes on from
"""

app = typer.Typer(
    name="cohobate",
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train)
app.command("doctor")(doctor)
app.command("eval")(evaluate)
app.command("score")(score)
app.command("demo")(demo)
app.command("align")(align)
app.add_typer(subtokens, name="subtokens")
app.add_typer(projection, name="projection")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cohobate {version('cohobate')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option(TRACEBACK, help="Show where in the code an error came from; for developers.")
    ] = False,
) -> None:
    """`main` reads `--traceback` itself, since an error leaves this frame before it is printed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with plain_warnings():
        try:
            app(args=arguments)
        except CohobateError as error:
            if TRACEBACK in arguments:
                raise
            say_error(str(error))
            sys.exit(exit_code(error))


def exit_code(error: CohobateError) -> int:
    """2 when the settings or the combination of parts cannot work, 75 when the teacher's server did not answer, 1 when
    a run or its data failed."""
    if isinstance(error, ServerUnreachable):
        return TRY_AGAIN
    return WRONG_USAGE if isinstance(error, ConfigError | MissingExtra | VocabularyMismatch) else FAILED
