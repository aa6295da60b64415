# SPDX-License-Identifier: Apache-2.0
"""From a checked recipe to a trainer: each section becomes the part that it describes."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from cohobate.cli import schema
from cohobate.cli.recipe import LoadedRecipe
from cohobate.data import PrivilegedContext, load_rows
from cohobate.data.graders import expected_answer, grader_named
from cohobate.data.reasoning_gym import reasoning_gym_splits
from cohobate.errors import CohobateError, ConfigError, MissingExtra
from cohobate.objectives import (
    CommonSupportObjective,
    CrossEntropyObjective,
    DivergenceObjective,
    Objective,
    PolicyGradientObjective,
    ProjectedObjective,
    TokenSelectionObjective,
)
from cohobate.teachers import (
    AdapterOffTeacher,
    EMATeacher,
    FrozenTeacher,
    LiveTeacher,
    LocalTeacher,
    OwnTokenizerTeacher,
    ServerTeacher,
    SeveralTeachers,
    StoredTeacher,
    Teacher,
)
from cohobate.teachers.load import load_model, load_tokenizer
from cohobate.teachers.server_support import ServerSupport, server_support
from cohobate.trainer.card import RunDescription
from cohobate.trainer.config import DistillationConfig
from cohobate.trainer.trainer import DistillationTrainer
from cohobate.vocab import Projection, SubtokenTables, check_same_vocabulary, real_vocab_size


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
    student = load_model(recipe.student.model, **_load_arguments(recipe.student))
    tokenizer = load_tokenizer(recipe.student.tokenizer or recipe.student.model)
    given_teacher, teacher_tokenizer = teacher(recipe, tokenizer)
    args = config(recipe, evaluates=eval_rows is not None, resume=resume)
    own_objective = objective(recipe.objective, recipe.teacher)
    if isinstance(recipe.objective, schema.CommonSupport | schema.Projected):
        given_teacher, own_objective = several(recipe.teachers, recipe.objective, tokenizer, args.device)
    try:
        trainer = DistillationTrainer(
            model=student,
            teacher=given_teacher,
            args=args,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            objective=own_objective,
            callbacks=callbacks,
            peft_config=None if recipe.student.lora is None else lora_config(recipe.student.lora),
            teacher_processing_class=teacher_tokenizer,
            prompts=recipe.data.prompts,
            privileged=recipe.data.privileged,
            grader=None if recipe.eval.grader is None else grader_named(recipe.eval.grader),
            description=description(loaded, args),
        )
    except CohobateError:
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
    except ConfigError:
        raise
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


def teacher(recipe: schema.Recipe, tokenizer: Any) -> tuple[Any, Any]:
    """What `DistillationTrainer` takes as a teacher, and its tokenizer if it has one of its own.

    `tokenizer` is the student's, whose ids a store or a server is asked for.
    """
    section = recipe.teacher
    match section:
        case schema.LocalTeacher():
            model = load_model(section.model, **_load_arguments(section))
            return model, load_tokenizer(section.tokenizer or section.model)
        case schema.FrozenTeacher():
            return FrozenTeacher(), None
        case schema.EMATeacher():
            return EMATeacher(decay=section.decay), None
        case schema.AdapterOffTeacher():
            return AdapterOffTeacher(), None
        case schema.LiveTeacher():
            return LiveTeacher(), None
        case schema.StoredTeacher():
            own = tokenizer if section.tokenizer is None else load_tokenizer(section.tokenizer)
            temperature = getattr(recipe.objective, "distill_temperature", None)
            return StoredTeacher(section.path, own, top_k=section.top_k, temperature=temperature), own
        case schema.ServerTeacher():
            return _on_server(section, recipe.objective, tokenizer), tokenizer
        case _:
            return None, None


def _on_server(section: schema.ServerTeacher, loss: schema.Objective, tokenizer: Any) -> ServerTeacher:
    """A teacher that is asked for what this loss can use; nothing is asked yet."""
    top_k, keep_sampled = 0, False
    if isinstance(loss, schema.Divergence):
        support = _support(section, loss)
        top_k, keep_sampled = support.top_k, support.keep_sampled
    return ServerTeacher(
        section.teacher_model_server_url,
        vocab_size=real_vocab_size(tokenizer),
        model=section.model,
        top_k=top_k,
        keep_sampled=keep_sampled,
        temperature=getattr(loss, "distill_temperature", 1.0),
        head_size=section.head_size,
        token_env=section.token_env,
        allow_insecure=section.allow_insecure,
        ca_file=section.ca_file,
        concurrency=section.concurrency,
    )


def _support(section: schema.ServerTeacher, loss: schema.Divergence) -> ServerSupport:
    return server_support(
        beta=loss.beta,
        loss_top_k=section.loss_top_k,
        loss_add_tail=section.loss_add_tail,
        reverse_kl_top_1_mode=section.reverse_kl_top_1_mode,
    )


def several(
    entries: Sequence[schema.TeacherEntry],
    section: schema.CommonSupport | schema.Projected,
    tokenizer: Any,
    device: Any = None,
) -> tuple[SeveralTeachers, Objective]:
    """The entries of `teachers`, and the objective that knows how each vocabulary relates to the student's.

    Raises:
        VocabularyMismatch: tables of other tokenizers, or a teacher without aligner whose tokenizer is another one.
    """
    teachers: list[Teacher] = []
    parts: list[Any] = []
    for entry in entries:
        own = load_tokenizer(entry.tokenizer or entry.model)
        shared = None if entry.aligner else check_same_vocabulary(tokenizer, own, recorded_text=True)
        parts.append(_relation(entry.aligner, tokenizer, own) if entry.aligner else None)
        if entry.path is not None:
            stored = StoredTeacher(entry.path, own, top_k=entry.top_k, temperature=section.distill_temperature)
            teachers.append(stored)
        elif shared is not None:
            model = load_model(entry.model, **_load_arguments(entry))
            teachers.append(LocalTeacher(model, vocab_size=shared.size, device=device))
        else:
            teachers.append(_with_own_tokenizer(entry, own, section.distill_temperature, device))
    options = section.model_dump(exclude={"kind", "distill_temperature"})
    options |= {"temperature": section.distill_temperature, "weights": tuple(entry.weight for entry in entries)}
    make = CommonSupportObjective if isinstance(section, schema.CommonSupport) else ProjectedObjective
    return SeveralTeachers(teachers), make(parts=tuple(parts), **options)


def _with_own_tokenizer(entry: schema.TeacherEntry, own: Any, temperature: float, device: Any) -> OwnTokenizerTeacher:
    """A teacher that reads its own tokens, in this process or on a server."""
    assert entry.aligner is not None
    top_k = entry.top_k
    if entry.teacher_model_server_url is None:
        inner: Teacher = LocalTeacher(load_model(entry.model, **_load_arguments(entry)), device=device)
    else:
        assert top_k is not None
        inner = ServerTeacher(
            entry.teacher_model_server_url, vocab_size=real_vocab_size(own), top_k=top_k, temperature=temperature
        )
        top_k = None  # it says no more
    return OwnTokenizerTeacher(
        inner,
        own,
        special_roles=entry.aligner.special_roles,
        max_length=entry.max_length,
        top_k=top_k,
        temperature=temperature,
    )


def _relation(aligner: schema.Aligner, student: Any, teacher: Any) -> SubtokenTables | Projection:
    """What relates two vocabularies: made now, or read and checked against both."""
    roles = aligner.special_roles or None
    path = aligner.subtokens or aligner.projection
    assert path is not None
    if path == "auto" and aligner.subtokens:
        return SubtokenTables.build(student, teacher, roles)
    if path == "auto":
        return Projection.build(student, teacher, special_roles=roles)
    if not Path(path).exists():
        command = "subtokens" if aligner.subtokens else "projection"
        raise ConfigError(
            f"teachers.aligner.{command}: there is no {path}. Write auto, or `cohobate {command} build`."
        )
    found = SubtokenTables.load(path, aligner.teacher_to_student) if aligner.subtokens else Projection.load(path)
    found.validate(student, teacher)
    return found


def objective(section: schema.Objective, of: schema.Teacher | None = None) -> Objective | None:
    """The objective; None is the trainer's own, a divergence that `beta` and `distill_temperature` describe.

    `of` is the teacher: where it is on a server, its settings say what becomes of the ids that it does not name.
    """
    match section:
        case schema.Divergence():
            tail = _support(of, section).tail if isinstance(of, schema.ServerTeacher) else section.tail
            own = DivergenceObjective(
                beta=section.beta,
                temperature=section.distill_temperature,
                clip=section.clip,
                clip_limit=section.clip_limit,
                top_k=section.top_k,
                tail=tail,
            )
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


def _load_arguments(section: schema.Student | schema.LocalTeacher | schema.TeacherEntry) -> dict[str, Any]:
    return {"dtype": section.dtype, "attn_implementation": section.attn_implementation}
