# SPDX-License-Identifier: Apache-2.0
"""Every example of docs/divergences.md gives what the page says."""

import doctest
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "divergences.md"


def test_every_example_of_the_page_gives_what_it_says():
    results = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert results.attempted > 40
    assert results.failed == 0
