# SPDX-License-Identifier: Apache-2.0
"""`cohobate demo`: the main job on models that ship with the package."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def demo(
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Folder for metrics, the table and the plots.")
    ] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds to run; the table shows mean and spread.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed and few steps: shows that it runs, not that it works.")
    ] = False,
) -> None:
    """See a small student get better by distillation on its own rollouts.

    A tiny student that adds up four numbers right about a third of the time
    learns from a tiny teacher that nearly always can. The same prompts and the
    same number of optimizer steps go to

    [cyan]OPD[/cyan]         distillation on the student's own completions
    [cyan]OPSD[/cyan]        the same, but the teacher is the student seeing its work marked
    [cyan]SFT[/cyan]         fine-tuning on recorded solutions
    [cyan]offline KD[/cyan]  distillation on recorded solutions

    and accuracy is measured on problems that nobody was trained on. The models
    ship with the package. About three minutes on two CPU cores.

    [bold]Examples[/bold]

    [cyan]cohobate demo[/cyan]          a table, and plots in runs/demo/
    [cyan]cohobate demo --quick[/cyan]  to check an installation
    """
    from cohobate.cli.progress import Steps, duration
    from cohobate.demo.run import run_demo

    with Steps("step", 1) as steps:

        def progress(done: int, total: int, news: str) -> None:
            steps.advance_to(done, total)
            if news:
                steps.say(news)

        report = run_demo(output_dir=output_dir, seeds=seeds, quick=quick, progress=progress)
    _print_table(report)
    if quick:
        print("a few steps show that everything runs; what the methods do shows without --quick")
    load = report["load_average_before"]
    busy = "" if load is None else f"; load average before it {load:.1f} on {os.cpu_count()} cores"
    print(f"{duration(report['seconds'])} in all{busy}")
    print(f"numbers: {output_dir / 'results.json'}   plots: {', '.join(map(str, sorted(output_dir.glob('*.png'))))}")


def _print_table(report: dict[str, Any]) -> None:
    """Accuracy on held-out problems at every evaluated step: mean over the seeds, and their range."""
    from rich.console import Console
    from rich.table import Table

    from cohobate.demo.run import steps_of, table

    several = "" if report["seeds"] == 1 else f"; mean of {report['seeds']} seeds (lowest–highest)"
    shown = Table(title=f"Held-out problems right, in %, after so many steps{several}", title_justify="left", box=None)
    shown.add_column("")
    for step in steps_of(report):
        shown.add_column("start" if step == 0 else str(step), justify="right", no_wrap=True)
    shown.add_column("time", justify="right", no_wrap=True)
    for row in table(report):
        shown.add_row(*row)
    Console(file=sys.stdout, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 120).print(
        shown
    )
