# SPDX-License-Identifier: Apache-2.0
"""`build_opsd_training_batch`, `align_logits`, `pairs` and `aligned_batch` against rows worked out by hand."""

import dataclasses

import pytest
import torch

from cohobate.align import RolloutBatch, TeacherContext, aligned_batch, build_opsd_training_batch
from cohobate.errors import AlignmentError

S0, S1, T0, T1, T2, T3, C0, C1 = 10, 11, 30, 31, 32, 33, 20, 21


def build(rollout, context, pad=99):
    return build_opsd_training_batch(rollout=rollout, teacher_context=context, pad_token_id=pad)


def numbered(ids: torch.Tensor, vocab: int = 2) -> torch.Tensor:
    """Logits over `ids [B, T]` that say where they stand: entry [b, t, v] is 100 b + t + v / 4."""
    rows, width = ids.shape
    b, t, v = torch.arange(rows), torch.arange(width), torch.arange(vocab)
    return (100 * b[:, None, None] + t[:, None] + v / 4).float()


# ------------------------------------------------------------------ values by hand


def test_prompt_of_2_and_prefix_of_4_read_rows_12_and_34(make_rollout, make_context):
    batch = build(make_rollout([([S0, S1], [C0, C1])]), make_context([[T0, T1, T2, T3]]))
    assert batch.student_model_inputs["input_ids"].tolist() == [[S0, S1, C0, C1]]
    assert batch.teacher_model_inputs["input_ids"].tolist() == [[T0, T1, T2, T3, C0, C1]]
    assert batch.student_logit_positions.tolist() == [[1, 2]]
    assert batch.teacher_logit_positions.tolist() == [[3, 4]]
    assert batch.completion_ids.tolist() == [[C0, C1]]
    assert batch.response_mask.tolist() == [[True, True]]


def test_left_padded_prompts_and_right_padded_completions(make_rollout, make_context):
    # As generation leaves it: prompts end in one column, completions end anywhere, the buffer is wider than needed.
    rollout = make_rollout([([1], [20, 21, 22]), ([2, 3, 4], [23])], offsets=[2, 0], width=9)
    batch = build(rollout, make_context([[5, 6], [7]], offsets=[1, 2], width=4))
    assert batch.student_logit_positions.tolist() == [[2, 3, 4], [2, 0, 0]]
    assert batch.teacher_logit_positions.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert batch.completion_ids.tolist() == [[20, 21, 22], [23, 99, 99]]
    assert batch.response_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.teacher_model_inputs["input_ids"].tolist() == [[5, 6, 20, 21, 22], [7, 23, 99, 99, 99]]
    assert batch.teacher_model_inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.student_model_inputs["position_ids"].tolist() == [
        [0, 0, 0, 1, 2, 3, 0, 0, 0],
        [0, 1, 2, 3, 0, 0, 0, 0, 0],
    ]
    assert batch.teacher_model_inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]


def test_right_padded_rollout_starts_every_row_at_its_own_prompt(make_rollout, make_context):
    rollout = make_rollout([([1, 2], [20, 21, 22]), ([1, 2, 3, 4, 5], [23, 24])], width=7)
    batch = build(rollout, make_context([[6, 7, 8, 9], [6, 7, 8]], width=11))
    assert batch.student_logit_positions.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch.teacher_logit_positions.tolist() == [[3, 4, 5], [2, 3, 0]]
    assert batch.response_mask.sum() == 5


def test_the_students_inputs_are_the_rollouts_own(make_rollout, make_context):
    rollout = make_rollout([([1], [2, 3])], offsets=[1], width=6)
    batch = build(rollout, make_context([[4]]))
    assert batch.student_model_inputs["input_ids"] is rollout.input_ids
    assert batch.student_model_inputs["attention_mask"] is rollout.attention_mask


