# SPDX-License-Identifier: Apache-2.0
"""A step as every side reads it: widths, micro-batches and what a rank without rows runs."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tiny
import tiny_bpe
from cohobate.align import AlignedBatch, SamplingConfig, TeacherText
from cohobate.data import PrivilegedConfig, PromptEncoder, PromptRow, rollout_request
from cohobate.data.privileged import CompletionView
from cohobate.errors import DataError
from cohobate.teachers.packing import packed_side
from cohobate.trainer import resolve
from cohobate.trainer.aligners import Aligner, aligner_of
from cohobate.trainer.metrics import MetricSums, add_alignment_metrics
from cohobate.trainer.rolled_out import RolledOut
from cohobate.trainer.step import StepAssembler

STUDENT, TEACHER = tiny_bpe.student_tokenizer(), tiny_bpe.teacher_tokenizer()
EOS = STUDENT.eos_token_id
ROWS = [{"prompt": f"{i}+{i * 120}=", "hint": "abc"} for i in range(6)]
ANSWERS = ["120", "12 34", "", "bcab=5", "2", "+1120"]


class Says:
    """A teacher that says which text it reads, and scores nothing."""

    def __init__(self, *texts: TeacherText | None) -> None:
        self.texts = texts


OWN = TeacherText(tokenizer=TEACHER)


def made(*texts: TeacherText | None, privileged: PrivilegedConfig | None = None) -> Aligner:
    teacher = Says(*texts) if texts else None
    return aligner_of(teacher, STUDENT, privileged=privileged, eos_token_ids=[EOS], pad_token_id=0)


def prompts(rows: Sequence[dict[str, Any]] = ROWS) -> list[PromptRow]:
    encoder = PromptEncoder(STUDENT)
    return [encoder(row, i) for i, row in enumerate(rows)]


def rolled(order: Sequence[int] = range(6)) -> RolledOut:
    """Every row with its answer, which ends with EOS unless it is empty."""
    rows = [prompts()[i] for i in order]
    answers = {prompts()[i].prompt_ids: answer_ids(i) for i in order}
    rollout = tiny.CannedRollouts(answers.__getitem__).sample(rollout_request(rows, 0), SamplingConfig())
    return RolledOut(rollout=rollout, rows=tuple(rows), is_sampled=torch.ones(len(rows)).bool(), sampling_seconds=0.0)


def answer_ids(i: int) -> list[int]:
    return [*STUDENT(ANSWERS[i])["input_ids"], *([EOS] if ANSWERS[i] else [])]


def by_row(batch: AlignedBatch) -> dict[str, Any]:
    """Of each row the student's pairs, and of each teacher what it reads and which tokens are one chunk."""
    found: dict[str, Any] = {}
    for r, name in enumerate(batch.sample_ids):
        sides = []
        for side in batch.teachers:
            ids, mask = side.model_inputs["input_ids"][r], side.model_inputs["attention_mask"][r].bool()
            chunks = [
                (batch.target_ids[a:b].tolist(), side.target_ids[c:d].tolist())
                for a, b, c, d in side.chunks or ()
                if int(batch.row[a]) == r
            ]
            sides.append((ids[mask].tolist(), side.target_ids[side.row == r].tolist(), chunks))
        found[name] = (batch.target_ids[batch.row == r].tolist(), sides)
    return found


def test_a_teacher_that_says_nothing_reads_the_students_tokens() -> None:
    batch = made().read(rolled()).batch(range(6))
    assert batch.teachers == ()
    assert batch.num_pairs == sum(len(answer_ids(i)) for i in range(6))
    ids = batch.teacher.model_inputs["input_ids"].flatten()
    assert torch.equal(ids[batch.teacher.pair_index + 1], batch.target_ids)


