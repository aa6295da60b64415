# SPDX-License-Identifier: Apache-2.0
"""The trainer over a student that FSDP2 shards gives the loss, the gradient and the weights of one process."""

from dataclasses import replace
from pathlib import Path

import pytest
from fsdp_step import ARRANGEMENTS, one_step_of, student
from launch import run_ranks
from one_step import Arrangement

TOLERANCE = 1e-6


@pytest.mark.distributed
def test_a_step_of_a_sharded_student_is_that_of_a_whole_one_also_if_one_rank_has_no_pair(tmp_path: Path):
    ties = {str(tmp_path / name): name == "tied" for name in ("tied", "untied")}
    for folder, tie in ties.items():
        student(tie=tie).save_pretrained(folder)
    per_rank = run_ranks(Path(__file__).with_name("fsdp_step.py"), list(ties), world=2, timeout=300)
    wanted = {}
    for folder, tie in ties.items():
        for empty in {a.empty for a in ARRANGEMENTS}:
            whole = Arrangement(method="gkd", empty=empty)
            wanted[folder, empty] = one_step_of(student(tie=tie), whole, tmp_path / "run")
    for results in per_rank:
        assert len(results) == len(ties) * len(ARRANGEMENTS)
        for folder, values, found in results:
            arrangement = replace(Arrangement(method="gkd"), **values)
            expected = wanted[folder, arrangement.empty]
            where = (ties[folder], arrangement)
            assert found["is sharded"]
            assert found["reads head"], "the loss must come from hidden states, not from logits"
            for name in ("loss", "grad_norm", "kl/forward", "kl/reverse", "entropy/student", "top1_agreement"):
                assert found["log"][name] == pytest.approx(expected["log"][name], rel=1e-5, abs=1e-7), (name, where)
            assert found["weights"].keys() == expected["weights"].keys()
            for name, value in expected["weights"].items():
                assert found["weights"][name] == pytest.approx(value, rel=TOLERANCE), (name, where)
