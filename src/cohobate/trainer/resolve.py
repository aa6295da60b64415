# SPDX-License-Identifier: Apache-2.0
"""From what a user passes to what the trainer runs: every check that can fail before training does so here."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from cohobate.data import LessonConfig, PromptConfig, PromptEncoder, PromptRow
from cohobate.errors import ConfigError, DataError, MissingExtra
from cohobate.objectives import DivergenceObjective, Objective
from cohobate.rollouts import LocalRollouts, RolloutSource
from cohobate.teachers import (
    AdapterOffTeacher,
    FrozenTeacher,
    LocalTeacher,
    Teacher,
)
from cohobate.teachers.load import load_tokenizer, resolve_model
from cohobate.teachers.packing import check_packing
from cohobate.trainer.aligners import Aligner
from cohobate.trainer.card import RunDescription
from cohobate.trainer.config import DistillationConfig
from cohobate.trainer.rolled_out import recorded
from cohobate.vocab import check_config_vocab_size, check_same_vocabulary, real_vocab_size

logger = logging.get_logger(__name__)

_ROWS_AT_A_TIME = 256  # that are aligned to be held against a store


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Encoded rows and the fingerprint of the data they came from."""

    rows: tuple[PromptRow, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self.rows[index]


def settings(args: Any) -> DistillationConfig:
    """The settings, refused where they could not be followed."""
    args = DistillationConfig() if args is None else args
    if not isinstance(args, DistillationConfig):
        raise ConfigError(
            f"args must be a DistillationConfig, got {type(args).__name__}; it takes every argument of "
            "TrainingArguments."
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"this one process sees {args.n_gpu} GPUs, over which transformers would spread each batch by threads: not"
            " supported. Start one process a GPU (torchrun --nproc-per-node, accelerate launch), or show one of"
            " them: CUDA_VISIBLE_DEVICES=0."
        )
    return args


def student(
    model: nn.Module | str | Path, tokenizer: Any, peft_config: Any, init_kwargs: Mapping[str, Any] | None
) -> tuple[nn.Module, Any]:
    """The student and its tokenizer; a path is loaded, an adapter put on."""
    if isinstance(model, str | Path) and tokenizer is None:
        tokenizer = _its_tokenizer(model, init_kwargs)
    model = resolve_model(model, init_kwargs, role="student")
    if tokenizer is None:
        raise ConfigError("processing_class is missing: pass the student's tokenizer.")
    if peft_config is None:
        return model, tokenizer
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise MissingExtra("peft_config needs the package peft: pip install 'cohobate[peft]'.") from error
    return get_peft_model(model, peft_config), tokenizer  # pyright: ignore[reportArgumentType]


def objective(given: Objective | None, args: DistillationConfig) -> Objective:
    """The objective; the default one is what `beta` and `distill_temperature` configure."""
    if given is None:
        return DivergenceObjective(beta=args.beta, temperature=args.distill_temperature)
    fields = DistillationConfig.__dataclass_fields__
    for name in ("beta", "distill_temperature"):
        if getattr(args, name) != fields[name].default:
            raise ConfigError(
                f"{name}={getattr(args, name)} configures the default objective, but objective="
                f"{type(given).__name__} was given too. Set it on the objective and leave it out of the config."
            )
    return given


def prompt_config(prompts: PromptConfig | None, args: DistillationConfig) -> PromptConfig:
    """How rows become prompts, with the `max_prompt_length` of either place."""
    if prompts is None:
        return PromptConfig(max_prompt_length=args.max_prompt_length)
    if args.max_prompt_length is None or args.max_prompt_length == prompts.max_prompt_length:
        return prompts
    if prompts.max_prompt_length is None:
        return replace(prompts, max_prompt_length=args.max_prompt_length)
    raise ConfigError(
        f"max_prompt_length is {args.max_prompt_length} in the config and {prompts.max_prompt_length} in prompts; set"
        " one of them."
    )


def training_rows(dataset: Any, encoder: PromptEncoder, *, rows_per_step: int) -> Rows | None:
    """The training rows, encoded; None when the trainer only evaluates."""
    if dataset is None:
        return None
    rows = _encode(dataset, encoder, "train_dataset")
    if len(rows) < rows_per_step:
        raise DataError(
            f"train_dataset has {len(rows)} usable rows, but one optimizer step takes {rows_per_step} "
            "(per_device_train_batch_size x gradient_accumulation_steps x processes). Lower one of them, or add rows."
        )
    return rows


def evaluation_rows(dataset: Any, encoder: PromptEncoder) -> Any:
    """The evaluation rows, encoded, or a dict of them by name."""
    if dataset is None or isinstance(dataset, Rows):
        return dataset
    if isinstance(dataset, Mapping):
        return {name: evaluation_rows(rows, encoder) for name, rows in dataset.items()}
    return _encode(dataset, encoder, "eval_dataset")


def _encode(dataset: Any, encoder: PromptEncoder, name: str) -> Rows:
    _check_sized(dataset, name)
    encoded = encoder.encode_rows(dataset)
    if encoded.skipped:
        logger.warning(f"{name}: {len(encoded.skipped)} of {len(dataset)} rows are over-long and are left out.")
    if encoded.num_typed_control:
        logger.warning(
            f"{name}: {encoded.num_typed_control} rows spell control tokens in their text; they are encoded as text."
        )
    return Rows(rows=encoded.rows, fingerprint=encoded.fingerprint)


def _check_sized(dataset: Any, name: str) -> None:
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise DataError(f"{name} must have a length and rows by index (a Dataset or a list); got a stream.")
    if len(dataset) == 0:
        raise DataError(f"{name} is empty: there is no row to work on. Check the path, the split and the filters.")


def _its_tokenizer(path: str | Path, init_kwargs: Mapping[str, Any] | None) -> Any:
    """The tokenizer beside a model, of the same revision."""
    shared = {n: v for n, v in (init_kwargs or {}).items() if n in ("revision", "trust_remote_code") and v is not None}
    return load_tokenizer(path, **shared)


def loaded_teacher(given: Any, init_kwargs: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """A teacher that was named by its path, loaded with its tokenizer; anything else as it is, without."""
    if isinstance(given, str | Path) and given != "self":
        return resolve_model(given, init_kwargs, role="teacher"), _its_tokenizer(given, init_kwargs)
    if init_kwargs:
        raise ConfigError(
            f"teacher_init_kwargs={dict(init_kwargs)} would have no effect: {type(given).__name__} is already there."
            " Leave them out, or pass the teacher as a path."
        )
    return given, None


def teacher(
    given: Any,
    student_model: nn.Module,
    tokenizer: Any,
    teacher_tokenizer: Any,
    *,
    recorded_text: bool,
    device: torch.device,
) -> tuple[Any, int | None]:
    """The teacher, and the number of shared real ids when two heads must be cut to them (else None)."""
    made_here = given is None or given == "self" or (hasattr(given, "build") and not hasattr(given, "score"))
    if made_here and teacher_tokenizer is not None:
        named = given if isinstance(given, str) else type(given).__name__
        raise ConfigError(
            f"teacher_processing_class would have no effect beside teacher={named}, which has no tokenizer of its own."
            " Leave it out, or pass the teacher that it belongs to."
        )
    if given is None:
        return None, None
    if given == "self":
        given = AdapterOffTeacher() if hasattr(student_model, "disable_adapter") else FrozenTeacher()
    if hasattr(given, "build") and not hasattr(given, "score"):
        vocab_size = _real_ids(student_model, tokenizer)
        return given.build(student_model, vocab_size), vocab_size
    if isinstance(given, nn.Module) and not hasattr(given, "score"):
        if teacher_tokenizer is None:
            check_config_vocab_size(student_model.config, given.config)
            vocab_size = _real_ids(student_model, tokenizer)
            return LocalTeacher(given, vocab_size=vocab_size, device=device), vocab_size
        widths = {"student_width": head_width(student_model), "teacher_width": head_width(given)}
        vocab_size = _proven_vocabulary(tokenizer, teacher_tokenizer, recorded_text=recorded_text, **widths)
        return LocalTeacher(given, vocab_size=vocab_size, device=device), vocab_size
    if getattr(given, "texts", None) is not None:
        if teacher_tokenizer is not None:
            raise ConfigError(
                f"teacher_processing_class would have no effect beside {type(given).__name__}, which says itself which"
                " tokenizers its teachers read. Leave it out."
            )
        return given, _real_ids(student_model, tokenizer)
    if hasattr(given, "score"):
        if teacher_tokenizer is None:
            return given, None
        return given, _proven_vocabulary(tokenizer, teacher_tokenizer, recorded_text=recorded_text)
    raise ConfigError(
        f"teacher must be a model, a path, a Teacher, a teacher config or 'self', got {type(given).__name__}."
    )


def _proven_vocabulary(tokenizer: Any, teacher_tokenizer: Any, **options: Any) -> int:
    shared = check_same_vocabulary(tokenizer, teacher_tokenizer, **options)
    for difference in shared.differences:
        logger.warning(f"student and teacher share a vocabulary of {shared.size} ids, but {difference}.")
    return shared.size


def _real_ids(model: nn.Module, tokenizer: Any) -> int | None:
    """The number of ids that stand for a token, where the head is padded beyond them; else None, nothing to cut."""
    real, width = real_vocab_size(tokenizer), head_width(model)
    return real if width is not None and width > real else None


def head_width(model: nn.Module) -> int | None:
    """The ids that the output head predicts, padding included; None for a model without one."""
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    weight = getattr(head, "weight", None)
    return getattr(head, "out_features", None if weight is None else weight.shape[0])


def check_context(model: nn.Module, rows: Rows | None) -> None:
    """A row must fit the positions that the student has: beyond them it predicts noise, and nothing would say so."""
    config = getattr(model, "config", None)
    limit = getattr(getattr(config, "text_config", None) or config, "max_position_embeddings", None)
    if limit is None or rows is None:
        return
    for row in rows.rows:
        completion = len(row.completion_ids or (0,))  # at least one token must find room
        if len(row.prompt_ids) + completion > limit:
            raise DataError(
                f"row {row.sample_id!r} has {len(row.prompt_ids)} prompt tokens and at least {completion} to predict, "
                f"but the student has {limit} positions (max_position_embeddings). Leave long rows out"
                " (max_prompt_length with over_long='skip'), or take a student with more positions."
            )


def check_readable(aligner: Aligner, *given: Any) -> None:
    """Every set of rows (`Rows`, a dict of them, or None) must be such as the teachers can read."""
    for rows in given:
        if isinstance(rows, Mapping):
            check_readable(aligner, *rows.values())
        elif rows is not None:
            aligner.check(rows.rows)


def check_recorded(teacher: Any, args: DistillationConfig, aligner: Aligner, pad_token_id: int, *given: Any) -> None:
    """A teacher that knows recorded completions alone needs rows that have one, and knows them all; or now, not later.

    Known is a row by every token that the teacher would read of it, so each is aligned here as the run will align it.

    Args:
        given: sets of rows, as for `check_readable`.
    """
    if not getattr(teacher, "recorded_only", False):
        return
    name = type(teacher).__name__
    if args.on_policy_fraction > 0:
        raise ConfigError(
            f"{name} knows the recorded completions that were scored and no others, but "
            f"on_policy_fraction={args.on_policy_fraction} samples new ones. Set it to 0."
        )
    sets = [rows for one in given for rows in (one.values() if isinstance(one, Mapping) else [one])]
    for rows in filter(None, sets):
        without = next((row.sample_id for row in rows.rows if row.completion_ids is None), None)
        if without is not None:
            raise DataError(f"row {without!r} has no recorded completion, and {name} knows no other.")
        for start in range(0, len(rows), _ROWS_AT_A_TIME):
            part = rows.rows[start : start + _ROWS_AT_A_TIME]
            teacher.check_batch(aligner.read(recorded(part, pad_token_id)).batch(range(len(part))))


def labels_notice(objective: Objective, args: DistillationConfig, rows: Rows | None) -> str | None:
    """What to say where a cross-entropy that no row of the run has is part of the loss, or a scale of it."""
    scaling = getattr(objective, "dynamic_scaling", "off")
    if getattr(objective, "ce_rows", "all") != "recorded" or rows is None:
        return None
    if args.on_policy_fraction < 1 and any(row.completion_ids is not None for row in rows.rows):
        return None
    if scaling == "off":
        weight = getattr(objective, "ce_weight", 0)
        return (
            (
                f"ce_weight={weight} weighs the cross-entropy of recorded completions, but the student writes every "
                "completion of this run: there is none. Lower on_policy_fraction, or set ce_weight=0."
            )
            if weight
            else None
        )
    return (
        f"dynamic_scaling={scaling!r} makes the divergence as large as the cross-entropy of recorded completions, but "
        "the student writes every completion of this run: the divergence stays multiplied by kd_weight / ce_weight. "
        "Set dynamic_scaling='off'."
    )


def calls_notice(objective: Objective, args: DistillationConfig) -> str | None:
    """What to say where something is chosen in each micro-batch anew, and a step has several."""
    scaling, chosen = (getattr(objective, name, None) for name in ("dynamic_scaling", "chosen_over"))
    named = ["dynamic_scaling='call'"] if scaling == "call" else []
    named += ["chosen_over='call'"] if chosen == "call" and getattr(objective, "chooses", False) else []
    cut = {"gradient_accumulation_steps": args.gradient_accumulation_steps, "token_budget": args.token_budget}
    cut = [f"{name}={value}" for name, value in cut.items() if value not in (None, 1)]
    if not named or not cut:
        return None
    return (
        f"{' and '.join(named)} decides in each micro-batch for itself, and {' and '.join(cut)} cuts a step into "
        "several: loss and gradient depend on how. For a result that does not, set dynamic_scaling='previous_step' "
        "and chosen_over='step', or let a step be one micro-batch."
    )


def packing(student_model: nn.Module, teacher: Any) -> None:
    """Every model of the run packs its rows from now on; `ConfigError` for one that cannot."""
    check_packing(student_model, "student")
    pack = getattr(teacher, "pack_rows", None)
    if pack is not None:
        pack("teacher")


def check_top_k(objective: Any, width: int | None) -> None:
    """A divergence over k ids needs so many in the vocabulary; a wrapper's is that of the objective inside."""
    while (inner := getattr(objective, "objective", None)) is not None:
        objective = inner
    k = getattr(objective, "top_k", None)
    if isinstance(k, int) and width is not None and k > width:
        raise ConfigError(f"top_k={k} is more than the {width} ids of the vocabulary. Lower it, or leave it out.")


def check_lessons(lessons: LessonConfig | None, args: DistillationConfig, rows: Rows | None) -> None:
    """A teacher that sees something of a group needs groups, of the student's own completions, that can be graded."""
    if lessons is None:
        return
    if args.on_policy_fraction < 1:
        raise ConfigError(
            f"lessons are made of completions that the student samples, but on_policy_fraction="
            f"{args.on_policy_fraction} takes recorded ones too. Set it to 1."
        )
    if args.num_generations == 1 and lessons.needs_peers:
        raise ConfigError(
            "num_generations=1 leaves every completion alone in its group, so none could be shown another's success. "
            "Set num_generations to 2 or more (8 is usual), or give the lessons a feedback."
        )
    for row in () if rows is None else rows.rows:
        if row.source is None:
            raise DataError(
                f"row {row.sample_id!r} is a `text` row and asks nothing, so there is no question that a teacher "
                "could read with a lesson in it. Give such rows as `prompt`."
            )
    lessons.check_rows([] if rows is None else [row.row for row in rows.rows])


def check_importance_ratio(objective: Objective, args: DistillationConfig) -> None:
    """Reusing rollouts needs an importance ratio, and a ratio needs the draw and the loss to speak of one policy."""
    if args.num_iterations > 1 and getattr(objective, "needs_fresh_rollouts", True):
        raise ConfigError(
            f"num_iterations={args.num_iterations} trains several steps on rollouts of an older policy, and "
            f"{type(objective).__name__} has no importance ratio for it. Use PolicyGradientObjective with "
            "clip_epsilon, ImportanceWeightedObjective (importance_clip in a recipe), or num_iterations=1."
        )
    if not getattr(objective, "needs_sampler_logprobs", False):
        return
    wanted = getattr(objective, "temperature", 1.0)
    drawn = {"top_p": (args.top_p, 1.0), "top_k": (args.top_k, 0), "min_p": (args.min_p, 0.0)}
    drawn["sampling_temperature"] = (args.sampling_temperature, wanted)
    for name, (found, needed) in drawn.items():
        if found != needed:
            raise ConfigError(
                f"the importance ratio of {type(objective).__name__} compares the policy that drew a token with the "
                f"one that is trained: {name} must be {needed}, got {found}. Change it, or leave the ratio out "
                "(clip_epsilon, importance_clip)."
            )


def eos_token_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion: the generation config's and the tokenizer's."""
    generation = getattr(model, "generation_config", None)
    found: list[int] = []
    for ids in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        found += [ids] if isinstance(ids, int) else list(ids or [])
    if not found:
        raise ConfigError(
            "neither the tokenizer nor the model's generation_config has an eos_token_id: no completion could end. Set"
            " tokenizer.eos_token."
        )
    return tuple(dict.fromkeys(found))


def pad_token_id(tokenizer: Any, eos: Sequence[int]) -> int:
    """Any id will do: padding is known from masks, never from ids."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]


def rollouts(
    given: Any,
    model: nn.Module,
    args: DistillationConfig,
    rows: Rows | None,
    *,
    ends: tuple[int, ...],
    pad: int,
    vocab_size: int | None,
) -> RolloutSource:
    """Who writes completions: the source that was given, one that a config builds, or the student's own `generate`."""
    if given is None:
        return LocalRollouts(model, eos_token_ids=ends, pad_token_id=pad, vocab_size=vocab_size)
    if hasattr(given, "sample"):
        return given
    if not hasattr(given, "build"):
        raise ConfigError(
            f"rollouts must be a RolloutSource or a config with build(), got {type(given).__name__}; None is the "
            "student's own generate."
        )
    return given.build(
        model,
        eos_token_ids=ends,
        pad_token_id=pad,
        vocab_size=vocab_size,
        max_staleness=args.max_staleness,
        canary_prompts=[row.prompt_ids or row.completion_ids for row in (() if rows is None else rows.rows[:8])],
    )


def describe(
    given: RunDescription | None,
    model: nn.Module,
    teacher: Teacher | None,
    objective: Objective,
    rows: Rows | None,
    *,
    settings: Mapping[str, Any],
) -> RunDescription:
    """The model card's facts: what the user said, and from the parts what was left open."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    said = given or RunDescription(
        student=str(name), teacher="none" if teacher is None else type(teacher).__name__, settings=settings
    )
    return replace(
        said,
        objective=said.objective or repr(objective),
        data_fingerprint=said.data_fingerprint or ("" if rows is None else rows.fingerprint),
        num_rows=said.num_rows or (0 if rows is None else len(rows)),
    )
