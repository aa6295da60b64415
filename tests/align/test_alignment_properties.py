# SPDX-License-Identifier: Apache-2.0
"""Alignment over 12,500 drawn geometries: neighbours and padding never change a row, no token is lost or doubled.

Only lengths and paddings are drawn. Ids are consecutive numbers, so every token of a batch is unique and a lost,
doubled or misplaced one cannot hide; logits are whole numbers, so every comparison is exact. Oracles are lists.
"""

from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from cohobate.align import (
    ResponseTokenBatch,
    RolloutBatch,
    align_rollout_logits,
    build_opsd_training_batch,
    concat_rollouts,
    select_rows,
)
from cohobate.errors import AlignmentError

PAD = 7  # also the id of a real token: the first that is handed out
VOCAB = 2


class Row(NamedTuple):
    """Numbers of tokens and of padding columns of one row on both sides."""

    prompt: int
    completion: int
    prefix: int
    left: int
    right: int
    prefix_left: int
    prefix_right: int


small = st.integers(0, 3)
row_strategy = st.builds(Row, st.integers(1, 4), small, st.integers(1, 4), small, small, small, small)
rows_strategy = st.lists(row_strategy, min_size=1, max_size=4)


def cases(count: int):
    return settings(max_examples=count, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def tokens(rows: list[Row]) -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, completion, prefix) of every row; every id is used once."""
    following = iter(range(PAD, 10_000))
    return [
        tuple([next(following) for _ in range(length)] for length in (row.prompt, row.completion, row.prefix))
        for row in rows
    ]  # pyright: ignore[reportReturnType]


def both_sides(make_rollout, make_context, rows: list[Row], pad: int = PAD, **fields):
    written = tokens(rows)
    rollout = make_rollout(
        [(prompt, completion) for prompt, completion, _ in written],
        offsets=[row.left for row in rows],
        width=max(row.left + row.prompt + row.completion + row.right for row in rows),
        pad=pad,
        **fields,
    )
    context = make_context(
        [prefix for _, _, prefix in written],
        offsets=[row.prefix_left for row in rows],
        width=max(row.prefix_left + row.prefix + row.prefix_right for row in rows),
        pad=pad,
    )
    return written, rollout, context


def logits_of(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a causal model might say: here the sum of the attended ids so far, and the last id; NaN on padding."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    said = torch.stack([(ids * mask).cumsum(1), ids], dim=-1).double()
    return said.masked_fill(mask[..., None] == 0, float("nan"))


@cases(3500)
@given(rows=rows_strategy)
def test_no_token_is_lost_or_doubled_and_both_sides_predict_it_from_the_place_before(make_rollout, make_context, rows):
    written, rollout, context = both_sides(make_rollout, make_context, rows)
    batch = build_opsd_training_batch(rollout=rollout, teacher_context=context, pad_token_id=PAD)
    event(f"{sum(row.completion == 0 for row in rows)} empty of {len(rows)}")

    # every token of every completion stands once, in order, in its own row; R is the longest completion
    assert batch.completion_ids.shape[1] == max(row.completion for row in rows)
    kept = [ids[mask].tolist() for ids, mask in zip(batch.completion_ids, batch.response_mask, strict=True)]
    assert kept == [completion for _, completion, _ in written]

    # the teacher's row is prefix + completion, right-padded, positions counted from 0
    teacher = batch.teacher_model_inputs
    for row, (_, completion, prefix) in enumerate(written):
        length = len(prefix) + len(completion)
        padding = teacher["input_ids"].shape[1] - length
        assert teacher["input_ids"][row].tolist() == prefix + completion + [PAD] * padding
        assert teacher["attention_mask"][row].tolist() == [1] * length + [0] * padding
        assert teacher["position_ids"][row].tolist() == list(range(length)) + [0] * padding

    # what stands one column after a predicting position is the token that it predicts, on both sides
    for positions, inputs in (
        (batch.student_logit_positions, batch.student_model_inputs),
        (batch.teacher_logit_positions, teacher),
    ):
        for row, (places, mask) in enumerate(zip(positions.tolist(), batch.response_mask.tolist(), strict=True)):
            ids = inputs["input_ids"][row].tolist()
            assert [ids[place + 1] for place, keep in zip(places, mask, strict=True) if keep] == written[row][1]
            assert all(place == 0 for place, keep in zip(places, mask, strict=True) if not keep)

    # the flat form says the same
    student_index, teacher_index, targets = batch.pairs()
    assert targets.tolist() == [token for _, completion, _ in written for token in completion]
    assert rollout.input_ids.reshape(-1)[student_index + 1].equal(targets)
    assert teacher["input_ids"].reshape(-1)[teacher_index + 1].equal(targets)


@cases(2500)
@given(rows=rows_strategy, chosen=st.integers(0, 3), bare=st.booleans())
def test_neighbours_and_padding_never_change_a_row(make_rollout, make_context, rows, chosen, bare):
    _, rollout, context = both_sides(make_rollout, make_context, rows)
    batch = build_opsd_training_batch(rollout=rollout, teacher_context=context, pad_token_id=PAD)
    student, teacher = batch.align_logits(logits_of(batch.student_model_inputs), logits_of(batch.teacher_model_inputs))
    assert student.isfinite().all()
    assert teacher.isfinite().all()

    row = chosen % len(rows)
    prompt, completion, prefix = tokens(rows)[row]
    alone = rows[row]
    shift = 0 if bare else 1
    rollout_alone = make_rollout([(prompt, completion)], offsets=[shift * alone.right])
    context_alone = make_context([prefix], offsets=[shift * alone.prefix_right])
    one = build_opsd_training_batch(rollout=rollout_alone, teacher_context=context_alone, pad_token_id=PAD)
    student_alone, teacher_alone = one.align_logits(
        logits_of(one.student_model_inputs), logits_of(one.teacher_model_inputs)
    )
    length = alone.completion
    assert student[row, :length].equal(student_alone[0])
    assert teacher[row, :length].equal(teacher_alone[0])
    assert not student[row, length:].any()
    assert not teacher[row, length:].any()
    # and the numbers themselves, from the lists: the last id before each target, and the sum of all ids before it
    assert student[row, :length, 1].tolist() == (prompt + completion)[alone.prompt - 1 : -1][:length]
    assert teacher[row, :length, 1].tolist() == (prefix + completion)[alone.prefix - 1 : -1][:length]
    assert student[row, :length, 0].tolist() == [sum(prompt + completion[:j]) for j in range(length)]
    assert teacher[row, :length, 0].tolist() == [sum(prefix + completion[:j]) for j in range(length)]


@cases(2500)
@given(rows=rows_strategy, more=small)
def test_right_padded_logits_give_each_row_what_it_gives_alone(rows, more):
    """`align_rollout_logits` against a slice of every row; each entry is unique, so no slot can hold another's."""
    responses = [row.completion for row in rows]
    sides = []
    for prompts in ([row.prompt for row in rows], [row.prefix for row in rows]):
        width = max(p + r for p, r in zip(prompts, responses, strict=True)) + more
        sides.append((prompts, torch.arange(1.0, len(rows) * width * VOCAB + 1).reshape(len(rows), width, VOCAB)))
    (student_prompts, student_logits), (teacher_prompts, teacher_logits) = sides
    student, teacher, mask = align_rollout_logits(
        student_logits, teacher_logits, student_prompts, teacher_prompts, responses
    )
    assert mask.tolist() == [[j < r for j in range(max(responses))] for r in responses]
    for aligned, logits, prompts in (
        (student, student_logits, student_prompts),
        (teacher, teacher_logits, teacher_prompts),
    ):
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            assert aligned[row, :response].tolist() == logits[row].tolist()[prompt - 1 : prompt - 1 + response]
            assert not aligned[row, response:].any()


