# SPDX-License-Identifier: Apache-2.0
"""What is tried on a teacher server before a run costs anything.

Each check is of something that later would only show in worse students: ids that mean other tokens there, entries of
the position beside, a teacher whose weights were lost and that finds every token equally likely, replicas that do not
agree, a temperature that is ignored. The checks ask a few short questions; none needs the model here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cohobate.errors import ConfigError, ServerResponseError, VocabularyMismatch
from cohobate.remote.client import Refused
from cohobate.teachers.server import ServerTeacher
from cohobate.teachers.server_answers import Asked, Row, read_json
from cohobate.vocab.tokens import vocabulary_table

_TEXT = "Straße 42: naïve cafés — 10 + 3 = 13,\n  日本語 and \U0001f44d."
_SAME = 1e-3  # nats beside the noise: what must be equal is computed from the same tokens
_NUM_DETOKENIZED = 256
_ASKED_AGAIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was tried, for people to read."""

    name: str
    passed: bool | None  # None: it could not be tried here
    detail: str


def check_server(teacher: ServerTeacher, tokenizer: Any = None) -> tuple[Check, ...]:
    """Try everything, in an order in which a later check may rely on the earlier ones.

    Args:
        tokenizer: whose ids the teacher is sent: the student's, or the teacher's own. None: bytes are not compared.

    Raises:
        CohobateError: the first check that fails, of the kind that says who has to act.
    """
    teacher.connect()
    checks = [("connection", True, _connection(teacher)), ("weights", *_not_uniform(teacher))]
    noise, said = _replicas(teacher)
    checks += [
        ("replicas", True, said),
        ("positions", *_positions(teacher, noise)),
        ("ids", *_same_ids(teacher, tokenizer)),
        ("temperature", True, _temperature(teacher, noise)),
    ]
    return tuple(Check(name=name, passed=passed, detail=detail) for name, passed, detail in checks)


def _connection(teacher: ServerTeacher) -> str:
    limit = "unknown" if teacher.max_model_len is None else f"{teacher.max_model_len} tokens"
    return (
        f"{teacher.client.url} serves {teacher.model!r}, rows up to {limit}; it gives the {teacher.asked_k} likeliest "
        "ids of each token"
    )


def _replicas(teacher: ServerTeacher) -> tuple[float, str]:
    """The same tokens asked several times, alone and beside others, must get the same answer up to rounding."""
    asked = teacher.canary.asked
    rows = [row for _ in range(_ASKED_AGAIN) for row in _ask(teacher, asked.ids)]
    rows += _ask(teacher, asked.ids[::-1], asked.ids, asked.ids[::2])[1:2]
    noise = max(teacher.canary.difference(row) for row in rows)
    if noise > teacher.canary_tolerance:
        raise ConfigError(
            f"the teacher server {teacher.client.url} answers the same question differently, by up to {noise:.3g} nats"
            f" on average (allowed: {teacher.canary_tolerance:g}). If it stands for several servers, they have other "
            "weights or another precision; use one of them, or raise canary_tolerance."
        )
    return noise, f"{len(rows)} times the same tokens: answers differ by at most {noise:.2g} nats on average"


def _not_uniform(teacher: ServerTeacher) -> tuple[bool | None, str]:
    """A model without weights is uniform, and its loss looks like a normal one (0.69 for a JSD)."""
    row = teacher.canary.row
    uniform = -math.log(teacher.head_size)
    seen = row.logprobs[:, 0] if row.ids.shape[1] else row.realized
    if np.abs(seen - uniform).max() < _SAME:
        raise ServerResponseError(
            f"the teacher server {teacher.client.url} finds all {teacher.head_size} ids equally likely at every token "
            f"(log-probability {uniform:.4f}). Its weights are missing, lost in sleep mode, or random: restart it and "
            "look at its log."
        )
    return True, f"the likeliest ids have {float(np.mean(seen)):.2f} nats on average, equal ones had {uniform:.2f}"


def _positions(teacher: ServerTeacher, noise: float) -> tuple[bool | None, str]:
    """What is said of a token depends on all tokens before it, and not on itself.

    Asked are two prompts that differ in the last token, and a third that differs in the one before it.
    """
    if teacher.asked_k == 0:
        return None, "with the token alone, and no likeliest ids, it cannot be tried (top_k=0)"
    ids = teacher.canary.asked.ids
    other = next(i for i in range(teacher.vocab_size) if i not in ids[-2:])
    plain, last, before = _ask(teacher, ids, (*ids[:-1], other), (*ids[:-2], other, ids[-1]))
    allowed = _SAME + 8 * noise
    own, context = _top_gap(plain, last), _top_gap(plain, before)
    if own > allowed:
        raise ServerResponseError(
            f"the teacher server {teacher.client.url} says something else of a token when the token itself changes, by"
            f" {own:.3g} nats: its entries belong to the position beside. Its prompt_logprobs cannot be used."
        )
    if context <= allowed:
        raise ServerResponseError(
            f"the teacher server {teacher.client.url} says the same of a token whatever stands right before it: its "
            "entries belong to the position beside, or its context is cut. Its prompt_logprobs cannot be used."
        )
    return True, f"a token changes what is said of itself by {own:.2g} nats, of the next by {context:.2g}"


def _top_gap(a: Row, b: Row) -> float:
    """By how many nats the likeliest ids of the last position differ; an id that one lacks counts by the bound."""
    worst = 0.0
    for mine, theirs in ((a, b), (b, a)):
        known = dict(zip(theirs.ids[-1].tolist(), theirs.logprobs[-1].tolist(), strict=True))
        floor = min(known.values())
        for token, value in zip(mine.ids[-1].tolist(), mine.logprobs[-1].tolist(), strict=True):
            worst = max(worst, abs(value - known[token]) if token in known else max(0.0, value - floor))
    return worst


