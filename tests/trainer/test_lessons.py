# SPDX-License-Identifier: Apache-2.0
"""Lessons in a step: who leaves it, what is counted and logged, and that a student learns from its own successes."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from transformers import LlamaForCausalLM

import tiny
import tiny_bpe
from cohobate.align import SamplingConfig, TeacherText
from cohobate.align.rollout import RolloutBatch, RolloutRequest
from cohobate.data import Lesson, LessonConfig, PrivilegedConfig, PromptEncoder, rollout_request
from cohobate.errors import ConfigError, DataError
from cohobate.objectives import DivergenceObjective, ImportanceWeightedObjective
from cohobate.teachers import EMATeacher
from cohobate.trainer import DistillationConfig, DistillationTrainer
from cohobate.trainer.aligners import Aligner, aligner_of
from cohobate.trainer.lessons import taught, with_lessons
from cohobate.trainer.rolled_out import RolledOut


class Says:
    """A teacher that says which text it reads, and scores nothing."""

    def __init__(self, *texts: TeacherText | None) -> None:
        self.texts = texts


TOKENIZER = tiny.char_tokenizer()
TEMPLATE = "{demonstration}{question}"


class InTurn:
    """A rollout source that answers sample j of a prompt with `answers(prompt)[j]`, text without an end."""

    def __init__(self, answers: dict[str, list[str]], tokenizer: Any = TOKENIZER) -> None:
        self.answers, self.tokenizer = answers, tokenizer

    def sample(self, request: RolloutRequest, sampling: SamplingConfig, /) -> RolloutBatch:
        left = iter(
            answer
            for ids, mask in zip(request.prompt_ids, request.prompt_attention_mask, strict=True)
            for answer in self.answers[self.tokenizer.decode(ids[mask.bool()])][: sampling.n_samples_per_prompt]
        )
        encode = self.tokenizer
        return tiny.CannedRollouts(lambda prompt: encode(next(left))["input_ids"]).sample(request, sampling)


def settings(folder: Path, **changes: Any) -> DistillationConfig:
    base: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "num_generations": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
        "max_completion_length": 4,
        "seed": 3,
    }
    return DistillationConfig(**base | changes)


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
ANSWERS = {"1+1=": ["2", "34", "2"], "1+2=": ["5", "6", "777"]}


def trainer(folder: Path, answers: dict[str, list[str]] | None = ANSWERS, **parts: Any) -> DistillationTrainer:
    lessons = parts.pop("lessons", {})
    options = {"grader": "exact_match", "template": TEMPLATE} | lessons
    return DistillationTrainer(
        model=parts.pop("model", None) or tiny.llama(1, layers=2),
        teacher=parts.pop("teacher", EMATeacher(decay=0.5)),
        args=settings(folder, **parts.pop("args", {})),
        train_dataset=parts.pop("rows", ROWS),
        processing_class=TOKENIZER,
        rollouts=None if answers is None else InTurn(answers),
        privileged=PrivilegedConfig(lessons=LessonConfig(**options)),
        **parts,
    )


def seen_batches(run: DistillationTrainer) -> list[Any]:
    """What the teacher is asked to score."""
    batches: list[Any] = []
    score = run.teacher.score
    run.teacher.score = lambda batch: batches.append(batch) or score(batch)
    return batches


# ------------------------------------------------------------------ who is in the step


def test_only_completions_with_a_lesson_are_aligned_and_counted(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    batches, counts = seen_batches(run), []
    inner = run.training_step
    run.training_step = lambda model, inputs, c=None: counts.append(c) or inner(model, inputs, c)
    run.train()
    (batch,) = batches
    assert batch.num_rows == 3
    assert len(set(batch.sample_ids)) == 1
    assert counts == [{"pairs": 4.0}]  # "2", "34" and "2"; the row without a success is in no denominator
    teacher = [
        TOKENIZER.decode(ids[mask.bool()])
        for ids, mask in zip(
            batch.teacher.model_inputs["input_ids"], batch.teacher.model_inputs["attention_mask"], strict=True
        )
    ]
    assert teacher == ["21+1=2", "21+1=34", "21+1=2"]
    log = run.state.log_history[0]
    assert log["lessons/success_share"] == pytest.approx(2 / 6)
    assert log["lessons/demonstration_share"] == 0.5
    assert log["lessons/without_share"] == 0.5
    assert log["lessons/feedback_share"] == 0.0
    assert log["rows/pairs"] == pytest.approx(4 / 3)
    assert log["completion/mean_length"] == pytest.approx(9 / 6)  # of all that were sampled
    assert log["loss"] != 0


def test_what_is_left_out_changes_nothing_for_those_that_are_not(tmp_path: Path) -> None:
    """The step of both rows is that of the taught row alone."""
    logs = []
    for rows in (ROWS, ROWS[:1]):
        run = trainer(tmp_path, rows=rows, args={"per_device_train_batch_size": len(rows)})
        run.train()
        logs.append(run.state.log_history[0])
    for name in ("loss", "grad_norm", "kl/forward", "entropy/teacher", "rows/pairs"):
        assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-6), name


@pytest.mark.parametrize("accumulation", [1, 2])
def test_how_a_step_is_cut_changes_neither_loss_nor_gradient(tmp_path: Path, accumulation: int) -> None:
    answers = {"1+1=": ["2", "34", "2"], "1+2=": ["3", "6", "77"]}
    logs = []
    for per_device, steps in ((2, 1), (1, 2)):
        args = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": steps}
        run = trainer(tmp_path, answers, args=args)
        run.train()
        logs.append(run.state.log_history[0])
    for name in ("loss", "grad_norm", "lessons/without_share"):
        assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-5), name


@pytest.mark.parametrize("objective", [None, "weighted"])
def test_a_step_without_any_lesson_is_a_zero(tmp_path: Path, objective: Any) -> None:
    answers = {"1+1=": ["9", "34", "7"], "1+2=": ["5", "6", "77"]}
    weighted = ImportanceWeightedObjective(objective=DivergenceObjective(top_k=5, top_k_of="student"))
    run = trainer(tmp_path, answers, objective=weighted if objective else None, args={"weight_decay": 0.0})
    before = [p.detach().clone() for p in run.model.parameters()]
    run.train()
    log = run.state.log_history[0]
    assert log["loss"] == 0.0
    assert log["grad_norm"] == 0.0
    assert log["lessons/without_share"] == 1.0
    assert "kl/forward" not in log
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_feedback_teaches_where_no_peer_succeeded(tmp_path: Path) -> None:
    lessons = {"feedback": lambda row, text: "a", "template": "{demonstration}{feedback}{question}"}
    run = trainer(tmp_path, lessons=lessons, args={"num_generations": 1})
    (batches) = seen_batches(run)
    run.train()
    (batch,) = batches
    assert batch.num_rows == 2
    assert TOKENIZER.decode(batch.teacher.model_inputs["input_ids"][0]) == "a1+1=2"
    log = run.state.log_history[0]
    assert (log["lessons/feedback_share"], log["lessons/without_share"]) == (1.0, 0.0)


def test_special_tokens_are_neither_graded_nor_shown() -> None:
    encoder = PromptEncoder(TOKENIZER)
    rows = [encoder(row, i) for i, row in enumerate(ROWS[:1] * 2)]
    answers = iter([[*TOKENIZER("2")["input_ids"], tiny.EOS], TOKENIZER("3")["input_ids"]])
    rollout = tiny.CannedRollouts(lambda prompt: next(answers)).sample(rollout_request(rows, 0), SamplingConfig())
    rolled = RolledOut(rollout=rollout, rows=(rows[0], rows[0]), is_sampled=torch.ones(2).bool(), sampling_seconds=0.0)
    assert taught(rolled) is None
    found = with_lessons(rolled, LessonConfig(grader="exact_match"), TOKENIZER.decode)
    assert found.lessons == (Lesson(score=1.0), Lesson(score=0.0, demonstration="2"))
    assert taught(found) == [1]
    assert found.select([1]).lessons == (found.lessons[1],)


def test_rows_of_one_name_are_a_group_wherever_they_stand_and_rows_of_another_are_not() -> None:
    encoder = PromptEncoder(TOKENIZER)
    one, other = (encoder(row, i) for i, row in enumerate(ROWS))
    texts = iter("2354")
    rows = (one, other, one, other)
    rollout = tiny.CannedRollouts(lambda prompt: TOKENIZER(next(texts))["input_ids"]).sample(
        rollout_request(rows, 0), SamplingConfig()
    )
    rolled = RolledOut(rollout=rollout, rows=rows, is_sampled=torch.ones(4).bool(), sampling_seconds=0.0)
    found = with_lessons(rolled, LessonConfig(grader="exact_match"), TOKENIZER.decode)
    assert [lesson.demonstration for lesson in found.lessons or ()] == [None, None, "2", "3"]


# ------------------------------------------------------------------ both aligners


def test_a_teacher_with_its_own_tokenizer_reads_each_completions_own_lesson() -> None:
    student, teacher = tiny_bpe.student_tokenizer(), tiny_bpe.teacher_tokenizer()
    lessons = LessonConfig(grader="exact_match", template=TEMPLATE)
    aligner: Aligner = aligner_of(
        Says(TeacherText(tokenizer=teacher), None),
        student,
        privileged=PrivilegedConfig(lessons=lessons),
        eos_token_ids=[student.eos_token_id],
        pad_token_id=0,
    )
    row = PromptEncoder(student)({"prompt": "1+120=", "answer": "12"}, 0)
    aligner.check([row])
    texts = iter(["12", "34", "12"])
    rollout = tiny.CannedRollouts(lambda prompt: student(next(texts))["input_ids"]).sample(
        rollout_request([row] * 3, 0), SamplingConfig()
    )
    rolled = RolledOut(rollout=rollout, rows=(row,) * 3, is_sampled=torch.ones(3).bool(), sampling_seconds=0.0)
    found = with_lessons(rolled, lessons, student.decode)
    shown = [
        Lesson(score=0.0, demonstration=word) for word in ("a", "b", "ca")
    ]  # three of one row: a prompt kept by the row's name would be one
    object.__setattr__(found, "lessons", tuple(shown))
    batch = aligner.read(found).batch(range(3))
    for side, tokenizer in zip(batch.teachers, (teacher, student), strict=True):
        for r, word in enumerate(("a", "b", "ca")):
            ids = side.model_inputs["input_ids"][r][side.model_inputs["attention_mask"][r].bool()]
            assert tokenizer.decode(ids) == word + "1+120=" + ("12", "34", "12")[r]


# ------------------------------------------------------------------ evaluation, logs, refusals


def test_a_run_with_lessons_is_evaluated_by_grades_alone(tmp_path: Path) -> None:
    run = trainer(tmp_path, eval_dataset=ROWS, grader=lambda row, text: float(text == row["answer"]))
    found = run.evaluate()
    assert found["eval/accuracy"] == 0.5
    assert "eval/loss" not in found
    assert "eval_loss" not in found


def test_a_doctor_takes_a_group_the_whole_way(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    found = run._evaluation(recorded=False, score=True, grader=None, as_trained=True)(run.train_dataset.rows)
    assert found["loss"] > 0
    assert found["lessons/without_share"] == 0.5


def test_completions_are_logged_with_their_grade_and_what_their_teacher_saw(tmp_path: Path) -> None:
    run = trainer(tmp_path, args={"log_completions": True})
    run.train()
    rows = pyarrow.parquet.read_table(next((tmp_path / "completions").iterdir())).to_pylist()
    assert [(r["completion"], r["score"], r["demonstration"], r["feedback"]) for r in rows] == [
        ("2", 1.0, "2", None),
        ("34", 0.0, "2", None),
        ("2", 1.0, "2", None),
        ("5", 0.0, None, None),
        ("6", 0.0, None, None),
        ("777", 0.0, None, None),
    ]
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert {"lessons/success_share", "lessons/demonstration_share", "lessons/feedback_share"} <= set(line)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({"args": {"num_generations": 1}}, ConfigError, "num_generations=1 leaves every completion alone"),
        ({"args": {"on_policy_fraction": 0.5}}, ConfigError, r"on_policy_fraction=0\.5 takes recorded ones too"),
        ({"rows": [{"prompt": "1+1="}] * 2}, DataError, "needs the column 'answer'"),
        ({"rows": [{"text": "1+1=2", "answer": "2"}] * 2}, DataError, "is a `text` row and asks nothing"),
        (
            {"objective": DivergenceObjective(top_k=24, top_k_of="student")},
            ConfigError,
            "top_k=24 is more than the 23 ids",
        ),
        (
            {
                "objective": ImportanceWeightedObjective(objective=DivergenceObjective(temperature=0.5)),
                "answers": None,
            },
            ConfigError,
            "ImportanceWeightedObjective compares the policy that drew .* sampling_temperature must be 0.5, got 1.0",
        ),
    ],
)
def test_what_cannot_work_is_refused_when_the_run_is_built(
    tmp_path: Path, parts: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trainer(tmp_path, **parts)


def test_a_completion_alone_may_learn_from_its_own_success(tmp_path: Path) -> None:
    run = trainer(tmp_path, args={"num_generations": 1}, lessons={"own_success": True})
    run.train()
    assert run.state.log_history[0]["lessons/demonstration_share"] == 0.5


def test_a_divergence_with_a_ratio_may_use_rollouts_again(tmp_path: Path) -> None:
    objective = ImportanceWeightedObjective(objective=DivergenceObjective(beta=0.5))
    args = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.05, "per_device_train_batch_size": 1}
    run = trainer(
        tmp_path,
        None,
        objective=objective,
        args=args,
        lessons={"grader": lambda row, text: 1.0},
    )
    run.train()
    first, second = run.state.log_history[:2]
    assert first["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    assert abs(second["ratio/mean"] - 1.0) > 1e-3
    with pytest.raises(ConfigError, match="ImportanceWeightedObjective"):
        trainer(tmp_path, None, objective=DivergenceObjective(beta=0.4), args=args)


# ------------------------------------------------------------------ learning

LETTERS, DIGITS = "abcdefgh", "0123"


@pytest.fixture(scope="module")
def copier() -> LlamaForCausalLM:
    """Answers `a=` with any of four digits, equally likely, and `2a=` with the digit that it was shown."""
    model = tiny.llama(0, hidden=32, layers=2).train()
    for parameter in model.parameters():
        parameter.data.mul_(0.2 if parameter.dim() > 1 else 1.0)
    prompts = [f"{shown}{letter}=" for letter in LETTERS for shown in DIGITS]
    asked = TOKENIZER([f"{letter}=" for letter in LETTERS], return_tensors="pt")["input_ids"]
    shown = TOKENIZER(prompts, return_tensors="pt")["input_ids"]
    copied = shown[:, 0]
    digits = torch.tensor(TOKENIZER(DIGITS)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(400):
        alone = model(asked, use_cache=False).logits[:, -1].log_softmax(-1)[:, digits]
        loss = torch.nn.functional.cross_entropy(model(shown, use_cache=False).logits[:, -1], copied) - alone.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def success(model: LlamaForCausalLM, rows: list[dict[str, str]]) -> float:
    """The exact chance that the first token is the answer, averaged over the questions."""
    ids = TOKENIZER([row["prompt"] for row in rows], return_tensors="pt")["input_ids"]
    answers = torch.tensor([TOKENIZER(row["answer"])["input_ids"][0] for row in rows])
    with torch.no_grad():
        chances = model(ids, use_cache=False).logits[:, -1].softmax(-1)
    return float(chances.gather(1, answers[:, None]).mean())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_student_learns_from_its_own_successes_and_not_from_any_peer(
    tmp_path: Path, copier: LlamaForCausalLM, seed: int
) -> None:
    rows = [{"prompt": f"{c}=", "answer": DIGITS[(i * 3 + seed) % 4]} for i, c in enumerate(LETTERS)]
    found = {}
    for name, threshold in (("successes", 1.0), ("any peer", -1.0)):
        model = tiny.llama(0, hidden=32, layers=2)
        model.load_state_dict(copier.state_dict())
        assert success(model, rows) == pytest.approx(0.25, abs=0.02)
        run = trainer(
            tmp_path / name,
            None,
            model=model,
            teacher=EMATeacher(decay=0.95),
            rows=rows,
            objective=ImportanceWeightedObjective(
                objective=DivergenceObjective(beta=0.5, top_k=8, top_k_of="student")
            ),
            lessons={"success_threshold": threshold},
            args={
                "max_steps": 20,
                "per_device_train_batch_size": 8,
                "num_generations": 16,
                "max_completion_length": 1,
                "learning_rate": 2e-3,
                "lr_scheduler_type": "constant",
                "seed": seed,
            },
        )
        run.train()
        found[name] = success(model, rows)
    assert found["successes"] > 0.9
    assert found["any peer"] < 0.35
