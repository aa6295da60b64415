# SPDX-License-Identifier: Apache-2.0
"""From rows of data to a teacher store, by the parts that a training run uses.

Rows are encoded by the student's tokenizer and aligned for the teacher exactly as a run with recorded completions does
it: what the teacher will be asked about is then, by construction, what it was asked about here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

from transformers import AutoConfig, GenerationConfig
from transformers.utils import logging

from cohobate.align.cross_tokenizer import TeacherText
from cohobate.cli.progress import Steps
from cohobate.data import PrivilegedConfig, PromptConfig, PromptEncoder, PromptRow
from cohobate.errors import ConfigError, DataError, VocabularyMismatch
from cohobate.teachers.load import load_tokenizer, model_folder
from cohobate.teachers.model_files import check_config_files
from cohobate.teachers.model_fingerprint import config_fingerprint, weights_fingerprint
from cohobate.teachers.store_files import ShardEntry
from cohobate.teachers.store_format import Header, Text, Values, asked_texts, data_digest, prompt_settings
from cohobate.teachers.store_ray import run_on_ray
from cohobate.teachers.store_scoring import model_scorer
from cohobate.teachers.store_writer import ShardJob, ShardMaker, Written, make_shards, plan_shards, write_store
from cohobate.trainer.aligners import aligner_of
from cohobate.trainer.resolve import eos_token_ids, pad_token_id
from cohobate.trainer.rolled_out import recorded
from cohobate.vocab import check_same_vocabulary, fingerprint, real_vocab_size, template_fingerprint
from cohobate.vocab.tokens import merges_fingerprint

_ROWS_AT_A_TIME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What is scored, by whom, and into what."""

    teacher: str
    datasets: tuple[Any, ...]  # rows, as `load_rows` gives them
    output: Path
    student: str  # encodes the rows
    prompts: PromptConfig
    student_tokenizer: str | None = None  # None: the student's folder
    teacher_tokenizer: str | None = None  # None: the teacher's folder
    own_tokenizer: bool = False  # the teacher reads its own tokens of the text
    privileged: PrivilegedConfig | None = None
    special_roles: Mapping[str, str] | None = None
    max_length: int | None = None
    top_k: int = 128
    temperature: float = 1.0
    values: Values = "exact"
    dtype: str | None = None
    revision: str | None = None
    batch_tokens: int = 8192
    shard_rows: int = 65_536
    launcher: Literal["local", "ray"] = "local"
    num_workers: int | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """What is known of both models without loading them."""

    student_tokenizer: Any
    teacher_tokenizer: Any
    student_config: Any  # None where the student is a tokenizer alone
    teacher_config: Any
    student_folder: Path
    teacher_folder: Path
    vocab_size: int  # ids that are scored


def build_store(settings: StoreSettings, say: Callable[[str], None] = print) -> Written:
    """Score every recorded completion of the rows; what is there already is kept.

    Raises:
        ConfigError, DataError: before the model is loaded, for what can be known then.
    """
    logging.disable_progress_bar()  # of loading: this has its own
    sides = _sides(settings)
    text = _teacher_text(settings, sides)
    texts = _texts(settings, sides, text, say)
    jobs = plan_shards(texts, settings.shard_rows)
    if not jobs:
        raise DataError("there is nothing to score: no row has a recorded completion that the teacher can read.")
    header = _header(settings, sides, text, jobs)
    load = {"model": settings.teacher, "dtype": settings.dtype, "revision": settings.revision}
    with Steps("shard", len(jobs)) as steps:

        def checked(done: int, total: int) -> None:
            steps.describe("checking shard")
            steps.advance_to(done, total)

        def run(missing: Sequence[ShardJob]) -> Iterable[ShardEntry]:
            return _made(settings, header, len(jobs), missing, load, steps)

        return write_store(settings.output, header, jobs, run, command=settings.command, on_check=checked)


