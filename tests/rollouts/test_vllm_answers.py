# SPDX-License-Identifier: Apache-2.0
"""Answers that no sampler in order gives: each is an error that names its prompt, and nothing is repaired."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from cohobate.align import SamplingConfig
from cohobate.errors import ServerResponseError
from fake_engine import FakeEngine
from fake_server import Answer, body_response
from vllm_cases import request, source

Edit = Callable[[Answer], Any]


def of_choice(edit: Edit) -> Edit:
    return lambda answer: edit(answer["choices"][0])


def ids_become(change: Callable[[list[int]], list[int]]) -> Edit:
    """Other ids, with log-probabilities to match, so that only the ids are wrong."""

    def edit(choice: Answer) -> None:
        ids = change(choice["token_ids"])
        choice["token_ids"] = ids
        choice["logprobs"] = {"token_logprobs": [-1.0] * len(ids), "tokens": [f"token_id:{i}" for i in ids]}

    return of_choice(edit)


def logprob_becomes(value: Any) -> Edit:
    return of_choice(lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, value))


def both(*edits: Edit) -> Edit:
    return lambda answer: [edit(answer) for edit in edits] and None


def reason_becomes(reason: Any) -> Edit:
    return of_choice(lambda choice: choice.update(finish_reason=reason))


BAD: dict[str, tuple[Edit, str]] = {
    "short": (both(ids_become(lambda ids: [5, 6]), reason_becomes("length")), "2 of 8 tokens and no end-of-sequence"),
    "empty": (ids_become(lambda ids: []), "completion is empty"),
    "over-long": (ids_become(lambda ids: [5] * 9), "has 9 tokens, asked were at most 8"),
    "ids without a token": (ids_become(lambda ids: [22] * 8), r"drew the id 22, but only the ids 0 to 19"),
    "no end": (both(ids_become(lambda ids: [5, 6]), reason_becomes("stop")), "at the id 6, which is none of the"),
    "goes on after its end": (ids_become(lambda ids: [5, 1, 6, 4]), "goes on for 2 tokens after the end-of-seq"),
    "aborted": (reason_becomes("abort"), "ended by 'abort'"),
    "no reason": (reason_becomes(None), "ended by 'None'"),
    "a log-probability less": (
        of_choice(lambda c: c["logprobs"]["token_logprobs"].pop()),
        r"\d log-probabilities for",
    ),
    "no log-probabilities": (of_choice(lambda c: c.update(logprobs=None)), "no list of log-probabilities"),
    "log-probabilities of other tokens": (of_choice(lambda c: c["logprobs"]["tokens"].reverse()), "of other tokens"),
    "a positive one": (logprob_becomes(0.5), "must not be above 0.*processed_logprobs"),
    "an impossible one": (logprob_becomes(-9999.0), "cannot be drawn"),
    "a text": (logprob_becomes("-1"), "is no number"),
    "null": (logprob_becomes(None), "is no number"),
    "another prompt": (of_choice(lambda c: c.update(prompt_token_ids=[9, 9])), "continues another prompt"),
    "no echo": (of_choice(lambda c: c.pop("prompt_token_ids")), "continues another prompt"),
    "ids as texts": (of_choice(lambda c: c.update(token_ids=["5"])), "no list of token ids"),
    "true among the ids": (of_choice(lambda c: c.update(token_ids=[True])), "no list of token ids"),
    "a negative id": (ids_become(lambda ids: [-1] * 8), "no list of token ids"),
    "too few choices": (lambda a: a["choices"].clear(), "0 choices for 1 prompts"),
    "too many choices": (lambda a: a["choices"].append(a["choices"][0]), "2 choices for 1 prompts"),
    "another model": (lambda a: a.update(model="teacher"), "by the model 'teacher', asked was 'student'"),
    "other prompt tokens": (lambda a: a["usage"].update(prompt_tokens=99), "it read 99 prompt tokens"),
}


def rollouts_on(engine: FakeEngine, folder: Path) -> Any:
    student = tiny.llama(1, layers=2)
    rollouts = source(engine, student, folder / "sync", vocab_size=20)
    rollouts.prepare(student, 0)
    return rollouts


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> tuple[FakeEngine, Any]:
    """An engine and the rollouts on it, for tests that change its answers and put them back."""
    engine = FakeEngine(tiny.llama(9, layers=2))
    return engine, rollouts_on(engine, tmp_path_factory.mktemp("ready"))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_is_refused_with_its_prompt(name: str, ready: tuple[FakeEngine, Any]):
    edit, says = BAD[name]
    engine, rollouts = ready
    engine.edit = lambda answer, payload: edit(answer) and None if payload["prompt"] == [[7, 8, 9]] else None
    try:
        with pytest.raises(ServerResponseError, match=rf"answer for prompt 1 cannot be used: .*{says}"):
            rollouts.sample(request(), SamplingConfig(max_new_tokens=8))
    finally:
        engine.edit = None
    assert len(rollouts.sample(request(), SamplingConfig(max_new_tokens=8)).input_ids) == 4


def literal_nan(body: bytes) -> bytes:
    return re.sub(rb'"token_logprobs": \[[^,\]]+', b'"token_logprobs": [NaN', body)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda body: body[:-9], "it is no JSON"),
        (literal_nan, "the number NaN"),
        (lambda body: body.replace(b'"model"', b'"choices": [], "model"'), "a key twice"),
        (lambda body: b"[" * 50_000, "nested without end"),
        (lambda body: body + b" " * (1 << 20), "more than the"),
    ],
    ids=["cut", "NaN", "a key twice", "nested", "too many bytes"],
)
def test_a_body_that_is_no_answer_is_refused(
    change: Callable[[bytes], bytes], says: str, ready: tuple[FakeEngine, Any]
):
    engine, rollouts = ready

    def fault(engine: FakeEngine, asked: Any) -> Any:
        if json.loads(asked.content or b"{}").get("prompt") != [[7, 8, 9]]:
            return None
        return body_response(change(b"".join(engine.answer(asked).iter_raw())))

    engine.fault = fault
    try:
        with pytest.raises(ServerResponseError, match=rf"prompt 1.*{says}"):
            rollouts.sample(request(), SamplingConfig(max_new_tokens=8))
    finally:
        engine.fault = None


@pytest.mark.parametrize(
    "edit",
    [
        lambda entries: entries.pop(),
        lambda entries: entries.__setitem__(0, {}),
        lambda entries: entries.__setitem__(2, {"0": {"logprob": -1.0}, "999": {"logprob": -2.0}}),
        lambda entries: next(iter(entries[2].values())).update(logprob=0.5),
        lambda entries: next(iter(entries[2].values())).update(logprob=None),
    ],
)
def test_a_bad_score_of_the_canary_is_refused(edit: Callable[[list[Any]], Any], tmp_path: Path):
    engine = FakeEngine(tiny.llama(9, layers=2))

    def on_scores(answer: Answer, payload: Answer) -> None:
        if payload.get("prompt_logprobs") is not None:
            edit(answer["choices"][0]["prompt_logprobs"])

    engine.edit = on_scores
    with pytest.raises(ServerResponseError, match="answer for canary 0 cannot be used"):
        rollouts_on(engine, tmp_path)