def test_with_pad_equal_to_eos_the_eos_is_a_target_on_both_sides(make_context):
    rollout = RolloutBatch(  # prompt [5, 9], completion [7, 9], padded with 9
        input_ids=torch.tensor([[9, 5, 9, 7, 9, 9]]),
        attention_mask=torch.tensor([[0, 1, 1, 1, 1, 0]]),
        response_start_idx=torch.tensor([3]),
    )
    context = TeacherContext(input_ids=torch.tensor([[9, 9, 4, 9]]), attention_mask=torch.tensor([[0, 1, 1, 1]]))
    batch = build(rollout, context, pad=9)
    assert batch.response_mask.tolist() == [[True, True]]
    assert batch.completion_ids.tolist() == [[7, 9]]
    assert batch.teacher_model_inputs["input_ids"].tolist() == [[9, 4, 9, 7, 9]]
    assert batch.teacher_model_inputs["attention_mask"].sum() == 5
    assert batch.student_logit_positions.tolist() == [[2, 3]]
    assert batch.teacher_logit_positions.tolist() == [[2, 3]]


def test_ids_are_kept_as_drawn_and_nothing_is_inserted(make_rollout, make_context):
    # [1, 2] could be re-encoded as [3]; special ids 101 to 103 could be dropped, a BOS added.
    batch = build(make_rollout([([101, 5, 6, 102, 103], [1, 2])]), make_context([[101, 7, 103]]))
    assert batch.completion_ids.tolist() == [[1, 2]]
    assert batch.teacher_model_inputs["input_ids"].tolist() == [[101, 7, 103, 1, 2]]


def test_mixed_empty_and_non_empty_completions(make_rollout, make_context):
    batch = build(make_rollout([([1, 2, 3], []), ([1], [20, 21])], width=4), make_context([[], [5, 6]]))
    assert batch.response_mask.tolist() == [[False, False], [True, True]]
    assert batch.completion_ids.tolist() == [[99, 99], [20, 21]]
    assert batch.student_logit_positions.tolist() == [[0, 0], [0, 1]]
    assert batch.teacher_logit_positions.tolist() == [[0, 0], [1, 2]]
    assert batch.teacher_model_inputs["input_ids"].tolist() == [[99, 99, 99, 99], [5, 6, 20, 21]]
    student = numbered(batch.student_model_inputs["input_ids"], vocab=3)
    teacher = numbered(batch.teacher_model_inputs["input_ids"], vocab=3)
    aligned = batch.align_logits(student, teacher)
    assert all(side.shape == (2, 2, 3) for side in aligned)
    assert all(side[0].abs().sum() == 0 for side in aligned)
    assert aligned[0][1, :, 0].tolist() == [100, 101]
    assert aligned[1][1, :, 0].tolist() == [101, 102]


def test_all_empty_completions_give_no_slot_no_pair_and_a_gradient_path(make_rollout, make_context):
    batch = build(make_rollout([([1, 2], []), ([1], [])], width=4), make_context([[5], []]))
    assert batch.completion_ids.shape == batch.response_mask.shape == (2, 0)
    logits = torch.rand(2, 4, 7, requires_grad=True)
    student, teacher = batch.align_logits(logits, torch.rand(2, 1, 7))
    assert student.shape == teacher.shape == (2, 0, 7)
    student.sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0
    assert [x.shape for x in batch.pairs()] == [(0,)] * 3


def test_rows_without_any_token_are_legal_when_the_completion_is_empty(make_context):
    rollout = RolloutBatch(
        input_ids=torch.full((2, 4), 99),
        attention_mask=torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0]]),
        response_start_idx=torch.tensor([1, 2]),
    )
    batch = build(rollout, make_context([[], [7]], width=3))
    assert batch.response_mask.tolist() == [[False], [True]]
    assert batch.student_model_inputs["position_ids"].tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]


def test_a_context_without_columns_is_legal_when_every_completion_is_empty(make_rollout):
    none = torch.zeros(1, 0, dtype=torch.int64)
    batch = build(make_rollout([([1], [])]), TeacherContext(input_ids=none, attention_mask=none))
    assert batch.teacher_model_inputs["input_ids"].tolist() == [[99]]  # one padding column, so that a model can run
    assert batch.teacher_model_inputs["attention_mask"].tolist() == [[0]]


def test_a_batch_without_rows_has_no_pairs():
    none = torch.zeros(0, 3, dtype=torch.int64)
    rollout = RolloutBatch(input_ids=none, attention_mask=none, response_start_idx=none[:, 0])
    batch = build(rollout, TeacherContext(input_ids=none, attention_mask=none))
    assert batch.completion_ids.shape == (0, 0)
    assert batch.pairs()[0].tolist() == []