def _temperature(teacher: ServerTeacher, noise: float) -> str:
    """Scores are at temperature 1; here it only shows whether this server would do otherwise on request."""
    asked = teacher.canary.asked
    row = teacher.ask([asked], k=teacher.asked_k, temperature=2.0)[0]
    ignored = teacher.canary.difference(row) <= _SAME + 8 * noise
    said = "ignores the temperature of a request, as vLLM does" if ignored else "follows the temperature of a request"
    if teacher.temperature == 1.0:
        return f"1, as asked; the server {said}"
    return f"{teacher.temperature:g}, exact from all {teacher.vocab_size} ids at temperature 1; the server {said}"


def _same_ids(teacher: ServerTeacher, tokenizer: Any) -> tuple[bool | None, str]:
    """Ids are only numbers: a server that echoes them right may still mean other tokens. So bytes are compared."""
    if tokenizer is None:
        return None, "no tokenizer was given, so it is not known whether ids mean the same tokens there"
    table, added = vocabulary_table(tokenizer)
    table = table[: teacher.vocab_size]
    tried = [text for compare in (_detokenized, _tokenized) if (text := compare(teacher, table, added))]
    if not tried:
        return None, "the server offers neither /detokenize nor /tokenize: ids were compared by nothing"
    return True, "; ".join(tried)


def _detokenized(teacher: ServerTeacher, table: Sequence[bytes | None], added: set[int]) -> str | None:
    """Tokens spread over the vocabulary whose text does not depend on what stands beside them."""
    plain = [i for i, b in enumerate(table) if b and i not in added and b.isascii() and b.decode().isprintable()]
    step = max(1, len(plain) // _NUM_DETOKENIZED)
    ids = plain[::step]
    answer = _helper(teacher, "/detokenize", {"tokens": ids})
    if answer is None or not ids:
        return None
    ours = b"".join(table[i] or b"" for i in ids)
    theirs = answer.get("prompt")
    if not isinstance(theirs, str) or _spaceless(theirs.encode()) != _spaceless(ours):
        first = _first_difference(teacher, table, ids)
        raise VocabularyMismatch(
            f"the teacher server {teacher.client.url} means other tokens by the same ids{first}. Give it the "
            "student's vocabulary, or train with the recipe `csd` and the teacher's own tokenizer."
        )
    return f"{len(ids)} ids have the same bytes there"


def _first_difference(teacher: ServerTeacher, table: Sequence[bytes | None], ids: Sequence[int]) -> str:
    """The first of the ids that differs by itself, by halving: `: id 17 is b'a' here and 'b' there`."""
    low, high = 0, len(ids)
    while high - low > 1:
        middle = (low + high) // 2
        answer = _helper(teacher, "/detokenize", {"tokens": list(ids[low:middle])}) or {}
        ours = b"".join(table[i] or b"" for i in ids[low:middle])
        if _spaceless(str(answer.get("prompt", "")).encode()) == _spaceless(ours):
            low = middle
        else:
            high = middle
    theirs = (_helper(teacher, "/detokenize", {"tokens": [ids[low]]}) or {}).get("prompt")
    return f": id {ids[low]} is {table[ids[low]]!r} here and {str(theirs)[:40]!r} there"


def _tokenized(teacher: ServerTeacher, table: Sequence[bytes | None], added: set[int]) -> str | None:
    """A text's tokens there, read with the bytes that ids have here."""
    pieces = [b for i, b in enumerate(table) if b and i not in added]
    single = {b for b in pieces if len(b) == 1}
    text = "".join(c for c in _TEXT if {bytes([n]) for n in c.encode()} <= single)
    if not text.strip():
        return None
    answer = _helper(teacher, "/tokenize", {"prompt": text, "add_special_tokens": False})
    if answer is None:
        return None
    found = answer.get("tokens")
    tokens = found if isinstance(found, list) else []
    known = all(type(t) is int and 0 <= t < len(table) for t in tokens)
    back = b"".join(table[t] or b"" for t in tokens) if known else b""
    if _spaceless(back) != _spaceless(text.encode()):
        raise VocabularyMismatch(
            f"the teacher server {teacher.client.url} makes of {text!r} tokens that are {back[:80]!r} here. Give it "
            "the student's vocabulary, or train with the recipe `csd` and the teacher's own tokenizer."
        )
    return f"a text of {len(tokens)} tokens there reads the same here"


def _helper(teacher: ServerTeacher, path: str, payload: dict[str, Any]) -> dict[str, Any] | None:
    """The answer of a route that a server need not have."""
    about = f"its tokenizer ({path})"
    try:
        body = teacher.client.post(path, {"model": teacher.model} | payload, about=about, most_bytes=1 << 20)
    except Refused as refusal:
        if refusal.status in (404, 405, 501):
            return None
        raise
    answer = read_json(body, about=about)
    if not isinstance(answer, dict):
        raise ServerResponseError(f"the teacher server's answer about {about} is no object.")
    return answer


def _spaceless(text: bytes) -> bytes:
    """Without spaces, which some decoders drop or add at a text's ends."""
    return text.replace(b" ", b"")


def _ask(teacher: ServerTeacher, *prompts: Sequence[int]) -> list[Row]:
    asked = [
        Asked(name=f"probe {i}", ids=tuple(ids), positions=tuple(range(1, len(ids)))) for i, ids in enumerate(prompts)
    ]
    return teacher.ask(asked, k=teacher.asked_k)
