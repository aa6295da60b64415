# SPDX-License-Identifier: Apache-2.0
"""The harness of `benchmarks/` runs one small row, and what it writes is what it measured."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = ("harness", "memory", "fused", "growth", "tables")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts as they import each other: from their own folder, under names of their own."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


def test_ours_and_the_floor_are_measured_and_ours_computes_the_definition(benchmarks: SimpleNamespace) -> None:
    harness, fused = benchmarks.harness, benchmarks.fused
    case = harness.Case(
        name="small",
        settings={"beta": 0.5, "N": 24, "H": 16, "V": 300},
        implementations=(harness.FLOOR, harness.OURS, "missing"),
    )
    fused.IMPLEMENTATIONS["missing"] = fused.IMPLEMENTATIONS[
        harness.FLOOR
    ]  # unknown to the workers: it must fail alone
    floor, ours, missing = harness.measure("fused", [case], rounds=2, say=lambda line: None)
    assert floor.seconds is not None
    assert ours.seconds is not None
    assert ours.facts["loss_error"] < 1e-5
    assert ours.facts["gradient_error"] < 1e-5
    assert missing.note.startswith("failed: KeyError")
    text = benchmarks.tables.table([floor, ours, missing])
    assert f"{ours.seconds / floor.seconds:.2f}" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_a_part_of_the_page_is_replaced_and_the_rest_stays(benchmarks: SimpleNamespace, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- begin: x -->\nold\n<!-- end: x -->\nb\n")
    benchmarks.tables.put(page, "x", "new")
    assert page.read_text() == "a\n<!-- begin: x -->\nnew\n<!-- end: x -->\nb\n"
    with pytest.raises(ValueError, match="no place for 'y'"):
        benchmarks.tables.put(page, "y", "new")


def test_a_straight_line_is_found(benchmarks: SimpleNamespace) -> None:
    measured = [
        SimpleNamespace(implementation=f"N={n}", seconds=0.5 + 0.002 * n, peak=10**6) for n in (100, 200, 300, 400)
    ]
    found = benchmarks.growth.fit(measured)
    assert found.r_squared == pytest.approx(1)
    assert found.milliseconds == pytest.approx(2)


def test_the_peak_sees_memory_that_is_gone_again(benchmarks: SimpleNamespace) -> None:
    base = benchmarks.memory.start_peak()
    if base is None:
        pytest.skip("no resident-memory counters on this system")
    block = bytearray(b"x" * 40_000_000)
    del block
    assert benchmarks.memory.peak_since(base) >= 35_000_000
