# SPDX-License-Identifier: Apache-2.0
import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "objectives.md"


def test_every_example_of_the_objectives_page_runs():
    results = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert results.attempted > 30
    assert results.failed == 0