@pytest.mark.parametrize("start", [3, 4, 5])
def test_an_empty_completion_may_name_any_boundary_behind_its_prompt(make_context, start):
    rollout = RolloutBatch(
        input_ids=torch.tensor([[1, 2, 3, 99, 99]]),
        attention_mask=torch.tensor([[1, 1, 1, 0, 0]]),
        response_start_idx=torch.tensor([start]),
    )
    assert build(rollout, make_context([[7]])).response_mask.shape == (1, 0)


def test_samples_are_prompt_major_and_each_row_keeps_its_own_prefix(make_rollout, make_context):
    # two prompts, three samples each: sample j of prompt i is row i * 3 + j
    rows = [([i], [10 * i + j]) for i in (1, 2) for j in (0, 1, 2)]
    context = make_context([[51], [52]])
    repeated = TeacherContext(
        input_ids=context.input_ids.repeat_interleave(3, dim=0),
        attention_mask=context.attention_mask.repeat_interleave(3, dim=0),
    )
    batch = build(make_rollout(rows), repeated)
    assert batch.teacher_model_inputs["input_ids"].tolist() == [
        [51, 10],
        [51, 11],
        [51, 12],
        [52, 20],
        [52, 21],
        [52, 22],
    ]


# ------------------------------------------------------------------ pairs


def test_pairs_point_into_the_flattened_positions_of_each_side(make_rollout, make_context):
    rollout = make_rollout([([1, 2], [20, 21, 22]), ([1, 2, 3, 4, 5], [23, 24])], width=7)
    batch = build(rollout, make_context([[6, 7, 8, 9], [6, 7, 8]]))
    student, teacher, targets = batch.pairs()
    assert student.tolist() == [1, 2, 3, 7 + 4, 7 + 5]
    assert teacher.tolist() == [3, 4, 5, 7 + 2, 7 + 3]
    assert targets.tolist() == [20, 21, 22, 23, 24]
    assert batch.student_model_inputs["input_ids"].reshape(-1)[student + 1].equal(targets)
    assert batch.teacher_model_inputs["input_ids"].reshape(-1)[teacher + 1].equal(targets)


def test_an_aligned_batch_carries_row_weight_and_sampler_logprob_of_each_pair(make_rollout, make_context):
    logprobs = torch.tensor([[0.0, 0.0, -0.5, -0.25], [0.0, -2.0, 7.0, 7.0]])
    rollout = make_rollout([([1, 2], [20, 21]), ([1], [22])], width=4, sampler_logprobs=logprobs)
    batch = build(rollout, make_context([[6], [7]]))
    pairs = aligned_batch(
        batch,
        sample_ids=["a", "b"],
        is_sampled=torch.tensor([True, False]),
        weights=torch.tensor([[1.0, 2.0], [3.0, 9.0]], dtype=torch.float64),
        sampler_logprobs=rollout.sampler_logprobs,
    )
    assert pairs.row.tolist() == [0, 0, 1]
    assert pairs.weights.tolist() == [1.0, 2.0, 3.0]
    assert pairs.weights.dtype == torch.float32
    assert pairs.sampler_logprobs is not None
    assert pairs.sampler_logprobs.tolist() == [-0.5, -0.25, -2.0]
    assert pairs.target_ids.tolist() == [20, 21, 22]
    assert pairs.sample_ids == ("a", "b")
    assert pairs.is_sampled.tolist() == [True, False]
    assert pairs.student.pair_index.equal(batch.pairs()[0])
    assert pairs.teacher.model_inputs is batch.teacher_model_inputs


