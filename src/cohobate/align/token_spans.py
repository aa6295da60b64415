# SPDX-License-Identifier: Apache-2.0
"""`align_bytes` for ids of two tokenizers: which bytes an id spells comes from its vocabulary, read once and kept.

Only table look-ups stand between the ids and `spans.py`, since this runs for every row of every step.
"""

import contextlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cohobate.align.spans import Chunks, Side, align_sides
from cohobate.errors import AlignmentError
from cohobate.vocab.pieces import TokenPieces, token_pieces

TokenIds = Sequence[int] | Tensor | NDArray[np.integer[Any]]


def align_tokens(
    student_tokenizer: Any,
    student_ids: TokenIds,
    teacher_tokenizer: Any,
    teacher_ids: TokenIds,
    *,
    special_roles: Mapping[str, str] | None = None,
) -> Chunks:
    """The chunks of one text as two tokenizers spell it; ids `[S]` and `[N]` without padding.

    Specials are paired if they play one role (bos, eos, unk, sep, cls, mask), are the same text, or are named by
    `special_roles`: student's special -> teacher's (`{"<|im_end|>": "<|eot_id|>"}`). Added tokens that are not special
    stand for their text. A space that a tokenizer (SentencePiece's) puts in front of a text is left out where the
    other side has none.

    Raises:
        AlignmentError: (a ValueError) an id outside its vocabulary, a special that does not exist, or unequal bytes.
        VocabularyMismatch: (a ValueError) a tokenizer whose ids do not give the text's bytes back.
    """
    student, teacher = token_pieces(student_tokenizer), token_pieces(teacher_tokenizer)
    shared = _named_pairs(student, teacher, special_roles or {})
    return align_sides(
        _side("student", student, student_ids, shared[0]), _side("teacher", teacher, teacher_ids, shared[1])
    )


def _named_pairs(
    student: TokenPieces, teacher: TokenPieces, special_roles: Mapping[str, str]
) -> tuple[dict[int, frozenset[str]], dict[int, frozenset[str]]]:
    """Roles by id of both sides, with one more role for each pair that the user names."""
    ours, theirs = student.roles, teacher.roles
    for of_student, of_teacher in special_roles.items():
        name = f"{of_student} = {of_teacher}"
        ours = ours | {(i := _id_of("student", ours, of_student)): ours[i] | {name}}
        theirs = theirs | {(j := _id_of("teacher", theirs, of_teacher)): theirs[j] | {name}}
    return ours, theirs


def _id_of(side: str, roles: Mapping[int, frozenset[str]], text: str) -> int:
    found = next((token_id for token_id, names in roles.items() if text in names), None)
    if found is None:
        known = ", ".join(sorted({name for names in roles.values() for name in names})[:12])
        raise AlignmentError(f"special_roles names {text!r}, which is no special of the {side}; it has: {known}.")
    return found


def _side(name: str, vocabulary: TokenPieces, ids: TokenIds, roles: Mapping[int, frozenset[str]]) -> Side:
    array = _integers(name, ids)
    num_ids = len(vocabulary.pieces)
    if array.size and not 0 <= array.min() <= array.max() < num_ids:
        at = int(np.flatnonzero((array < 0) | (array >= num_ids))[0])
        raise AlignmentError(
            f"{name}_ids[{at}] is {array[at]}, but the {name}'s tokenizer has the ids 0 to {num_ids - 1}. Cut padding "
            "and ignored labels off first, and check that the two tokenizers are not swapped."
        )
    special = vocabulary.special[array]
    at_special = np.flatnonzero(special).tolist()
    return Side(
        name=name,
        lengths=vocabulary.lengths[array],
        special=special,
        text=vocabulary.spell(array),
        roles={i: roles[token_id] for i in at_special if (token_id := int(array[i])) in roles},
        strip_space=vocabulary.prefix_space,
    )


def _integers(name: str, ids: TokenIds) -> NDArray[np.int64]:
    if isinstance(ids, list | tuple):
        with contextlib.suppress(struct.error):  # holds something else: numpy says what
            return np.frombuffer(struct.pack(f"{len(ids)}q", *ids), dtype=np.int64)  # a third of `asarray`'s time
    array = np.asarray(ids.detach().cpu() if isinstance(ids, Tensor) else ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise AlignmentError(f"{name}_ids must be one row of integers, got shape {array.shape} of {array.dtype}.")
    return array.astype(np.int64)
