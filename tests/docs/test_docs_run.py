# SPDX-License-Identifier: Apache-2.0
"""Every Python block of the README and of every page in docs/ runs, in order: one process, one namespace a page.

The blocks are written to a file in which all other lines are empty, so a traceback shows the line numbers of the page.
Each page runs in an empty folder, with warnings as errors. A block that is not to run is not marked as `python`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_lines(page: str) -> str:
    """`page` with every line outside its ```python blocks emptied."""
    lines, fence = [], None
    for line in page.splitlines():
        mark = line.strip()
        if fence is None and mark.startswith("```"):
            fence = mark
            lines.append("")
        elif mark == "```":
            fence = None
            lines.append("")
        else:
            lines.append(line if fence == "```python" else "")
    assert fence is None, f"a block is not closed: {fence}"
    return "\n".join(lines) + "\n"


def test_only_python_blocks_are_kept_and_lines_keep_their_numbers():
    page = "text\n```python\na = 1\n```\nx = 2\n```text\nb = 3\n```\n```python\nc = a\n```\n"
    assert python_lines(page).splitlines() == ["", "", "a = 1", "", "", "", "", "", "", "c = a", ""]


def test_the_pages_that_teach_by_example_have_blocks_to_run():
    with_code = {page.name for page in PAGES if python_lines(page.read_text(encoding="utf-8")).strip()}
    assert {"alignment.md", "opsd.md"} <= with_code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path):
    code = python_lines(page.read_text(encoding="utf-8"))
    if not code.strip():
        return
    script = tmp_path / f"{page.stem}.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script.name], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{page.name}:\n{done.stdout}\n{done.stderr}"