def test_weights_default_to_one_and_may_come_per_pair(make_rollout, make_context):
    batch = build(make_rollout([([1, 2], [20, 21]), ([1], [22])]), make_context([[6], [7]]))
    names = {"sample_ids": ("a", "b"), "is_sampled": torch.tensor([True, True])}
    assert aligned_batch(batch, **names).weights.tolist() == [1.0, 1.0, 1.0]
    assert aligned_batch(batch, **names).sampler_logprobs is None
    assert aligned_batch(batch, weights=torch.tensor([2, 3, 4]), **names).weights.tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.ones(4)}, r"AlignedBatch.weights must have shape \[N\] = \[3\], got \[4\]"),
        ({"weights": torch.ones(2, 3)}, r"weights must have shape \[B, R\] = \[2, 2\], got \[2, 3\]"),
        ({"sampler_logprobs": torch.zeros(2, 3)}, r"sampler_logprobs must have shape \[B, T\] = \[2, 4\]"),
        ({"sample_ids": ("a",)}, "2 rows, 1 names"),
    ],
)
def test_an_aligned_batch_refuses_what_does_not_fit(make_rollout, make_context, change, message):
    batch = build(make_rollout([([1, 2], [20, 21]), ([1], [22])], width=4), make_context([[6], [7]]))
    names = {"sample_ids": ("a", "b"), "is_sampled": torch.tensor([True, True])}
    with pytest.raises(ValueError, match=message):
        aligned_batch(batch, **(names | change))


# ------------------------------------------------------------------ align_logits: gradients and refusals


def ragged(make_rollout, make_context):
    rollout = make_rollout([([1], [20, 21, 22]), ([2, 3, 4], [23])], offsets=[2, 0], width=9)
    return build(rollout, make_context([[5, 6], [7]], offsets=[1, 2], width=4))


def test_the_gradient_is_non_zero_exactly_at_the_students_positions(make_rollout, make_context):
    batch = ragged(make_rollout, make_context)
    student_logits = numbered(batch.student_model_inputs["input_ids"]).requires_grad_()
    teacher_logits = numbered(batch.teacher_model_inputs["input_ids"]).requires_grad_()
    student, teacher = batch.align_logits(student_logits, teacher_logits)
    ((student - teacher + 1000) ** 2).sum().backward()
    assert student_logits.grad is not None
    expected = torch.zeros(2, 9, dtype=torch.bool)
    expected[0, 2:5] = expected[1, 2] = True
    assert (student_logits.grad != 0).all(-1).equal(expected)
    assert (student_logits.grad != 0).any(-1).equal(expected)
    assert teacher_logits.grad is None


def test_nan_in_padding_prompt_and_prefix_reaches_neither_value_nor_gradient(make_rollout, make_context):
    batch = ragged(make_rollout, make_context)
    student_logits = torch.full((2, 9, 3), float("nan"))
    teacher_logits = torch.full((2, 5, 3), float("nan"))
    student_logits[0, 2:5] = student_logits[1, 2] = 1.0
    teacher_logits[0, 1:4] = teacher_logits[1, 0] = 2.0
    student_logits.requires_grad_()
    student, teacher = batch.align_logits(student_logits, teacher_logits)
    assert student.sum() == 4 * 3
    assert teacher.sum() == 4 * 3 * 2
    (student * teacher).sum().backward()
    assert student_logits.grad is not None
    assert student_logits.grad.sum() == 4 * 3 * 2
    assert student_logits.grad.isfinite().all()


def test_each_side_keeps_its_dtype(make_rollout, make_context):
    batch = ragged(make_rollout, make_context)
    student, teacher = batch.align_logits(torch.zeros(2, 9, 3).bfloat16(), torch.zeros(2, 5, 3).double())
    assert (student.dtype, teacher.dtype) == (torch.bfloat16, torch.float64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"student": torch.zeros(9, 3)}, ValueError, r"student_logits must be 3-D.*\[9, 3\]"),
        ({"teacher": torch.zeros(2, 5, 3).long()}, TypeError, r"teacher_logits must be floating.*int64"),
        (
            {"student": torch.zeros(2, 8, 3)},
            ValueError,
            r"student_logits.*\[2, 8\].*\[2, 9\].*neither shifted nor cut",
        ),
        ({"teacher": torch.zeros(1, 5, 3)}, ValueError, r"teacher_logits.*\[1, 5\].*\[2, 5\]"),
        ({"student": torch.zeros(2, 9, 3, device="meta")}, ValueError, r"student_logits is on meta.*is on cpu"),
        ({"teacher": torch.zeros(2, 5, 3, device="meta")}, ValueError, r"teacher_logits is on meta.*is on cpu"),
        (
            {"teacher": torch.zeros(2, 5, 4)},
            ValueError,
            r"3 ids and teacher_logits 4.*real ids.*\[\.\.\., :num_real_ids\]",
        ),
    ],
)
def test_logits_that_are_not_this_batchs_are_refused(make_rollout, make_context, change, error, message):
    batch = ragged(make_rollout, make_context)
    logits = {"student": torch.zeros(2, 9, 3), "teacher": torch.zeros(2, 5, 3)}
    batch.align_logits(*logits.values())
    with pytest.raises(error, match=message):
        batch.align_logits(*(logits | change).values())


