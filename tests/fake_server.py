# SPDX-License-Identifier: Apache-2.0
"""A teacher server that answers as vLLM does, from a tiny model in this process, and misbehaves as it is told.

It is an `httpx` transport, so that no time passes: the clock is a number that sleeping and waiting move on. `serve`
puts the same behind a real socket. What it answers was written down from vLLM 0.32.
"""

import contextlib
import copy
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import httpx
import torch

from cohobate.remote.client import Surroundings

Answer = dict[str, Any]
Fault = Callable[["FakeServer", httpx.Request, int], "httpx.Response | None"]


class FakeClock:
    """Seconds that pass only when somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.pass_by(seconds)


class Dripping(httpx.SyncByteStream):
    """A body of which each part takes `seconds`; an exception among the parts is raised in its place."""

    def __init__(self, clock: FakeClock, parts: list[bytes | Exception], seconds: float = 0.0) -> None:
        self._clock, self._parts, self._seconds = clock, parts, seconds

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            self._clock.pass_by(self._seconds)
            if isinstance(part, Exception):
                raise part
            yield part


class FakeServer:
    """`faults` maps the number of a request for log-probabilities (0 is the first canary) to what happens there."""

    _logprobs: ClassVar[dict[tuple[int, tuple[int, ...]], torch.Tensor]] = {}
    _entries: ClassVar[dict[Any, list[Answer | None]]] = {}

    def __init__(
        self,
        model: Any,
        *,
        num_ids: int = 23,
        name: str = "teacher",
        max_logprobs: int = 23,
        max_model_len: int = 128,
        tokenizer: Any = None,
        faults: dict[int, Fault] | None = None,
        always: Fault | None = None,
    ) -> None:
        self.model, self.num_ids, self.name, self.tokenizer = model, num_ids, name, tokenizer
        self.max_logprobs, self.max_model_len = max_logprobs, max_model_len
        self.faults, self.always = faults or {}, always
        self.clock = FakeClock()
        self.asked: list[Answer] = []  # payloads of the requests for log-probabilities
        self.seen: list[httpx.Request] = []
        self.shift = 0  # positions by which what is said of a token is computed too late
        self.ids: Callable[[int], int] = lambda i: i  # what an id means to the model
        self.edit: Callable[[Answer, Answer], Any] | None = None  # of every answer, given the payload
        self._lock = threading.Lock()

    @property
    def surroundings(self) -> Surroundings:
        return Surroundings(
            transport=httpx.MockTransport(self.handle), clock=self.clock, sleep=self.clock.sleep, draw=lambda: 0.5
        )

    def handle(self, request: httpx.Request) -> httpx.Response:
        with self._lock:
            self.seen.append(request)
            scoring = request.url.path == "/v1/completions"
            number = len(self.asked)
            if scoring:
                self.asked.append(json.loads(request.content))
        if self.always is not None and (done := self.always(self, request, number)) is not None:
            return done
        if scoring and number in self.faults and (done := self.faults[number](self, request, number)) is not None:
            return done
        return self.answer(request)

    def answer(self, request: httpx.Request) -> httpx.Response:
        """What a server in order says."""
        if request.url.path == "/v1/models":
            return json_response({"object": "list", "data": [{"id": self.name, "max_model_len": self.max_model_len}]})
        payload = json.loads(request.content)
        if request.url.path == "/v1/completions":
            return self._score(payload)
        if self.tokenizer is not None and request.url.path == "/detokenize":
            return json_response({"prompt": self.tokenizer.decode([self.ids(i) for i in payload["tokens"]])})
        if self.tokenizer is not None and request.url.path == "/tokenize":
            return json_response({"tokens": self.tokenizer.encode(payload["prompt"], add_special_tokens=False)})
        return json_response({"detail": "Not Found"}, 404)

    def _score(self, payload: Answer) -> httpx.Response:
        prompts, k = payload["prompt"], payload["prompt_logprobs"]
        if payload["model"] != self.name:
            return refusal(404, f"The model `{payload['model']}` does not exist.")
        if k > self.max_logprobs:
            return refusal(
                400, f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.max_logprobs}"
            )
        for ids in prompts:
            if len(ids) + 1 > self.max_model_len:
                return refusal(400, f"This model's maximum context length is {self.max_model_len} tokens.")
            if max(ids) >= self.num_ids:
                return refusal(400, f"Token id {max(ids)} is out of vocabulary")
        answer = {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": self.name,
            "choices": [
                {"index": i, "text": "", "prompt_logprobs": self.entries(ids, k), "prompt_token_ids": ids}
                for i, ids in enumerate(prompts)
            ],
            "usage": {"prompt_tokens": sum(map(len, prompts))},
        }
        if self.edit is not None:
            answer = self.edit(answer, payload) or answer
        return json_response(answer)

    def entries(self, ids: list[int], k: int) -> list[Answer | None]:
        """`prompt_logprobs` of one prompt: the token that stands there first, then the likeliest."""
        key = (id(self.model), self.shift, self.num_ids, self.ids(0), self.ids(5), tuple(ids), k)
        if key not in self._entries:
            self._entries[key] = self._new_entries(ids, k)
        return copy.deepcopy(self._entries[key]) if self.edit is not None else self._entries[key]

    def _new_entries(self, ids: list[int], k: int) -> list[Answer | None]:
        rows = self.logprobs(tuple(ids))
        found: list[Answer | None] = [None]
        for row, token in zip(rows, ids[1:], strict=False):
            best = row.topk(k).indices.tolist()
            rank = int((row > row[token]).sum()) + 1
            entry = {str(token): {"logprob": float(row[token]), "rank": rank, "decoded_token": "?"}}
            for r, i in enumerate(best):
                entry[str(i)] = {"logprob": float(row[i]), "rank": r + 1, "decoded_token": "?"}
            found.append(entry)
        return found

    def logprobs(self, ids: tuple[int, ...]) -> torch.Tensor:
        """`[L, V]` in float32, row t predicting token t + 1, in the server's ids."""
        meant = tuple(self.ids(i) for i in ids)
        key = (id(self.model), meant)
        if key not in self._logprobs:
            with torch.no_grad():
                logits = self.model(torch.tensor([meant])).logits[0].float()
            self._logprobs[key] = logits.log_softmax(-1)
        rows = self._logprobs[key][:, [self.ids(i) for i in range(self.num_ids)]]
        return rows.roll(-self.shift, 0)


def json_response(answer: Any, status: int = 200) -> httpx.Response:
    return body_response(json.dumps(answer).encode(), status)


def body_response(body: bytes, status: int = 200, kind: str = "application/json", **headers: str) -> httpx.Response:
    stream = httpx.ByteStream(body)  # unread, as from a connection
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, stream=stream, headers={"content-type": kind} | names)


def refusal(status: int, message: str) -> httpx.Response:
    return json_response({"error": {"message": message, "type": "BadRequestError", "code": status}}, status)


@contextlib.contextmanager
def serve(handle: Callable[[httpx.Request], httpx.Response]) -> Iterator[str]:
    """`handle` behind a socket on the loopback address; gives the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            request = httpx.Request(
                self.command, f"http://localhost{self.path}", headers=dict(self.headers.items()), content=content
            )
            response = handle(request)
            body = b"".join(response.iter_raw())
            self.send_response(response.status_code)
            for name, value in response.headers.items():
                if name.lower() not in ("content-length", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
