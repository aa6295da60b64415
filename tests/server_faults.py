# SPDX-License-Identifier: Apache-2.0
"""63 ways in which a teacher server goes wrong: 12 that pass, 20 restarts, and 31 that must stop the run.

Each is set up by a function of a `FakeServer` and of the request that it happens to. What passes must leave no trace
in the scores; what does not must end in an error of the right kind that says what happened.
"""

import gzip
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from cohobate.errors import ConfigError, DataError, ServerResponseError
from fake_server import Answer, Dripping, FakeServer, Fault, body_response, json_response, refusal

AT = 5  # the request for log-probabilities that meets the fault; 0 is the canary before the first


@dataclass(frozen=True)
class Case:
    name: str
    set_up: Callable[[FakeServer], None]
    error: type[Exception] | None = None  # None: the scores are as if nothing had happened
    says: str = ""  # a pattern in the message


def once(fault: Fault) -> Callable[[FakeServer], None]:
    def set_up(server: FakeServer) -> None:
        server.faults[AT] = fault

    return set_up


def times(num: int, fault: Fault) -> Callable[[FakeServer], None]:
    def set_up(server: FakeServer) -> None:
        server.faults |= {AT + i: fault for i in range(num)}

    return set_up


def raising(make: Callable[[str], Exception]) -> Fault:
    def fault(server: FakeServer, request: httpx.Request, number: int) -> httpx.Response:
        raise make("as scripted")

    return fault


def status(code: int, **headers: str) -> Fault:
    return lambda server, request, number: body_response(b'{"error": {"message": "no"}}', code, **headers)


# ------------------------------------------------------------------ what passes


def refused_at_start(server: FakeServer) -> None:
    def always(server: FakeServer, request: httpx.Request, number: int) -> None:
        if len(server.seen) <= 3:
            raise httpx.ConnectError("[Errno 111] Connection refused")

    server.always = always


def late(server: FakeServer, request: httpx.Request, number: int) -> None:
    server.clock.pass_by(10)


def hang(server: FakeServer, request: httpx.Request, number: int) -> httpx.Response:
    server.clock.pass_by(request.extensions["timeout"]["read"])
    raise httpx.ReadTimeout("as scripted")


def _body_of(server: FakeServer, request: httpx.Request) -> bytes:
    return b"".join(server.answer(request).iter_raw())


def _in_parts(
    server: FakeServer, request: httpx.Request, parts: Callable[[bytes], list[bytes | Exception]], seconds: float = 0
) -> httpx.Response:
    stream = Dripping(server.clock, parts(_body_of(server, request)), seconds)
    return httpx.Response(200, stream=stream, headers={"content-type": "application/json"})


