# SPDX-License-Identifier: Apache-2.0
"""Text that people typed never becomes a control token.

A tokenizer reads the string `<|im_end|>` as the token that ends a turn wherever it stands, so a prompt that contains
it can close its own turn and write the assistant's, or a system message. `split_special_tokens` does not help against
tokens that are added but not "special" (`<think>`, `<tool_call>`), nor against a string that template and content form
together. Here *every* added token counts as control, except white space (some vocabularies add runs of spaces), and
only the places that a caller allows are read as one.

How: a twin of the tokenizer knows each control token by a private name, made of a character that the text does not
contain. Allowed places are written by that name; everything else, also the control token's own spelling, is text to
the twin. One call encodes the whole, so all else of the tokenizer (normaliser, prefix space, merges) acts as always.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from cohobate.errors import ConfigError, DataError
from cohobate.vocab.tokens import describe

_STRETCH = "\0"  # the matcher's one ordinary token: any stretch of text between control tokens

# Unicode keeps these for internal use; one that does not occur in the text marks the private names.
_MARKERS = [*map(chr, range(0xFDD0, 0xFDF0)), *(chr(plane * 0x10000 + 0xFFFE) for plane in range(1, 17))]


class Span(NamedTuple):
    """Characters `start .. end - 1` of a text are the control token `token_id`."""

    start: int
    end: int
    token_id: int


class ControlTokens:
    """The control tokens of one tokenizer: where text holds them, and how to encode text if only some count."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"{describe(tokenizer)} is no fast tokenizer (it has no `backend_tokenizer`), so control tokens "
                "in typed text could not be neutralised. Load the fast one: AutoTokenizer.from_pretrained(...)."
            )
        self._tokenizer, self._backend = tokenizer, backend
        added = backend.get_added_tokens_decoder()
        self._tokens = {i: token for i, token in added.items() if not token.content.isspace()}
        self._matcher, self._matched = self._build_matcher()
        self._twins: dict[str, Tokenizer] = {}

    def find(self, text: str) -> list[Span]:
        """The control tokens that the tokenizer would read in `text`, in order."""
        if not self._tokens:
            return []
        found = self._matcher.encode(text, add_special_tokens=False)
        return [
            Span(start, end, self._matched[i])
            for i, (start, end) in zip(found.ids, found.offsets, strict=True)
            if i in self._matched
        ]

    def encode(self, text: str, allowed: Sequence[Span] | None) -> tuple[int, ...]:
        """Ids of `text`, where control tokens are read in the `allowed` places only; None allows them everywhere.

        Adds no BOS or EOS, never truncates.

        Raises:
            DataError: the tokenizer cannot encode the text.
        """
        try:
            if allowed is None or list(allowed) == self.find(text):
                plain = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
                return tuple(self._tokenizer(text, **plain)["input_ids"])
            marker = next((m for m in _MARKERS if m not in text), None)
            if marker is None:
                raise DataError("the text holds every noncharacter of Unicode: it is no text. Drop the row.")
            written = "".join(_by_name(text, allowed, marker))
            return tuple(self._twin(marker).encode(written, add_special_tokens=False).ids)
        except DataError:
            raise
        except (
            Exception
        ) as error:  # tokenizers raises bare Exception, for example for a character without an unk token
            raise DataError(f"the tokenizer cannot encode the text: {error}") from error

    def encode_after(self, text: str, allowed: Sequence[Span] | None) -> tuple[int, ...]:
        """Like `encode`, for text that follows other text: a prefix space that begins every text is not added here."""
        spans = self.find(text) if allowed is None else allowed
        for anchor in ("\n", "a", "."):  # one that does not grow together with the text
            moved = [Span(start + 1, end + 1, i) for start, end, i in spans]
            try:
                before, ids = self.encode(anchor, ()), self.encode(anchor + text, moved)
            except DataError:  # the vocabulary has no such character
                continue
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self.encode(text, allowed)

    def _build_matcher(self) -> tuple[Tokenizer, dict[int, int]]:
        """A tokenizer that finds control tokens by the same rules as the real one and knows nothing else."""
        matcher = Tokenizer(WordLevel({_STRETCH: 0}, unk_token=_STRETCH))
        if self._backend.normalizer is not None:
            matcher.normalizer = self._backend.normalizer
        matcher.add_special_tokens([token for token in self._tokens.values() if token.special])
        matcher.add_tokens([token for token in self._tokens.values() if not token.special])
        ids = ((matcher.token_to_id(token.content), i) for i, token in self._tokens.items())
        return matcher, {own: i for own, i in ids if own is not None}

    def _twin(self, marker: str) -> Tokenizer:
        if marker not in self._twins:
            self._twins[marker] = self._build_twin(marker)
        return self._twins[marker]

    def _build_twin(self, marker: str) -> Tokenizer:
        names = {token.content: _name(i, marker) for i, token in self._tokens.items()}
        spec = json.loads(self._backend.to_str())
        spec.update(post_processor=None, truncation=None, padding=None)
        for token in spec["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        _rename_pieces(spec["model"], names)
        twin = Tokenizer.from_str(json.dumps(spec))
        for i, token in self._tokens.items():
            readable = self.find(token.content) == [Span(0, len(token.content), i)]
            if readable and twin.encode(_name(i, marker), add_special_tokens=False).ids != [i]:
                raise ConfigError(
                    f"the control token {token.content!r} (id {i}) cannot be told from typed text with this "
                    "tokenizer. If every text of the data set is your own, set allow_control_tokens=True."
                )
        return twin


def _name(token_id: int, marker: str) -> str:
    return f"{marker}{token_id}{marker}"


def _by_name(text: str, allowed: Sequence[Span], marker: str) -> Iterator[str]:
    position = 0
    for start, end, token_id in allowed:
        yield text[position:start]
        yield _name(token_id, marker)
        position = end
    yield text[position:]


def _rename_pieces(model: dict[str, Any], names: dict[str, str]) -> None:
    """Take the control tokens' spellings out of the model's vocabulary, where merges or whole words reach them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocab.items()}
    else:  # Unigram: a list of [piece, score]
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