def test_swapped_outputs_are_caught_and_named(make_rollout, make_context):
    batch = ragged(make_rollout, make_context)
    with pytest.raises(AlignmentError, match=r"student_logits.*\[2, 5\].*\[2, 9\].*swapped"):
        batch.align_logits(torch.zeros(2, 5, 3), torch.zeros(2, 9, 3))


# ------------------------------------------------------------------ the builder's refusals


def two_rows(**changes) -> dict[str, torch.Tensor]:
    """Row 0 is right-padded, row 1 left-padded; both have a prompt of 2 and a completion of 2."""
    fields = {
        "input_ids": torch.tensor([[1, 2, 20, 21, 99], [99, 3, 4, 22, 23]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]),
        "response_start_idx": torch.tensor([2, 3]),
    }
    return fields | changes


def context_fields(**changes) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[5, 99], [99, 6]]), "attention_mask": torch.tensor([[1, 0], [0, 1]])} | changes


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        (
            "attention_mask",
            torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1]]),
            ValueError,
            r"row 1: 4 attended.*1 unatt",
        ),
        ("attention_mask", torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1]]), ValueError, r"row 0.*between prompt and"),
        ("attention_mask", torch.tensor([[1, 1, 1, 2, 0], [0, 1, 1, 1, 1]]), ValueError, r"row 0: found the value 2"),
        (
            "attention_mask",
            torch.tensor([[1, 1, 1, 1, 0], [0, 1, -1, 1, 1]]),
            ValueError,
            r"row 1: found the value -1",
        ),
        ("attention_mask", torch.ones(2, 5), TypeError, r"rollout.attention_mask must be bool.*float32"),
        ("attention_mask", torch.ones(2, 5).half(), TypeError, r"rollout.attention_mask must be bool.*float16"),
        ("input_ids", torch.ones(2, 5), TypeError, r"rollout.input_ids must be int64 or int32, got torch.float32"),
        ("input_ids", torch.ones(2, 5).bool(), TypeError, r"rollout.input_ids.*bool"),
        ("response_start_idx", torch.tensor([2.0, 3.0]), TypeError, r"rollout.response_start_idx.*float32"),
        ("response_start_idx", torch.tensor([2, 0]), ValueError, r"row 1: 0 is outside \[1, 5\]"),
        ("response_start_idx", torch.tensor([6, 3]), ValueError, r"row 0: 6 is outside \[1, 5\].*empty"),
        ("response_start_idx", torch.tensor([-1, 3]), ValueError, r"row 0: -1 is outside"),
        (
            "response_start_idx",
            torch.tensor([2, 1]),
            ValueError,
            r"row 1: 4 completion tokens, but no attended prompt",
        ),
        ("input_ids", torch.ones(2, 5, device="meta").long(), ValueError, r"rollout.input_ids is on the meta device"),
        (
            "attention_mask",
            torch.ones(2, 5, device="meta").long(),
            ValueError,
            r"attention_mask is on the meta device",
        ),
    ],
)
def test_a_rollout_that_cannot_be_aligned_is_refused(field, value, error, message):
    context = TeacherContext(**context_fields())
    build(RolloutBatch(**two_rows()), context)
    with pytest.raises(error, match=message):
        build(RolloutBatch(**two_rows(**{field: value})), context)


