# SPDX-License-Identifier: Apache-2.0
"""Several teachers: each scores its own side of the batch, in order, and keeps its own state."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from cohobate.align import AlignedBatch, TeacherSide
from cohobate.align.agreement import no_chunks
from cohobate.errors import ConfigError
from cohobate.functional.scores import HiddenScores, SeveralScores, TopKScores
from cohobate.teachers import EMATeacher, LocalTeacher, OwnTokenizerTeacher, SeveralTeachers


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
