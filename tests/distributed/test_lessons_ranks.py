# SPDX-License-Identifier: Apache-2.0
"""Completions without a lesson leave the step, also if they are all that a rank has, or all that there are."""

from pathlib import Path

import pytest
from launch import run_ranks
from lessons_step import CASES, one_step


@pytest.mark.distributed
def test_a_rank_without_any_lesson_changes_nothing_and_hangs_nobody() -> None:
    per_rank = run_ranks(Path(__file__).with_name("lessons_step.py"), ["2"], world=2, timeout=300)
    for case in CASES:
        alone = one_step(case, 1)
        for found in (results[case] for results in per_rank):
            assert found["weights"] == pytest.approx(alone["weights"], rel=1e-5), case
            for log, wanted in zip(found["logs"], alone["logs"], strict=True):
                shared = {name for name in wanted if not name.startswith(("speed/", "epoch"))}
                assert shared == {name for name in log if not name.startswith(("speed/", "epoch"))}
                for name in shared:
                    assert log[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-7), (case, name)
        first = alone["logs"][0]
        assert first["lessons/without_share"] == {"late": 0.5, "all": 1.0}[case]
        assert first["lessons/success_share"] == {"late": 0.2, "all": 0.0}[case]
        assert (first["loss"] == 0.0) == (case == "all")
        assert (first["grad_norm"] > 1e-3) == (case == "late")
