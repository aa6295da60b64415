# SPDX-License-Identifier: Apache-2.0
"""What the ids of a tokenizer stand for, and whether two models speak of the same thing by the same id.

A divergence over "the vocabulary" is meaningful only if id i is the same bytes on both sides. Equal sizes prove
nothing: two vocabularies of one size may be permutations of each other, and training on them gives a finite, plausible
and wrong loss. Unequal head widths disprove nothing either: heads are padded to round numbers, so Qwen2.5 has 151936
rows in one size and 152064 in another over one tokenizer of 151665 ids. So identity is proven id by id over bytes, and
both heads are then cut to the ids that exist.

Roles are bos, eos, unk, sep, cls and mask. The pad token has none: padding is told by masks, and users set it freely.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from cohobate.errors import VocabularyMismatch

ROLES = ("bos", "eos", "unk", "sep", "cls", "mask")

_OTHER_RECIPES = "For two different vocabularies use the recipe `csd` or `xtoken`."


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedVocabulary:
    """The ids that both sides have: `0 .. size - 1`. Cut both heads to `size` before any softmax."""

    size: int
    proven: bool = True  # id -> bytes was compared; False if only the configured sizes could be
    differences: tuple[str, ...] = ()  # what is not equal and does not forbid the comparison: report it


def token_bytes(tokenizer: Any) -> list[bytes | None]:
    """The bytes of every ordinary id, exactly as it stands in text: length = highest id + 1.

    None for every added token, special or not, and for ids that no token has. For ByteLevel BPE, SentencePiece-style
    (`▁`, byte fallback) and plain-text (WordLevel, character) vocabularies. NFC normalisation is accepted.

    Raises:
        VocabularyMismatch: (a ValueError) no fast tokenizer, a decoder that is none of these, or a step before the
            model that loses text (lower-casing, NFKC, stripping, dropping spaces), so that ids do not give it back.
    """
    if lossy := [step["type"] for step in text_steps(tokenizer) if _loses_text(step)]:
        raise VocabularyMismatch(
            f"{describe(tokenizer)} changes or drops characters of the text ({', '.join(lossy)}), so its ids do not "
            f"give the text's bytes back; its decoder is {decoder_of(tokenizer)}. Only NFC normalisation is accepted."
        )
    table, added = vocabulary_table(tokenizer)
    return [None if token_id in added else piece for token_id, piece in enumerate(table)]


def real_vocab_size(tokenizer: Any) -> int:
    """Highest id of the tokenizer + 1, added tokens included; a model's head may be wider (padding rows)."""
    return max(backend_of(tokenizer).get_vocab(with_added_tokens=True).values(), default=-1) + 1


def special_roles(tokenizer: Any) -> dict[str, int]:
    """Role (`bos`, `eos`, `unk`, `sep`, `cls`, `mask`) -> id, without the roles that the tokenizer lacks."""
    ids = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}
    return {role: int(token_id) for role, token_id in ids.items() if token_id is not None}


def fingerprint(tokenizer: Any) -> str:
    """sha256 (hex) over id -> bytes of every id, added tokens included, and the special-token roles.

    The same in every process and for every name or folder of the tokenizer; padded heads, the pad token and the chat
    template do not enter it (see `template_fingerprint`).
    """
    digest = hashlib.sha256(json.dumps(sorted(special_roles(tokenizer).items())).encode())
    table, _ = vocabulary_table(tokenizer)
    for piece in table:
        digest.update(b"-" if piece is None else b"%d:" % len(piece) + piece)
    return digest.hexdigest()


def merges_fingerprint(tokenizer: Any) -> str:
    """sha256 (hex) over what turns a piece of text into ids: vocabulary, merges and their options."""
    return hashlib.sha256(component_state(backend_of(tokenizer).model)).hexdigest()


