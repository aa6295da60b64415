# SPDX-License-Identifier: Apache-2.0
"""What an engine says it has drawn, believed only if a sampler could have drawn it that way.

A wrong completion trains as smoothly as a right one: ids without their end, log-probabilities that are one short, a
prompt that was cut on the way give finite losses. So each rule that a right answer keeps is checked, and an answer
that breaks one is refused as a whole; nothing is repaired, padded or cut.

The form is that of vLLM's `/v1/completions` with `return_token_ids`, `return_tokens_as_token_ids` and `logprobs`: the
ids of prompt and completion as lists, and for each token of the completion its log-probability and, as a second
witness, its id once more as the text `token_id:17`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cohobate.errors import ServerResponseError
from cohobate.remote.answers import Malformed, check_envelope, choices_in_order, parse_json

_ROUNDING = 1e-3  # nats: what a float32 log-softmax may be above 0
_LEAST = -9000.0  # vLLM writes -9999 for minus infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids that are sent, and their name in messages."""

    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What every completion of a request must keep to."""

    model: str
    num_ids: int | None  # ids that stand for a token; None: as many as the head has, which is not known here
    max_tokens: int
    eos_token_ids: tuple[int, ...]  # empty: only its length ends a completion


class Completion(NamedTuple):
    """One completion. Its last id ends it, or it has `max_tokens` of them."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # as the engine gives them: raw or processed, by its `--logprobs-mode`


def read_completions(body: bytes, prompts: Sequence[Prompt], rules: Rules) -> list[Completion]:
    """The answer to one request, in the order of `prompts`.

    Raises:
        ServerResponseError: naming the prompt and what is wrong.
    """
    found = []
    for prompt, choice in _choices(body, prompts, rules.model):
        try:
            found.append(_completion(choice, rules))
        except Malformed as problem:
            raise unusable(prompt.name, problem) from None
    return found


def read_scores(body: bytes, prompts: Sequence[Prompt], model: str) -> list[list[float]]:
    """The log-probabilities of every token but the first of each prompt, from `prompt_logprobs: 0`.

    Raises:
        ServerResponseError: naming the prompt and what is wrong.
    """
    found = []
    for prompt, choice in _choices(body, prompts, model):
        try:
            found.append(_scores(choice.get("prompt_logprobs"), prompt.ids))
        except Malformed as problem:
            raise unusable(prompt.name, problem) from None
    return found


def unusable(name: str, problem: Malformed) -> ServerResponseError:
    return ServerResponseError(
        f"the rollout server's answer for {name} cannot be used: {problem}. Nothing was trained on it; look at the "
        "server (its version, its flags, what stands between) before running again."
    )


def _choices(body: bytes, prompts: Sequence[Prompt], model: str) -> list[tuple[Prompt, dict[str, Any]]]:
    """Each prompt with its choice, whose echo of the prompt is what was sent."""
    about = ", ".join(prompt.name for prompt in prompts)
    try:
        answer = parse_json(body)
        check_envelope(answer, model=model, num_prompt_tokens=sum(len(prompt.ids) for prompt in prompts))
        choices = choices_in_order(answer["choices"], len(prompts))
    except Malformed as problem:
        raise unusable(about, problem) from None
    for prompt, choice in zip(prompts, choices, strict=True):
        if choice.get("prompt_token_ids") != list(prompt.ids):
            raise unusable(prompt.name, Malformed("it continues another prompt than was sent"))
    return list(zip(prompts, choices, strict=True))


def _completion(choice: dict[str, Any], rules: Rules) -> Completion:
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise Malformed("it has no list of token ids (vLLM: return_token_ids)")
    if not ids:
        raise Malformed("its completion is empty: not even an end-of-sequence token was drawn")
    if len(ids) > rules.max_tokens:
        raise Malformed(f"its completion has {len(ids)} tokens, asked were at most {rules.max_tokens}")
    if rules.num_ids is not None and max(ids) >= rules.num_ids:
        raise Malformed(f"it drew the id {max(ids)}, but only the ids 0 to {rules.num_ids - 1} stand for a token")
    _check_end(ids, choice.get("finish_reason"), rules)
    said = choice.get("logprobs")
    said = said if isinstance(said, dict) else {}
    values = _logprobs(said.get("token_logprobs"), len(ids))
    if said.get("tokens") != [f"token_id:{i}" for i in ids]:
        raise Malformed("its log-probabilities are of other tokens than it drew (return_tokens_as_token_ids)")
    return Completion(tuple(ids), tuple(values))


def _check_end(ids: list[int], reason: Any, rules: Rules) -> None:
    """A completion ends at its first end-of-sequence token, which is kept, or has all the tokens it may have."""
    ends = [at for at, i in enumerate(ids) if i in rules.eos_token_ids]
    if ends and ends[0] != len(ids) - 1:
        raise Malformed(
            f"its completion goes on for {len(ids) - 1 - ends[0]} tokens after the end-of-sequence id {ids[ends[0]]}"
        )
    if reason not in ("stop", "length"):
        raise Malformed(
            f"its completion ended by {str(reason)[:40]!r}, not by an end-of-sequence token or its length (a paused "
            "or restarted server aborts requests)"
        )
    if not ends and reason == "stop":
        raise Malformed(
            f"its completion stops after {len(ids)} tokens at the id {ids[-1]}, which is none of the student's "
            f"end-of-sequence ids {list(rules.eos_token_ids)}"
        )
    if not ends and len(ids) != rules.max_tokens:
        raise Malformed(f"its completion has {len(ids)} of {rules.max_tokens} tokens and no end-of-sequence token")


def _logprobs(values: Any, wanted: int) -> list[float]:
    if not isinstance(values, list) or len(values) != wanted:
        got = f"{len(values)}" if isinstance(values, list) else "no list of"
        raise Malformed(f"it has {got} log-probabilities for {wanted} tokens")
    return [_logprob(value, f"token {at}") for at, value in enumerate(values)]


def _logprob(value: Any, of: str) -> float:
    if type(value) not in (float, int):
        raise Malformed(f"the log-probability of {of} is no number")
    if not (math.isfinite(value) and value > _LEAST):
        raise Malformed(f"the log-probability of {of} is {value:g}: what has no probability cannot be drawn")
    if value > _ROUNDING:
        raise Malformed(
            f"the log-probability of {of} is {value:.4g}, which must not be above 0 (for vLLM: --logprobs-mode "
            "raw_logprobs or processed_logprobs)"
        )
    return min(float(value), 0.0)


def _scores(entries: Any, ids: tuple[int, ...]) -> list[float]:
    if not isinstance(entries, list) or len(entries) != len(ids) or (ids and entries[0] is not None):
        raise Malformed(f"its prompt_logprobs are no list of {len(ids)} entries that begins with null")
    found = []
    for at in range(1, len(ids)):
        entry = entries[at]
        said = entry.get(str(ids[at])) if isinstance(entry, dict) else None
        if not isinstance(said, dict):
            raise Malformed(f"position {at} is without the token {ids[at]} that stands there")
        value: Any = said.get("logprob")
        if type(value) not in (float, int) or not math.isfinite(value) or value > _ROUNDING:
            raise Malformed(f"position {at} has the log-probability {str(value)[:20]}")
        found.append(min(float(value), 0.0))
    return found
