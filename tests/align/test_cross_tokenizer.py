# SPDX-License-Identifier: Apache-2.0
"""What teachers read of single rows, put behind each other: predictions and chunks are numbered through the batch."""

import random
from typing import Any

import pytest
import torch

from cohobate.align import aligned_batch, build_opsd_training_batch
from cohobate.align.agreement import chunks_of, no_chunks, ranges_of
from cohobate.align.cross_tokenizer import TeacherTokens, empty_side, unaligned, with_teachers
from cohobate.align.rollout import AlignedBatch, TeacherSide

# (student's prompt, its completion), what the teacher reads, tokens of its prompt, chunks over completions
ROWS = [
    (([11, 12], [13, 14, 15]), [21, 22, 23, 24], 2, [(0, 2, 0, 1), (2, 3, 1, 2)]),
    (([16], []), [25], 1, []),
    (([17], [18, 19]), [26, 27, 28, 29, 30, 31], 3, [(0, 1, 0, 3)]),
    (([11], [12]), [32], 1, []),  # nothing of it could be aligned
]


def tokens(ids: list[int], num_prompt: int, ranges: list[tuple[int, ...]]) -> TeacherTokens:
    chunks = chunks_of(torch.tensor(ranges).reshape(-1, 4).numpy())
    return TeacherTokens(ids=tuple(ids), num_prompt=num_prompt, chunks=chunks)


def batch_of(rows: list[Any], make_rollout: Any, make_context: Any, **layout: Any) -> AlignedBatch:
    student = make_rollout([row[0] for row in rows], **layout)
    context = make_context([row[0][0] for row in rows])
    built = build_opsd_training_batch(rollout=student, teacher_context=context, pad_token_id=0)
    return aligned_batch(
        built, sample_ids=tuple(str(ROWS.index(row)) for row in rows), is_sampled=torch.ones(len(rows)).bool()
    )


def joined(rows: list[Any], make_rollout: Any, make_context: Any, **layout: Any) -> AlignedBatch:
    base = batch_of(rows, make_rollout, make_context, **layout)
    read = [tokens(ids, num_prompt, ranges) for _, ids, num_prompt, ranges in rows]
    return with_teachers(base, [read, None], pad_token_ids=[7, 0])


def said_by_row(batch: AlignedBatch, side: TeacherSide) -> dict[str, Any]:
    """By row: what is read, what predicts what, and the tokens of each chunk on both sides."""
    ids, mask = side.model_inputs["input_ids"], side.model_inputs["attention_mask"].bool()
    flat = ids.flatten().tolist()
    found: dict[str, Any] = {
        name: {"read": ids[r][mask[r]].tolist(), "pairs": [], "chunks": []} for r, name in enumerate(batch.sample_ids)
    }
    for index, target, row in zip(side.pair_index.tolist(), side.target_ids.tolist(), side.row.tolist(), strict=True):
        assert index // ids.shape[1] == row
        assert flat[index + 1] == target
        assert mask.flatten()[index : index + 2].all()
        found[batch.sample_ids[row]]["pairs"].append((flat[index], target))
    for a, b, c, d in side.chunks or ():
        rows = {*batch.row[a:b].tolist(), *side.row[c:d].tolist()}
        assert len(rows) == 1, "a chunk spans two rows"
        here = (batch.target_ids[a:b].tolist(), side.target_ids[c:d].tolist())
        found[batch.sample_ids[rows.pop()]]["chunks"].append(here)
    return found


def wanted_by_row() -> dict[str, Any]:
    """From the rows as written, by plain lists."""
    return {
        str(number): {
            "read": ids,
            "pairs": list(zip(ids[num_prompt - 1 :], ids[num_prompt:], strict=False)),
            "chunks": [(completion[a:b], ids[num_prompt + c : num_prompt + d]) for a, b, c, d in ranges],
        }
        for number, ((_, completion), ids, num_prompt, ranges) in enumerate(ROWS)
    }


