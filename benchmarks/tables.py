# SPDX-License-Identifier: Apache-2.0
"""Measurements as Markdown, and their place between the markers of a page."""

import os
import platform
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

import growth
from harness import Measured


def table(measured: Sequence[Measured]) -> str:
    """One row an implementation, grouped by case; ratios refer to the case's base in the same rotation."""
    lines = [
        "| work | implementation | CPU s / threads | × base | spread | wall s | peak MB | gradient error | target |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for _, group in groupby(measured, key=lambda m: m.case.name):
        rows = list(group)
        base = next((m.seconds for m in rows if m.implementation == m.case.base), None)
        lines += [_row(m, base, first=m is rows[0]) for m in rows]
    return "\n".join(lines)


def _row(m: Measured, base: float | None, *, first: bool) -> str:
    name = f"{m.implementation} {m.version}".strip()
    if m.case.base == m.implementation:
        name = f"**{name}** (base)"
    cells = [m.case.name if first else "", name]
    target = m.case.targets.get(m.implementation, "")
    if m.note or m.seconds is None:
        return "| " + " | ".join([*cells, f"{_cell(m.note)}", "", "", "", "", "", target]) + " |"
    error = m.facts.get("gradient_error")
    cells += [
        f"{m.seconds:.3f}",
        f"{m.seconds / base:.2f}" if base else "",
        f"±{100 * (m.spread or 0):.0f} %",
        f"{m.wall:.3f}",
        "n/a" if m.peak is None else f"{m.peak / 1e6:.0f}",
        "" if error is None else f"{error:.1e}",
        target,
    ]
    return "| " + " | ".join(cells) + " |"


def growth_table(measured: Sequence[Measured]) -> str:
    """Times and peaks by size, and the straight line through them."""
    lines = ["| line | size | CPU s / threads | peak MB |", "|---|---:|---:|---:|"]
    notes = []
    for name, group in groupby(measured, key=lambda m: m.case.name):
        rows = list(group)
        for m in rows:
            seconds = _cell(m.note) if m.seconds is None else f"{m.seconds:.3f}"
            lines.append(
                f"| {name if m is rows[0] else ''} | {m.implementation} | {seconds} | {(m.peak or 0) / 1e6:.0f} |"
            )
        line = growth.fit(rows)
        if line is not None:
            low, high = line.peak_range
            notes.append(
                f"- {name}: R² {line.r_squared:.4f} (target ≥ 0.98), {line.milliseconds:.2f} ms more a "
                f"{'row' if 'N' in name.split()[-1] else 'thousand ids'}; peak {low:.0f} to {high:.0f} MB."
            )
    return "\n".join([*lines, "", *notes])


def breakdown_table(measured: Sequence[Measured]) -> str:
    """CPU seconds a step by part, of whole trainer steps, and the losses that must agree."""
    names: dict[str, None] = {}
    for m in measured:
        names |= dict.fromkeys(m.facts.get("parts", {}))
    head = ["steps", "implementation", *names, "rest", "loss of step 1"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for m in measured:
        parts = m.facts.get("parts")
        if parts is None or m.seconds is None:
            continue
        threads = m.facts["threads"]
        spent = [parts.get(name, 0.0) / threads for name in names]
        cells = [m.case.name, m.implementation, *(f"{s:.2f}" for s in spent)]
        lines.append("| " + " | ".join([*cells, f"{m.seconds - sum(spent):.2f}", f"{m.facts['loss']:.6f}"]) + " |")
    return "\n".join(lines)


def agreement(measured: Iterable[Measured]) -> str:
    """A sentence on whether all computed the same value."""
    errors = [(m.facts["loss_error"], m) for m in measured if "loss_error" in m.facts]
    if not errors:
        return ""
    worst, m = max(errors, key=lambda pair: pair[0])
    return (
        f"Values were compared with float64: the largest relative difference is {worst:.1e} "
        f"({m.implementation}, {m.case.name})."
    )


def machine() -> str:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        model = found.group(1) if found else model
    except OSError:
        pass
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    packages = ", ".join(f"{p} {_version(p)}" for p in ("torch", "transformers", *PEER_PACKAGES))
    return (
        f"{model}, {os.cpu_count()} cores, Linux; Python {platform.python_version()}. {packages}. "
        f"Load average when the section began: {load:.1f}."
    )


PEER_PACKAGES = ("trl", "liger-kernel", "deepspeed", "verl", "megatron-core", "triton")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:160]


def put(page: Path, name: str, text: str) -> None:
    """Replace what stands between the markers of `name`; the rest of the page is its author's."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page.name} has no place for {name!r}: add the lines {begin} and {end}.")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