def _made(
    settings: StoreSettings,
    header: Header,
    num_shards: int,
    missing: Sequence[ShardJob],
    load: Mapping[str, Any],
    steps: Steps,
) -> Iterable[ShardEntry]:
    """The shards that are not there, made here or by Ray."""
    rows_of = {job.number: sum(text.num_rows for text in job.texts) for job in missing}
    total, done = sum(rows_of.values()), 0
    steps.describe("prediction")
    steps.advance_to(0, total)

    def more(rows: int) -> None:
        nonlocal done
        done += rows
        steps.advance_to(done, total)

    folder = settings.output
    if settings.launcher == "ray":
        for entry in run_on_ray(
            missing,
            folder=folder,
            header=header,
            num_shards=num_shards,
            load=load,
            num_workers=settings.num_workers,
        ):
            more(rows_of[entry.number])
            yield entry
        return
    score = model_scorer(header, **load, on_rows=more)
    make = ShardMaker(folder=folder, header=header, num_shards=num_shards, score=score)
    yield from make_shards(make, missing)


def _sides(settings: StoreSettings) -> _Sides:
    teacher_folder = model_folder(settings.teacher, revision=settings.revision)
    student_folder = model_folder(settings.student)
    student = load_tokenizer(settings.student_tokenizer or settings.student)
    named = settings.teacher_tokenizer
    teacher = load_tokenizer(named) if named else load_tokenizer(settings.teacher, revision=settings.revision)
    configs = [_config(folder) for folder in (student_folder, teacher_folder)]
    if configs[1] is None:
        raise ConfigError(f"the teacher {teacher_folder} has no config.json, so it is no model.")
    widths = [None if config is None else getattr(config.get_text_config(), "vocab_size", None) for config in configs]
    if settings.own_tokenizer:
        vocab_size = real_vocab_size(teacher)
        if widths[1] is not None and widths[1] < vocab_size:
            raise ConfigError(
                f"the teacher predicts {widths[1]} ids, but its tokenizer has {vocab_size}. Name the tokenizer that "
                "belongs to it, or resize its embeddings."
            )
    else:
        try:
            shared = check_same_vocabulary(
                student, teacher, recorded_text=True, student_width=widths[0], teacher_width=widths[1]
            )
        except VocabularyMismatch as problem:
            raise VocabularyMismatch(
                f"{problem} A teacher that is to read its own tokens, for `csd`, is scored with --own-tokenizer."
            ) from problem
        vocab_size = shared.size
    return _Sides(
        student_tokenizer=student,
        teacher_tokenizer=teacher,
        student_config=configs[0],
        teacher_config=configs[1],
        student_folder=student_folder,
        teacher_folder=teacher_folder,
        vocab_size=vocab_size,
    )


def _config(folder: Path) -> Any:
    """The model's settings, or None for a folder with a tokenizer alone."""
    if not (folder / "config.json").is_file():
        return None
    check_config_files(folder, trust_remote_code=False)
    return AutoConfig.from_pretrained(str(folder), local_files_only=True)


def _teacher_text(settings: StoreSettings, sides: _Sides) -> TeacherText | None:
    if not settings.own_tokenizer:
        return None
    limits = [n for n in (settings.max_length, _positions(sides.teacher_config)) if n is not None]
    return TeacherText(
        tokenizer=sides.teacher_tokenizer,
        special_roles=settings.special_roles or None,
        max_length=min(limits) if limits else None,
    )


