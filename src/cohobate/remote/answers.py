# SPDX-License-Identifier: Apache-2.0
"""What every answer of a server is held to, whatever was asked: strict JSON, choices in order, a model that is there.

A reader of one kind of answer raises `Malformed` with what is wrong; who asked knows whose answer it was and makes a
`ServerResponseError` of it. Nothing is repaired.
"""

import json
from typing import Any

from cohobate.errors import ConfigError, ServerResponseError
from cohobate.remote.client import ServerClient

_LONGEST_NUMBER = 40  # characters of a JSON number


class Malformed(Exception):
    """An answer that no server in order gives; the text says what is wrong with it, without its subject."""


def parse_json(body: bytes) -> Any:
    """A body as JSON, strictly: no NaN, no key twice, nothing nested without end. Raises `Malformed`."""
    try:
        return json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_int=_integer,
        )
    except RecursionError:
        raise Malformed("its JSON is nested without end") from None
    except ValueError as error:
        raise Malformed(f"it is no JSON ({str(error)[:100]})") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Malformed("a JSON object has a key twice")
    return found


def _no_constant(name: str) -> float:
    raise Malformed(f"it has the number {name}")


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise Malformed(f"it has an integer of {len(digits)} digits")
    return int(digits)


def check_envelope(answer: Any, *, model: str, num_prompt_tokens: int) -> None:
    """The parts of a completions answer that do not depend on what was asked for. Raises `Malformed`."""
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        raise Malformed("it has no list `choices`")
    if answer.get("model") != model:
        raise Malformed(f"it is by the model {str(answer.get('model'))[:80]!r}, asked was {model!r}")
    usage = answer.get("usage")
    if isinstance(usage, dict) and usage.get("prompt_tokens") not in (None, num_prompt_tokens):
        raise Malformed(f"it read {str(usage['prompt_tokens'])[:20]} prompt tokens, sent were {num_prompt_tokens}")


def choices_in_order(choices: list[Any], wanted: int) -> list[dict[str, Any]]:
    """The choices by their index: a server may answer prompts in any order. Raises `Malformed`."""
    if len(choices) != wanted:
        raise Malformed(f"it has {len(choices)} choices for {wanted} prompts")
    found: dict[int, dict[str, Any]] = {}
    for choice in choices:
        index = choice.get("index") if isinstance(choice, dict) else None
        if type(index) is not int or not 0 <= index < wanted or index in found:
            raise Malformed(
                f"a choice has the index {str(index)[:20]}, where each of 0 to {wanted - 1} is needed once"
            )
        found[index] = choice
    return [found[i] for i in range(wanted)]


def served_model(client: ServerClient, wanted: str | None) -> tuple[str, int | None]:
    """The model that the server has by that name, or the only one; and how many tokens it takes, if it says so.

    Raises:
        ConfigError: no such model, or several and none was named.
        ServerResponseError: an answer that names none.
    """
    try:
        answer = parse_json(client.get("/v1/models", about="its models"))
    except Malformed as problem:
        raise ServerResponseError(f"{client.name}'s answer about its models cannot be used: {problem}.") from None
    data = answer.get("data") if isinstance(answer, dict) else None
    found = {m["id"]: m for m in data or () if isinstance(m, dict) and isinstance(m.get("id"), str)}
    names = ", ".join(map(repr, sorted(found)))
    if not found:
        raise ServerResponseError(f"{client.name} names no model at /v1/models.")
    if wanted is None and len(found) > 1:
        raise ConfigError(f"{client.name} has {len(found)} models; name one of them: {names}.")
    name = wanted or next(iter(found))
    if name not in found:
        raise ConfigError(
            f"{client.name} has no model {name!r}, only {names} (the name is what --served-model-name says, else the "
            "path)."
        )
    limit = found[name].get("max_model_len")
    return name, limit if type(limit) is int else None
