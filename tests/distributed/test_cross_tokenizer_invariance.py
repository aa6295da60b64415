# SPDX-License-Identifier: Apache-2.0
"""With teachers that read their own tokens too, a step is its rows and not how they were cut up."""

from pathlib import Path
from typing import Any

import pytest
from cross_tokenizer_step import METHODS, Arrangement, arrangements, one_step
from launch import run_ranks

NAMES = ("kd/", "ce", "chunks/", "teacher", "align/", "completion/", "rows/", "loss")


def same(found: dict[str, Any], wanted: dict[str, Any], where: object) -> None:
    assert found["weights"] == pytest.approx(wanted["weights"], rel=1e-9), where
    # The logged loss is summed in float32.
    for name, tolerance in (("loss", 1e-6), ("grad_norm", 1e-9)):
        assert found["log"][name] == pytest.approx(wanted["log"][name], rel=tolerance), (name, where)
    shared = {name for name in wanted["log"] if name.startswith(NAMES)}
    assert {"align/unaligned_student_share", "align/rows_without_chunk", "chunks/mismatch_share"} <= shared
    assert shared == {name for name in found["log"] if name.startswith(NAMES)}
    for name in shared:
        assert found["log"][name] == pytest.approx(wanted["log"][name], rel=1e-6, abs=1e-9), (name, where)


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    """One process, one micro-batch."""
    return {method: one_step(Arrangement(method=method)) for method in METHODS}


def test_the_references_train_on_chunks_and_leave_something_out(references: dict[str, dict[str, Any]]) -> None:
    for method, result in references.items():
        log = result["log"]
        assert log["grad_norm"] > 1e-3, method
        assert log["kd/teacher0"] > 0.01, method
        assert 0 < log["chunks/mismatch_share"] < 1, method
        if method == "csd-recorded":
            assert log["align/unaligned_student_share"] == 0.0
        else:  # one answer goes on behind its end
            assert 0 < log["align/unaligned_student_share"] < 1, method
    assert references["csd"]["log"]["kd/teacher0"] != references["csd-top-k"]["log"]["kd/teacher0"]


@pytest.mark.parametrize("arrangement", arrangements(1), ids=str)
def test_accumulation_and_sorted_micro_batches_change_nothing(
    arrangement: Arrangement, references: dict[str, dict[str, Any]]
) -> None:
    same(one_step(arrangement), references[arrangement.method], arrangement)


@pytest.mark.distributed
def test_two_ranks_change_nothing(references: dict[str, dict[str, Any]]) -> None:
    script = Path(__file__).with_name("cross_tokenizer_step.py")
    for results in run_ranks(script, ["2"], world=2, timeout=300):
        assert len(results) == len(arrangements(2))
        for arrangement, result in results:
            same(result, references[arrangement["method"]], arrangement)


def test_rows_that_are_split_between_twins_are_those_of_one_of_them(references: dict[str, dict[str, Any]]) -> None:
    """And so it is in every arrangement of the twins, which the others of this file compare with this one."""
    found, wanted = references["twins"], references["csd"]
    assert found["weights"] == pytest.approx(wanted["weights"], rel=1e-12)
    assert found["log"]["grad_norm"] == pytest.approx(wanted["log"]["grad_norm"], rel=1e-9)
    for name in ("loss", "ce", "align/unaligned_student_share", "align/rows_without_chunk", "chunks/mismatch_share"):
        assert found["log"][name] == pytest.approx(wanted["log"][name], rel=1e-6), name
    assert [found["log"][f"teacher{i}/row_share"] for i in (0, 1)] == [3 / 8, 5 / 8]
