# SPDX-License-Identifier: Apache-2.0
"""Loss, gradient and every metric are properties of the rows of a step, not of how the step was cut up."""

from pathlib import Path

import pytest
from launch import run_ranks
from one_step import Arrangement, arrangements, one_step

# float32: rows that run packed sum their attention in another order than padded ones. How far that goes depends on the
# processor: 1.1e-6 was seen on one, 3.6e-6 on another. `test_cross_tokenizer_invariance.py` holds 1e-9 in float64.
TOLERANCE = 1e-5


def same(found: dict, wanted: dict, where: object) -> None:
    for name in ("loss", "grad_norm"):
        assert found["log"][name] == pytest.approx(wanted["log"][name], rel=TOLERANCE, abs=1e-9), (name, where)
    assert found["weights"] == pytest.approx(wanted["weights"], rel=TOLERANCE), where
    shared = {k for k in wanted["log"] if k.startswith(("kl/", "entropy/", "top1", "completion/", "rows/", "loss/"))}
    assert shared
    assert shared == {
        k for k in found["log"] if k.startswith(("kl/", "entropy/", "top1", "completion/", "rows/", "loss/"))
    }
    for name in shared:
        assert found["log"][name] == pytest.approx(wanted["log"][name], rel=TOLERANCE, abs=1e-7), (name, where)


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str], dict]:
    """The plainest arrangement of each method: one process, one micro-batch."""
    return {
        (method, empty): one_step(Arrangement(method=method, empty=empty))
        for method, empty in {(a.method, a.empty) for a in arrangements(1)}
    }


def test_the_references_train_on_something(references: dict[tuple[str, str], dict]) -> None:
    for key, result in references.items():
        assert result["log"]["loss"] != 0.0, key
        assert result["log"]["grad_norm"] > 1e-3, key


@pytest.mark.parametrize("arrangement", arrangements(1), ids=str)
def test_accumulation_and_sorted_micro_batches_change_nothing(
    arrangement: Arrangement, references: dict[tuple[str, str], dict]
) -> None:
    same(one_step(arrangement), references[arrangement.method, arrangement.empty], arrangement)


@pytest.mark.distributed
def test_two_ranks_change_nothing_even_if_one_has_no_valid_token(references: dict[tuple[str, str], dict]) -> None:
    script = Path(__file__).with_name("one_step.py")
    per_rank = run_ranks(script, ["2"], world=2, timeout=300)
    for results in per_rank:
        assert len(results) == len(arrangements(2))
        for arrangement, result in results:
            same(result, references[arrangement["method"], arrangement["empty"]], arrangement)