def template_fingerprint(tokenizer: Any) -> str | None:
    """sha256 (hex) of the chat template, or None if there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def check_same_vocabulary(
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    *,
    recorded_text: bool = False,
    student_width: int | None = None,
    teacher_width: int | None = None,
) -> SharedVocabulary:
    """Prove that every shared id is the same bytes on both sides, and give the number of shared ids.

    One side may have more added tokens at its end (a later release of a family): they are not shared, are cut, and are
    reported in `differences`, as are special-token roles that differ (a base model that stops at another token).

    Args:
        recorded_text: completions come from text and not from the student: the two sides must then also encode text
            alike, so normaliser, pre-tokenizer, merges, special-token roles and chat template must be equal.
        student_width, teacher_width: rows of each output head. A head narrower than its tokenizer cuts further, if
            only added tokens are lost.

    Raises:
        VocabularyMismatch: with the first id that differs and its bytes on both sides, or with the rule that differs.
    """
    same_object = student_tokenizer is teacher_tokenizer
    student, student_added = vocabulary_table(student_tokenizer)
    teacher, teacher_added = (student, student_added) if same_object else vocabulary_table(teacher_tokenizer)
    size = min(len(student), len(teacher))
    if student[:size] != teacher[:size]:
        first = next(i for i in range(size) if student[i] != teacher[i])
        raise VocabularyMismatch(
            f"student and teacher do not share a vocabulary: id {first} is {_show(student[first])} for the student "
            f"and {_show(teacher[first])} for the teacher ({len(student)} and {len(teacher)} ids; equal sizes alone "
            f"prove nothing). {_OTHER_RECIPES}"
        )
    differences = list(_role_differences(student_tokenizer, teacher_tokenizer))
    if recorded_text and not same_object:
        _check_text_rules(student_tokenizer, teacher_tokenizer, differences)
    for side, other, table, added, width in (
        ("student", "teacher", student, student_added, student_width),
        ("teacher", "student", teacher, teacher_added, teacher_width),
    ):
        if len(table) > size:
            _check_only_added(side, f"which the {other} lacks", table, added, size)
            differences.append(f"the {side} has {len(table) - size} more ids, which are cut: {_list(table, size)}")
        if width is not None and width < len(table):
            _check_only_added(side, f"for which its head of {width} rows has no row", table, added, width)
            differences.append(f"the {side}'s head has no row for {_list(table, width)}")
            size = min(size, width)
    return SharedVocabulary(size=size, differences=tuple(differences))


def check_config_vocab_size(student_config: Any, teacher_config: Any, *, tokenizer: Any = None) -> SharedVocabulary:
    """For a teacher given as a bare module: `vocab_size` must be equal; this is taken for identity, and not proven.

    Also reads a nested `text_config`. With `tokenizer` (the one both are said to share) the result is cut to its ids.
    Embeddings are never resized.

    Raises:
        VocabularyMismatch: the sizes differ, or one is not stated.
    """
    student_size, teacher_size = _config_vocab_size(student_config), _config_vocab_size(teacher_config)
    if student_size is None or teacher_size is None:
        side = "student" if student_size is None else "teacher"
        raise VocabularyMismatch(
            f"the {side}'s config states no vocab_size. Pass both tokenizers (processing_class and "
            "teacher_processing_class), so that the vocabularies can be compared by their bytes."
        )
    if student_size != teacher_size:
        raise VocabularyMismatch(
            f"the student's config has vocab_size {student_size}, the teacher's has {teacher_size}, and the teacher "
            "came without a tokenizer. If both use one tokenizer and only the heads are padded differently, pass "
            f"teacher_processing_class to prove it. {_OTHER_RECIPES}"
        )
    size = student_size if tokenizer is None else min(student_size, real_vocab_size(tokenizer))
    return SharedVocabulary(size=size, proven=False)


def _config_vocab_size(config: Any) -> int | None:
    """`vocab_size` of a config object or of its JSON; of the text model where the model reads more than text."""

    def read(source: Any, name: str) -> Any:
        return source.get(name) if isinstance(source, dict) else getattr(source, name, None)

    for source in (read(config, "text_config"), config):
        if source is not None and (size := read(source, "vocab_size")) is not None:
            return int(size)
    return None


def _role_differences(student: Any, teacher: Any) -> list[str]:
    ours, theirs = special_roles(student), special_roles(teacher)

    def show(tokenizer: Any, roles: dict[str, int], role: str) -> str:
        return f"{roles[role]} ({getattr(tokenizer, f'{role}_token')!r})" if role in roles else "none"

    return [
        f"{role} is {show(student, ours, role)} for the student and {show(teacher, theirs, role)} for the teacher"
        for role in ROLES
        if ours.get(role) != theirs.get(role)
    ]


def _check_text_rules(student: Any, teacher: Any, role_differences: list[str]) -> None:
    """Everything by which two tokenizers of one vocabulary may still encode the same text differently."""
    ours, theirs = backend_of(student), backend_of(teacher)
    parts = [
        ("the normalisers differ", component_state(ours.normalizer) != component_state(theirs.normalizer)),
        ("the pre-tokenizers differ", component_state(ours.pre_tokenizer) != component_state(theirs.pre_tokenizer)),
        ("the merges differ", component_state(ours.model) != component_state(theirs.model)),
        ("the chat templates differ", template_fingerprint(student) != template_fingerprint(teacher)),
    ]
    found = [text for text, differs in parts if differs] + role_differences
    if found:
        raise VocabularyMismatch(
            f"recorded text would not be the same tokens on both sides: {'; '.join(found)}. Give both sides one "
            "tokenizer and chat template (if the difference does not matter to you, assign the student's to the "
            f"teacher), or train on the student's own completions only. {_OTHER_RECIPES}"
        )


def _check_only_added(side: str, why: str, table: list[bytes | None], added: set[int], start: int) -> None:
    ordinary = [i for i in range(start, len(table)) if table[i] is not None and i not in added]
    if ordinary:
        first = ordinary[0]
        raise VocabularyMismatch(
            f"the {side} has {len(ordinary)} ordinary tokens from id {first} ({_show(table[first])}) on, {why}; "
            f"cutting them would change what every other token means. {_OTHER_RECIPES}"
        )


def _show(piece: bytes | None) -> str:
    return "no token" if piece is None else repr(piece)


def _list(table: list[bytes | None], start: int) -> str:
    named = [f"{i} {_show(table[i])}" for i in range(start, min(start + 4, len(table)))]
    return ", ".join(named) + (", …" if len(table) > start + 4 else "")


def describe(tokenizer: Any) -> str:
    """What a message calls this tokenizer; not by its class, a name within transformers that tells nobody which."""
    name = getattr(tokenizer, "name_or_path", "")
    return f"the tokenizer {name}" if name else "the tokenizer (without a name)"


def decoder_of(tokenizer: Any) -> str:
    """What a message calls this tokenizer's decoder."""
    kinds = [part["type"] for part in component_parts(backend_of(tokenizer).decoder, "decoders")]
    return ", ".join(kinds) or "none"


