# SPDX-License-Identifier: Apache-2.0
"""The pair of sub-token tables that CSD compares two vocabularies by: made once, checked before it is trusted.

A table that is stale by one tokenizer release gives finite, plausible and wrong losses. So the file says what it was
built from (fingerprints over every id's bytes, the merges, the roles), and `validate` compares all of it with the
tokenizers in use. Files are safetensors with a JSON header: nothing in them is executed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cohobate.errors import VocabularyMismatch
from cohobate.files import written_whole
from cohobate.vocab.chains import Progress, SubtokenTable, Vocabulary, build_table, shared_roles

FORWARD, REVERSE, SINGLE = "student_to_teacher", "teacher_to_student", "source_to_destination"
_Side = tuple[str, Vocabulary]  # student or teacher, and what it is
_REBUILD = "Build the tables again: cohobate subtokens build --student STUDENT --teacher TEACHER --output DIR"


@dataclass(frozen=True, kw_only=True)
class SubtokenTables:
    """How each side's tokens are spelled by the other: CSD's sub-token tables."""

    student_to_teacher: SubtokenTable
    teacher_to_student: SubtokenTable

    @classmethod
    def build(
        cls,
        student_tokenizer: Any,
        teacher_tokenizer: Any,
        special_roles: Mapping[str, str] | None = None,
        *,
        progress: Progress | None = None,
    ) -> "SubtokenTables":
        """Both directions for two fast BPE tokenizers; about a second each for 130,000 ids.

        Args:
            special_roles: student's special -> teacher's, beside those that play one role (bos, eos, ...) on both.
            progress: called with (tokens done, tokens of this direction) from time to time.

        Raises:
            VocabularyMismatch: (a ValueError) as `build_table`.
        """
        student, teacher = Vocabulary.of(student_tokenizer), Vocabulary.of(teacher_tokenizer)
        roles = shared_roles(student_tokenizer, teacher_tokenizer, special_roles)
        mirrored = [(role, teacher_id, student_id) for role, student_id, teacher_id in roles]
        return cls(
            student_to_teacher=build_table(student, teacher, roles, progress),
            teacher_to_student=build_table(teacher, student, mirrored, progress),
        )

    @classmethod
    def from_chains(
        cls,
        student_to_teacher: Iterable[Sequence[int] | None],
        teacher_to_student: Iterable[Sequence[int] | None],
    ) -> "SubtokenTables":
        """From chains by hand: one sequence of the other side's ids for each id, `()` or None where there is none."""
        tables = cls(
            student_to_teacher=SubtokenTable.from_chains(student_to_teacher),
            teacher_to_student=SubtokenTable.from_chains(teacher_to_student),
        )
        tables._check_numbers()
        return tables

    @classmethod
    def load(cls, path: str | Path, teacher_to_student: str | Path | None = None) -> "SubtokenTables":
        """From what `save` wrote, from the folder that `cohobate subtokens build` wrote, or from one file each.

        Raises:
            VocabularyMismatch: no such file, half a pair, or a file that holds no tables.
        """
        path = Path(path)
        if teacher_to_student is not None:
            files = [(path, FORWARD), (Path(teacher_to_student), REVERSE)]
        elif path.is_dir():
            files = [(path / f"{name}.safetensors", name) for name in (FORWARD, REVERSE)]
        else:
            files = [(path, FORWARD), (path, REVERSE)]
        one_file = teacher_to_student is None and not path.is_dir()
        tables = cls(**{name: _read(file, name, both=one_file) for file, name in files})
        tables._check_numbers()
        return tables

    def save(self, path: str | Path) -> None:
        """Both directions into one safetensors file at exactly `path`, whole or not at all."""
        write_tables(path, {FORWARD: self.student_to_teacher, REVERSE: self.teacher_to_student})

    @cached_property
    def common(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Student ids and teacher ids `[n], [n]` that spell the same bytes, or are specials of one role."""
        return self.student_to_teacher.one_token()

    def validate(self, student_tokenizer: Any, teacher_tokenizer: Any) -> None:
        """Raise unless the tables were built from exactly these two tokenizers and are what they should be.

        Raises:
            VocabularyMismatch: (a ValueError) which side and which field differ, and the command that repairs it.
        """
        sides = ("student", Vocabulary.of(student_tokenizer)), ("teacher", Vocabulary.of(teacher_tokenizer))
        for name, table, (source, destination) in (
            (FORWARD, self.student_to_teacher, sides),
            (REVERSE, self.teacher_to_student, sides[::-1]),
        ):
            _check_header(name, table.header, source, destination)
            _check_chains(name, table, source, destination)
        self._check_numbers()
        self._check_roles()

    def _check_numbers(self) -> None:
        """What can be said without the tokenizers: ids are in range, one-token chains agree in both directions."""
        forward, reverse = self.student_to_teacher, self.teacher_to_student
        for name, table, other in ((FORWARD, forward, reverse), (REVERSE, reverse, forward)):
            if table.ids.size and not 0 <= table.ids.min() <= table.ids.max() < len(other):
                raise VocabularyMismatch(
                    f"{name} holds ids from {table.ids.min()} to {table.ids.max()}, but the other side has 0 to "
                    f"{len(other) - 1}. {_REBUILD}"
                )
        pairs = set(zip(*(ids.tolist() for ids in forward.one_token()), strict=True))
        mirrored = {
            (student, teacher) for teacher, student in zip(*(i.tolist() for i in reverse.one_token()), strict=True)
        }
        if pairs != mirrored:
            student, teacher = min(pairs ^ mirrored)
            here, there = (FORWARD, REVERSE) if (student, teacher) in pairs else (REVERSE, FORWARD)
            raise VocabularyMismatch(
                f"{here} says that student id {student} is teacher id {teacher}, {there} does not. One-token chains "
                f"must agree. {_REBUILD}"
            )
        if not pairs:
            raise VocabularyMismatch(
                "no student token is one teacher token, so there is nothing to compare token by token. Check that "
                "the two tokenizers are the ones you mean."
            )

    def _check_roles(self) -> None:
        roles = [tuple(role) for role in self.student_to_teacher.header["roles"]]
        mirrored = [(role, teacher, student) for role, student, teacher in roles]
        if mirrored != [tuple(role) for role in self.teacher_to_student.header["roles"]]:
            raise VocabularyMismatch(
                f"the roles of specials differ: {FORWARD} has {roles}, {REVERSE} "
                f"{self.teacher_to_student.header['roles']}. {_REBUILD}"
            )
        for role, student, teacher in roles:
            if self.student_to_teacher[student] != (teacher,):
                raise VocabularyMismatch(
                    f"the {role} token, student id {student}, should be teacher id {teacher}, but {FORWARD} has "
                    f"{self.student_to_teacher[student]}. {_REBUILD}"
                )


def write_tables(path: str | Path, tables: Mapping[str, SubtokenTable]) -> None:
    """Directions by name into one safetensors file with a JSON header."""
    tensors = {f"{name}.{part}": getattr(table, part) for name, table in tables.items() for part in ("ids", "offsets")}
    headers = {name: json.dumps(dict(table.header)) for name, table in tables.items()}
    with written_whole(Path(path)) as temporary:
        save_file(tensors, temporary, metadata=headers)


def _read(path: Path, name: str, *, both: bool) -> SubtokenTable:
    """The direction `name` of a file, or, unless the file should hold `both`, the only one that it has."""
    if not path.is_file():
        raise VocabularyMismatch(f"there is no sub-token table at {path}. {_REBUILD}")
    try:
        with safe_open(path, framework="numpy") as file:
            headers = file.metadata() or {}
            found = [n for n in (FORWARD, REVERSE, SINGLE) if n in headers]
            wanted = name if both or name in found else SINGLE
            if "projection" in headers:
                raise VocabularyMismatch(
                    f"{path} is a projection, which X-Token reads (aligner.projection), and no sub-token table. "
                    f"{_REBUILD}"
                )
            if not both and found and wanted not in found:
                raise VocabularyMismatch(f"{path} holds {', '.join(found)}, not {name}: the two files are swapped.")
            if wanted not in found:
                raise VocabularyMismatch(
                    f"{path} holds {', '.join(found) or 'no sub-token table'}, not {name}: a pair needs both "
                    f"directions. {_REBUILD}"
                )
            ids, offsets = (file.get_tensor(f"{wanted}.{part}") for part in ("ids", "offsets"))
            header = json.loads(headers[wanted])
    except (SafetensorError, json.JSONDecodeError) as error:
        raise VocabularyMismatch(f"{path} is no sub-token table ({error}). {_REBUILD}") from error
    if not isinstance(header, dict) or any(x.dtype != np.int32 or x.ndim != 1 for x in (ids, offsets)):
        raise VocabularyMismatch(
            f"{path} is no sub-token table: {name} needs int32 ids and offsets, one row each, and a header with "
            f"fields. {_REBUILD}"
        )
    if offsets.size == 0 or offsets[0] != 0 or (np.diff(offsets) < 0).any() or offsets[-1] != ids.size:
        raise VocabularyMismatch(f"{path} is damaged: its {name} rows do not fit its ids. {_REBUILD}")
    return SubtokenTable(ids=ids, offsets=offsets, header=header)


def _check_header(name: str, header: Mapping[str, Any], source: _Side, destination: _Side) -> None:
    if not header:
        raise VocabularyMismatch(f"{name} was made by from_chains and says nothing of its tokenizers. {_REBUILD}")
    if header.get("format_version") != 1:
        raise VocabularyMismatch(f"{name} has format version {header.get('format_version')}, not 1. {_REBUILD}")
    roles = header.get("roles")
    if not isinstance(roles, list) or not all(isinstance(role, list) and len(role) == 3 for role in roles):
        raise VocabularyMismatch(f"{name} does not say which specials play which role. {_REBUILD}")
    found = {
        "source_fingerprint": (source, source[1].fingerprint),
        "destination_fingerprint": (destination, destination[1].fingerprint),
        "destination_merges": (destination, destination[1].merges),
    }
    differing = [(field, side) for field, (side, value) in found.items() if header.get(field) != value]
    if not differing:
        return
    swapped = (
        header.get("source_fingerprint") == found["destination_fingerprint"][1]
        and header.get("destination_fingerprint") == found["source_fingerprint"][1]
    )
    if swapped:
        raise VocabularyMismatch(
            f"{name} is the table of the other direction: student and teacher are swapped, or the two files are."
        )
    field, (side, vocabulary) = differing[0]
    raise VocabularyMismatch(
        f"{name}.{field} is not that of the {side}'s, {vocabulary.name}: it was built from another one, "
        f"or the tokenizer has changed since. {_REBUILD}"
    )


def _check_chains(name: str, table: SubtokenTable, source: _Side, destination: _Side) -> None:
    """Every chain spells its source token, and only what has no bytes of its own may lack one."""
    pieces, wanted = source[1].pieces, destination[1].pieces
    if len(table) != len(pieces):
        raise VocabularyMismatch(
            f"{name} has {len(table)} rows, the {source[0]}'s tokenizer {len(pieces)} ids. {_REBUILD}"
        )
    special = {source_id for _, source_id, _ in table.header["roles"]}
    seen: set[bytes] = set()
    without = 0
    for token_id, (piece, chain) in enumerate(zip(pieces, table, strict=True)):
        if not piece or piece in seen:
            if bool(chain) != (token_id in special):
                raise VocabularyMismatch(
                    f"{name}[{token_id}] is {chain}, but the {source[0]}'s token has no bytes of its own and "
                    f"{'a' if token_id in special else 'no'} role. {_REBUILD}"
                )
            continue
        seen.add(piece)
        without += not chain
        if chain and b"".join(wanted[i] or b"" for i in chain) != piece:
            raise VocabularyMismatch(
                f"{name}[{token_id}] is {chain}, which spells {[wanted[i] for i in chain]} for {piece!r}. {_REBUILD}"
            )
    if without != table.header.get("unwritable"):
        raise VocabularyMismatch(
            f"{name} has {without} ordinary tokens without a chain; its header says "
            f"{table.header.get('unwritable')}. {_REBUILD}"
        )