@cases(1500)
@given(rows=rows_strategy)
def test_one_models_targets_are_the_next_inputs_and_agree_with_the_two_sided_form(make_rollout, make_context, rows):
    written, rollout, context = both_sides(make_rollout, make_context, rows)
    one_sided = ResponseTokenBatch.from_rollout(rollout)
    ids, targets = rollout.input_ids.tolist(), one_sided.target_ids.tolist()
    assert targets == [row[1:] for row in ids]
    kept = [t[m].tolist() for t, m in zip(one_sided.target_ids, one_sided.response_mask, strict=True)]
    assert kept == [completion for _, completion, _ in written]

    two_sided = build_opsd_training_batch(rollout=rollout, teacher_context=context, pad_token_id=PAD)
    logits = logits_of(two_sided.student_model_inputs)
    student, _ = two_sided.align_logits(logits, logits_of(two_sided.teacher_model_inputs))
    causal = one_sided.select_causal_logits(logits)
    assert causal[one_sided.response_mask].equal(student[two_sided.response_mask])


@cases(1000)
@given(rows=rows_strategy, parts=st.lists(st.integers(0, 2), min_size=4, max_size=4), pad=st.sampled_from([0, PAD]))
def test_cutting_and_joining_keep_every_token_with_its_logprob(make_rollout, make_context, rows, parts, pad):
    written, rollout, _ = both_sides(make_rollout, make_context, rows)
    rollout = RolloutBatch(
        input_ids=rollout.input_ids,
        attention_mask=rollout.attention_mask,
        response_start_idx=rollout.response_start_idx,
        sampler_logprobs=-rollout.input_ids.float(),  # a token's log-prob names the token
    )
    groups = [[r for r in range(len(rows)) if parts[r] == part] for part in range(3)]
    groups = [group for group in groups if group]
    order = [r for group in groups for r in group]
    cut = [select_rows(rollout, group) for group in groups]
    assert all(c.attention_mask.any(0)[[0, -1]].all() for c in cut)  # no column of padding is left outside

    joined = concat_rollouts(cut, pad_token_id=pad)
    targets = ResponseTokenBatch.from_rollout(joined)
    assert joined.sampler_logprobs is not None
    for place, r in enumerate(order):
        prompt, completion, _ = written[r]
        attended = joined.attention_mask[place] != 0
        assert joined.input_ids[place][attended].tolist() == prompt + completion
        assert joined.sampler_logprobs[place][attended].tolist() == [-float(t) for t in prompt + completion]
        assert targets.target_ids[place][targets.response_mask[place]].tolist() == completion


