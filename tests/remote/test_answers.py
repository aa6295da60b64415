# SPDX-License-Identifier: Apache-2.0
"""What is asked of every answer, whatever it is about."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cohobate.errors import ConfigError, ServerResponseError
from cohobate.remote import Malformed, ServerClient, Surroundings, served_model
from cohobate.remote.answers import choices_in_order, parse_json
from fake_server import body_response, json_response


def client(handle: Callable[[httpx.Request], httpx.Response], **options: Any) -> ServerClient:
    world = Surroundings(transport=httpx.MockTransport(handle))
    return ServerClient("http://localhost:8000", surroundings=world, **options)


def models(*names: Any, **more: Any) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: json_response({"data": [{"id": name, **more} for name in names]})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"a": 1', "no JSON"),
        (b"\xff", "no JSON"),
        (b'{"a": NaN}', "the number NaN"),
        (b'{"a": -Infinity}', "the number -Infinity"),
        (b'{"a": 1, "a": 2}', "a key twice"),
        (b"[" * 100_000, "nested without end"),
        (b"1" * 41, "an integer of 41 digits"),
    ],
)
def test_a_body_that_strict_json_does_not_allow_is_malformed(body: bytes, says: str):
    with pytest.raises(Malformed, match=says):
        parse_json(body)


def test_choices_are_put_in_order_and_each_is_needed_once():
    mixed = [{"index": 2}, {"index": 0}, {"index": 1}]
    assert [choice["index"] for choice in choices_in_order(mixed, 3)] == [0, 1, 2]
    for wrong in (
        [{"index": 0}] * 2,
        [{"index": 0}, {"index": 2}],
        [{"index": 0}, {}],
        [{"index": 0}, {"index": True}],
    ):
        with pytest.raises(Malformed, match="each of 0 to 1 is needed once"):
            choices_in_order(wrong, 2)


def test_the_served_model_is_the_one_that_is_named_or_the_only_one():
    assert served_model(client(models("a", max_model_len=9)), None) == ("a", 9)
    assert served_model(client(models("a", "b", max_model_len="9")), "b") == ("b", None)
    with pytest.raises(ConfigError, match=r"the rollout server http://localhost:8000 has 2 models; .*: 'a', 'b'"):
        served_model(client(models("b", "a"), role="rollout"), None)
    with pytest.raises(ConfigError, match="has no model 'c', only 'a', 'b'"):
        served_model(client(models("b", "a")), "c")


@pytest.mark.parametrize("answer", [[], {"data": []}, {"data": [{"id": 3}]}, {"data": ["a"]}, {}])
def test_a_server_without_models_is_named(answer: Any):
    with pytest.raises(ServerResponseError, match="names no model"):
        served_model(client(lambda request: json_response(answer)), None)


def test_a_list_of_models_that_is_no_json_is_named():
    with pytest.raises(ServerResponseError, match="answer about its models cannot be used: it is no JSON"):
        served_model(client(lambda request: body_response(b"{")), None)
