# SPDX-License-Identifier: Apache-2.0
"""How the cost of our fused divergence grows: time against N and against V, memory against N.

All sizes of a line are timed in one rotation, a process each, so that drift of the machine does not look like a curve.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fused import TINY, FusedJob, ours
from harness import Case, Implementation, Measured

__all__ = ["IMPLEMENTATIONS", "TINY", "cases", "fit"]

ROWS, VOCABULARIES = (512, 1024, 2048, 4096), (16384, 32768, 49152, 65536)


def _sized(**size: int) -> Implementation:
    def build(settings: dict[str, Any]) -> FusedJob:
        # TINY, which warms the process up, keeps its own size.
        return ours()({**settings, **size} if settings["N"] != TINY["N"] else settings)

    return Implementation(build=build, package="cohobate")


IMPLEMENTATIONS = {f"N={n}": _sized(N=n) for n in ROWS} | {f"V={v}": _sized(V=v) for v in VOCABULARIES}


def cases(*, quick: bool = False) -> list[Case]:
    if quick:
        return []
    settings = {"beta": 0.5, "N": 512, "H": 576, "V": 49152}
    return [
        Case(
            name=f"JSD 0.5, float32, H=576, growing {axis}",
            settings=settings,
            implementations=tuple(n for n in IMPLEMENTATIONS if n.startswith(axis)),
            base="",
        )
        for axis in "NV"
    ]


@dataclass(frozen=True, slots=True)
class Fit:
    r_squared: float
    milliseconds: float  # of one more row, or of a thousand more ids
    peak_range: tuple[float, float]  # MB


def fit(measured: Sequence[Measured]) -> Fit | None:
    """A straight line through the times of one case, by least squares."""
    found = [m for m in measured if m.seconds is not None]
    if len(found) < 3:
        return None
    sizes = [float(m.implementation.split("=")[1]) for m in found]
    times = [m.seconds or 0.0 for m in found]
    line = statistics.linear_regression(sizes, times)
    peaks = [(m.peak or 0) / 1e6 for m in found]
    step = 1.0 if found[0].implementation.startswith("N") else 1000.0
    return Fit(statistics.correlation(sizes, times) ** 2, line.slope * step * 1000, (min(peaks), max(peaks)))
