# SPDX-License-Identifier: Apache-2.0
"""How one vocabulary spells the tokens of another: for each source token a chain of destination tokens.

The chain is what the destination's own merges make of the token's *bytes*, as one piece: no pre-tokenizer divides it,
and it never becomes text in between, since a thousand and more tokens of a usual vocabulary are no valid UTF-8 alone.
A destination token with the same bytes comes before any merge, because vocabularies hold tokens that their own merges
never produce. A chain is kept whole, however long, and always spells its source exactly.

V source tokens, K ids of all chains together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cohobate.errors import VocabularyMismatch
from cohobate.vocab.tokens import (
    alphabet,
    backend_of,
    decoder_of,
    describe,
    fingerprint,
    merges_fingerprint,
    special_roles,
    token_bytes,
)

Progress = Callable[[int, int], None]  # (done, total)
_REPORT_EVERY = 4096
_UNWRITABLE_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class SubtokenTable:
    """One direction: `table[i]` is the chain of source token i, `()` where it has none. Compressed rows."""

    ids: NDArray[np.int32]  # [K] destination ids, chain after chain
    offsets: NDArray[np.int32]  # [V + 1] the chain of token i is ids[offsets[i] : offsets[i + 1]]
    header: Mapping[str, Any] = field(default_factory=dict)  # what it was built from; empty for `from_chains`

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, token_id: int) -> tuple[int, ...]:
        if not 0 <= token_id < len(self):
            raise IndexError(f"source id {token_id} is outside the table's 0 to {len(self) - 1}.")
        return tuple(self.ids[self.offsets[token_id] : self.offsets[token_id + 1]].tolist())

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        ids, ends = self.ids.tolist(), self.offsets.tolist()
        return (tuple(ids[a:b]) for a, b in pairwise(ends))

    def lengths(self) -> NDArray[np.int32]:
        """`[V]` length of each chain."""
        return np.diff(self.offsets)

    def one_token(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Source and destination ids of the chains of one token, ascending by source: `[n], [n]`."""
        sources = np.flatnonzero(self.lengths() == 1).astype(np.int32)
        return sources, self.ids[self.offsets[sources]]

    @cached_property
    def counterpart(self) -> NDArray[np.int32]:
        """`[V]` the destination id of a chain of one token, -1 for every other source token."""
        found = np.full(len(self), -1, dtype=np.int32)
        sources, destinations = self.one_token()
        found[sources] = destinations
        return found

    def alternatives(self, prefix: tuple[int, ...]) -> list[tuple[int, int]]:
        """(source id, last id of its chain) of all chains of `prefix` and one more id, ascending by source id.

        Everything the source side could have written in one token after which the destination side stands at
        `prefix`; `prefix` has at least one id.
        """
        return self._by_prefix.get(prefix, [])

    @cached_property
    def _by_prefix(self) -> dict[tuple[int, ...], list[tuple[int, int]]]:
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for source in np.flatnonzero(self.lengths() > 1).tolist():
            *prefix, last = self[source]
            found.setdefault(tuple(prefix), []).append((source, last))
        return found

    @classmethod
    def from_chains(
        cls, chains: Iterable[Sequence[int] | None], header: Mapping[str, Any] | None = None
    ) -> "SubtokenTable":
        """From one sequence of destination ids for each source token; empty or None where there is none."""
        rows = [() if chain is None else tuple(chain) for chain in chains]
        return cls(
            ids=np.fromiter((i for row in rows for i in row), dtype=np.int32),
            offsets=np.append(0, np.cumsum([len(row) for row in rows], dtype=np.int32)).astype(np.int32),
            header=dict(header or {}),
        )


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What tables are built from and compared with, read once: a pass over 130,000 ids takes half a second."""

    tokenizer: Any
    name: str  # for messages
    pieces: list[bytes | None]  # as `token_bytes`
    fingerprint: str
    merges: str

    @classmethod
    def of(cls, tokenizer: Any) -> "Vocabulary":
        """Raises VocabularyMismatch: as `token_bytes`."""
        return cls(
            tokenizer=tokenizer,
            name=describe(tokenizer),
            pieces=token_bytes(tokenizer),
            fingerprint=fingerprint(tokenizer),
            merges=merges_fingerprint(tokenizer),
        )


def build_table(
    source: Vocabulary,
    destination: Vocabulary,
    roles: Sequence[tuple[str, int, int]],
    progress: Progress | None = None,
) -> SubtokenTable:
    """The chains of every token of `source` in `destination`, both fast BPE tokenizers.

    Args:
        roles: (role, source id, destination id) of specials that play one role: chains of one token.
        progress: called with (tokens done, tokens in all) from time to time.

    Of several source tokens with the same bytes the lowest id gets the chain, the others none; of several destination
    tokens the lowest id is taken. Without a chain are also added tokens, specials without a counterpart, and tokens
    with a byte that the destination cannot write (SmolLM2's vocabulary lacks 21 bytes that text seldom or never has).

    Raises:
        VocabularyMismatch: a tokenizer that is no BPE or whose bytes cannot be read; a chain that does not spell its
            source token; or a destination that cannot write more than 1 % of the source's tokens.
    """
    spell = _speller(destination)
    pieces, wanted = source.pieces, destination.pieces
    exact: dict[bytes, int] = {}
    for token_id, piece in enumerate(wanted):
        if piece is not None:
            exact.setdefault(piece, token_id)
    special = {source_id: destination_id for _, source_id, destination_id in roles}
    writable = {byte for byte in range(256) if bytes([byte]) in exact}
    unwritable: list[int] = []
    chains: list[tuple[int, ...]] = []
    seen: set[bytes] = set()
    for token_id, piece in enumerate(pieces):
        if progress is not None and token_id % _REPORT_EVERY == 0:
            progress(token_id, len(pieces))
        if not piece or piece in seen:
            chains.append((special[token_id],) if token_id in special else ())
            continue
        seen.add(piece)
        chain = (exact[piece],) if piece in exact else spell(piece)
        if b"".join(wanted[i] or b"" for i in chain) != piece:
            if writable.issuperset(piece):
                raise VocabularyMismatch(
                    f"{destination.name} spells {piece!r} (id {token_id} of {source.name}) as "
                    f"{[wanted[i] for i in chain]}, which are other bytes; its decoder is "
                    f"{decoder_of(destination.tokenizer)}. Sub-token tables need a BPE vocabulary whose merges keep "
                    "the bytes."
                )
            unwritable.append(token_id)
            chain = ()
        chains.append(chain)
    if len(unwritable) > _UNWRITABLE_SHARE * len(pieces):
        raise VocabularyMismatch(
            f"{destination.name} cannot write {len(unwritable)} of the {len(pieces)} tokens of {source.name} (the "
            f"first is id {unwritable[0]}, {pieces[unwritable[0]]!r}): it has no token for "
            f"{256 - len(writable)} of the 256 bytes; its decoder is {decoder_of(destination.tokenizer)}. Sub-token "
            "tables need a vocabulary that writes any text: ByteLevel BPE, or BPE with byte fallback."
        )
    if progress is not None:
        progress(len(pieces), len(pieces))
    header = _header(source, destination, roles) | {"unwritable": len(unwritable)}
    return SubtokenTable.from_chains(chains, header)


def shared_roles(source: Any, destination: Any, named: Mapping[str, str] | None = None) -> list[tuple[str, int, int]]:
    """(role, source id, destination id) of the specials that play one role on both sides.

    `named`: text of a source's special -> text of a destination's, in addition and before the tokenizers' own roles.
    A special that plays two roles (bos = eos) is paired once, by the first: no id comes twice on either side.

    Raises:
        VocabularyMismatch: `named` speaks of a token that a side does not have, or that is text there.
    """
    ours, theirs = special_roles(source), special_roles(destination)
    candidates = [
        (f"{a} = {b}", _token_id(source, a), _token_id(destination, b)) for a, b in (named or {}).items()
    ] + [(role, ours[role], theirs[role]) for role in ours if role in theirs]
    pairs: list[tuple[str, int, int]] = []
    for role, source_id, destination_id in candidates:
        if all(source_id != a and destination_id != b for _, a, b in pairs):
            pairs.append((role, source_id, destination_id))
    return pairs


def _header(source: Vocabulary, destination: Vocabulary, roles: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
    return {
        "format_version": 1,
        "rule": "exact bytes, else the destination's merges over the raw bytes as one piece",
        "source_size": len(source.pieces),
        "destination_size": len(destination.pieces),
        "source_fingerprint": source.fingerprint,
        "destination_fingerprint": destination.fingerprint,
        "destination_merges": destination.merges,
        "roles": [list(role) for role in roles],
    }


def _speller(vocabulary: Vocabulary) -> Callable[[bytes], tuple[int, ...]]:
    """Bytes -> the ids that this tokenizer's merges make of them as one piece."""
    model = backend_of(vocabulary.tokenizer).model
    if type(model).__name__ != "BPE":
        raise VocabularyMismatch(
            f"{vocabulary.name} is a {type(model).__name__} vocabulary; its decoder is "
            f"{decoder_of(vocabulary.tokenizer)}. Sub-token tables need BPE, whose merges spell any bytes in one way."
        )
    letters = alphabet(vocabulary.tokenizer)

    def spell(piece: bytes) -> tuple[int, ...]:
        ids: list[int] = []
        for part in letters.write(piece):
            if isinstance(part, str):
                ids += [token.id for token in model.tokenize(part)]
            elif (token_id := model.token_to_id(f"<0x{part:02X}>")) is not None:
                ids.append(token_id)
        return tuple(ids)

    return spell


def _token_id(tokenizer: Any, text: str) -> int:
    token_id = backend_of(tokenizer).token_to_id(text)
    if token_id is None:
        raise VocabularyMismatch(f"special_roles names {text!r}, which {describe(tokenizer)} does not have.")
    if token_id not in backend_of(tokenizer).get_added_tokens_decoder():
        raise VocabularyMismatch(
            f"special_roles names {text!r}, an ordinary token of {describe(tokenizer)}: its bytes say what it is."
        )
    return token_id
