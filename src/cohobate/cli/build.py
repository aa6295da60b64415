# SPDX-License-Identifier: Apache-2.0
"""From a checked recipe to a trainer: each section becomes the part that it describes."""

import os
import tempfile
from pathlib import Path
from typing import Any, cast

from cohobate.cli import schema
from cohobate.cli.build_teachers import build_teacher, build_teachers, load_arguments, server_support_of
from cohobate.cli.recipe import LoadedRecipe
from cohobate.data import CompletionView, PrivilegedContext, load_rows
from cohobate.data.graders import expected_answer, grader_named
from cohobate.data.reasoning_gym import reasoning_gym_splits
from cohobate.errors import CohobateError, ConfigError, DataError, MissingExtra
from cohobate.objectives import (
    CrossEntropyObjective,
    DivergenceObjective,
    ImportanceWeightedObjective,
    Objective,
    PolicyGradientObjective,
    TokenSelectionObjective,
)
from cohobate.rollouts import VLLMRolloutsConfig
from cohobate.teachers.load import load_model, load_tokenizer
from cohobate.trainer.card import RunDescription
from cohobate.trainer.config import DistillationConfig
from cohobate.trainer.trainer import DistillationTrainer


def build_trainer(
    loaded: LoadedRecipe, *, resume: bool = False, callbacks: list[Any] | None = None
) -> DistillationTrainer:
    """The trainer of a recipe, with every part loaded and checked against the others; nothing is trained yet."""
    recipe = loaded.recipe
    check_output_dir(Path(recipe.output_dir))
    train_rows, eval_rows = rows(recipe)
    if recipe.eval.grader is not None and eval_rows is None:
        raise ConfigError(
            f"eval.grader={recipe.eval.grader} has no rows to grade: set data.eval (or data.eval_size), or leave the "
            "grader out."
        )
    student = load_model(recipe.student.model, **load_arguments(recipe.student))
    tokenizer = load_tokenizer(recipe.student.tokenizer or recipe.student.model)
    given_teacher, teacher_tokenizer = build_teacher(recipe, tokenizer, loaded.words)
    args = config(recipe, evaluates=eval_rows is not None, resume=resume)
    own_objective = objective(recipe.objective, recipe.teacher)
    if isinstance(recipe.objective, schema.OfTeachers):
        given_teacher, own_objective = build_teachers(
            recipe.teachers, recipe.objective, tokenizer, args.device, recipe.routing, loaded.words
        )
    try:
        trainer = DistillationTrainer(
            model=student,
            teacher=given_teacher,
            args=args,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            objective=own_objective,
            rollouts=rollouts(recipe.rollouts),
            callbacks=callbacks,
            peft_config=None if recipe.student.lora is None else lora_config(recipe.student.lora),
            teacher_processing_class=teacher_tokenizer,
            prompts=recipe.data.prompts,
            privileged=recipe.data.privileged,
            grader=None if recipe.eval.grader is None else grader_named(recipe.eval.grader),
            description=description(loaded, args),
        )
    except CohobateError as problem:
        if type(problem) in (ConfigError, DataError):
            raise type(problem)(schema.as_in_recipe(str(problem))) from problem
        raise
    except (ValueError, ImportError) as problem:  # transformers and PEFT check what they are given
        raise ConfigError(" ".join(str(problem).split())) from problem
    _check_privileged(recipe, tokenizer, trainer)
    _check_answers(recipe, trainer)
    return trainer


def _check_answers(recipe: schema.Recipe, trainer: DistillationTrainer) -> None:
    """A row that cannot be graded must not be found after the training."""
    if recipe.eval.grader is not None:
        for row in cast(Any, trainer.eval_dataset) or ():
            expected_answer(row.row)


def _check_privileged(recipe: schema.Recipe, tokenizer: Any, trainer: DistillationTrainer) -> None:
    """Write every teacher prefix once: a missing column or an over-long one must not end a run in its last hour."""
    if recipe.data.privileged is None:
        return
    context = PrivilegedContext(tokenizer, recipe.data.privileged)
    lessons = recipe.data.privileged.lessons
    if lessons is not None:  # there is no completion yet: a short one shows whether the template fits the rows
        for row in cast(Any, trainer.train_dataset) or ():
            context(row, CompletionView(ids=(), text="", lesson=lessons.example()))
        return
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        for row in cast(Any, dataset) or ():
            context(row)


