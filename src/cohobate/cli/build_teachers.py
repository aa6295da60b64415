# SPDX-License-Identifier: Apache-2.0
"""From a recipe's `teacher` or `teachers` to teachers: beside the student, in a store, or on a server.

Whether tokenizers belong together is proven here, where the recipe's names for them are known, before any model of a
teacher is asked for anything.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cohobate.cli import schema
from cohobate.errors import CohobateError, ConfigError, VocabularyMismatch
from cohobate.objectives import CommonSupportObjective, Objective, ProjectedObjective
from cohobate.teachers import (
    AdapterOffTeacher,
    EMATeacher,
    FrozenTeacher,
    LiveTeacher,
    LocalTeacher,
    OwnTokenizerTeacher,
    Routing,
    ServerTeacher,
    SeveralTeachers,
    StoredTeacher,
    Teacher,
)
from cohobate.teachers.load import load_model, load_tokenizer
from cohobate.teachers.server_support import ServerSupport, server_support
from cohobate.vocab import Projection, SubtokenTables, check_same_vocabulary, fingerprint, real_vocab_size


def build_teacher(recipe: schema.Recipe, tokenizer: Any, words: Sequence[str] = ()) -> tuple[Any, Any]:
    """What `DistillationTrainer` takes as a teacher, and its tokenizer if it has one of its own.

    `tokenizer` is the student's, whose ids a store or a server is asked for. `words`: the recipe's name and changes,
    for the command that makes a store anew.
    """
    section = recipe.teacher
    match section:
        case schema.LocalTeacher():
            model = load_model(section.model, **load_arguments(section))
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
            run = run_options(words, section.model)
            options: dict[str, Any] = {"top_k": section.top_k, "temperature": temperature}
            return StoredTeacher(section.path, own, reads="student", run=run, **options), own
        case schema.ServerTeacher():
            return _on_server(section, recipe.objective, tokenizer), tokenizer
        case _:
            return None, None


def _on_server(section: schema.ServerTeacher, loss: schema.Objective, tokenizer: Any) -> ServerTeacher:
    """A teacher that is asked for what this loss can use; nothing is asked yet."""
    top_k, keep_sampled = 0, False
    if isinstance(loss, schema.Divergence):
        support = server_support_of(section, loss)
        top_k, keep_sampled = support.top_k, support.keep_sampled
    return ServerTeacher(
        section.teacher_model_server_url,
        vocab_size=real_vocab_size(tokenizer),
        model=section.model,
        top_k=top_k,
        keep_sampled=keep_sampled,
        temperature=getattr(loss, "distill_temperature", 1.0),
        **section.reached(),
    )


def server_support_of(section: schema.ServerTeacher, loss: schema.Divergence) -> ServerSupport:
    return server_support(
        beta=loss.beta,
        loss_top_k=section.loss_top_k,
        loss_add_tail=section.loss_add_tail,
        reverse_kl_top_1_mode=section.reverse_kl_top_1_mode,
    )


def build_teachers(
    entries: Sequence[schema.TeacherEntry],
    section: schema.OfTeachers,
    tokenizer: Any,
    device: Any = None,
    routing: Routing | None = None,
    words: Sequence[str] = (),
) -> tuple[SeveralTeachers, Objective]:
    """The entries of `teachers`, and the objective that knows how each vocabulary relates to the student's.

    `words`: as for `build_teacher`.

    Raises:
        VocabularyMismatch: tables of other tokenizers, or a teacher without aligner whose tokenizer is another one.
    """
    teachers: list[Teacher] = []
    parts: list[Any] = []
    for i, entry in enumerate(entries):
        try:
            run = run_options(words, entry.model)
            made, part = _entry(entry, section.distill_temperature, tokenizer, device, run)
        except (ConfigError, VocabularyMismatch) as problem:
            raise type(problem)(f"teachers.{i} ({entry.model}): {problem}") from problem
        teachers.append(made)
        parts.append(part)
    options = section.model_dump(exclude={"kind", "distill_temperature"})
    if isinstance(section, schema.MultiTeacher):  # it has no chunk, so `beta` is that of tokens
        options["same_vocab_beta"] = options["beta"]
    options |= {"temperature": section.distill_temperature, "weights": tuple(entry.weight for entry in entries)}
    make = ProjectedObjective if isinstance(section, schema.Projected) else CommonSupportObjective
    objective = make(parts=tuple(parts), routed=routing is not None, **options)
    return SeveralTeachers(teachers, routing), objective


def run_options(words: Sequence[str], model: str | None) -> list[str]:
    """A recipe's name and changes as options of `cohobate score`, with its name of the model that is to score."""
    if not words:
        return []
    return ["--recipe", *words[:1], *([] if model is None else ["--teacher", model]), *words[1:]]