def _positions(config: Any) -> int | None:
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _texts(settings: StoreSettings, sides: _Sides, text: TeacherText | None, say: Callable[[str], None]) -> list[Text]:
    """What the teacher is to read, as a run with these rows would have it."""
    rows = _recorded_rows(settings, sides, say)
    ends = eos_token_ids(cast(Any, _with_generation_config(sides)), sides.student_tokenizer)
    pad = pad_token_id(sides.student_tokenizer, ends)
    aligner = aligner_of(
        SimpleNamespace(texts=None if text is None else (text,)),
        sides.student_tokenizer,
        privileged=settings.privileged,
        eos_token_ids=ends,
        pad_token_id=pad,
    )
    aligner.check(rows)
    texts: list[Text] = []
    with Steps("row", len(rows)) as steps:
        for start in range(0, len(rows), _ROWS_AT_A_TIME):
            part = rows[start : start + _ROWS_AT_A_TIME]
            batch = aligner.read(recorded(part, pad)).batch(range(len(part)))
            texts += [asked.text for asked in asked_texts(batch)]
            steps.advance_to(start + len(part))
    _check_lengths(texts, _positions(sides.teacher_config))
    if len(texts) < len(rows):
        say(f"rows in which the teacher has nothing to predict: {len(rows) - len(texts)}")
    return texts


def _recorded_rows(settings: StoreSettings, sides: _Sides, say: Callable[[str], None]) -> list[PromptRow]:
    """The rows with a completion, of all data sets."""
    encoder = PromptEncoder(sides.student_tokenizer, settings.prompts)
    encoded = [encoder.encode_rows(dataset) for dataset in settings.datasets]
    rows = [row for part in encoded for row in part.rows]
    with_completion = [row for row in rows if row.completion_ids is not None]
    for count, what in (
        (sum(len(part.skipped) for part in encoded), "over-long rows, left out"),
        (len(rows) - len(with_completion), "rows without a recorded completion, which no store can hold"),
    ):
        if count:
            say(f"{what}: {count}")
    if not with_completion:
        raise DataError(
            "no row has a recorded completion (prompt and completion, messages that end with the assistant's turn, or "
            "text). A store holds scores of recorded completions only; sampled ones need a live teacher or a server."
        )
    return with_completion


def _with_generation_config(sides: _Sides) -> Any:
    """Something with the student's `generation_config`, which names further ends of a completion."""
    found = None
    if (sides.student_folder / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(str(sides.student_folder), local_files_only=True)
    elif sides.student_config is not None:
        found = GenerationConfig.from_model_config(sides.student_config)
    return SimpleNamespace(generation_config=found)


def _check_lengths(texts: Sequence[Text], limit: int | None) -> None:
    for text in texts:
        if limit is not None and len(text.ids) > limit:
            raise DataError(
                f"row {text.sample_id!r} has {len(text.ids)} tokens, but the teacher has {limit} positions "
                "(max_position_embeddings): beyond them it predicts noise. Leave long rows out "
                "(data.prompts.max_prompt_length with over_long=skip in a recipe), or take another teacher."
            )


def _header(settings: StoreSettings, sides: _Sides, text: TeacherText | None, jobs: Sequence[ShardJob]) -> Header:
    texts = [text for job in jobs for text in job.texts]
    read = sides.student_tokenizer if text is None else sides.teacher_tokenizer
    with Steps("weights, MB", 1) as steps:
        weights = weights_fingerprint(
            sides.teacher_folder, lambda done, total: steps.advance_to(done // 2**20, total // 2**20)
        )
    return Header(
        teacher_config=config_fingerprint(sides.teacher_folder),
        teacher_weights=weights,
        teacher_dtype=settings.dtype or "as in the file",
        teacher_revision=settings.revision,
        tokens="student" if text is None else "teacher",
        tokenizer=fingerprint(read),
        merges=merges_fingerprint(read),
        template=template_fingerprint(read),
        max_length=None if text is None else text.max_length,
        special_roles=None if text is None else text.special_roles,
        prompts=None if text is None else prompt_settings(text.prompts),
        top_k=settings.top_k,
        temperature=settings.temperature,
        vocab_size=sides.vocab_size,
        values=settings.values,
        data=data_digest(texts),
        num_texts=len(texts),
        num_rows=sum(text.num_rows for text in texts),
        shard_rows=settings.shard_rows,
        batch_tokens=settings.batch_tokens,
    )
