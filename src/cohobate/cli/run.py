# SPDX-License-Identifier: Apache-2.0
"""A training run as the command sees it: what is said first, what a signal does, what is left in the folder."""

import math
import signal
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from transformers import PrinterCallback, ProgressCallback, TrainerState
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from cohobate.cli import schema
from cohobate.cli.build import build_trainer
from cohobate.cli.evaluate import write_json
from cohobate.cli.progress import EVALUATION, SCALED, RunProgress, duration, numbers
from cohobate.cli.recipe import LoadedRecipe
from cohobate.errors import ServerUnreachable
from cohobate.teachers.server_check import check_server
from cohobate.trainer.signals import GracefulStop
from cohobate.trainer.trainer import DistillationTrainer


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in an output folder."""
    found = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return None if found is None else Path(found)


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of a recipe in this process."""

    loaded: LoadedRecipe
    trainer: DistillationTrainer
    stop: GracefulStop
    progress: RunProgress
    started: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> Path:
        return Path(self.loaded.recipe.output_dir)

    def say(self, text: str) -> None:
        """Print on the first process only."""
        if self.trainer.is_world_process_zero():
            print(text, flush=True)

    def headline(self) -> str:
        """Who learns from whom on what, before it costs anything."""
        recipe, trainer = self.loaded.recipe, self.trainer
        rows, held_out = cast(Any, trainer.train_dataset), cast(Any, trainer.eval_dataset)
        kind = "none" if recipe.teacher is None else recipe.teacher.kind
        places = ("path", "teacher_model_server_url", "model")
        named = next((found for place in places if (found := getattr(recipe.teacher, place, None))), None)
        routing = recipe.routing
        several = [
            f"{e.path or e.teacher_model_server_url or e.model} ({'own' if e.aligner else 'the same'} tokenizer"
            f"{'' if routing is None else f'; {routing.describe(i)}'})"
            for i, e in enumerate(recipe.teachers)
        ]
        parameters: Any = trainer.model.parameters() if trainer.model is not None else ()
        sizes = [(p.numel(), p.requires_grad) for p in parameters]
        total, trained = sum(n for n, _ in sizes), sum(n for n, grad in sizes if grad)
        part = "" if trained == total else f", {_millions(trained)} of them trained"
        lines = [
            f"method    {recipe.method}",
            f"student   {recipe.student.model} ({_millions(total)} parameters{part})",
            f"teacher   {', '.join(several) or (f'{named} ({kind})' if named else kind)}",
            f"rows      {len(rows)} to train on" + ("" if held_out is None else f", {len(held_out)} held out"),
            f"output    {recipe.output_dir}",
        ]
        lines[-1:-1] = _of_loss(recipe.objective)
        if isinstance(recipe.rollouts, schema.VLLMRollouts):
            lines[-1:-1] = [f"rollouts  {recipe.rollouts.url} (vllm), weights by way of {recipe.rollouts.sync_folder}"]
        return "\n".join(lines)

    def try_server(self) -> str:
        """Ask servers what is easy to check, before it costs anything; an error stops the run here.

        Every rank asks, as every rank will. One that is to sample is given the student's weights.
        """
        recipe, teacher = self.loaded.recipe, cast(Any, self.trainer.teacher)
        asked = [(teacher, self.trainer.processing_class)] if getattr(recipe.teacher, "kind", "") == "server" else []
        for i, entry in enumerate(recipe.teachers):
            if entry.teacher_model_server_url is not None:
                reading = teacher.teachers[i]
                asked.append((reading.teacher, reading.tokenizer))
        checks = [check for server, tokenizer in asked for check in check_server(server, tokenizer)]
        said = [f"server    {check.name}: {check.detail}" for check in checks]
        if isinstance(recipe.rollouts, schema.VLLMRollouts):
            said.append(f"rollouts  {self.trainer.try_rollouts()}")
        return "\n".join(said)

    def train(self, checkpoint: Path | None) -> int | None:
        """Train to the end or to a signal; returns the signal's number."""
        if self.trainer.is_world_process_zero():
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "recipe.yaml").write_text(self.loaded.text, encoding="utf-8")
        wanted = self.trainer.args.max_steps
        if checkpoint is not None and self._made(checkpoint) >= wanted > 0:
            self.say(f"finished  {checkpoint.name} has all of max_steps={wanted}: nothing to train")
            self.trainer.restore(checkpoint)
            self.progress.close()
            self.stop.restore()
            return None
        try:
            self.trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except ServerUnreachable as error:
            saved = self.trainer.save_unfinished()
            if saved is None:
                raise
            raise ServerUnreachable(f"{error} {saved} is the last whole step: go on with --resume.") from error
        except KeyboardInterrupt:  # a second signal, or one before the first step
            return self.stop.received or signal.SIGINT
        finally:
            self.progress.close()
            self.stop.restore()
        stopped_elsewhere = signal.SIGTERM if self.trainer._stop_requested else None  # another rank had the signal
        return self.stop.received or stopped_elsewhere

    @staticmethod
    def _made(checkpoint: Path) -> int:
        """The steps that a checkpoint has behind it; transformers would make one more, were they all."""
        return int(TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).global_step)

    def close(self) -> None:
        """End what the teacher and the source of completions keep open."""
        for part in (self.trainer.teacher, self.trainer.rollouts):
            close = getattr(part, "close", None)
            if close is not None:
                close()

    def finish(self) -> str:
        """Save the model, evaluate it, and say what came out."""
        trainer, recipe = self.trainer, self.loaded.recipe
        trainer.save_model()
        history = [entry for entry in trainer.state.log_history if any(name.startswith("eval/") for name in entry)]
        measured = bool(history) and history[-1]["step"] == trainer.state.global_step
        if trainer.eval_dataset is not None and recipe.eval.after and not measured:
            history.append(trainer.evaluate() | {"step": trainer.state.global_step})
        evaluations = [_numbers_only(entry) for entry in history]
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if trainer.is_world_process_zero():
            write_json(
                self.folder / "result.json",
                {
                    "method": recipe.method,
                    "steps": trainer.state.global_step,
                    "seconds": round(time.monotonic() - self.started, 1),
                    "last_loss": losses[-1] if losses else None,
                    "evaluations": evaluations,
                },
            )
        lines = [f"done: {trainer.state.global_step} steps in {duration(time.monotonic() - self.started)}"]
        if evaluations:
            first, last = evaluations[0], evaluations[-1]
            lines += [f"before    {numbers(first, EVALUATION)}"] if first["step"] == 0 else []
            lines += [f"after     {numbers(last, EVALUATION)}"] if last["step"] > 0 else []
        lines.append(f"saved     {self.folder} (model, README.md, metrics.jsonl, recipe.yaml, result.json)")
        return "\n".join(lines)


