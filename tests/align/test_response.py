# SPDX-License-Identifier: Apache-2.0
"""`align_rollout_logits` and `ResponseTokenBatch` against rows worked out by hand."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from cohobate.align import ResponseTokenBatch, RolloutBatch, align_rollout_logits


def numbered(rows: int, width: int, vocab: int = 2, dtype=torch.float32, base: int = 0) -> torch.Tensor:
    """Logits that say where they stand: entry [b, t, v] is base + 100 b + t + v / 4."""
    b, t, v = torch.arange(rows), torch.arange(width), torch.arange(vocab)
    return (base + 100 * b[:, None, None] + t[:, None] + v / 4).to(dtype)


def positions(aligned: torch.Tensor, row: int, base: int = 0) -> list[int]:
    return [int(x) - base - 100 * row for x in aligned[row, :, 0].tolist()]


# ------------------------------------------------------------------ align_rollout_logits


def test_student_prompt_2_teacher_prompt_5_response_3_reads_rows_123_and_456():
    student, teacher, mask = align_rollout_logits(numbered(1, 5), numbered(1, 8), [2], [5], [3])
    assert positions(student, 0) == [1, 2, 3]
    assert positions(teacher, 0) == [4, 5, 6]
    assert mask.tolist() == [[True, True, True]]


def test_every_row_starts_at_its_own_prompt_and_five_tokens_stay_five():
    # row 0: prompt 2 + [a b c]; row 1: prompt 5 + [d e]; width 7. Teacher prompts 4 and 3.
    student, teacher, mask = align_rollout_logits(
        numbered(2, 7), numbered(2, 7), torch.tensor([2, 5]), torch.tensor([4, 3]), torch.tensor([3, 2])
    )
    assert positions(student, 0) == [1, 2, 3]
    assert positions(student, 1)[:2] == [4, 5]
    assert positions(teacher, 0) == [3, 4, 5]
    assert positions(teacher, 1)[:2] == [2, 3]
    assert mask.tolist() == [[True, True, True], [True, True, False]]
    assert student[1, 2].tolist() == [0.0, 0.0]
    assert teacher[1, 2].tolist() == [0.0, 0.0]


def test_the_width_is_the_longest_response_and_not_the_room_in_the_logits():
    student, teacher, mask = align_rollout_logits(numbered(2, 30), numbered(2, 40), [3, 9], [1, 2], [1, 2])
    assert student.shape == teacher.shape == (2, 2, 2)
    assert mask.tolist() == [[True, False], [True, True]]


def test_a_row_may_fill_its_logits_exactly():
    student, _, _ = align_rollout_logits(numbered(1, 4), numbered(1, 3), [2], [1], [2])
    assert positions(student, 0) == [1, 2]


def test_mixed_empty_and_non_empty_responses_keep_their_rows():
    student, teacher, mask = align_rollout_logits(numbered(2, 4, 3), numbered(2, 4, 3), [4, 2], [1, 1], [0, 2])
    assert student.shape == teacher.shape == (2, 2, 3)
    assert mask.tolist() == [[False, False], [True, True]]
    assert student[0].abs().sum() == teacher[0].abs().sum() == 0
    assert positions(student, 1) == [1, 2]


def test_all_empty_responses_give_width_zero_with_a_gradient_path():
    logits = numbered(2, 3, 5).requires_grad_()
    student, teacher, mask = align_rollout_logits(logits, numbered(2, 4, 5), [1, 2], [1, 1], [0, 0])
    assert student.shape == teacher.shape == (2, 0, 5)
    assert mask.shape == (2, 0)
    student.sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0


def test_no_row_at_all_gives_an_empty_result():
    student, _, mask = align_rollout_logits(torch.zeros(0, 3, 5), torch.zeros(0, 3, 5), [], [], [])
    assert student.shape == (0, 0, 5)
    assert mask.shape == (0, 0)


def test_the_gradient_is_non_zero_exactly_at_the_selected_positions_and_the_teacher_has_none():
    student_logits = torch.rand(2, 7, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    teacher_logits = torch.rand(2, 7, 3).requires_grad_()
    student, teacher, _ = align_rollout_logits(student_logits, teacher_logits, [2, 5], [4, 3], [3, 2])
    ((student + teacher + 1) ** 2).sum().backward()
    assert student_logits.grad is not None
    touched = (student_logits.grad != 0).all(-1)
    assert touched.tolist() == [
        [False, True, True, True, False, False, False],
        [False, False, False, False, True, True, False],
    ]
    assert (student_logits.grad != 0).any(-1).equal(touched)
    assert not teacher.requires_grad
    assert teacher_logits.grad is None


def test_nan_outside_the_response_reaches_neither_value_nor_gradient():
    student_logits, teacher_logits = numbered(2, 7), numbered(2, 7)
    keep = torch.zeros(2, 7, dtype=torch.bool)
    keep[0, 1:4] = keep[1, 4:6] = True
    student_logits[~keep] = float("nan")
    teacher_keep = torch.zeros(2, 7, dtype=torch.bool)
    teacher_keep[0, 3:6] = teacher_keep[1, 2:4] = True
    teacher_logits[~teacher_keep] = float("nan")
    student_logits.requires_grad_()
    student, teacher, _ = align_rollout_logits(student_logits, teacher_logits, [2, 5], [4, 3], [3, 2])
    (student * (teacher + 1)).sum().backward()
    assert student.isfinite().all()
    assert teacher.isfinite().all()
    assert student_logits.grad is not None
    assert student_logits.grad.isfinite().all()
    assert (student_logits.grad != 0).any(-1).equal(keep)


def test_each_side_keeps_its_dtype_and_its_length():
    student, teacher, _ = align_rollout_logits(
        numbered(1, 5, dtype=torch.bfloat16), numbered(1, 9, dtype=torch.float64), [2], [5], [3]
    )
    assert (student.dtype, teacher.dtype) == (torch.bfloat16, torch.float64)
    assert positions(teacher, 0) == [4, 5, 6]


@pytest.mark.parametrize(
    "kind",
    [
        lambda v: torch.tensor(v),
        lambda v: torch.tensor(v, dtype=torch.int32),
        tuple,
        lambda v: np.array(v),
        lambda v: [torch.tensor(x) for x in v],
    ],
)
def test_lengths_may_be_any_kind_of_integers(kind):
    student, _, _ = align_rollout_logits(numbered(2, 7), numbered(2, 7), kind([2, 5]), kind([4, 3]), kind([3, 2]))
    assert positions(student, 0) == [1, 2, 3]


def test_no_argument_is_changed():
    student, teacher = numbered(2, 7), numbered(2, 7)
    lengths = [torch.tensor([2, 5]), torch.tensor([4, 3]), torch.tensor([3, 2])]
    before = [x.clone() for x in (student, teacher, *lengths)]
    aligned, _, mask = align_rollout_logits(student, teacher, *lengths)
    aligned.zero_(), mask.zero_()
    assert all(x.equal(y) for x, y in zip((student, teacher, *lengths), before, strict=True))


@pytest.mark.parametrize("which", ["student_prompt_lengths", "teacher_prompt_lengths", "response_lengths"])
@pytest.mark.parametrize(
    "bad",
    [torch.tensor([2.0, 1.0]), torch.tensor([True, True]), [2.0, 1.0], [2, True], ["2", "1"], np.array([2.0, 1.0])],
)
def test_lengths_that_are_not_integers_are_refused_by_name(which, bad):
    lengths = {"student_prompt_lengths": [2, 1], "teacher_prompt_lengths": [2, 1], "response_lengths": [2, 1]}
    with pytest.raises(TypeError, match=which):
        align_rollout_logits(numbered(2, 7), numbered(2, 7), **(lengths | {which: bad}))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"student_prompt_lengths": [2, 0]}, ValueError, r"student_prompt_lengths, row 1: got 0, must be >= 1.*BOS"),
        ({"teacher_prompt_lengths": [-3, 2]}, ValueError, r"teacher_prompt_lengths, row 0: got -3, must be >= 1"),
        ({"response_lengths": [1, -1]}, ValueError, r"response_lengths, row 1: got -1, must be >= 0"),
        ({"response_lengths": [1]}, ValueError, r"response_lengths has 1 entries.*2 rows"),
        ({"response_lengths": torch.ones(2, 1).long()}, ValueError, r"response_lengths must be 1-D.*\[2, 1\]"),
        ({"response_lengths": [1, 6]}, ValueError, r"row 1: the student's prompt of 2 and response of 6.*8.*has 7"),
        ({"teacher_prompt_lengths": [7, 2]}, ValueError, r"row 0: the teacher's prompt of 7 and response of 1.*has 7"),
        ({"response_lengths": torch.ones(2, device="meta").long()}, ValueError, r"response_lengths is on the meta"),
        ({"student_logits": torch.zeros(3, 7, 2)}, ValueError, r"student_logits has 3 rows and teacher_logits 2"),
        ({"student_logits": torch.zeros(2, 7, 3)}, ValueError, r"3 ids and teacher_logits 2.*num_real_ids"),
        ({"teacher_logits": torch.zeros(2, 7).float()}, ValueError, r"teacher_logits must be 3-D.*\[2, 7\]"),
        ({"student_logits": torch.zeros(2, 7, 2).long()}, TypeError, r"student_logits must be floating.*int64"),
        ({"teacher_logits": torch.zeros(2, 7, 2).bool()}, TypeError, r"teacher_logits must be floating.*bool"),
        ({"teacher_logits": torch.zeros(2, 7, 2, device="meta")}, ValueError, r"student_logits is on cpu.*on meta"),
    ],
)
def test_what_cannot_be_aligned_is_refused_with_row_and_numbers(change, error, message):
    arguments = {
        "student_logits": numbered(2, 7),
        "teacher_logits": numbered(2, 7),
        "student_prompt_lengths": [2, 2],
        "teacher_prompt_lengths": [2, 2],
        "response_lengths": [1, 1],
    }
    align_rollout_logits(**arguments)
    with pytest.raises(error, match=message):
        align_rollout_logits(**(arguments | change))


# ------------------------------------------------------------------ ResponseTokenBatch


def test_position_i_predicts_token_i_plus_1(make_rollout):
    rollout = make_rollout([([10, 11], [20, 21]), ([12], [22])], offsets=[0, 1], width=5)
    batch = ResponseTokenBatch.from_rollout(rollout)
    assert batch.target_ids.tolist() == [[11, 20, 21, 99], [12, 22, 99, 99]]
    assert batch.response_mask.tolist() == [[False, True, True, False], [False, True, False, False]]
    logits = numbered(2, 5)
    causal = batch.select_causal_logits(logits)
    assert causal.shape == (2, 4, 2)
    assert causal.equal(logits[:, :4])


def test_with_pad_equal_to_eos_the_eos_stays_a_target_and_a_separator_stays_attended():
    # prompt [5, 9] (9 is also a turn separator), completion [7, 9], buffer padded with 9 to width 6
    rollout = RolloutBatch(
        input_ids=torch.tensor([[5, 9, 7, 9, 9, 9]]),
        attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]),
        response_start_idx=torch.tensor([2]),
    )
    batch = ResponseTokenBatch.from_rollout(rollout)
    assert batch.response_mask.tolist() == [[False, True, True, False, False]]
    assert batch.target_ids[batch.response_mask].tolist() == [7, 9]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0, 0]]


def test_the_prompt_is_never_a_target(make_rollout):
    rollout = make_rollout([([1, 2, 3], [4, 5])])
    assert ResponseTokenBatch.from_rollout(rollout).response_mask.sum() == 2


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.int64])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_every_supported_dtype_gives_the_same_targets(make_rollout, mask_dtype, id_dtype):
    r = make_rollout([([1, 2], [3]), ([1], [2, 3])], offsets=[0, 1])
    same = RolloutBatch(
        input_ids=r.input_ids.to(id_dtype),
        attention_mask=r.attention_mask.to(mask_dtype),
        response_start_idx=r.response_start_idx.to(id_dtype),
    )
    batch = ResponseTokenBatch.from_rollout(same)
    assert batch.target_ids.dtype == torch.int64
    assert batch.target_ids[batch.response_mask].tolist() == [3, 2, 3]


@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        (torch.zeros(1, 4, 2), ValueError, r"\[1, 4\], but input_ids has \[1, 5\].*neither shifted nor cut"),
        (torch.zeros(5, 2), ValueError, "3-D"),
        (torch.zeros(1, 5, 2).long(), TypeError, "int64"),
    ],
)
def test_logits_of_another_forward_are_refused(make_rollout, logits, error, message):
    batch = ResponseTokenBatch.from_rollout(make_rollout([([1, 2, 3], [4, 5])]))
    with pytest.raises(error, match=message):
        batch.select_causal_logits(logits)


def test_a_rollout_that_cannot_be_aligned_is_refused_here_too(make_rollout):
    hole = RolloutBatch(
        input_ids=torch.tensor([[1, 2, 3, 4]]),
        attention_mask=torch.tensor([[1, 0, 1, 1]]),
        response_start_idx=torch.tensor([2]),
    )
    with pytest.raises(ValueError, match=r"attention_mask, row 0: 3 attended tokens.*columns 0 and 3.*1 unattended"):
        ResponseTokenBatch.from_rollout(hole)


def test_both_ways_of_alignment_select_the_same_numbers(make_rollout):
    rollout = make_rollout([([1, 2], [3, 4, 5]), ([1, 2, 3, 4, 5], [6, 7])])
    logits = numbered(2, 7)
    batch = ResponseTokenBatch.from_rollout(rollout)
    causal = batch.select_causal_logits(logits)[batch.response_mask]
    aligned, _, mask = align_rollout_logits(logits, logits, [2, 5], [2, 5], [3, 2])
    assert_close(causal, aligned[mask], rtol=0, atol=0)
