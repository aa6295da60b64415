# SPDX-License-Identifier: Apache-2.0
"""Two teachers with habits of their own, each for its kind of rows, through the trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from cohobate.align import AlignedBatch
from cohobate.errors import ConfigError, DataError
from cohobate.objectives import CommonSupportObjective
from cohobate.teachers import LocalTeacher, Routing, SeveralTeachers
from cohobate.trainer import DistillationConfig, DistillationTrainer

TOKENIZER = tiny.char_tokenizer()
ROWS = [
    {"prompt": f"{i}{'+' if i % 3 else '='}", "completion": "cdef"[: 1 + i % 4] * 2, "kind": "add" if i % 3 else "is"}
    for i in range(8)
]
ROUTING = Routing(column="kind", routes=(("add",), None))


def habit(letter: str, seed: int) -> Any:
    """A model that has learnt to say nothing but `letter`, in float64."""
    model = tiny.llama(seed).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    prompts = [TOKENIZER(row["prompt"])["input_ids"] for row in ROWS]
    ids = torch.tensor([[*prompt, *TOKENIZER(letter * 8)["input_ids"]] for prompt in prompts])
    for _ in range(25):
        loss = model(input_ids=ids, labels=ids.masked_fill(torch.arange(ids.shape[1]) < 2, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def teachers() -> tuple[Any, Any]:
    return habit("a", 5), habit("b", 6)


class Hears(LocalTeacher):
    """Keeps the names of the rows that it scored."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.heard: list[tuple[str, ...]] = []

    def score(self, batch: AlignedBatch, /) -> Any:
        self.heard.append(tuple(name for name in batch.sample_ids if name))
        return super().score(batch)


def trainer(folder: Path, models: Any, routing: Routing | None = ROUTING, **changes: Any) -> DistillationTrainer:
    objective = CommonSupportObjective(
        parts=(None,) * len(models),
        same_vocab_beta=0.0,
        same_vocab_top_k=None,
        dynamic_scaling="off",
        ce_weight=0.0,
        routed=routing is not None,
        weights=changes.pop("weights", ()),
    )
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "on_policy_fraction": 0.0,
        "max_completion_length": 6,
        "seed": 3,
    }
    return DistillationTrainer(
        model=tiny.llama(1).double(),
        teacher=SeveralTeachers([Hears(model) for model in models], routing),
        args=DistillationConfig(**settings | changes),
        train_dataset=changes.get("rows", ROWS),
        processing_class=TOKENIZER,
        objective=objective,
    )


def log_of(run: DistillationTrainer) -> dict[str, Any]:
    run.train()
    return next(entry for entry in run.state.log_history if "loss" in entry)


def kl_of_row(student: Any, teacher: Any, row: dict[str, str]) -> list[float]:
    """Of each token of a row's completion and its end, by two plain forward passes."""
    prompt, answer = (TOKENIZER(row[name])["input_ids"] for name in ("prompt", "completion"))
    ids = torch.tensor([[*prompt, *answer, tiny.EOS]])
    with torch.no_grad():
        s, t = (model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in (student, teacher))
    return (t.exp() * (t - s)).sum(-1).tolist()


def test_each_row_is_compared_with_its_teacher_and_every_token_counts_once(tmp_path: Path, teachers: Any) -> None:
    run = trainer(tmp_path, teachers)
    student = tiny.llama(1).double()
    log = log_of(run)
    own = [
        [v for row in ROWS if (row["kind"] == "is") == i for v in kl_of_row(student, teachers[i], row)] for i in (0, 1)
    ]
    assert len(own[0]) != len(own[1])
    assert log["loss"] == pytest.approx(sum(map(sum, own)) / sum(map(len, own)), rel=1e-6)
    for i in (0, 1):
        assert log[f"kd/teacher{i}"] == pytest.approx(sum(own[i]) / len(own[i]), rel=1e-9)
    assert [log["teacher0/row_share"], log["teacher1/row_share"]] == [5 / 8, 3 / 8]
    wrong = [v for row in ROWS for v in kl_of_row(student, teachers[row["kind"] == "add"], row)]
    assert log["loss"] != pytest.approx(sum(wrong) / len(wrong), rel=1e-2)
    weighted = log_of(trainer(tmp_path / "weighted", teachers, weights=(0.25, 2.0)))
    assert weighted["loss"] == pytest.approx((0.25 * sum(own[0]) + 2.0 * sum(own[1])) / sum(map(len, own)), rel=1e-6)


def test_the_loss_of_two_teachers_that_are_one_is_that_of_one(tmp_path: Path, teachers: Any) -> None:
    one = log_of(trainer(tmp_path / "one", teachers[:1], None))
    both = log_of(trainer(tmp_path / "both", (teachers[0], teachers[0])))
    for name in ("loss", "grad_norm"):
        assert both[name] == pytest.approx(one[name], rel=1e-6), name


def test_a_student_takes_each_habit_where_it_is_taught(tmp_path: Path, teachers: Any) -> None:
    changes = {"max_steps": 40, "learning_rate": 3e-2, "lr_scheduler_type": "constant", "on_policy_fraction": 1.0}
    run = trainer(tmp_path, teachers, **changes)
    run.train()
    said = {}
    for row in ROWS:
        ids = torch.tensor([TOKENIZER(row["prompt"])["input_ids"]])
        with torch.no_grad():
            said.setdefault(row["kind"], set()).add(TOKENIZER.decode(run.model(input_ids=ids).logits[0, -1].argmax()))
    assert said == {"add": {"a"}, "is": {"b"}}


def test_a_resumed_run_asks_the_same_teachers_for_the_same_rows(tmp_path: Path, teachers: Any) -> None:
    saving = {"save_steps": 1, "save_strategy": "steps", "max_steps": 4, "learning_rate": 1e-2}
    whole = trainer(tmp_path, teachers, **saving, per_device_train_batch_size=2)
    whole.train()
    resumed = trainer(tmp_path, teachers, **saving, per_device_train_batch_size=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for before, after in zip(whole.teacher.teachers, resumed.teacher.teachers, strict=True):
        assert len(before.heard) == 8  # two micro-batches of a step; one without its rows is a pass, too
        assert after.heard == before.heard[4:]
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    kind = {str(row.sample_id): row.row["kind"] for row in whole.train_dataset.rows}
    for i, teacher in enumerate(whole.teacher.teachers):
        assert {kind[name] for names in teacher.heard for name in names} == {("add", "is")[i]}


def test_what_cannot_be_routed_is_refused_before_training(tmp_path: Path, teachers: Any) -> None:
    with pytest.raises(DataError, match=r"row '.*' has 'is' in the column 'kind'.*known are 'add'\."):
        trainer(tmp_path, teachers[:1], Routing(column="kind", routes=(("add",),)))
    with pytest.raises(DataError, match=r"no row has the column 'kinds'.* Did you mean 'kind'\?"):
        trainer(tmp_path, teachers, Routing(column="kinds", routes=(("add",), None)))
    args = DistillationConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    several = SeveralTeachers([LocalTeacher(model) for model in teachers], ROUTING)
    objective = CommonSupportObjective(parts=(None, None), dynamic_scaling="off")
    with pytest.raises(ConfigError, match="routes each row to one teacher"):
        DistillationTrainer(tiny.llama(1), several, args, ROWS, processing_class=TOKENIZER, objective=objective)