def reset_mid_body(server: FakeServer, request: httpx.Request, number: int) -> httpx.Response:
    return _in_parts(server, request, lambda b: [b[: len(b) // 2], httpx.ReadError("reset")])


def hang_mid_body(server: FakeServer, request: httpx.Request, number: int) -> httpx.Response:
    seconds = request.extensions["timeout"]["read"] / 2
    return _in_parts(server, request, lambda b: [b[: len(b) // 2], httpx.ReadTimeout("as scripted")], seconds)


def one_byte_a_second(server: FakeServer, request: httpx.Request, number: int) -> httpx.Response:
    return _in_parts(server, request, lambda b: [bytes([n]) for n in b], 1.0)


PASSING = [
    Case("refused at the start", refused_at_start),
    Case("late by 10 s", once(late)),
    Case("500 once", once(status(500))),
    Case("500 five times", times(5, status(500))),
    Case("502", once(status(502))),
    Case("503", once(status(503))),
    Case("429 with Retry-After", once(status(429, retry_after="7"))),
    Case("reset before the headers", once(raising(httpx.RemoteProtocolError))),
    Case("reset within the body", once(reset_mid_body)),
    Case("hangs before the headers", once(hang)),
    Case("hangs within the body", once(hang_mid_body)),
    Case("one byte a second", once(one_byte_a_second)),
]


# ------------------------------------------------------------------ restarts


def dies(
    at: int, seconds: float = 5.0, then: Callable[[FakeServer], None] = lambda server: None
) -> Callable[[FakeServer], None]:
    """At that request the server goes away; it comes back after some seconds, perhaps changed."""

    def set_up(server: FakeServer) -> None:
        back: list[float] = []

        def always(server: FakeServer, request: httpx.Request, number: int) -> None:
            if request.url.path != "/v1/completions" or number < at:
                return
            if not back:
                back.append(server.clock() + seconds)
                then(server)
                raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
            if server.clock() < back[0]:
                raise httpx.ConnectError("[Errno 111] Connection refused")

        server.always = always

    return set_up


RESTARTS = [Case(f"dies at request {k}", dies(k)) for k in range(1, 21)]


# ------------------------------------------------------------------ what must stop the run


def edited(edit: Callable[[Answer], Any]) -> Callable[[FakeServer], None]:
    """The answer of one request, changed by `edit`."""

    def fault(server: FakeServer, request: httpx.Request, number: int) -> httpx.Response:
        answer = json.loads(_body_of(server, request))
        edit(answer)
        return json_response(answer)

    return once(fault)


def of_first(edit: Callable[[Answer], Any]) -> Callable[[FakeServer], None]:
    """The first prompt's choice, changed."""
    return edited(lambda answer: edit(answer["choices"][0]))


def of_entry(edit: Callable[[Answer], Any], position: int = 2) -> Callable[[FakeServer], None]:
    """One entry of the first prompt's list, changed."""
    return of_first(lambda choice: edit(choice["prompt_logprobs"][position]))


def in_bytes(edit: Callable[[bytes], bytes], **headers: str) -> Callable[[FakeServer], None]:
    """The body of one answer, changed."""
    return once(lambda server, request, number: body_response(edit(_body_of(server, request)), **headers))


def _first_value(entry: Answer, value: Any) -> None:
    next(iter(entry.values()))["logprob"] = value


def shifted(choice: Answer) -> None:
    """Every entry stands one position too early; the list keeps its length."""
    entries = choice["prompt_logprobs"]
    choice["prompt_logprobs"] = [None, *entries[2:], entries[-1]]


def permuted(answer: Answer) -> None:
    """The likeliest ids are called by others' names, the token that stands there by its own."""
    for choice in answer["choices"]:
        ids = choice["prompt_token_ids"]
        for t, entry in enumerate(choice["prompt_logprobs"]):
            if entry is not None:
                own = str(ids[t])
                names = [str((int(i) + 7) % 23) for i in entry if i != own]
                names = [n if n != own else str((int(n) + 11) % 23) for n in names]
                choice["prompt_logprobs"][t] = {own: entry[own]} | dict(
                    zip(names, [v for i, v in entry.items() if i != own], strict=True)
                )


def too_heavy(entry: Answer) -> None:
    for said in entry.values():
        said["logprob"] = -0.1


def _infinite(body: bytes) -> bytes:
    return re.sub(rb'"logprob": [^,]+', b'"logprob": -1e999', body, count=3)


GZIP_BOMB = gzip.compress(b" " * (1 << 26))  # 64 KiB that stand for 64 MiB


def _other_model(other: Any) -> Callable[[FakeServer], None]:
    def change(server: FakeServer) -> None:
        server.model = other

    return change


def _other_ids(server: FakeServer) -> None:
    server.ids = lambda i: (i + 9) % 23


def _renamed(server: FakeServer) -> None:
    server.edit = lambda answer, payload: answer | {"model": "teacher-v2"}


def _fewer(server: FakeServer) -> None:
    server.max_logprobs = 1


def fatal(other_model: Any) -> list[Case]:
    """`other_model`: what a server with other weights serves."""
    bad = ServerResponseError
    too_long = "This model's maximum context length is 8 tokens. However, your prompt contains 12 input tokens"
    return [
        Case(
            "400, too long", once(lambda *_: refusal(400, too_long)), DataError, r"row '.*' has \d+ tokens.*8 tokens"
        ),
        Case("401", once(status(401)), ConfigError, "HTTP 401.*environment variable"),
        Case("403", once(status(403)), ConfigError, "HTTP 403.*environment variable"),
        Case("404, the model", once(status(404)), ConfigError, "HTTP 404"),
        Case("a redirect", once(status(302, location="http://localhost:2/v1")), ConfigError, "redirect.*302"),
        Case("another content type", in_bytes(lambda b: b, kind="text/html"), bad, "text/html, not JSON"),
        Case("invalid JSON", in_bytes(lambda b: b.replace(b'"choices":', b'"choices"')), bad, "no JSON"),
        Case("cut JSON", in_bytes(lambda b: b[:-20]), bad, "no JSON"),
        Case("the literal NaN", of_entry(lambda e: _first_value(e, float("nan"))), bad, "number NaN"),
        Case("a body over the cap", in_bytes(lambda b: b + b" " * (1 << 18)), bad, "more than the"),
        Case("a gzip bomb", in_bytes(lambda b: GZIP_BOMB, content_encoding="gzip"), bad, "compressed.*not expanded"),
        Case("a nesting bomb", in_bytes(lambda b: b"[" * 50_000), bad, "nested without end"),
        Case("too few choices", edited(lambda a: a["choices"].pop()), bad, "has 1 choices for 2 prompts"),
        Case("too many choices", edited(lambda a: a["choices"].append(a["choices"][0])), bad, "3 choices for 2"),
        Case("choices without an index", of_first(lambda c: c.pop("index")), bad, "has the index None"),
        Case("positions short", of_first(lambda c: c["prompt_logprobs"].pop()), bad, r"\d+ entries for \d+ tokens"),
        Case("positions long", of_first(lambda c: c["prompt_logprobs"].append({})), bad, r"\d+ entries for \d+"),
        Case("no positions", of_first(lambda c: c.update(prompt_logprobs=[])), bad, r"0 entries for \d+ tokens"),
        Case("an entry is null", of_first(lambda c: c["prompt_logprobs"].__setitem__(2, None)), bad, "is null"),
        Case("shifted by one", of_first(shifted), bad, "may be shifted"),
        Case("NaN as a text", of_entry(lambda e: _first_value(e, "NaN")), bad, "has no number"),
        Case("infinity", in_bytes(_infinite), bad, "infinite"),
        Case("a positive log-probability", of_entry(lambda e: _first_value(e, 0.2)), bad, "must not be above 0"),
        Case("more mass than 1", of_entry(too_heavy), bad, "the mass .* must not be above 1"),
        Case("an id out of range", of_entry(lambda e: _renamed_last(e, "23")), bad, "has the id 23, but"),
        Case("permuted ids", edited(permuted), bad, "another model|ids, where|other ids"),
        Case("fewer ids than asked", of_entry(_without_others), bad, "has 1 ids, where"),
        Case("another model after a restart", dies(AT, then=_renamed), bad, "by the model 'teacher-v2'"),
        Case("another tokenizer after a restart", dies(AT, then=_other_ids), bad, "another model, other weights"),
        Case("other weights after a restart", dies(AT, then=_other_model(other_model)), bad, "another model, other w"),
        Case("a lower limit after a restart", dies(AT, then=_fewer), ConfigError, "--max-logprobs"),
    ]


def _renamed_last(entry: Answer, name: str) -> None:
    last = list(entry)[-1]
    entry[name] = entry.pop(last)


def _without_others(entry: Answer) -> None:
    for key in list(entry)[1:]:
        del entry[key]


# ------------------------------------------------------------------ schedules


def schedule(seed: int) -> tuple[dict[int, Fault], bool]:
    """5 to 20 faults at random requests, and whether one of them is of the kind that stops the run."""
    draw = random.Random(seed)
    passing: list[Fault] = [late, hang, reset_mid_body, hang_mid_body, status(500), status(503), status(429)]
    faults: dict[int, Fault] = {draw.randrange(1, 40): draw.choice(passing) for _ in range(draw.randrange(5, 21))}
    stops = draw.random() < 0.3
    if stops:
        faults[draw.randrange(1, 20)] = status(draw.choice([302, 401, 404, 418]))
    return faults, stops
