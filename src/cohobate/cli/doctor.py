# SPDX-License-Identifier: Apache-2.0
"""`cohobate doctor`: everything of a run but the training, so that what cannot work is known before it costs hours.

The parts are loaded and held against each other as for a run, a server is tried, and a few rows go the whole way: they
are rolled out, aligned, scored and compared. Nothing is trained and nothing is written into the recipe's folder.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cohobate.errors import NonFiniteError

if TYPE_CHECKING:
    from cohobate.cli.run import Run

_SHOWN = {
    "loss": "loss",
    "kl/forward": "kl/forward",
    "kl/reverse": "kl/reverse",
    "kd/average": "kd",
    "kd/teacher0": "kd",
    "kd/teacher1": "kd of the second teacher",
    "ce": "ce",
    "entropy/teacher": "entropy of the teacher",
    "align/unaligned_student_share": "unaligned",
    "rows/without_pair": "rows without a pair",
    "completion/mean_length": "length",
    "lessons/success_share": "successful",
    "lessons/without_share": "without a lesson",
}


def doctor(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.", metavar="RECIPE")],
    changes: Annotated[list[str] | None, typer.Argument(help="Changes to it.", metavar="[KEY=VALUE]...")] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows that go the whole way.")] = 4,
) -> None:
    """Check a recipe before it costs anything.

    Loads every part, holds them against each other, tries the server if
    there is one, and takes a few rows the whole way: sampled, aligned,
    scored, compared. Nothing is trained, nothing is written. Exit code 0
    if the run would start.

    [cyan]cohobate doctor csd student.model=DIR teachers.0.model=DIR data.train=rows.jsonl[/cyan]
    """
    from cohobate.cli.build import check_output_dir
    from cohobate.cli.recipe import load_recipe
    from cohobate.cli.run import build_run

    loaded = load_recipe(recipe, changes or [])
    check_output_dir(Path(loaded.recipe.output_dir))
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = replace(loaded, recipe=loaded.recipe.model_copy(update={"output_dir": folder}))
        run = build_run(elsewhere)
        try:
            print("\n".join(line for line in run.headline().splitlines() if not line.startswith("output")))
            if found := run.try_server():
                print(found)
            print(f"rows      {_whole_way(run, rows)}")
        finally:
            run.stop.restore()
            run.close()
    print(f"ok        nothing was trained; the run would write into {loaded.recipe.output_dir}")


def _first_rows(trainer: Any, num_rows: int) -> list[Any]:
    """The first rows, and of each teacher that rows are routed to the first that is its own."""
    rows, routing = trainer.train_dataset.rows, getattr(trainer.teacher, "routing", None)
    if routing is None:
        return list(rows[:num_rows])
    firsts: dict[int, int] = {}
    for i, row in enumerate(rows):
        firsts.setdefault(routing(row.row, row.sample_id), i)
    return [rows[i] for i in sorted({*range(min(num_rows, len(rows))), *firsts.values()})]


def _whole_way(run: "Run", num_rows: int) -> str:
    """What came out for the first rows; raises if the loss is no number."""
    trainer: Any = run.trainer
    rows = _first_rows(trainer, num_rows)
    recorded = trainer.args.on_policy_fraction == 0 and all(row.completion_ids is not None for row in rows)
    has_lessons = trainer._lessons is not None
    found = trainer._evaluation(recorded=recorded, score=True, grader=None, as_trained=has_lessons)(rows)
    if has_lessons and "loss" not in found:
        share = f"{found.get('lessons/success_share', 0.0):.4g}"
        return (
            f"{len(rows)} sampled and graded, {trainer.args.num_generations} completions each: {share} of them are "
            "successful and none has a lesson, so nothing was compared. Try more (--rows), or an easier task."
        )
    if not found["loss"] == found["loss"] or abs(found["loss"]) == float("inf"):
        raise NonFiniteError(f"the loss of the first {len(rows)} rows is {found['loss']}: a run would stop at step 1.")
    numbers = "  ".join(f"{label} {found[name]:.4g}" for name, label in _SHOWN.items() if name in found)
    return f"{len(rows)} taken the whole way: {numbers}"
