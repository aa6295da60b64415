# SPDX-License-Identifier: Apache-2.0
"""What a client sends to whom, how long it waits, and what it never tells."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny
from cohobate.cli.app import exit_code
from cohobate.errors import ConfigError, ServerResponseError, ServerUnreachable
from cohobate.remote.client import Refused, ServerClient, Surroundings, TooLarge, checked_url
from cohobate.remote.workers import Workers
from cohobate.teachers import Patience, ServerTeacher
from fake_server import Dripping, FakeClock, FakeServer, body_response, json_response, serve

SECRET = "sk-canary-0123456789abcdef"
QUICK = Patience(total=1.5, attempt=0.5, idle=0.3, connect=0.3, first_pause=0.05, longest_pause=0.1)


def client_of(handle: Any, *, clock: FakeClock | None = None, **options: Any) -> ServerClient:
    clock = clock or FakeClock()
    world = Surroundings(transport=httpx.MockTransport(handle), clock=clock, sleep=clock.sleep, draw=lambda: 0.5)
    return ServerClient("http://localhost:8000", surroundings=world, **options)


def ask(client: ServerClient, **options: Any) -> bytes:
    return client.post("/v1/completions", {"prompt": [[1]]}, about="row 'a'", most_bytes=10_000, **options)


# ------------------------------------------------------------------ where to


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        (" http://127.0.0.1:8000/v1 ", "http://127.0.0.1:8000"),
        ("http://127.5.0.9/v1/", "http://127.5.0.9"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("https://teacher.example/team/v1", "https://teacher.example/team"),
    ],
)
def test_the_address_is_brought_into_one_form(url: str, base: str):
    assert checked_url(url) == base


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://teacher.example", "unencrypted.*allow_insecure"),
        ("http://192.0.2.7:8000", "unencrypted"),
        ("http://localhost.example", "unencrypted"),
        ("http://0.0.0.0:8000", "no address that"),
        ("http://169.254.169.254/latest", "no address that"),
        ("https://[fe80::1]", "no address that"),
        ("http://2130706433", "usual form"),
        ("http://0x7f000001", "usual form"),
        ("http://127.1", "usual form"),
        ("https://user:hunter2@teacher.example", "without user:password"),
        ("https://teacher.example/?key=hunter2", "without [?] and #"),
        ("file:///etc/passwd", "must look like"),
        ("gopher://localhost", "must look like"),
        ("localhost:8000", "must look like"),
        ("", "must look like"),
    ],
)
def test_an_address_that_is_unsafe_or_no_address_is_refused(url: str, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        ServerTeacher(url, vocab_size=23)
    assert "hunter2" not in str(caught.value)


def test_plain_http_to_another_machine_has_to_be_asked_for():
    assert checked_url("http://192.0.2.7:8000", allow_insecure=True) == "http://192.0.2.7:8000"
    with pytest.raises(ConfigError, match="no address that"):
        checked_url("http://169.254.169.254", allow_insecure=True)


def test_a_redirect_is_not_followed_and_its_target_sees_nothing():
    seen: list[httpx.Request] = []

    def target(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return json_response({})

    with (
        serve(target) as other,
        serve(lambda request: body_response(b"", 307, location=f"{other}/v1/completions")) as url,
    ):
        client = ServerClient(url, patience=QUICK)
        with pytest.raises(ConfigError, match=r"redirect .HTTP 307., which is not followed"):
            ask(client)
        client.close()
    assert seen == []


def test_neither_netrc_nor_a_proxy_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".netrc").write_text("default login thief password stolen\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("COHOBATE_TEST_TOKEN", SECRET)
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return json_response({"ok": True})

    with serve(answer) as url:
        client = ServerClient(url, token_env="COHOBATE_TEST_TOKEN", patience=QUICK)
        assert ask(client) == b'{"ok": true}'
        client.close()
    assert seen[0].headers["authorization"] == f"Bearer {SECRET}"
    assert seen[0].headers["accept-encoding"] == "identity"


# ------------------------------------------------------------------ the token


def test_a_token_comes_from_the_environment_or_there_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COHOBATE_TEST_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="COHOBATE_TEST_TOKEN, which is not set or is empty"):
        client_of(None, token_env="COHOBATE_TEST_TOKEN")
    monkeypatch.setenv("COHOBATE_TEST_TOKEN", "two words")
    with pytest.raises(ConfigError, match="holds no token") as caught:
        client_of(None, token_env="COHOBATE_TEST_TOKEN")
    assert "two words" not in str(caught.value)
    seen: list[httpx.Request] = []
    ask(client_of(lambda request: seen.append(request) or json_response({})))
    assert "authorization" not in seen[0].headers


@pytest.mark.parametrize("status", [200, 302, 400, 401, 404, 500])
def test_the_token_is_told_to_nobody_but_the_server(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("COHOBATE_TEST_TOKEN", SECRET)
    caplog.set_level(logging.DEBUG)
    said = {"error": {"message": f"who is Bearer {SECRET}?"}}  # a server that echoes it
    server = FakeServer(tiny.llama(3))
    server.always = lambda server, request, number: json_response(said, status)
    teacher = ServerTeacher(
        "http://localhost:8000", vocab_size=23, token_env="COHOBATE_TEST_TOKEN", surroundings=server.surroundings
    )
    with pytest.raises((ConfigError, ServerResponseError, ServerUnreachable)) as caught:
        teacher.connect()
    assert server.seen[0].headers["authorization"] == f"Bearer {SECRET}"
    error = caught.value
    shown = [str(error), repr(error), repr(teacher), repr(teacher.client), str(vars(teacher)), caplog.text]
    shown += [str(vars(teacher.client)), repr(error.__cause__), str(teacher.state_dict())]
    assert not any(SECRET in text for text in shown)
    if status == 401:
        assert "COHOBATE_TEST_TOKEN was sent" in str(error)


# ------------------------------------------------------------------ how long


def test_pauses_grow_to_a_limit_and_are_shortened_at_random():
    patience = Patience(first_pause=1.0, longest_pause=30.0)
    assert [patience.pause(n, 0.0) for n in (1, 2, 3, 5, 6, 7, 500)] == [1, 2, 4, 16, 30, 30, 30]
    assert patience.pause(3, 0.5) == 3.0
    with pytest.raises(ConfigError, match=r"Patience\.total must be a number of seconds > 0"):
        Patience(total=0)


@pytest.mark.parametrize(
    ("header", "wanted"), [("7", 7.0), ("0", 0.375), ("900", 30.0), ("soon", 0.375), ("-5", 0.375)]
)
def test_a_server_may_ask_for_a_longer_pause_but_not_for_an_endless_one(header: str, wanted: float):
    clock, answers = FakeClock(), iter([body_response(b"", 429, retry_after=header), json_response({})])
    ask(client_of(lambda request: next(answers), clock=clock))
    assert clock.slept == [wanted]


def test_a_request_is_given_up_at_the_deadline_and_not_long_after():
    clock = FakeClock()
    client = client_of(lambda request: body_response(b"", 503), clock=clock)
    started = clock()
    with pytest.raises(ServerUnreachable, match=r"row 'a', the last one: HTTP 503"):
        ask(client)
    assert 270 < clock() - started <= 300
    assert issubclass(ServerUnreachable, ConnectionError)


def test_an_unreachable_teacher_has_an_exit_code_of_its_own():
    errors = ServerUnreachable("gone"), ServerResponseError("wrong"), ConfigError("declined")
    assert [exit_code(error) for error in errors] == [75, 1, 2]


def test_an_answer_that_drips_is_cut_off_at_the_deadline_of_one_try():
    clock = FakeClock()

    def drip(request: httpx.Request) -> httpx.Response:
        stream = Dripping(clock, [b" "] * 100_000, 1.0)
        return httpx.Response(200, stream=stream, headers={"content-type": "application/json"})

    started = clock()
    with pytest.raises(ServerUnreachable, match="the answer took too long"):
        client_of(drip, clock=clock).post("/", {}, about="row 'a'", most_bytes=10**9)
    assert clock() - started <= 302


def test_time_outs_never_reach_beyond_the_deadline():
    clock, seen = FakeClock(), []

    def hang(request: httpx.Request) -> httpx.Response:
        seen.append(request.extensions["timeout"])
        clock.pass_by(request.extensions["timeout"]["read"])
        raise httpx.ReadTimeout("hangs")

    started = clock()
    with pytest.raises(ServerUnreachable, match=r"no answer in time .ReadTimeout"):
        ask(client_of(hang, clock=clock))
    assert clock() - started <= 300
    assert all(timeout["connect"] <= 10 and timeout["read"] <= 60 for timeout in seen)
    assert seen[-1]["read"] < 60


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(status: int):
    answers = iter([body_response(b"busy", status), json_response({"ok": 1})])
    assert ask(client_of(lambda request: next(answers))) == b'{"ok": 1}'


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 409, 410, 418, 422, 451, 301, 302, 308])
def test_a_server_that_declines_is_not_asked_again(status: int):
    seen: list[int] = []
    with pytest.raises(Refused, match=f"HTTP {status}"):
        ask(client_of(lambda request: seen.append(1) or body_response(b"{}", status)))
    assert seen == [1]


def test_a_status_that_the_caller_calls_final_is_not_asked_again_and_others_are():
    seen: list[int] = []
    answers = iter([503, 500])
    with pytest.raises(Refused, match=r"HTTP 500\).*says: broken") as caught:
        ask(client_of(lambda request: seen.append(1) or body_response(b"broken", next(answers))), final={500})
    assert seen == [1, 1]
    assert (caught.value.status, caught.value.said) == (500, "broken")


def test_a_request_that_is_too_large_is_the_callers_to_split():
    with pytest.raises(TooLarge):
        ask(client_of(lambda request: body_response(b"", 413)))


def test_what_a_server_says_is_quoted_in_one_short_printable_line():
    said = json_response({"detail": "a\nb\x1b[31m" + "x" * 5000}, 400)
    with pytest.raises(Refused) as caught:
        ask(client_of(lambda request: said))
    assert "It says: a b" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 600
    endless = body_response(b"[" * 1_000_000, 400)
    with pytest.raises(Refused):
        ask(client_of(lambda request: endless))


@pytest.mark.parametrize(
    "response",
    [
        lambda: body_response(b" " * 10_001),
        lambda: body_response(b" ", content_length="99999"),
        lambda: httpx.Response(
            200, stream=Dripping(FakeClock(), [b" " * 100] * 200), headers={"content-type": "application/json"}
        ),
    ],
)
def test_no_body_is_read_beyond_its_limit(response: Any):
    with pytest.raises(ServerResponseError, match="more than the 10000 bytes"):
        ask(client_of(lambda request: response()))


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "identity, gzip"])
def test_nothing_compressed_is_expanded(encoding: str):
    with pytest.raises(ServerResponseError, match="compressed"):
        ask(client_of(lambda request: body_response(b"x", content_encoding=encoding)))


# ------------------------------------------------------------------ real sockets


@pytest.fixture
def behind_a_socket() -> Iterator[tuple[FakeServer, str]]:
    server = FakeServer(tiny.llama(3))
    with serve(server.handle) as url:
        yield server, url


def test_scores_come_through_a_socket(behind_a_socket: tuple[FakeServer, str]):
    server, url = behind_a_socket
    teacher = ServerTeacher(url, vocab_size=23, top_k=3, patience=QUICK)
    teacher.connect()
    mocked = ServerTeacher("http://localhost:8000", vocab_size=23, top_k=3, surroundings=server.surroundings)
    mocked.connect()
    assert teacher.canary.difference(mocked.canary.row) == 0
    teacher.close()


def test_a_socket_that_hangs_or_refuses_ends_in_unreachable_after_seconds():
    release = threading.Event()

    def hang(request: httpx.Request) -> httpx.Response:
        release.wait(5)
        return json_response({})

    started = time.perf_counter()
    with serve(hang) as url:
        client = ServerClient(url, patience=QUICK)
        with pytest.raises(ServerUnreachable, match="no answer in time"):
            ask(client)
        release.set()
        client.close()
    client = ServerClient(url, patience=QUICK)  # nobody listens there any more
    with pytest.raises(ServerUnreachable, match="cannot be connected to"):
        ask(client)
    client.close()
    assert time.perf_counter() - started < 8


def test_a_tls_server_without_a_known_certificate_is_a_setting_and_not_a_network_problem():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError(
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed (_ssl.c:1000)"
        )

    with pytest.raises(ConfigError, match=r"certificate of http://localhost:8000 is not valid here.*ca_file"):
        ask(client_of(refuse))
    with pytest.raises(ConfigError, match="cannot be read as certificates"):
        ServerClient("https://teacher.example", ca_file="/nowhere/ca.pem")


# ------------------------------------------------------------------ threads


def test_no_more_calls_run_at_once_than_allowed():
    running, most, lock = 0, 0, threading.Lock()

    def call() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1
        return 7

    workers = Workers(3)
    assert [f.result() for f in [workers.submit(call) for _ in range(20)]] == [7] * 20
    assert most == 3
    workers.close()
    with pytest.raises(RuntimeError, match="closed"):
        workers.submit(call)


def test_a_cancelled_call_does_not_begin_and_an_error_is_raised_where_it_is_waited_for():
    workers, gate, begun = Workers(1), threading.Event(), []
    first = workers.submit(gate.wait)
    second = workers.submit(lambda: begun.append(1))
    assert second.cancel()
    third = workers.submit(lambda: 1 / 0)
    gate.set()
    first.result()
    with pytest.raises(ZeroDivisionError):
        third.result()
    assert begun == []
    workers.close()
