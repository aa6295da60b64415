# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel operations on 2 and 3 gloo ranks against the whole-vocabulary oracle: one launch for each."""

import re
from pathlib import Path
from typing import Any

import pytest
import vocab_oracle as oracle
from launch import run_ranks

SCRIPT = Path(__file__).parents[1] / "distributed" / "vocab_ranks.py"
NAN, INF = pytest.approx(float("nan"), nan_ok=True), float("inf")

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("vocab_ranks")]


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank reports."""
    return run_ranks(SCRIPT, [], world=request.param)


def test_values_and_gradients_are_those_of_the_whole_vocabulary(ranks: list[dict[str, Any]]):
    assert [rank["failures"] for rank in ranks] == [[]] * len(ranks)
    outputs = 5 * 3 + 4 * 2  # of the pair operations and of the others
    assert {tuple(rank["cases"]) for rank in ranks} == {(3 * 3 * 2 * outputs, 1 * 2 * 2 * outputs)}


@pytest.mark.parametrize(
    ("operation", "sums", "statistics"), [("kl", 1, 8), ("jsd", 2, 10), ("entropy", 1, 3), ("logprobs", 1, 4)]
)
def test_a_call_costs_one_maximum_and_at_most_two_sums_and_its_backward_pass_none(
    ranks: list[dict[str, Any]], operation: str, sums: int, statistics: int
):
    for rank in ranks:
        calls = dict(rank["collectives"][operation])
        numbers = calls.pop("numbers")
        assert calls == {"all_reduce RedOpType.MAX": 1, "all_reduce RedOpType.SUM": sums, "backward": 0}
        assert 50 * statistics <= numbers <= 50 * statistics + 8 * len(ranks)  # of 50 rows; the rest is the facts


def test_many_ids_a_row_travel_in_the_same_sum(ranks: list[dict[str, Any]]):
    calls = ranks[0]["collectives"]["logprobs of 4"]
    assert calls["all_reduce RedOpType.SUM"] == 1
    assert calls["numbers"] == ranks[0]["collectives"]["logprobs"]["numbers"] + 3 * 50


def test_top_k_gathers_its_candidates_once_and_nothing_else(ranks: list[dict[str, Any]]):
    assert ranks[0]["collectives"]["top k"] == {"all_gather": 1, "numbers": 50 * 4 + 4, "backward": 0}


ERRORS = {
    "index too high": r"in \[0, 37\), got 99 on rank {last}",
    "index too low": r"in \[0, 37\), got -7 on rank {last}",
    "index in the padding": r"in \[0, 32\), got 32 on rank 0",
    "index of another shape": r"on rank {last} its leading axes are not",
    "overlap": r"without gap or overlap",
    "gap": r"without gap or overlap",
    "start on one rank": r"given on every rank or on none; rank 0 has none",
    "range of another width": r"rank {last} holds .* columns",
    "size of another rank": r"must be the same on every rank",
    "size beyond the shards": r"in \[1, 37\].* got 38",
    "padding at an unknown place": r"needs vocab_start_index on every rank",
    "teacher of another width": r"rank {last} holds .* columns of the student and .* of the teacher",
    "teacher of other rows": r"on rank {last} they differ",
    "k beyond the vocabulary": r"k must be in \[1, 37\].* got 38",
    "top k of shards with a gap": r"without gap or overlap",
    "a row without an allowed token": r"cannot sample row 2",
    "after all this": r"no error",
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_one_rank_finds_wrong_is_the_same_error_on_all(ranks: list[dict[str, Any]], case: str):
    errors = {rank["errors"][case] for rank in ranks}
    assert len(errors) == 1

    assert re.search(ERRORS[case].replace("{last}", str(len(ranks) - 1)), errors.pop())


def test_no_other_error_was_tried(ranks: list[dict[str, Any]]):
    assert set(ranks[0]["errors"]) == set(ERRORS)


def test_forbidden_tokens_cost_nothing_infinity_or_a_finite_amount(ranks: list[dict[str, Any]]):
    rows = ranks[0]["odd rows"]
    # both sides forbid some; only the student forbids one; only the teacher; nothing allowed; nothing in common
    one_of_37 = pytest.approx(0.02739897, rel=1e-5)  # log(37 / 36)
    jsd_of_one = pytest.approx(0.00945942, rel=1e-5)
    assert rows["forward"] == [0.0, INF, one_of_37, NAN, INF]
    assert rows["reverse"] == [0.0, one_of_37, INF, NAN, INF]
    assert rows["jsd"] == [0.0, jsd_of_one, jsd_of_one, NAN, pytest.approx(0.6931472, rel=1e-6)]
    assert rows["logprobs"][1:4:2] == [-INF, 0.0]  # the forbidden token; an ignored row without an allowed token
    assert all(str(rank["odd rows"]) == str(rows) for rank in ranks)


def test_a_row_without_an_allowed_token_has_no_gradient(ranks: list[dict[str, Any]]):
    for rank in ranks:
        for name, numbers in rank["odd rows"].items():
            if name.endswith("gradient"):
                assert numbers == [0.0, 1.0], name  # of that row; all others are finite
            elif name.endswith("unmasked"):
                assert numbers == [0.0], name


def test_top_k_and_argmax_are_what_sorting_gives_also_with_ties(ranks: list[dict[str, Any]]):
    assert [rank["top k"] for rank in ranks] == [[]] * len(ranks)


def test_a_teacher_top_k_made_at_degree_two_serves_a_student_at_any(ranks: list[dict[str, Any]]):
    one, many = ranks[0]["cache"]["one"], ranks[0]["cache"]["many"]
    assert one[0] > 0.1
    assert many == pytest.approx(one, rel=1e-4, abs=1e-6)
    assert [rank["cache"] for rank in ranks] == [ranks[0]["cache"]] * len(ranks)


def test_samples_are_those_of_one_process_with_the_generator_of_rank_zero(ranks: list[dict[str, Any]]):
    assert [rank["samples"]["differs"] for rank in ranks] == [[]] * len(ranks)


def test_without_a_generator_ranks_still_draw_the_same(ranks: list[dict[str, Any]]):
    drawn = [rank["samples"]["no generator"] for rank in ranks]
    assert all(ids == drawn[0] for ids in drawn)
    assert len(set(drawn[0])) > 10
    assert set(drawn[0]) <= set(range(oracle.V))


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float64"])
def test_shards_meet_in_maxima_sums_and_the_largest_with_the_lowest_id(ranks: list[dict[str, Any]], dtype: str):
    size = len(ranks)
    for rank in ranks:
        groups = rank["groups"]
        assert groups[f"max {dtype}"] == [[1.0, 0.0], [size - 3.0, -INF], [0.25, 3.0]]
        total = sum(range(size))
        assert groups[f"sum {dtype}"] == [[size, 0.0], [total - 2.0 * size, -INF], [0.25 * size, 3.0 * size - total]]
        values, ids = groups[f"largest {dtype}"]
        assert values[:3] == [2.0, 0.0, size - 1.0]
        assert values[3] < -1e300
        assert values[5] == 1e9  # NaN, whatever its sign
        assert ids == [3, 0, 9 + 10 * (size - 1), 0, 1 + 10 * (size - 1), 12]
        assert groups[f"last bit {dtype}"] == size - 1


def test_nothing_and_a_group_of_one_are_a_whole_vocabulary(ranks: list[dict[str, Any]]):
    for rank in ranks:
        kinds = [rank["groups"][name] for name in ("whole", "alone", "sharded")]
        assert kinds == ["WholeVocabulary", "WholeVocabulary", "GroupShards"]