@cases(1500)
@given(
    masks=st.integers(1, 5).flatmap(
        lambda width: st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=1, max_size=2)
    ),
    starts=st.lists(st.integers(0, 6), min_size=2, max_size=2),
)
def test_exactly_the_legal_masks_and_boundaries_are_accepted(masks, starts):
    width, starts = len(masks[0]), starts[: len(masks)]

    def legal(mask: list[int], start: int) -> bool:
        attended = [column for column, value in enumerate(mask) if value]
        in_one_piece = not attended or attended == list(range(attended[0], attended[-1] + 1))
        predicted = not any(column >= start for column in attended) or any(column < start for column in attended)
        return 1 <= start <= width and in_one_piece and predicted

    bad = [row for row, (mask, start) in enumerate(zip(masks, starts, strict=True)) if not legal(mask, start)]
    event("refused" if bad else "accepted")
    rollout = RolloutBatch(
        input_ids=torch.arange(len(masks) * width).reshape(len(masks), width),
        attention_mask=torch.tensor(masks),
        response_start_idx=torch.tensor(starts),
    )
    if not bad:
        kept = ResponseTokenBatch.from_rollout(rollout).response_mask
        wanted = [[bool(m) and c >= s for c, m in enumerate(mask)][1:] for mask, s in zip(masks, starts, strict=True)]
        assert kept.tolist() == wanted
        return
    with pytest.raises(AlignmentError) as refusal:
        ResponseTokenBatch.from_rollout(rollout)
    assert any(f"row {row}" in str(refusal.value) for row in bad)
