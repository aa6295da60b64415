# SPDX-License-Identifier: Apache-2.0
"""Several teachers: each scores its own side of the batch, in order, and keeps its own state."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from cohobate.align import AlignedBatch, TeacherSide
from cohobate.align.agreement import no_chunks
from cohobate.errors import ConfigError, DataError
from cohobate.functional.scores import HiddenScores, SeveralScores, TopKScores
from cohobate.teachers import EMATeacher, LocalTeacher, OwnTokenizerTeacher, Routing, SeveralTeachers


@pytest.fixture
def sides(batch: AlignedBatch) -> AlignedBatch:
    """Teacher 0 has its own tokenizer and two predictions, teacher 1 the student's and all five."""
    own = TeacherSide(
        model_inputs=batch.teacher.model_inputs,
        pair_index=torch.tensor([3, 14]),
        target_ids=torch.tensor([7, 8]),
        row=torch.tensor([0, 1]),
        chunks=no_chunks(),
    )
    same = TeacherSide(
        model_inputs=batch.student.model_inputs,
        pair_index=batch.student.pair_index,
        target_ids=batch.target_ids,
        row=batch.row,
    )
    return replace(batch, teacher=own, teachers=(own, same))


def own_logits(model: Any, side: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = model(**side.model_inputs, use_cache=False).logits
    return logits.reshape(-1, logits.shape[-1])[side.pair_index]


def test_each_scores_its_own_side_in_order(sides: AlignedBatch) -> None:
    first, second = tiny.llama(3), tiny.llama(4)
    own = OwnTokenizerTeacher(LocalTeacher(first), tiny.char_tokenizer(), top_k=23)
    several = SeveralTeachers([own, LocalTeacher(second)])
    assert several.provides is SeveralScores
    assert several.texts == (own.text, None)
    kept, whole = several.score(sides).scores
    assert isinstance(kept, TopKScores)
    assert isinstance(whole, HiddenScores)
    torch.testing.assert_close(kept.logits, own_logits(first, sides.teachers[0]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.logits(), own_logits(second, sides.teachers[1]), rtol=1e-4, atol=1e-5)


def test_no_teacher_another_number_of_sides_and_teachers_inside_teachers_are_refused(sides: AlignedBatch) -> None:
    teacher = LocalTeacher(tiny.llama(3))
    with pytest.raises(ConfigError, match="at least one teacher"):
        SeveralTeachers([])
    with pytest.raises(ConfigError, match="the sides of 2 teachers, and there are 1"):
        SeveralTeachers([teacher]).score(sides)
    with pytest.raises(ConfigError, match="teacher 1 is itself several"):
        SeveralTeachers([teacher, SeveralTeachers([teacher])])


def moved(student: Any) -> SeveralTeachers:
    several = SeveralTeachers([LocalTeacher(tiny.llama(4)), EMATeacher(decay=0.5).build(student)])
    with torch.no_grad():
        next(student.parameters()).add_(1.0)
    several.after_optimizer_step()
    return several


def test_the_state_of_each_comes_back_to_it() -> None:
    several = moved(tiny.llama(3))
    state = {name: value.clone() for name, value in several.state_dict().items()}
    assert {name.split(".")[0] for name in state} == {"1"}
    assert int(state["1.num_updates"]) == 1
    other = SeveralTeachers([LocalTeacher(tiny.llama(4)), EMATeacher(decay=0.5).build(tiny.llama(3))])
    other.load_state_dict(state)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in state.items())


def test_the_state_of_other_teachers_is_refused() -> None:
    state = moved(tiny.llama(3)).state_dict()
    with pytest.raises(ValueError, match="there are 1 teachers"):
        SeveralTeachers([LocalTeacher(tiny.llama(4))]).load_state_dict(state)
    with pytest.raises(ValueError, match="carries no state"):
        SeveralTeachers([LocalTeacher(tiny.llama(4))] * 2).load_state_dict(state)


# ------------------------------------------------------------------ routes

BY_DOMAIN = Routing(column="domain", routes=(("math", "algebra", 1), ("code", True), None))


@pytest.mark.parametrize(
    ("value", "teacher"),
    [
        ("math", 0),
        ("algebra", 0),
        (1, 0),
        ("code", 1),
        (True, 1),
        ("1", 2),
        (1.0, 2),
        ("Math", 2),
        (None, 2),
        (["code"], 2),
    ],
)
def test_a_row_goes_to_the_teacher_that_lists_its_value_with_its_type_and_else_to_the_one_without_routes(
    value: Any, teacher: int
) -> None:
    assert BY_DOMAIN({"domain": value}, "a row") == teacher


def test_a_row_that_nobody_answers_is_named_with_its_value_and_the_known_ones() -> None:
    routing = Routing(column="domain", routes=(("math",), ("code", 3)))
    with pytest.raises(
        DataError, match=r"row 'r7' has 'maths' .* known are 'math', 'code', 3\. Did you mean 'math'\?"
    ):
        routing({"domain": "maths"}, "r7")
    with pytest.raises(DataError, match="row 'r8' has no value in the column 'domain'"):
        routing({"domain": None}, "r8")
    with pytest.raises(DataError, match=r"row 'r9' has no value .* Did you mean 'domains'\?"):
        routing({"domains": "math"}, "r9")
    with pytest.raises(DataError, match="row 'r1' has 'maths'"):
        routing.check([("r0", {"domain": "math"}), ("r1", {"domain": "maths"})])


def test_a_column_that_no_row_has_is_refused_also_where_one_teacher_answers_for_all_others() -> None:
    rows = [("a", {"dommain": "math", "prompt": "1"}), ("b", {"prompt": "2"})]
    with pytest.raises(
        DataError, match=r"no row has the column 'domain'.* dommain, prompt\. Did you mean 'dommain'\?"
    ):
        BY_DOMAIN.check(rows)
    BY_DOMAIN.check([*rows, ("c", {"domain": None})])


def test_a_value_that_is_listed_and_that_no_row_has_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        ("a", {"domain": "math"}),
        ("b", {"domain": "code"}),
        ("c", {"domain": "algebra"}),
        ("d", {"domain": True}),
    ]
    BY_DOMAIN.check(rows)
    assert "Of 4 rows none has 1 in the column 'domain'" in caplog.text


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ((("a", "b"), ("b",)), r"the value 'b' of domain twice, for teachers\[0\] and teachers\[1\]"),
        ((("a", "a"), None), r"the value 'a' of domain twice, for teachers\[0\] and teachers\[0\]"),
        ((None, ("a",), None), r"teachers\[0\] and teachers\[2\] have no routes, but only one teacher can answer"),
        ((("a",), ()), r"teachers\[1\]\.routes lists no value"),
    ],
)
def test_routes_that_leave_a_choice_open_are_refused(routes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Routing(column="domain", routes=routes)
    with pytest.raises(ConfigError, match="name a column"):
        Routing(column="", routes=(None,))


def test_routes_are_those_of_the_teachers() -> None:
    with pytest.raises(ConfigError, match="routes of 3 teachers, and there are 1"):
        SeveralTeachers([LocalTeacher(tiny.llama(3))], BY_DOMAIN)
    assert [BY_DOMAIN.describe(i) for i in range(3)] == [
        "domain: math, algebra, 1",
        "domain: code, True",
        "domain: all others",
    ]


class Hears:
    """A teacher that keeps what it was asked."""

    provides = HiddenScores

    def __init__(self) -> None:
        self.heard: list[AlignedBatch] = []

    def score(self, batch: AlignedBatch, /) -> Any:
        self.heard.append(batch)
        return LocalTeacher(tiny.llama(3)).score(batch)

    prefetch = check_batch = score


def test_a_teacher_hears_of_its_rows_alone_in_every_verb(sides: AlignedBatch) -> None:
    """Of two rows the second is teacher 0's and the first teacher 1's."""
    read = [(1,), (0,), ()]
    whole = sides.teachers[1]
    some = [torch.isin(sides.row, torch.tensor(rows, dtype=torch.int64)) for rows in read]
    parts = tuple(
        replace(whole, pair_index=whole.pair_index[s], target_ids=whole.target_ids[s], row=whole.row[s], rows=rows)
        for s, rows in zip(some, read, strict=True)
    )
    sides = replace(sides, weights=torch.rand(5), sampler_logprobs=-torch.rand(5))
    batch = replace(sides, teacher=parts[0], teachers=parts)
    teachers = [Hears(), Hears(), Hears()]
    several = SeveralTeachers(teachers, Routing(column="x", routes=(("a",), ("b",), None)))
    several.prefetch(batch)
    several.check_batch(batch)
    scores = several.score(batch).scores
    for i, teacher in enumerate(teachers):
        assert len(teacher.heard) == 3
        for heard in teacher.heard:
            assert heard.sample_ids == (tuple(batch.sample_ids[r] for r in read[i]) or ("",))
            for name in ("target_ids", "weights", "sampler_logprobs"):
                assert torch.equal(getattr(heard, name), getattr(batch, name)[some[i]])
            assert torch.equal(heard.student.pair_index, batch.student.pair_index[some[i]])
            assert [read[i][r] for r in heard.row.tolist()] == batch.row[some[i]].tolist()
        assert scores[i].hidden.shape[0] == int(some[i].sum())  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("value", [1.0, ["math"]])
def test_a_value_that_no_route_can_be_is_refused_although_a_teacher_answers_for_all_others(value: Any):
    routing = Routing(column="domain", routes=((1, "math"), None))
    with pytest.raises(DataError, match=r"row 'b' has .* in the column 'domain'.*a string, an integer or a truth"):
        routing.check([("a", {"domain": 1}), ("b", {"domain": value})])