@pytest.mark.parametrize("offsets", [None, [0, 3, 2, 1]])
def test_every_row_keeps_its_tokens_predictions_and_chunks(
    offsets: list[int] | None, make_rollout: Any, make_context: Any
) -> None:
    batch = joined(ROWS, make_rollout, make_context, offsets=offsets, width=9)
    assert said_by_row(batch, batch.teachers[0]) == wanted_by_row()
    assert batch.teacher is batch.teachers[0]


@pytest.mark.parametrize("seed", range(6))
def test_neither_the_order_nor_the_company_of_rows_changes_them(
    seed: int, make_rollout: Any, make_context: Any
) -> None:
    shuffled = random.Random(seed).sample(ROWS, k=1 + seed % len(ROWS))
    batch = joined(shuffled, make_rollout, make_context)
    wanted = wanted_by_row()
    assert said_by_row(batch, batch.teachers[0]) == {name: wanted[name] for name in batch.sample_ids}


def test_a_teacher_with_the_students_tokenizer_stands_beside_it(make_rollout: Any, make_context: Any) -> None:
    batch, base = joined(ROWS, make_rollout, make_context), batch_of(ROWS, make_rollout, make_context)
    side = batch.teachers[1]
    assert side.chunks is None
    assert torch.equal(side.pair_index, base.teacher.pair_index)
    assert torch.equal(side.target_ids, base.target_ids)
    assert torch.equal(side.row, base.row)
    assert side.model_inputs is not batch.teachers[0].model_inputs
    assert torch.equal(batch.target_ids, base.target_ids)  # the student's own pairs stay, chunks or not


def test_rows_are_padded_on_the_right_with_the_teachers_own_id(make_rollout: Any, make_context: Any) -> None:
    inputs = joined(ROWS, make_rollout, make_context).teachers[0].model_inputs
    assert inputs["input_ids"][0].tolist() == [21, 22, 23, 24, 7, 7]
    assert inputs["attention_mask"][0].tolist() == [1, 1, 1, 1, 0, 0]
    assert inputs["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 0]


def test_what_stands_in_no_chunk_is_counted_row_by_row(make_rollout: Any, make_context: Any) -> None:
    batch = joined(ROWS, make_rollout, make_context)
    ((rows, pairs, outside, chunks),) = unaligned(batch)  # of the one teacher with its own tokenizer
    assert rows.tolist() == [0, 1, 2, 3]
    assert pairs.tolist() == torch.bincount(batch.row, minlength=4).tolist()
    assert outside.tolist() == [0, 0, 1, 1]
    assert chunks.tolist() == [2, 0, 1, 0]


def test_a_side_moves_with_its_batch_and_an_empty_one_has_one_token(make_rollout: Any, make_context: Any) -> None:
    batch = joined(ROWS, make_rollout, make_context).to("meta")
    assert batch.teachers[0].pair_index.device.type == "meta"
    assert batch.teachers[0].chunks is not None
    for same in (True, False):
        side = empty_side(5, same_tokenizer=same)
        assert side.model_inputs["input_ids"].tolist() == [[5]]
        assert side.pair_index.numel() == side.target_ids.numel() == side.row.numel() == 0
        assert (side.chunks is None) == same


@pytest.mark.parametrize("num_prompt", [0, 3])
def test_a_row_that_predicts_its_first_token_is_refused(num_prompt: int) -> None:
    with pytest.raises(ValueError, match="at least one token that is only read"):
        TeacherTokens(ids=(1, 2), num_prompt=num_prompt, chunks=no_chunks())


def test_ranges_and_chunks_are_one_thing_in_two_forms() -> None:
    ranges = torch.randint(0, 99, (5, 4), generator=torch.Generator().manual_seed(0)).numpy()
    assert ranges_of(chunks_of(ranges)).tolist() == ranges.tolist()
    assert [list(chunk) for chunk in chunks_of(ranges)] == ranges.tolist()
