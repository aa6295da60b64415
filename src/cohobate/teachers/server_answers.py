# SPDX-License-Identifier: Apache-2.0
"""What a server says about the tokens of a prompt, believed only if it could be true.

A wrong answer trains as smoothly as a right one: a list that is one short, log-probabilities of the position beside,
another model after a restart give finite losses. So every rule that a right answer keeps is checked, over the whole
prompt and not only where it is read, and an answer that breaks one is refused as a whole; nothing is repaired, padded
or cut. What no single answer can show (permuted ids, other weights) is for `server_check.py`.

The form is that of vLLM's `/v1/completions` with `prompt_logprobs: k`: for every prompt a list with one entry for each
token; the first is null, the others map ids to log-probabilities at temperature 1, of the k likeliest ids and of the
token that stands there, which makes k or k + 1. That token is found by its id, never by its rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cohobate.errors import ServerResponseError
from cohobate.remote.answers import Malformed, check_envelope, choices_in_order, parse_json

_ROUNDING = 1e-3  # nats: a float32 log-softmax over a wide vocabulary, summed again


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One prompt of a request: its tokens, and of which of them the log-probabilities are wanted."""

    name: str  # for messages
    ids: tuple[int, ...]
    positions: tuple[int, ...]  # of predicted tokens, so at least 1; increasing


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What must be the same in every answer."""

    model: str
    k: int  # `prompt_logprobs` of the request
    num_ids: int  # that the teacher's head predicts; k is at most this


class Row(NamedTuple):
    """What one prompt's answer says, of the n positions that were asked for."""

    ids: np.ndarray  # [n, k] int64, the likeliest first, equals by id; realized tokens are here only on their merit
    logprobs: np.ndarray  # [n, k] float64, nats
    realized: np.ndarray  # [n] float64, of the token that stands there


def read_rows(body: bytes, asked: Sequence[Asked], expected: Expected, *, about: str) -> list[Row]:
    """The answer to one request, in the order of `asked`.

    Raises:
        ServerResponseError: naming `about`, the prompt, the position and what is wrong there.
    """
    try:
        answer = parse_json(body)
        _check_envelope(answer, asked, expected)
        return [
            _row(prompt, choice, expected)
            for prompt, choice in zip(asked, choices_in_order(answer["choices"], len(asked)), strict=True)
        ]
    except Malformed as problem:
        raise ServerResponseError(
            f"the teacher server's answer about {about} cannot be used: {problem}. Nothing was trained on it; look at "
            "the server (its version, its flags, what stands between) before running again."
        ) from None


def read_json(body: bytes, *, about: str) -> Any:
    """A body as JSON, strictly: no NaN, no key twice, nothing nested without end."""
    try:
        return parse_json(body)
    except Malformed as problem:
        raise ServerResponseError(f"the teacher server's answer about {about} cannot be used: {problem}.") from None


def _check_envelope(answer: Any, asked: Sequence[Asked], expected: Expected) -> None:
    check_envelope(answer, model=expected.model, num_prompt_tokens=sum(len(prompt.ids) for prompt in asked))


def _row(prompt: Asked, choice: dict[str, Any], expected: Expected) -> Row:
    echoed = choice.get("prompt_token_ids")
    if echoed is not None and echoed != list(prompt.ids):
        raise Malformed(f"for {prompt.name} it echoes other tokens than were sent")
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(prompt.ids):
        got = f"{len(entries)} entries" if isinstance(entries, list) else "no list"
        raise Malformed(f"prompt_logprobs of {prompt.name} is {got} for {len(prompt.ids)} tokens")
    if entries[0] is not None:
        raise Malformed(f"prompt_logprobs of {prompt.name} must begin with null, for its first token")
    wanted = set(prompt.positions)
    ids, logprobs, realized = [], [], []
    for position in range(1, len(entries)):
        try:
            found = _entry(entries[position], prompt.ids[position], expected)
        except Malformed as problem:
            raise Malformed(f"position {position} of {prompt.name} {problem}") from None
        if position in wanted:
            ids.append(found[0])
            logprobs.append(found[1])
            realized.append(found[2])
    shape = (len(realized), expected.k)
    return Row(
        ids=np.array(ids, dtype=np.int64).reshape(shape),
        logprobs=np.array(logprobs, dtype=np.float64).reshape(shape),
        realized=np.array(realized, dtype=np.float64),
    )


def _entry(entry: Any, token: int, expected: Expected) -> tuple[np.ndarray, np.ndarray, float]:
    """The k likeliest ids of one position, their log-probabilities, and that of the token that stands there."""
    if not isinstance(entry, dict):
        raise Malformed(f"is {'null' if entry is None else type(entry).__name__}, not an object")
    k, num_ids = expected.k, expected.num_ids
    if len(entry) not in ({k} if k == num_ids else {max(k, 1), k + 1}):
        raise Malformed(f"has {len(entry)} ids, where {k} or {k + 1} are needed")
    key = str(token)
    if key not in entry:
        raise Malformed(f"is without the token {token} that stands there; the positions may be shifted")
    ids = _ids(entry, num_ids)
    values = _values(entry)
    realized = float(values[list(entry).index(key)])
    if len(entry) > k:  # the token is outside the k likeliest
        others = ids != token
        ids, values = ids[others], values[others]
        if k and realized > values.min() + _ROUNDING:
            raise Malformed(
                f"has {k + 1} ids, although its token {token} is among the {k} likeliest; the positions may be shifted"
            )
    if k:
        _check_distribution(values, num_ids)
    order = np.lexsort((ids, -values))
    return ids[order], values[order], realized


def _ids(entry: dict[str, Any], num_ids: int) -> np.ndarray:
    ids = []
    for key in entry:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and str(int(key)) == key):
            raise Malformed(f"has the id {key[:20]!r}")
        ids.append(int(key))
    found = np.array(ids, dtype=np.int64)
    if found.max() >= num_ids:
        raise Malformed(
            f"has the id {found.max()}, but the teacher is said to predict the ids 0 to {num_ids - 1} (a padded head "
            "is wider than its tokenizer: then set head_size)"
        )
    return found


def _values(entry: dict[str, Any]) -> np.ndarray:
    values = []
    for key, said in entry.items():
        value = said.get("logprob") if isinstance(said, dict) else None
        if type(value) not in (float, int):
            raise Malformed(f"has no number as the log-probability of the id {key}")
        values.append(value)
    try:
        found = np.array(values, dtype=np.float64)
    except OverflowError:
        raise Malformed("has a log-probability beyond any number") from None
    if not np.isfinite(found).all():
        raise Malformed("has a log-probability that is infinite or no number")
    if found.max() > _ROUNDING:
        raise Malformed(f"has the log-probability {found.max():.4g}, which must not be above 0")
    return np.minimum(found, 0.0)


def _check_distribution(values: np.ndarray, num_ids: int) -> None:
    """Whether `values` can be the largest log-probabilities of one distribution over `num_ids` ids."""
    mass = float(np.exp(values).sum())
    if mass > 1 + _ROUNDING:
        raise Malformed(f"has the mass {mass:.6g} on its ids, which must not be above 1")
    if mass < len(values) / num_ids * (1 - _ROUNDING):
        raise Malformed(
            f"has the mass {mass:.3g} on its {len(values)} likeliest of {num_ids} ids, which even equal ones exceed "
            f"({len(values) / num_ids:.3g}); these are no log-probabilities (for vLLM: --logprobs-mode raw_logprobs)"
        )
    if len(values) == num_ids and abs(math.log(mass)) > 10 * _ROUNDING:
        raise Malformed(f"has the mass {mass:.6g} on all ids, which must be 1")