def test_a_boundary_in_the_padding_before_the_row_is_no_prompt():
    fields = two_rows(
        attention_mask=torch.tensor([[1, 1, 1, 1, 0], [0, 0, 0, 1, 1]]), response_start_idx=torch.tensor([2, 1])
    )
    with pytest.raises(ValueError, match=r"row 1: 2 completion tokens, but no attended prompt token before column 1"):
        build(RolloutBatch(**fields), TeacherContext(**context_fields()))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 1], [0, 0]])}, ValueError, r"teacher_context, row 1.*completion has 2"),
        ({"attention_mask": torch.tensor([[1, 1], [0, 3]])}, ValueError, r"teacher_context.attention_mask, row 1.*3"),
        ({"attention_mask": torch.ones(2, 2)}, TypeError, r"teacher_context.attention_mask.*float32"),
        ({"input_ids": torch.ones(2, 2)}, TypeError, r"teacher_context.input_ids.*float32"),
        ({"input_ids": torch.ones(2, 2).int()}, TypeError, r"rollout.input_ids is torch.int64.*torch.int32"),
        (
            {"input_ids": torch.ones(2, 2, device="meta").long()},
            ValueError,
            r"teacher_context.input_ids is on the meta",
        ),
    ],
)
def test_a_context_that_cannot_be_aligned_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        build(RolloutBatch(**two_rows()), TeacherContext(**context_fields(**changes)))


def test_a_hole_in_the_context_is_refused():
    context = TeacherContext(
        input_ids=torch.tensor([[5, 6, 7], [5, 6, 7]]), attention_mask=torch.tensor([[1, 1, 1], [1, 0, 1]])
    )
    with pytest.raises(ValueError, match=r"teacher_context.attention_mask, row 1: 2 attended.*columns 0 and 2"):
        build(RolloutBatch(**two_rows()), context)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_context_with_another_number_of_rows_is_never_broadcast(rows):
    context = TeacherContext(
        input_ids=torch.ones(rows, 2, dtype=torch.int64), attention_mask=torch.ones(rows, 2, dtype=torch.int64)
    )
    with pytest.raises(ValueError, match=rf"teacher_context has {rows} rows.*has 2.*i \* n \+ j.*repeat_interleave"):
        build(RolloutBatch(**two_rows()), context)


@pytest.mark.parametrize(
    ("pad", "error"), [(None, TypeError), (True, TypeError), (1.0, TypeError), ("<pad>", TypeError), (-1, ValueError)]
)
def test_a_pad_id_that_is_no_token_id_is_refused(pad, error):
    with pytest.raises(error, match=r"pad_token_id must be"):
        build(RolloutBatch(**two_rows()), TeacherContext(**context_fields()), pad=pad)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.int64])
def test_every_supported_dtype_gives_the_same_batch(id_dtype, mask_dtype):
    def cast(fields):
        return {k: v.to(mask_dtype if k == "attention_mask" else id_dtype) for k, v in fields.items()}

    batch = build(RolloutBatch(**cast(two_rows())), TeacherContext(**cast(context_fields())))
    assert batch.completion_ids.tolist() == [[20, 21], [22, 23]]
    assert batch.teacher_model_inputs["input_ids"].tolist() == [[5, 20, 21], [6, 22, 23]]
    assert batch.teacher_model_inputs["input_ids"].dtype == id_dtype
    assert batch.teacher_model_inputs["attention_mask"].dtype == mask_dtype
    assert batch.student_logit_positions.tolist() == [[1, 2], [2, 3]]
    assert batch.student_model_inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0], [0, 0, 1, 2, 3]]


def test_nothing_that_was_given_is_changed():
    rollout, context = RolloutBatch(**two_rows()), TeacherContext(**context_fields())
    batch = build(rollout, context)
    for value in (*batch.teacher_model_inputs.values(), batch.completion_ids, batch.student_logit_positions):
        value.zero_()
    batch.student_model_inputs["position_ids"].zero_()
    for given, wanted in ((rollout, two_rows()), (context, context_fields())):
        assert all(getattr(given, name).equal(value) for name, value in wanted.items())


def test_batches_are_frozen():
    rollout = RolloutBatch(**two_rows())
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollout.input_ids = rollout.input_ids  # pyright: ignore[reportAttributeAccessIssue]