def _entry(
    entry: schema.TeacherEntry, temperature: float, tokenizer: Any, device: Any, run: Sequence[str]
) -> tuple[Teacher, Any]:
    """One of several teachers, and what relates its vocabulary to the student's (None: it is the student's)."""
    own = _tokenizer_of(entry)
    if entry.aligner is None:
        try:
            shared = check_same_vocabulary(tokenizer, own, recorded_text=True)
        except VocabularyMismatch as problem:
            raise VocabularyMismatch(
                f"it has no aligner, so its tokenizer must be the student's. {problem}"
            ) from problem
        model = load_model(entry.model, **load_arguments(entry))
        return LocalTeacher(model, vocab_size=shared.size, device=device), None
    part = _relation(entry.aligner, tokenizer, own)
    if entry.path is None:
        return _with_own_tokenizer(entry, own, temperature, device), part
    stored = StoredTeacher(entry.path, own, top_k=entry.top_k, temperature=temperature, reads="teacher", run=run)
    named = entry.aligner.special_roles
    if dict(stored.store.header.special_roles or {}) != named:
        raise ConfigError(
            f"aligner.special_roles is {named}, but the store {entry.path} was made with "
            f"{dict(stored.store.header.special_roles or {})}. Write the same here, or score again. "
            f"{stored.store.anew()}"
        )
    return stored, part


def _tokenizer_of(entry: schema.TeacherEntry) -> Any:
    """The teacher's tokenizer; one that is named must be the one beside the model, if there is one."""
    if entry.tokenizer is None:
        return load_tokenizer(entry.model)
    named = load_tokenizer(entry.tokenizer)
    try:
        beside = load_tokenizer(entry.model)
    except CohobateError:
        return named
    if fingerprint(beside) != fingerprint(named):
        raise ConfigError(
            f"tokenizer={entry.tokenizer} is not the one that lies beside the model, which would read ids that mean "
            "something else to it. Leave tokenizer out."
        )
    return named


def _with_own_tokenizer(entry: schema.TeacherEntry, own: Any, temperature: float, device: Any) -> OwnTokenizerTeacher:
    """A teacher that reads its own tokens, in this process or on a server."""
    assert entry.aligner is not None
    top_k = entry.top_k
    if entry.teacher_model_server_url is None:
        inner: Teacher = LocalTeacher(load_model(entry.model, **load_arguments(entry)), device=device)
    else:
        assert top_k is not None
        inner = ServerTeacher(
            entry.teacher_model_server_url,
            vocab_size=real_vocab_size(own),
            model=entry.served_model_name,
            top_k=top_k,
            temperature=temperature,
            **entry.reached(),
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
    if not aligner.subtokens:
        projection = Projection.load(path)
        projection.validate(student, teacher)
        counterpart = np.where(projection.exact, projection.indices[:, 0], -1)
        _check_roles(aligner.special_roles, student, teacher, counterpart, f"projection at {path}")
        return projection
    tables = SubtokenTables.load(path, aligner.teacher_to_student)
    tables.validate(student, teacher)
    counterpart = tables.student_to_teacher.counterpart
    _check_roles(aligner.special_roles, student, teacher, counterpart, f"subtokens at {path}")
    return tables


def _check_roles(
    named: Mapping[str, str], student: Any, teacher: Any, counterpart: NDArray[np.integer], what: str
) -> None:
    """What the recipe pairs must be paired in what was read from disk; `counterpart[s]` is the teacher's id, or -1."""
    for of_student, of_teacher in named.items():
        ids = student.convert_tokens_to_ids(of_student), teacher.convert_tokens_to_ids(of_teacher)
        if None in ids or counterpart[ids[0]] != ids[1]:
            raise ConfigError(
                f"aligner.special_roles pairs {of_student!r} with {of_teacher!r}, but the {what} does not: build it "
                f"again with --role '{of_student}={of_teacher}', or write {what.split()[0]}: auto."
            )


def load_arguments(section: schema.Student | schema.LocalTeacher | schema.TeacherEntry) -> dict[str, Any]:
    return {"dtype": section.dtype, "attn_implementation": section.attn_implementation}