def backend_of(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise VocabularyMismatch(
            f"{describe(tokenizer)} is no fast tokenizer (it has no `backend_tokenizer`), so its ids cannot be read "
            "as bytes. Load the fast one: AutoTokenizer.from_pretrained(...)."
        )
    return backend


def vocabulary_table(tokenizer: Any) -> tuple[list[bytes | None], set[int]]:
    """Bytes of every id, added tokens by their text, and the ids of the added tokens."""
    backend = backend_of(tokenizer)
    to_bytes = alphabet(tokenizer).read
    ordinary = backend.get_vocab(with_added_tokens=False)
    added = backend.get_added_tokens_decoder()
    size = max(max(ordinary.values(), default=-1), max(added, default=-1)) + 1
    table: list[bytes | None] = [None] * size
    for piece, token_id in ordinary.items():
        table[token_id] = to_bytes(piece)
    for token_id, token in added.items():
        table[token_id] = token.content.encode()
    return table, set(added)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alphabet:
    """How a vocabulary writes bytes: in ByteLevel's characters, or as text with a mark for the space."""

    byte_level: bool = False
    space: str | None = None
    byte_fallback: bool = False

    def read(self, piece: str) -> bytes:
        """The bytes of one entry of the vocabulary."""
        if self.byte_level:
            return _byte_level(piece)
        if self.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return (piece.replace(self.space, " ") if self.space else piece).encode()

    def write(self, piece: bytes) -> list[str | int]:
        """Any bytes in the vocabulary's writing: texts for its merges, and between them bytes that are no text."""
        if self.byte_level:
            return ["".join(map(_CHARACTER_OF.__getitem__, piece))]
        text = piece.decode("utf-8", "surrogateescape")
        parts = re.findall("[\udc80-\udcff]|[^\udc80-\udcff]+", text)
        return [
            ord(part) - 0xDC00 if "\udc80" <= part <= "\udcff" else part.replace(" ", self.space or " ")
            for part in parts
        ]


def alphabet(tokenizer: Any) -> _Alphabet:
    """How this tokenizer writes bytes in its vocabulary, as its decoder (else its pre-tokenizer) says.

    Raises:
        VocabularyMismatch: a decoder that is not known to give the bytes of a single id.
    """
    backend = backend_of(tokenizer)
    parts = component_parts(backend.decoder, "decoders")
    kinds = {part["type"] for part in parts}
    if not parts:
        kinds = {part["type"] for part in component_parts(backend.pre_tokenizer, "pretokenizers")} & {"ByteLevel"}
    if "ByteLevel" in kinds:
        return _Alphabet(byte_level=True)
    spaces = [_space_mark(part) for part in parts if part["type"] in ("Metaspace", "Replace")]
    if kinds - {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"} or None in spaces or len(set(spaces)) > 1:
        raise VocabularyMismatch(
            f"{describe(tokenizer)}: its decoder ({', '.join(sorted(kinds))}) is not known to give the bytes of a "
            "single id. Known are ByteLevel BPE, SentencePiece-style with `▁`, and WordLevel or character "
            "vocabularies."
        )
    return _Alphabet(space=spaces[0] if spaces else None, byte_fallback="ByteFallback" in kinds)


def _space_mark(part: dict[str, Any]) -> str | None:
    """The character that this decoder turns into a space, or None if it does something else."""
    if part["type"] == "Metaspace":
        return part["replacement"]
    return part["pattern"].get("String") if part["content"] == " " else None


def _byte_alphabet() -> dict[str, int]:
    """The printable character by which ByteLevel BPE writes each byte: itself, or the next free one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, piece))
    except KeyError:  # a piece outside the alphabet stands for itself, in the decoder too
        return piece.encode()


def _loses_text(step: dict[str, Any]) -> bool:
    """Whether a normaliser or pre-tokenizer step, as its JSON says, maps two texts to the same tokens."""
    kind = step["type"]
    if kind == "Replace":  # SentencePiece writes spaces as `▁`
        return step["pattern"] != {"String": " "}
    if kind in ("Split", "Punctuation"):
        return step["behavior"] == "Removed"
    return kind not in ("NFC", "Prepend", "ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")


def component_state(component: Any) -> bytes:
    return b"" if component is None else component.__getstate__()


def text_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """What the tokenizer does to a text before its model sees it, step by step, as its JSON says."""
    backend = backend_of(tokenizer)
    steps = (backend.normalizer, "normalizers"), (backend.pre_tokenizer, "pretokenizers")
    return [part for component, key in steps for part in component_parts(component, key)]


def component_parts(component: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normaliser, pre-tokenizer or decoder, sequences flattened."""
    if component is None:
        return []

    def flatten(part: dict[str, Any]) -> list[dict[str, Any]]:
        if part["type"] != "Sequence":
            return [part]
        return [leaf for inner in part[key] for leaf in flatten(inner)]

    return flatten(json.loads(component_state(component)))
