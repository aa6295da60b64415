# SPDX-License-Identifier: Apache-2.0
"""The demo's pictures: accuracy by optimizer step and by training time, mean and range over the seeds."""

from pathlib import Path
from statistics import mean
from typing import Any

from cohobate.demo.methods import LABELS
from cohobate.errors import MissingExtra

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers repeat what colour says.
STYLES = {
    "sft": ("#999999", "s"),
    "offline_kd": ("#E69F00", "D"),
    "opd_reverse": ("#0072B2", "o"),
    "opd_forward": ("#56B4E9", "^"),
    "opsd": ("#009E73", "v"),
}


def draw(report: dict[str, Any], folder: Path) -> Path:
    """Write `accuracy.png` and return its path."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise MissingExtra("the demo's plots need matplotlib: pip install 'cohobate[demo]'.") from error
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    for method, runs in report["methods"].items():
        if runs:
            _curves(axes, method, [run["curve"] for run in runs])
    axes[0].set(xlabel="optimizer steps", ylabel="held-out problems solved", title="Equal steps")
    axes[1].set(xlabel="training seconds (one core, evaluation left out)", title="Equal time")
    axes[0].yaxis.set_major_formatter("{x:.0%}")
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    seeds = report["seeds"]
    shade = f"; mean and range of {seeds} seeds" if seeds > 1 else ""
    figure.suptitle(f"Adding up four numbers: one student, the same prompts, five methods{shade}", fontsize=12)
    path = folder / "accuracy.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _curves(axes: Any, method: str, curves: list[list[dict[str, float]]]) -> None:
    colour, marker = STYLES[method]
    steps = [point["step"] for point in curves[0]]
    seconds = [mean(curve[i]["seconds"] for curve in curves) for i in range(len(steps))]
    values = [[curve[i]["accuracy"] for curve in curves] for i in range(len(steps))]
    for axis, x in zip(axes, (steps, seconds), strict=True):
        axis.plot(x, [mean(v) for v in values], color=colour, marker=marker, label=LABELS[method])  # type: ignore[index]
        axis.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, lw=0)
