# SPDX-License-Identifier: Apache-2.0
"""Batches are refused at birth when their fields do not fit each other."""

import dataclasses

import pytest
import torch

from cohobate.align import (
    AlignedBatch,
    AlignedSide,
    RolloutBatch,
    RolloutRequest,
    SamplingConfig,
    TeacherContext,
    TeacherSide,
    align_bytes,
)


def test_a_rollout_whose_mask_has_another_width_is_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"RolloutBatch.attention_mask must have shape \[B, T\] = \[2, 5\].*\[2, 4\]"):
        RolloutBatch(
            input_ids=torch.zeros(2, 5, dtype=torch.int64),
            attention_mask=torch.ones(2, 4, dtype=torch.int64),
            response_start_idx=torch.tensor([2, 2]),
        )


def test_a_rollout_with_one_boundary_for_all_rows_is_refused():
    with pytest.raises(ValueError, match=r"response_start_idx must have shape \[B\] = \[2\], got \[1\]"):
        RolloutBatch(
            input_ids=torch.zeros(2, 5, dtype=torch.int64),
            attention_mask=torch.ones(2, 5, dtype=torch.int64),
            response_start_idx=torch.tensor([2]),
        )


def test_sampler_logprobs_cover_every_column_of_the_rollout():
    with pytest.raises(ValueError, match=r"sampler_logprobs must have shape \[B, T\] = \[1, 5\], got \[1, 3\]"):
        RolloutBatch(
            input_ids=torch.zeros(1, 5, dtype=torch.int64),
            attention_mask=torch.ones(1, 5, dtype=torch.int64),
            response_start_idx=torch.tensor([2]),
            sampler_logprobs=torch.zeros(1, 3),
        )


def test_a_list_in_place_of_a_tensor_is_named():
    with pytest.raises(TypeError, match=r"RolloutRequest.prompt_ids must be a tensor \[B, Tp\], got list"):
        RolloutRequest(prompt_ids=[[1, 2]], prompt_attention_mask=torch.ones(1, 2))  # pyright: ignore[reportArgumentType]


def test_a_flat_teacher_context_is_refused():
    with pytest.raises(ValueError, match=r"TeacherContext.input_ids must have shape \[B, P\].*got \[3\]"):
        TeacherContext(input_ids=torch.tensor([1, 2, 3]), attention_mask=torch.tensor([1, 1, 1]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 1.1),
        ("n_samples_per_prompt", 0),
    ],
)
def test_a_sampling_setting_out_of_range_is_named_with_its_range(field, value):
    with pytest.raises(ValueError, match=rf"SamplingConfig\.{field} must be .*, got {value}"):
        SamplingConfig(**{field: value})


def test_greedy_sampling_and_the_ends_of_every_range_are_legal():
    config = SamplingConfig(max_new_tokens=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, n_samples_per_prompt=1)
    assert config.temperature == 0.0


def aligned(num_pairs=3, rows=2, **changes) -> AlignedBatch:
    inputs = {"input_ids": torch.zeros(rows, 4, dtype=torch.int64)}
    side = AlignedSide(model_inputs=inputs, pair_index=torch.arange(num_pairs))
    fields = {
        "student": side,
        "teacher": side,
        "target_ids": torch.arange(num_pairs),
        "weights": torch.ones(num_pairs),
        "row": torch.zeros(num_pairs, dtype=torch.int64),
        "is_sampled": torch.ones(rows, dtype=torch.bool),
        "sample_ids": tuple(f"row-{i}" for i in range(rows)),
    }
    return AlignedBatch(**(fields | changes))


def test_an_aligned_batch_counts_its_pairs_and_rows():
    batch = aligned(num_pairs=3, rows=2)
    assert (batch.num_pairs, batch.num_rows) == (3, 2)


@pytest.mark.parametrize("field", ["weights", "row", "sampler_logprobs", "target_ids"])
def test_an_aligned_batch_with_a_field_of_another_length_is_refused(field):
    with pytest.raises(ValueError, match=r"must have shape \[N\]"):
        aligned(**{field: torch.ones(4)})


def teacher_side(num_pairs=4, chunks=None) -> TeacherSide:
    ids = torch.arange(num_pairs)
    return TeacherSide(
        model_inputs={"input_ids": ids[None]}, pair_index=ids, target_ids=ids, row=ids * 0, chunks=chunks
    )


def test_only_teachers_with_chunks_may_have_another_number_of_predictions():
    with pytest.raises(ValueError, match=r"teacher.pair_index must have shape \[N\] = \[3\], got \[4\]"):
        aligned(teacher=teacher_side())
    with pytest.raises(ValueError, match=r"teachers\[0\] has no chunks, .* it has 4 and the student 3"):
        aligned(teacher=teacher_side(), teachers=(teacher_side(),))
    some = dataclasses.replace(teacher_side(2), rows=(0,))
    with pytest.raises(ValueError, match=r"it has 2 and the student 1 in rows \[0\]"):
        aligned(row=torch.tensor([0, 1, 1]), teachers=(some,))
    chunked = teacher_side(chunks=align_bytes([b"a", b"b", b"c"], [b"a", b"b", b"", b"c"]))
    assert aligned(teacher=chunked, teachers=(chunked,)).num_pairs == 3


def test_each_of_several_teachers_is_given_its_own_side():
    sides = (teacher_side(3), teacher_side(3))
    batch = aligned(teachers=sides)
    assert batch.for_teacher(1).teacher is sides[1]
    assert batch.for_teacher(1).teachers == sides


def test_every_row_of_an_aligned_batch_has_a_name():
    with pytest.raises(ValueError, match="2 rows, 1 names"):
        aligned(sample_ids=("only",))


def test_moving_an_aligned_batch_moves_every_tensor_and_keeps_the_rest():
    batch = aligned(sampler_logprobs=torch.zeros(3), teachers=(teacher_side(3),))
    moved = batch.to("meta")
    tensors = [moved.student.pair_index, moved.teacher.pair_index, moved.student.model_inputs["input_ids"]]
    tensors += [v for f in dataclasses.fields(moved) if isinstance(v := getattr(moved, f.name), torch.Tensor)]
    tensors += [moved.teachers[0].pair_index, moved.teachers[0].target_ids, moved.teachers[0].row]
    tensors += moved.teachers[0].model_inputs.values()
    assert len(tensors) == 3 + 5 + 4
    assert all(t.device.type == "meta" for t in tensors)
    assert moved.sample_ids == batch.sample_ids
