# SPDX-License-Identifier: Apache-2.0
"""X-Token's projection: for each student token the few teacher tokens that carry its probability, with weights.

A student token that the teacher has too is that token, weight 1, and flagged exact. Any other is spread over the ids
of its chain (`chains.py`), a tenth as much on each id as on the one before, and receives in the same way from teacher
tokens that it helps to spell. A chain longer than a row is left out rather than cut: a beginning is another word. The
flag is stored, since a row such as "aa" -> a, a also adds up to weight 1 on one id.

Vs student tokens, Vt teacher tokens, k entries of a row.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cohobate.errors import VocabularyMismatch
from cohobate.files import written_whole
from cohobate.vocab.chains import Progress, SubtokenTable, Vocabulary, build_table, shared_roles

_DECAY = 0.1  # of the weight from one id of a chain to the next
_REBUILD = "Build it again: cohobate projection build --student STUDENT --teacher TEACHER --output FILE"


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Rows of `[Vs, k]`: student token s stands for `indices[s]` with `weights[s]`, which add up to 1, or is empty."""

    indices: NDArray[np.int32]  # [Vs, k] teacher ids, -1 where a row has fewer than k
    weights: NDArray[np.float64]  # [Vs, k] descending
    exact: NDArray[np.bool_]  # [Vs] the first entry spells the same bytes, or is the special of the same role
    teacher_vocab_size: int
    header: Mapping[str, Any] = field(default_factory=dict)  # what it was built from; empty for `from_rows`

    @property
    def student_vocab_size(self) -> int:
        return self.indices.shape[0]

    @classmethod
    def build(
        cls,
        student_tokenizer: Any,
        teacher_tokenizer: Any,
        top_k: int = 4,
        *,
        special_roles: Mapping[str, str] | None = None,
        reverse_pass: bool = True,
        progress: Progress | None = None,
    ) -> "Projection":
        """For two fast BPE tokenizers, `top_k` entries a row.

        Args:
            special_roles: student's special -> teacher's, beside those that play one role on both sides.
            reverse_pass: let teacher tokens weigh on the student tokens that spell them, too.
            progress: called with (tokens done, tokens of this direction) from time to time.

        Raises:
            VocabularyMismatch: (a ValueError) as `SubtokenTables.build`.
        """
        if top_k < 1:
            raise ValueError(f"top_k must be >= 1, got {top_k}.")
        student, teacher = Vocabulary.of(student_tokenizer), Vocabulary.of(teacher_tokenizer)
        roles = shared_roles(student_tokenizer, teacher_tokenizer, special_roles)
        forward = build_table(student, teacher, roles, progress)
        entries = [_chain_entries(forward, top_k)]
        if reverse_pass:
            mirrored = [(role, of_teacher, of_student) for role, of_student, of_teacher in roles]
            of_teacher, of_student, weights = _chain_entries(build_table(teacher, student, mirrored, progress), top_k)
            entries.append((of_student, of_teacher, weights))
        sources, ids, weights = (np.concatenate(column) for column in zip(*entries, strict=True))
        exact = forward.counterpart
        inexact = exact[sources] < 0
        sources, ids, weights = sources[inexact], ids[inexact], weights[inexact]
        kept_s, kept_t = np.flatnonzero(exact >= 0), exact[exact >= 0].astype(np.int64)
        indices, values = _heaviest(
            np.concatenate([sources, kept_s]),
            np.concatenate([ids, kept_t]),
            np.concatenate([weights, np.ones(len(kept_s))]),
            len(forward),
            len(teacher.pieces),
            top_k,
        )
        header = {
            "format_version": 1,
            "top_k": top_k,
            "reverse_pass": reverse_pass,
            "student_fingerprint": student.fingerprint,
            "teacher_fingerprint": teacher.fingerprint,
            "student_merges": student.merges,
            "teacher_merges": teacher.merges,
            "roles": [list(role) for role in roles],
        }
        return cls(
            indices=indices,
            weights=values,
            exact=exact >= 0,
            teacher_vocab_size=len(teacher.pieces),
            header=header,
        )

    @classmethod
    def from_rows(
        cls, indices: ArrayLike, weights: ArrayLike, exact: ArrayLike, *, teacher_vocab_size: int
    ) -> "Projection":
        """From rows by hand: `indices [Vs, k]` (-1 where empty), `weights [Vs, k]`, `exact [Vs]`."""
        made = cls(
            indices=np.asarray(indices, dtype=np.int32),
            weights=np.asarray(weights, dtype=np.float64),
            exact=np.asarray(exact, dtype=np.bool_),
            teacher_vocab_size=teacher_vocab_size,
        )
        made._check_numbers()
        return made

    @classmethod
    def load(cls, path: str | Path) -> "Projection":
        """What `save` wrote. Raises VocabularyMismatch for a file that is no projection."""
        path = Path(path)
        if not path.is_file():
            what = (
                f"{path} is a folder, and a projection is a file"
                if path.is_dir()
                else f"there is no projection at {path}"
            )
            raise VocabularyMismatch(f"{what}. {_REBUILD}")
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if "projection" not in metadata:
                    found = ", ".join(sorted(metadata)) or "tensors alone"
                    raise VocabularyMismatch(f"{path} is no projection but holds {found}. {_REBUILD}")
                header = dict(json.loads(metadata["projection"]))
                size = int(header.pop("teacher_vocab_size"))
                arrays = {name: file.get_tensor(name) for name in ("indices", "weights", "exact")}
        except VocabularyMismatch:
            raise
        except (SafetensorError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise VocabularyMismatch(f"{path} is no projection ({error}). {_REBUILD}") from error
        made = cls(**arrays, teacher_vocab_size=size, header=header)
        made._check_numbers()
        return made

    def save(self, path: str | Path) -> None:
        """One safetensors file at exactly `path`, whole or not at all."""
        header = {**self.header, "teacher_vocab_size": self.teacher_vocab_size}
        tensors = {"indices": self.indices, "weights": self.weights, "exact": self.exact}
        with written_whole(Path(path)) as temporary:
            save_file(tensors, temporary, metadata={"projection": json.dumps(header)})

    def validate(self, student_tokenizer: Any, teacher_tokenizer: Any) -> None:
        """Raise unless the projection was built from exactly these two tokenizers.

        Raises:
            VocabularyMismatch: (a ValueError) which side and field differ, and the command that repairs it.
        """
        if not self.header:
            raise VocabularyMismatch(f"the projection was made by from_rows and names no tokenizers. {_REBUILD}")
        if self.header.get("format_version") != 1:
            raise VocabularyMismatch(
                f"the projection has format version {self.header.get('format_version')}, not 1. {_REBUILD}"
            )
        sides = {"student": Vocabulary.of(student_tokenizer), "teacher": Vocabulary.of(teacher_tokenizer)}
        if (
            self.header.get("student_fingerprint") == sides["teacher"].fingerprint
            and self.header.get("teacher_fingerprint") == sides["student"].fingerprint
            and sides["student"].fingerprint != sides["teacher"].fingerprint
        ):
            raise VocabularyMismatch("the projection goes from teacher to student: the two sides are swapped.")
        widths = {"student": self.student_vocab_size, "teacher": self.teacher_vocab_size}
        for side, vocabulary in sides.items():
            for name, value in (("fingerprint", vocabulary.fingerprint), ("merges", vocabulary.merges)):
                if self.header.get(f"{side}_{name}") != value:
                    raise VocabularyMismatch(
                        f"the projection's {side}_{name} is not that of the {side}'s, {vocabulary.name}: it "
                        f"was built from another one, or the tokenizer has changed since. {_REBUILD}"
                    )
            if widths[side] != len(vocabulary.pieces):
                raise VocabularyMismatch(
                    f"the projection has {widths[side]} {side} ids, but {vocabulary.name} has "
                    f"{len(vocabulary.pieces)}. {_REBUILD}"
                )
        self._check_numbers()

    @cached_property
    def strict_pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Student and teacher ids `[n], [n]` of the exact rows; a teacher id claimed twice is the lowest's."""
        students = np.flatnonzero(self.exact)
        return _first_claims(students, self.indices[students, 0])

    @cached_property
    def relaxed_pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same of all rows whose largest weight is >= .6; a teacher id goes to the largest, then lowest."""
        largest = self.weights[:, 0]
        students = np.flatnonzero((largest >= 0.6) & (self.indices[:, 0] >= 0))
        by_weight = students[np.lexsort((students, -largest[students]))]
        return _first_claims(by_weight, self.indices[by_weight, 0])

    def _check_numbers(self) -> None:
        rows = self.indices.shape
        if len(rows) != 2 or self.weights.shape != rows or self.exact.shape != rows[:1]:
            raise VocabularyMismatch(
                f"a projection has indices and weights [Vs, k] and exact [Vs], got {list(rows)}, "
                f"{list(self.weights.shape)} and {list(self.exact.shape)}."
            )
        kinds = "".join(x.dtype.kind for x in (self.indices, self.weights, self.exact))
        if kinds != "ifb":
            raise VocabularyMismatch(
                "a projection has integer indices, floating weights and boolean exact, got "
                f"{self.indices.dtype}, {self.weights.dtype} and {self.exact.dtype}."
            )
        used = self.indices >= 0
        if (used[:, 1:] > used[:, :-1]).any():
            raise VocabularyMismatch("a row of a projection has its entries in front, and -1 only behind them.")
        if self.indices.size and self.indices.max() >= self.teacher_vocab_size:
            raise VocabularyMismatch(
                f"the projection names teacher id {self.indices.max()}, but the teacher has {self.teacher_vocab_size}."
            )
        if (self.weights[~used] != 0).any() or (self.weights < 0).any():
            raise VocabularyMismatch("a projection's weights are >= 0, and 0 where its index is -1.")
        if (np.diff(self.weights, axis=1) > 1e-9).any():
            raise VocabularyMismatch("the weights of a projection's row descend: the first entry is the heaviest.")
        bad = np.flatnonzero(used.any(1) & ~(np.abs(self.weights.sum(1) - 1) <= 1e-6))  # NaN is no sum either
        if len(bad):
            raise VocabularyMismatch(f"row {bad[0]} of the projection adds up to {self.weights[bad[0]].sum()}, not 1.")
        if self.exact.any() and not (used[self.exact].sum(1) == 1).all():
            raise VocabularyMismatch("an exact row of a projection has one entry, of weight 1.")
        if not self.exact.any():
            raise VocabularyMismatch("no student token is a teacher token. Check that the two tokenizers are meant.")


def _chain_entries(
    table: SubtokenTable, longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """(source, destination, weight) of every id of every chain of at most `longest` ids."""
    lengths = table.lengths().astype(np.int64)
    sources = np.repeat(np.arange(len(table)), lengths)
    place = np.arange(len(table.ids)) - np.repeat(table.offsets[:-1].astype(np.int64), lengths)
    of_length = lengths[sources]
    weights = _DECAY**place * (1 - _DECAY) / (1 - _DECAY**of_length)
    fits = of_length <= longest
    return sources[fits], table.ids[fits].astype(np.int64), weights[fits]


def _heaviest(
    sources: NDArray[np.int64],
    ids: NDArray[np.int64],
    weights: NDArray[np.float64],
    num_sources: int,
    num_ids: int,
    top_k: int,
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Equal (source, id) added up, the `top_k` heaviest of each source, ties to the lower id; rows add up to 1."""
    keys, where = np.unique(sources * num_ids + ids, return_inverse=True)
    total = np.bincount(where, weights=weights, minlength=len(keys))
    source, token = keys // num_ids, keys % num_ids
    order = np.lexsort((token, -total, source))
    source, token, total = source[order], token[order], total[order]
    rank = np.arange(len(source)) - np.searchsorted(source, source)
    kept = rank < top_k
    indices = np.full((num_sources, top_k), -1, dtype=np.int32)
    values = np.zeros((num_sources, top_k))
    indices[source[kept], rank[kept]] = token[kept]
    values[source[kept], rank[kept]] = total[kept]
    sums = values.sum(1, keepdims=True)
    return indices, np.divide(values, sums, out=values, where=sums > 0)


def _first_claims(
    students: NDArray[np.int64], teachers: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One student for each teacher id, the first that claims it; ascending by student id."""
    claimed, first = np.unique(teachers.astype(np.int64), return_index=True)
    order = np.argsort(students[first])
    return students[first][order], claimed[order]
