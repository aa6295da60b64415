# SPDX-License-Identifier: Apache-2.0
"""Whole optimizer steps of a real model: our `DistillationTrainer` beside TRL's, each in a process of its own.

SmolLM2-135M is student and, slightly perturbed, teacher: 8 prompts a step (4 rows x accumulation 2), float32, JSD 1/2,
AdamW. Completions are exactly 48 tokens on both sides, since no token ends them. The same 8 prompts come every step.
A trainer runs in a thread that waits at the end of each step, so that steps of both can alternate.
"""

import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from harness import OURS, Case, Implementation

TINY: dict[str, Any] = {}  # what loads at the first step is loaded before the second, where the peak is read
TRL = "TRL"
NEW_TOKENS = 48
PROMPTS = (
    "Why is the sky blue?",
    "Write a short letter to a neighbour whose dog barks at night.",
    "Explain to a child of ten how a refrigerator keeps food cold, and why its back gets warm.",
    "List five uses of a paper clip.",
    "What is 17 times 23? Show the steps.",
    "A train leaves at 9:40 and arrives at 13:05, with one stop of 12 minutes. How long did it move?",
    "Name three rivers of France and the seas that they flow into.",
    "Translate into plain English: 'The aforementioned party shall desist forthwith.'",
)


class Clock:
    """CPU seconds inside named calls; a call inside another is not counted twice, it is taken from the outer one."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        inner = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            self._inner.append(0.0)
            try:
                return inner(*args, **kwargs)
            finally:
                whole = time.process_time() - started
                self.spent[name] += whole - self._inner.pop()
                self._inner[-1] += whole

        setattr(owner, attribute, timed)


class StepsJob:
    """Runs `trainer.train()` in a thread, one optimizer step a `run`."""

    whole_process = True  # weights, gradients and optimizer states are part of the peak

    def __init__(self, make: Callable[[dict[str, Any], Clock, Any], Any], settings: dict[str, Any]) -> None:
        from transformers import TrainerCallback

        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._failure: BaseException | None = None
        self.clock, self.steps = Clock(), 0
        job = self

        class Gate(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                job._done.release()
                job._go.acquire()

        self._make = lambda: make(settings, self.clock, Gate())
        self.trainer: Any = None
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        self._go.acquire()
        try:
            self.trainer = self._make()
            self.trainer.train()
        except BaseException as error:
            self._failure = error
        self._done.release()

    def run(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._go.release()
        self._done.acquire()
        if self._failure is not None:
            raise self._failure
        self.steps += 1
        if self.steps == 2:  # parts are counted over the timed steps alone
            self.clock.spent.clear()

    def clear(self) -> None: ...

    def facts(self, reference: str | None) -> dict[str, Any]:
        """Losses of the first step, and CPU seconds a step by part, over the steps that were timed."""
        logs = [entry for entry in self.trainer.state.log_history if "loss" in entry]
        parts = {name: spent / max(1, self.steps - 2) for name, spent in self.clock.spent.items()}
        return {"loss": logs[0]["loss"], "parts": parts, "threads": torch.get_num_threads()}


def _model_and_teacher() -> tuple[Any, Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cohobate.teachers.smollm2 import smollm2_folder

    folder = str(smollm2_folder())
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(torch.randn(weight.shape, generator=draw), alpha=0.05 * float(weight.std()))
    return student, teacher, AutoTokenizer.from_pretrained(folder)


def _rows(*, recorded: bool) -> list[dict[str, Any]]:
    """The prompts as chats; with completions of about `NEW_TOKENS` tokens of any text."""
    text = (" ".join(PROMPTS)).split()
    rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": p}]} for p in PROMPTS]
    if recorded:
        for i, row in enumerate(rows):
            row["completion"] = [{"role": "assistant", "content": " ".join(text[4 * i : 4 * i + NEW_TOKENS - 10])}]
    return rows


def _recorded_ids(tokenizer: Any) -> list[list[int]]:
    """The completions' tokens as our trainer reads them, in the order of the prompts."""
    from cohobate.data import PromptConfig, PromptEncoder

    encoded = PromptEncoder(tokenizer, PromptConfig()).encode_rows(_rows(recorded=True))
    return [list(row.completion_ids or ()) for row in encoded.rows]


_COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-6,
    "max_steps": 10_000,
    "max_completion_length": NEW_TOKENS,
    "beta": 0.5,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 0,
}


def _ours(settings: dict[str, Any], clock: Clock, gate: Any) -> Any:
    from cohobate import DistillationConfig, DistillationTrainer
    from cohobate.rollouts import LocalRollouts
    from cohobate.trainer import trainer as module

    student, teacher, tokenizer = _model_and_teacher()
    rows = _rows(recorded=settings["recorded"])
    trainer = DistillationTrainer(
        student,
        teacher,
        DistillationConfig(
            output_dir=tempfile.mkdtemp(),
            train_sampling_strategy="sequential",
            on_policy_fraction=0.0 if settings["recorded"] else 1.0,
            **_COMMON,
        ),
        rows * 20,
        processing_class=tokenizer,
        rollouts=LocalRollouts(student, eos_token_ids=(), pad_token_id=tokenizer.pad_token_id),
        callbacks=[gate],
    )
    clock.wrap(trainer._assembler.rollouts, "sample", "sampling")
    clock.wrap(trainer.teacher, "score", "teacher forward")
    clock.wrap(module, "pair_scores", "student forward")
    clock.wrap(type(trainer.objective), "__call__", "loss")
    _wrap_rest(trainer, clock)
    return trainer


def _trl(settings: dict[str, Any], clock: Clock, gate: Any) -> Any:
    from datasets import Dataset
    from trl.trainer import distillation_trainer as module
    from trl.trainer.distillation_config import DistillationConfig
    from trl.trainer.distillation_trainer import DistillationTrainer

    student, teacher, tokenizer = _model_and_teacher()
    trainer = DistillationTrainer(
        student,
        teacher,
        DistillationConfig(
            output_dir=tempfile.mkdtemp(),
            shuffle_dataset=False,
            generation_kwargs={"min_new_tokens": NEW_TOKENS},
            **_COMMON,
        ),
        Dataset.from_list(_rows(recorded=False) * 20),
        processing_class=tokenizer,
        callbacks=[gate],
    )
    if settings["recorded"]:
        completions = _recorded_ids(tokenizer)
        trainer._generate_single_turn = lambda *args, **kwargs: completions
    clock.wrap(trainer, "_generate_single_turn", "sampling")
    hidden = trainer._get_last_hidden_state

    def named(model: Any, *args: Any, **kwargs: Any) -> Any:
        return sides[model is trainer.accelerator.unwrap_model(trainer.teacher_model)].hidden(model, *args, **kwargs)

    class Side:
        def __init__(self, name: str) -> None:
            self.hidden = hidden
            clock.wrap(self, "hidden", name)

    sides = [Side("student forward"), Side("teacher forward")]
    trainer._get_last_hidden_state = named
    clock.wrap(module, "_chunked_divergence_loss", "loss")
    _wrap_rest(trainer, clock)
    return trainer


def _wrap_rest(trainer: Any, clock: Clock) -> None:
    clock.wrap(trainer.accelerator, "backward", "backward")
    create = trainer.create_optimizer

    def created(*args: Any, **kwargs: Any) -> Any:
        optimizer = create(*args, **kwargs)
        clock.wrap(optimizer, "step", "optimizer")
        return optimizer

    trainer.create_optimizer = created


def _build(make: Callable[[dict[str, Any], Clock, Any], Any]) -> Callable[[dict[str, Any]], StepsJob]:
    return lambda settings: StepsJob(make, settings)


IMPLEMENTATIONS = {
    OURS: Implementation(build=_build(_ours), package="cohobate", warm_first=True, lives_on=False),
    TRL: Implementation(build=_build(_trl), package="trl", warm_first=True, lives_on=False),
}


def cases(*, quick: bool = False) -> list[Case]:
    """Steps that sample their completions, and steps on recorded ones, where both must give the same loss."""
    if quick:
        return []
    targets = {OURS: "≤ 0.67 of TRL, peak ≤ 3.7 GiB"}
    names = (OURS, TRL)
    return [
        Case(
            name="sampled completions", settings={"recorded": False}, implementations=names, targets=targets, base=TRL
        ),
        Case(name="recorded completions", settings={"recorded": True}, implementations=names, base=TRL),
    ]