def build_run(loaded: LoadedRecipe, *, resume: bool = False) -> Run:
    """The run of a recipe, ready to start; everything that does not fit together has been refused by now."""
    logging.disable_progress_bar()  # of loading and mapping: the run has its own
    # peft 0.21 asks transformers 5.24 for an attribute by its old name; nobody who reads it here can mend it.
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
    scaled = getattr(loaded.recipe.objective, "dynamic_scaling", "off") != "off"
    stop, progress = GracefulStop(announce=_announce), RunProgress(scaled=scaled)
    trainer = build_trainer(loaded, resume=resume, callbacks=[stop, progress])
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    return Run(loaded=loaded, trainer=trainer, stop=stop, progress=progress)


def _of_loss(section: schema.Objective) -> list[str]:
    """What the numbers called loss are, where one of training and one of evaluation are not on one scale."""
    if not isinstance(section, schema.OfTeachers):
        return []
    fixed = f"{section.kd_weight:g} kd + {section.ce_weight:g} ce"
    mismatch = getattr(section, "mismatch_weight", 1)
    fixed += "" if mismatch == 1 else f", where chunks that are not one token on both sides count {mismatch:g} times"
    if section.dynamic_scaling == "off":
        return [f"loss      {fixed}"]
    return [f"loss      held out: {fixed}; of a step ({SCALED}): kd made as large as ce, plus ce"]


def _announce(number: int) -> None:
    name = signal.Signals(number).name
    print(
        f"\n{name}: stopping after this step, with a checkpoint. Once more stops at once.", file=sys.stderr, flush=True
    )


def _numbers_only(entry: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in entry.items() if isinstance(v, int) or (isinstance(v, float) and math.isfinite(v))}


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