def check_output_dir(folder: Path) -> None:
    """Refuse a folder that cannot be written before a model is loaded for it."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"output_dir={folder} cannot be written: {there} is not a folder that you may write to.")
    try:
        with tempfile.TemporaryFile(dir=there):  # what the permissions promise, the file system may refuse
            pass
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder} cannot be written: {there} takes no files ({error.strerror}). Name another folder."
        ) from error


def config(recipe: schema.Recipe, *, evaluates: bool, resume: bool = False) -> DistillationConfig:
    """The trainer's settings: `sampling`, `training`, and what the objective says of temperature and beta."""
    settings: dict[str, Any] = {
        "report_to": "none",
        "disable_tqdm": True,
        **recipe.training,
        **recipe.sampling,
        "output_dir": recipe.output_dir,
        "seed": recipe.seed,
    }
    if isinstance(recipe.objective, schema.Divergence) and objective(recipe.objective, recipe.teacher) is None:
        settings |= {"beta": recipe.objective.beta, "distill_temperature": recipe.objective.distill_temperature}
    if evaluates and recipe.eval.before and not resume:
        settings.setdefault("eval_on_start", True)
    try:
        return DistillationConfig(**settings)
    except ConfigError as problem:
        raise ConfigError(schema.as_in_recipe(str(problem))) from problem
    except (ValueError, TypeError, ImportError) as problem:  # transformers checks its own fields
        raise ConfigError(f"training: {' '.join(str(problem).split())}") from problem


def rows(recipe: schema.Recipe) -> tuple[Any, Any]:
    """Training rows, and evaluation rows or None."""
    data = recipe.data
    if isinstance(data, schema.RowData):
        held_out = None if data.eval is None else load_rows(data.eval, split=data.eval_split, rename=data.rename)
        return load_rows(data.train, split=data.train_split, rename=data.rename), held_out
    train, held_out = reasoning_gym_splits(
        data.task,
        train_size=data.train_size,
        eval_size=data.eval_size,
        seed=recipe.seed if data.seed is None else data.seed,
        config=data.options,
    )
    return train, held_out or None


def objective(section: schema.Objective, of: schema.Teacher | None = None) -> Objective | None:
    """The objective; None is the trainer's own, a divergence that `beta` and `distill_temperature` describe.

    `of` is the teacher: where it is on a server, its settings say what becomes of the ids that it does not name.
    """
    match section:
        case schema.Divergence():
            tail = server_support_of(of, section).tail if isinstance(of, schema.ServerTeacher) else section.tail
            own = DivergenceObjective(
                beta=section.beta,
                temperature=section.distill_temperature,
                clip=section.clip,
                clip_limit=section.clip_limit,
                top_k=section.top_k,
                top_k_of=section.top_k_of,
                tail=tail,
            )
            if section.importance_clip is not None:
                weighted = ImportanceWeightedObjective(objective=own, clip=section.importance_clip)
                return _selected(weighted, section.select)
            if section.select is None and own == DivergenceObjective(beta=own.beta, temperature=own.temperature):
                return None
            return _selected(own, section.select)
        case schema.PolicyGradient():
            own = PolicyGradientObjective(
                temperature=section.distill_temperature,
                iw_gamma=section.iw_gamma,
                clip_epsilon=section.clip_epsilon,
            )
            return _selected(own, section.select)
        case schema.CrossEntropy():
            return CrossEntropyObjective()
        case _:  # made in `several`, where the teachers' vocabularies are known
            return None


def rollouts(section: schema.Rollouts) -> VLLMRolloutsConfig | None:
    """What builds the source of completions; None is the student's own `generate`."""
    if isinstance(section, schema.LocalRollouts):
        return None
    settings = section.model_dump(exclude={"kind", "served_model_name"})
    return VLLMRolloutsConfig(model=section.served_model_name, **settings)


def _selected(own: Objective, select: schema.TokenSelection | None) -> Objective:
    if select is None:
        return own
    return TokenSelectionObjective(objective=own, signal=select.signal, keep=select.keep)


def lora_config(section: schema.Lora) -> Any:
    """The adapter's description for PEFT."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise MissingExtra("student.lora needs the package peft: pip install 'cohobate[peft]'.") from error
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=section.target_modules,
    )


def description(loaded: LoadedRecipe, args: DistillationConfig) -> RunDescription:
    """What the model card says of the recipe; the trainer adds what only it knows."""
    recipe = loaded.recipe
    named = recipe.teacher.model if isinstance(recipe.teacher, schema.LocalTeacher) else None
    named = named or ", ".join(entry.model for entry in recipe.teachers)
    kind = "none" if recipe.teacher is None else recipe.teacher.kind
    return RunDescription(
        method=recipe.method,
        student=recipe.student.model,
        teacher=named or kind,
        settings=args.distillation_settings(),
        recipe=loaded.plain(),
    )