def test_the_tokens_of_every_row_are_the_teachers_own() -> None:
    batch = made(OWN).read(rolled()).batch(range(6))
    for i, (student, ((ids, targets, chunks),)) in enumerate(by_row(batch).values()):
        assert student == answer_ids(i)  # chunks or not: cross-entropy needs them
        if ANSWERS[i]:
            prompt = TEACHER(ROWS[i]["prompt"])["input_ids"]
            assert ids == [*prompt, *TEACHER(ANSWERS[i])["input_ids"], TEACHER.eos_token_id]
            assert targets == ids[len(prompt) :]
            assert [token for ours, _ in chunks for token in ours] == student
            assert chunks[-1] == ([EOS], [TEACHER.eos_token_id])
        else:
            assert (len(ids), targets, chunks) == (1, [], [])


@pytest.mark.parametrize("rows", [(0,), (2,), (5, 4, 3), (1, 2), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("order", [range(6), (3, 1, 5, 0, 2, 4)])
def test_neither_the_micro_batch_nor_the_order_of_rows_changes_a_row(
    rows: tuple[int, ...], order: Sequence[int]
) -> None:
    aligner = made(OWN, None)
    whole = by_row(aligner.read(rolled()).batch(range(6)))
    found = by_row(aligner.read(rolled(order)).batch(rows))
    assert len(found) == len(rows)
    assert found == {name: whole[name] for name in found}


def test_the_lengths_of_a_row_are_those_of_every_side() -> None:
    one, both = made(OWN).read(rolled()), made(OWN, None).read(rolled())
    batch = both.batch(range(6))
    student = batch.student.model_inputs["attention_mask"].sum(1)
    sides = [side.model_inputs["attention_mask"].sum(1) for side in batch.teachers]
    assert one.lengths == list(zip(student.tolist(), sides[0].tolist(), strict=True))
    assert both.lengths == list(zip(student.tolist(), *(side.tolist() for side in sides), strict=True))
    assert made().read(rolled()).lengths == list(zip(student.tolist(), sides[1].tolist(), strict=True))


def test_a_token_budget_counts_every_side() -> None:
    """Two rows fit a micro-batch with one teacher and do not with two."""
    widest = max(map(sum, made(OWN).read(rolled()).lengths))
    plans = []
    for aligner in (made(OWN), made(OWN, None)):
        assembler = StepAssembler(
            rollouts=tiny.CannedRollouts(list),
            aligner=aligner,
            decode=STUDENT.decode,
            pad_token_id=0,
            seed=0,
            on_policy_fraction=1.0,
            max_rows=6,
            token_budget=2 * widest,
        )
        batches = assembler.align(rolled())
        assert sorted(name for batch in batches for name in batch.sample_ids) == sorted(r.sample_id for r in prompts())
        plans.append(len(batches))
    assert plans[0] < plans[1]


def test_a_rank_without_rows_runs_one_token_on_every_side() -> None:
    batch = made(OWN, None).without_pairs(0)
    assert batch.num_pairs == 0
    assert [side.model_inputs["input_ids"].shape for side in batch.teachers] == [(1, 1), (1, 1)]
    assert [side.chunks is None for side in batch.teachers] == [False, True]
    assert batch.teachers[0].model_inputs["input_ids"].item() == TEACHER.pad_token_id
    for side in batch.teachers:
        assert packed_side(side, tiny.llama(1)) is side


def test_packing_a_teachers_side_changes_none_of_its_predictions() -> None:
    side = made(OWN).read(rolled()).batch(range(6)).teachers[0]
    model = tiny.llama(3, vocab_size=len(TEACHER), hidden=64)
    packed = packed_side(side, model)
    assert packed is not side
    with torch.no_grad():
        wanted, found = (
            model(**s.model_inputs, use_cache=False).logits.flatten(0, 1)[s.pair_index] for s in (side, packed)
        )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_privileged_context_is_written_by_each_side_for_itself() -> None:
    privileged = PrivilegedConfig(source="hint", template="{privileged}{question}")
    batch = made(OWN, None, privileged=privileged).read(rolled()).batch([0])
    for side, tokenizer in zip(batch.teachers, (TEACHER, STUDENT), strict=True):
        asked = tokenizer("abc" + ROWS[0]["prompt"])["input_ids"]
        assert side.model_inputs["input_ids"][0, : len(asked)].tolist() == asked


def test_a_context_that_reacts_to_the_answer_sees_each_of_them_and_others_are_written_once() -> None:
    seen: list[tuple[str, str]] = []

    def feedback(row: Any, view: CompletionView | None) -> str:
        assert view is not None
        seen.append((row["prompt"], view.text))
        return "a"

    made(OWN, privileged=PrivilegedConfig(source=feedback)).read(rolled())
    assert seen == [(row["prompt"], answer) for row, answer in zip(ROWS, ANSWERS, strict=True)]
    aligner = made(OWN)
    written: list[str] = []
    reader = aligner.readers[0]  # pyright: ignore[reportAttributeAccessIssue]
    inner = reader._context
    reader._context = lambda row, view=None: written.append(row.sample_id) or inner(row, view)
    reader._context.config = inner.config
    aligner.read(rolled((0, 0, 1)))
    assert written == [prompts()[0].sample_id, prompts()[1].sample_id]


def test_rows_that_a_teacher_cannot_be_asked_are_refused_before_training() -> None:
    talk = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    templated = tiny_bpe.student_tokenizer().__class__(
        tokenizer_object=STUDENT.backend_tokenizer,
        eos_token="<eos>",
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    rows = [*prompts(), PromptEncoder(templated)(talk, 9)]
    made().check(rows)
    given = resolve.Rows(rows=tuple(rows), fingerprint="")
    for found in (given, {"one": given}):
        with pytest.raises(DataError, match=r"teacher's side: .* no chat template"):
            resolve.check_readable(made(None, OWN), None, found)


def test_what_is_left_out_is_logged_as_shares() -> None:
    short = TeacherText(tokenizer=TEACHER, max_length=len(TEACHER(ROWS[1]["prompt"])["input_ids"]) + 1)
    batch = made(short).read(rolled([1, 2])).batch([0, 1])
    sums = MetricSums()
    add_alignment_metrics(sums, [batch])
    found = sums.reduce()
    inside = sum(b - a for a, b, _, _ in batch.teachers[0].chunks or ())
    assert 0 < inside < batch.num_pairs
    assert found["align/unaligned_student_share"] == pytest.approx(1 - inside / batch.num_pairs)
    assert found["align/rows_without_chunk"] == 0.0  # the empty answer has nothing to align
    none = MetricSums()
    tiny_text = TeacherText(tokenizer=TEACHER, max_length=1)
    add_alignment_metrics(none, [made(tiny_text).read(rolled([1, 2])).batch([0, 1])])
    assert none.reduce() == {"align/unaligned_student_share": 1.0, "align/rows_without_chunk": 0.5}
    same = MetricSums()
    add_alignment_metrics(same, [made().read(rolled([1, 2])).batch([0, 1])])
    assert same.reduce() == {}


# ------------------------------------------------------------------ rows that are routed

BY_ANSWER = (0, 1, 2, 1, 0, 2)  # of six rows the teacher that reads each
THREE = (OWN, None, TeacherText(tokenizer=TEACHER))


class Routes:
    """By a row's number, which is what its column `number` holds."""

    def __init__(self, by_number: Sequence[int]) -> None:
        self.by_number = by_number

    def __call__(self, row: Any, sample_id: str) -> int:
        return self.by_number[int(row["prompt"].partition("+")[0])]

    def check(self, rows: Sequence[tuple[str, Any]]) -> None:
        for sample_id, row in rows:
            self(row, sample_id)


def routed(by_number: Sequence[int] = BY_ANSWER, *, privileged: PrivilegedConfig | None = None) -> Aligner:
    teacher = Says(*THREE)
    teacher.routing = Routes(by_number)  # pyright: ignore[reportAttributeAccessIssue]
    return aligner_of(teacher, STUDENT, privileged=privileged, eos_token_ids=[EOS], pad_token_id=0)


@pytest.mark.parametrize("rows", [(0, 1, 2, 3, 4, 5), (0, 4), (1, 2), (5, 3, 1), (2,), (5, 1, 0)])
@pytest.mark.parametrize("order", [range(6), (3, 1, 5, 0, 2, 4)])
def test_a_teacher_reads_of_its_rows_what_it_reads_without_routes_and_nothing_of_others(
    rows: tuple[int, ...], order: Sequence[int]
) -> None:
    whole = by_row(made(*THREE).read(rolled()).batch(range(6)))
    batch = routed().read(rolled(order)).batch(rows)
    for i, side in enumerate(batch.teachers):
        assert side.rows == tuple(b for b, r in enumerate(rows) if BY_ANSWER[order[r]] == i)
        alone = batch.for_teacher(i)
        if not side.rows:
            assert side.model_inputs["input_ids"].shape == (1, 1)  # a pass that may be a collective takes place
            assert (alone.num_pairs, alone.num_rows, alone.sample_ids) == (0, 1, ("",))
            continue
        assert side.model_inputs["input_ids"].shape[0] == len(side.rows)
        assert side.model_inputs["attention_mask"].any(0).all()  # no column of padding alone
        found = by_row(alone)
        assert found == {name: (student, [sides[i]]) for name, (student, sides) in whole.items() if name in found}
        names = {batch.sample_ids[r] for r in side.rows}
        assert set(found) == names
        ids = side.model_inputs["input_ids"].flatten()
        assert torch.equal(ids[side.pair_index + 1], side.target_ids)
        (own,) = alone.teachers
        assert [batch.sample_ids[r] for r in side.row.tolist()] == [alone.sample_ids[r] for r in own.row.tolist()]


def test_chunks_of_a_routed_side_are_numbered_through_the_students_pairs_of_all_rows() -> None:
    batch = routed().read(rolled()).batch(range(6))
    for side in (batch.teachers[0], batch.teachers[2]):
        assert side.chunks is not None
        assert len(side.chunks)
        for a, b, c, d in side.chunks:
            row = int(batch.row[a])
            assert row in (side.rows or ())
            assert set(batch.row[a:b].tolist()) == set(side.row[c:d].tolist()) == {row}
            ours, theirs = STUDENT.decode(batch.target_ids[a:b]), TEACHER.decode(side.target_ids[c:d])
            assert ours == theirs or (ours, theirs) == ("<eos>", "<end>")


def test_a_row_has_no_length_for_a_teacher_that_does_not_read_it() -> None:
    whole, found = made(*THREE).read(rolled()).lengths, routed().read(rolled()).lengths
    for row, (some, all_sides) in enumerate(zip(found, whole, strict=True)):
        sides = [length if i == BY_ANSWER[row] else 0 for i, length in enumerate(all_sides[1:])]
        assert list(some) == [all_sides[0], *sides]


def test_a_privileged_context_is_written_for_the_teacher_of_the_row_alone() -> None:
    seen: list[str] = []

    def feedback(row: Any, view: CompletionView | None) -> str:
        seen.append(row["prompt"])
        return "a"

    privileged = PrivilegedConfig(source=feedback, template="{privileged}{question}")
    routed(privileged=privileged).read(rolled())
    assert sorted(seen) == sorted(row["prompt"] for row in ROWS)


def test_a_rank_without_rows_has_none_for_any_teacher() -> None:
    batch = routed().without_pairs(0)
    assert [side.rows for side in batch.teachers] == [(), (), ()]


def test_rows_without_a_teacher_are_refused_before_training() -> None:
    with pytest.raises(IndexError):  # what `Routing` raises is said in its own tests
        routed((0, 1)).check(prompts())


def test_what_is_left_out_is_counted_in_the_rows_that_a_teacher_reads() -> None:
    batch = routed().read(rolled([0, 1, 4, 5])).batch(range(4))  # rows 0 and 4 are teacher 0's, 5 is teacher 2's
    sums = MetricSums()
    add_alignment_metrics(sums, [batch, routed().without_pairs(0)])
    found = sums.reduce()
    read = sum(int((batch.row == r).sum()) for r in (0, 2, 3))
    inside = sum(b - a for i in (0, 2) for a, b, _, _ in batch.teachers[i].chunks or ())
    assert found["align/unaligned_student_share"] == pytest.approx(1 - inside / read)
    assert found["align/rows_without_chunk"] == 0.0
