# SPDX-License-Identifier: Apache-2.0
"""A vocabulary as alignment reads it: by id, how many bytes a token spells, which bytes, and what a special is for.

A pass over 150,000 ids takes a quarter of a second, as long as aligning a thousand pages, so it is made once for each
tokenizer object. Unlike `token_bytes`, an added token that is not special (`<think>`) stands here for its own text:
the other side may spell it with ordinary tokens.
"""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cohobate.vocab.tokens import backend_of, special_roles, text_steps, token_bytes, vocabulary_table


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPieces:
    """What the V ids of a tokenizer stand for."""

    pieces: list[bytes]  # [V] b"" for a special and for an id that no token has
    lengths: NDArray[np.int64]  # [V] bytes of each
    special: NDArray[np.bool_]  # [V] True for specials and for ids that no token has
    roles: dict[int, frozenset[str]]  # special id -> `bos`, `eos`, ... and its own text
    prefix_space: bool  # the tokenizer may put a space in front of a text that has none
    num_tokens: int  # that the tokenizer had when it was read
    text: NDArray[np.uint8] = field(init=False)  # all pieces behind each other
    ends: NDArray[np.int64] = field(init=False)  # [V] where each ends in `text`

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", np.frombuffer(b"".join(self.pieces), dtype=np.uint8))
        object.__setattr__(self, "ends", self.lengths.cumsum())

    def spell(self, ids: NDArray[np.int64]) -> bytes:
        """The bytes of `ids [n]`, which are in range; four times as fast as joining `pieces`."""
        if not len(ids):
            return b""
        lengths = self.lengths[ids]
        ends = lengths.cumsum()
        place = np.arange(ends[-1])
        place += np.repeat(self.ends[ids] - ends, lengths)  # from the text of `ids` to that of the vocabulary
        return self.text[place].tobytes()


_READ: WeakKeyDictionary[Any, TokenPieces] = WeakKeyDictionary()


def token_pieces(tokenizer: Any) -> TokenPieces:
    """`TokenPieces` of `tokenizer`, read once for each tokenizer object and again after tokens were added to it.

    Raises:
        VocabularyMismatch: as `token_bytes`.
    """
    backend = backend_of(tokenizer)
    kept = _READ.get(tokenizer)
    # Where every id has a token, one more would be the next id; asking for that takes a hundredth of counting them.
    if kept is not None and kept.num_tokens == len(kept.pieces) and backend.id_to_token(kept.num_tokens) is None:
        return kept
    num_tokens = backend.get_vocab_size(with_added_tokens=True)
    if kept is None or kept.num_tokens != num_tokens:
        kept = _READ[tokenizer] = _read(tokenizer, num_tokens)
    return kept


def adds_prefix_space(tokenizer: Any) -> bool:
    """Whether the tokenizer may put a space in front of a text, or of what follows a special, that is not there."""
    return any(
        step["type"] == "Prepend"
        or (step["type"] == "Metaspace" and step["prepend_scheme"] != "never")
        or (step["type"] == "ByteLevel" and step["add_prefix_space"])
        for step in text_steps(tokenizer)
    )


def _read(tokenizer: Any, num_tokens: int) -> TokenPieces:
    token_bytes(tokenizer)  # refuses what cannot be read
    table, _ = vocabulary_table(tokenizer)
    added = backend_of(tokenizer).get_added_tokens_decoder()
    roles = {token_id: {token.content} for token_id, token in added.items() if token.special}
    for role, token_id in special_roles(tokenizer).items():
        roles.setdefault(token_id, set()).add(role)
    pieces = [b"" if piece is None or token_id in roles else piece for token_id, piece in enumerate(table)]
    special = [piece is None or token_id in roles for token_id, piece in enumerate(table)]
    return TokenPieces(
        pieces=pieces,
        lengths=np.array([len(piece) for piece in pieces], dtype=np.int64),
        special=np.array(special, dtype=np.bool_),
        roles={token_id: frozenset(names) for token_id, names in roles.items()},
        prefix_space=adds_prefix_space(tokenizer),
        num_tokens=num_tokens,
    )
