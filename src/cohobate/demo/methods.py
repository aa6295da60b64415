# SPDX-License-Identifier: Apache-2.0
"""The methods that the demo compares: one student, the same prompts, the same optimizer steps, five ways to learn.

Each is a few parts put together, as a recipe would; the trainer is the same for all.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import TrainerCallback

from cohobate.data import CompletionView, PrivilegedConfig
from cohobate.demo import load_student, load_teacher, task
from cohobate.files import written_whole
from cohobate.objectives import CrossEntropyObjective, DivergenceObjective
from cohobate.teachers import FrozenTeacher
from cohobate.trainer import DistillationConfig, DistillationTrainer, RunDescription

Method = Literal["sft", "offline_kd", "opd_reverse", "opd_forward", "opsd"]
METHODS: tuple[Method, ...] = get_args(Method)

LABELS: dict[Method, str] = {
    "sft": "SFT on recorded solutions",
    "offline_kd": "offline KD on recorded solutions",
    "opd_reverse": "OPD, reverse KL",
    "opd_forward": "OPD, forward KL",
    "opsd": "OPSD, its own work marked",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all methods share."""

    num_prompts: int = 128
    batch_size: int = 64
    num_steps: int = 100
    eval_every: int = 25
    num_heldout: int = 500
    learning_rate: float = 7e-4  # linear to nothing
    warmup_steps: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation: exact match on held-out problems."""

    step: int
    seconds: float  # spent training until then, evaluation left out
    accuracy: float  # in [0, 1]


class _Clock(TrainerCallback):
    """Training seconds at each evaluation, without the evaluations themselves."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._trained = 0.0
        self._since: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_evaluate and self._since is not None:
            self._trained += time.perf_counter() - self._since
            self._since = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        metrics = kwargs["metrics"]
        self.points.append(Point(step=state.global_step, seconds=self._trained, accuracy=metrics["eval/accuracy"]))
        self._since = time.perf_counter()


def _parts(method: Method) -> dict[str, Any]:
    """Teacher, objective and context of a method, as `DistillationTrainer` takes them."""
    match method:
        case "sft":
            return {"objective": CrossEntropyObjective()}
        case "offline_kd" | "opd_forward":
            return {"objective": DivergenceObjective(beta=0.0), "teacher": load_teacher()[0]}
        case "opd_reverse":
            return {"objective": DivergenceObjective(beta=1.0), "teacher": load_teacher()[0]}
        case "opsd":
            return {
                "objective": DivergenceObjective(beta=1.0),
                "teacher": FrozenTeacher(),
                "privileged": PrivilegedConfig(source=_marked, template=task.SHOWN_TEMPLATE),
            }


def _marked(row: Mapping[str, Any], completion: CompletionView | None) -> str:
    """What the teacher of OPSD sees more: the student's own work with every total put right."""
    return task.marked(row, "" if completion is None else completion.text)


def build(method: Method, seed: int, folder: Path, setting: Setting) -> tuple[DistillationTrainer, _Clock]:
    """The trainer of one method and seed. The seed draws the prompts, their order and the rollouts."""
    clock = _Clock()
    student, tokenizer = load_student()
    config = DistillationConfig(
        output_dir=str(folder),
        max_steps=setting.num_steps,
        per_device_train_batch_size=setting.batch_size,
        per_device_eval_batch_size=setting.num_heldout,
        learning_rate=setting.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=setting.warmup_steps,
        max_completion_length=task.MAX_NEW_TOKENS,
        on_policy_fraction=0.0 if method in ("sft", "offline_kd") else 1.0,
        eval_strategy="steps",
        eval_steps=setting.eval_every,
        eval_on_start=True,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=seed,
    )
    trainer = DistillationTrainer(
        model=student,
        args=config,
        train_dataset=task.rows("train", setting.num_prompts, seed=seed),
        eval_dataset=task.rows("heldout", setting.num_heldout),
        processing_class=tokenizer,
        grader=task.grade,
        callbacks=[clock],
        description=RunDescription(method=method, student="cohobate demo student"),
        **_parts(method),
    )
    return trainer, clock


def run_job(method: Method, seed: int, folder: Path, setting: Setting) -> dict[str, Any]:
    """Train and evaluate one method with one seed; writes and returns `result.json`."""
    trainer, clock = build(method, seed, folder, setting)
    trainer.train()
    result = {"method": method, "seed": seed, "curve": [asdict(point) for point in clock.points]}
    with written_whole(folder / "result.json") as path:
        path.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result
