# SPDX-License-Identifier: Apache-2.0
"""Each check of a server finds the fault that it is there for, and none where there is none."""

import random
from typing import Any

import httpx
import pytest
import torch
from torch import nn

import tiny
import tiny_bpe
from cohobate.errors import ConfigError, ServerResponseError, ServerUnreachable, VocabularyMismatch
from cohobate.teachers import Check, ServerTeacher, check_server
from fake_server import FakeServer, json_response

MODEL, OTHER = tiny.llama(3), tiny.llama(4)
TOKENIZER = tiny.char_tokenizer()


def checked(server: FakeServer, tokenizer: Any = TOKENIZER, **options: Any) -> dict[str, Check]:
    teacher = ServerTeacher(
        "http://localhost:8000", **{"vocab_size": 23, "top_k": 3} | options, surroundings=server.surroundings
    )
    try:
        return {check.name: check for check in check_server(teacher, tokenizer)}
    finally:
        teacher.close()


def test_a_server_in_order_passes_every_check():
    found = checked(FakeServer(MODEL, tokenizer=TOKENIZER))
    assert list(found) == ["connection", "weights", "replicas", "positions", "ids", "temperature"]
    assert all(check.passed for check in found.values())
    assert "21 ids have the same bytes" in found["ids"].detail
    assert "ignores the temperature" in found["temperature"].detail


def test_what_cannot_be_tried_is_said_to_be_untried():
    found = checked(FakeServer(MODEL), top_k=0)
    assert found["positions"].passed is None
    assert found["ids"].passed is None
    assert "neither /detokenize nor /tokenize" in found["ids"].detail
    assert checked(FakeServer(MODEL), tokenizer=None)["ids"].passed is None


class Uniform(nn.Module):
    def forward(self, ids: Any) -> Any:
        return type("Output", (), {"logits": torch.zeros(*ids.shape, 23)})


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_uniform_teacher_is_found(top_k: int):
    with pytest.raises(ServerResponseError, match=r"all 23 ids equally likely.*-3\.1355"):
        checked(FakeServer(Uniform()), top_k=top_k)


def test_replicas_with_other_weights_are_found():
    server, draw = FakeServer(MODEL), random.Random(0)

    def balance(server: FakeServer, request: httpx.Request, number: int) -> None:
        server.model = draw.choice([MODEL, OTHER])

    server.always = balance
    with pytest.raises((ConfigError, ServerResponseError), match="answers the same question differently"):
        checked(server)


@pytest.mark.parametrize(
    ("shift", "says"), [(1, "when the token itself changes"), (-1, "whatever stands right before it")]
)
def test_entries_of_the_position_beside_are_found(shift: int, says: str):
    server = FakeServer(MODEL)
    server.shift = shift
    with pytest.raises(ServerResponseError, match=says):
        checked(server)


def test_a_tokenizer_with_permuted_ids_is_found_by_its_bytes():
    server = FakeServer(MODEL, tokenizer=TOKENIZER)
    server.ids = lambda i: {5: 6, 6: 5}.get(i, i)  # echoes what it is sent, and means another token
    with pytest.raises(VocabularyMismatch, match="id 5 is b'3' here and '4' there"):
        checked(server)


def test_a_tokenizer_that_cuts_text_into_other_ids_is_found():
    server = FakeServer(MODEL, tokenizer=tiny_bpe.teacher_tokenizer())

    def no_detokenize(server: FakeServer, request: httpx.Request, number: int) -> httpx.Response | None:
        return json_response({}, 404) if request.url.path == "/detokenize" else None

    server.always = no_detokenize
    with pytest.raises(VocabularyMismatch, match=r"makes of .* tokens that are"):
        checked(server)


def test_the_limit_on_ids_is_found_at_the_start():
    with pytest.raises(ConfigError, match="Start it with --max-logprobs 3 or more"):
        checked(FakeServer(MODEL, max_logprobs=2))


def test_a_server_that_follows_the_temperature_is_reported():
    server = FakeServer(MODEL)

    def hot(answer: dict[str, Any], payload: dict[str, Any]) -> None:
        if payload["temperature"] != 1.0:
            for choice in answer["choices"]:
                for entry in choice["prompt_logprobs"][1:]:
                    for said in entry.values():
                        said["logprob"] -= 1.0

    server.edit = hot
    assert "follows the temperature" in checked(server)["temperature"].detail
    assert "exact from all 23 ids" in checked(FakeServer(MODEL), top_k=23, temperature=2.0)["temperature"].detail


def test_a_server_that_is_not_there_is_unreachable():
    server = FakeServer(MODEL)

    def gone(server: FakeServer, request: httpx.Request, number: int) -> None:
        raise httpx.ConnectError("[Errno 111] Connection refused")

    server.always = gone
    with pytest.raises(ServerUnreachable, match="Connection refused"):
        checked(server)
