# SPDX-License-Identifier: Apache-2.0
"""Asking an HTTP server for something that only it can say, without hanging, hammering it, or telling it too much.

Nothing is asked whose answer a second asking would change, so a request that failed on its way may be sent again. What
came of one is told apart by who has to act: nobody, if the network or a busy server is to blame (it is asked again,
until a deadline: `ServerUnreachable`); the user, about a setting (`ConfigError`); the caller, who splits what is
`TooLarge`; or the server's keeper, about an answer that no correct server gives (`ServerResponseError`). What is
inside a body is not looked at here.

A server is not trusted: no redirect is followed, no proxy or .netrc of the environment is used, nothing that was sent
compressed is expanded, and no body grows beyond what the question can need. The API token is read from an environment
variable and is in nobody's `repr`, message or log.
"""

import ipaddress
import json
import logging
import math
import os
import random
import re
import ssl
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from cohobate.errors import ConfigError, ServerResponseError, ServerUnreachable

_RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOST_OF_AN_ERROR = 16_384  # bytes read of an answer that is no result
_QUOTED = 300  # characters of it in a message

_log = logging.getLogger(__name__)


class TooLarge(ConfigError):
    """The server takes no request of this size (413)."""


class Refused(ConfigError):
    """The server understood and declined: a setting on one of the two sides is wrong."""

    def __init__(self, message: str, *, status: int, said: str) -> None:
        super().__init__(message)
        self.status, self.said = status, said


class _Transient(Exception):
    """Worth another try; `after` is what the server asked to wait, in seconds; `status` 0: no answer came."""

    def __init__(self, what: str, after: float | None = None, *, status: int = 0, said: str = "") -> None:
        super().__init__(what)
        self.after, self.status, self.said = after, status, said


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a server is waited for, in seconds."""

    total: float = 300.0  # from the first try of a request to giving it up
    attempt: float = 120.0  # one try, to its last byte
    idle: float = 60.0  # without a byte
    connect: float = 10.0
    first_pause: float = 0.5  # before the second try; doubles, and up to half of it is left off at random
    longest_pause: float = 30.0

    def __post_init__(self) -> None:
        for name in ("total", "attempt", "idle", "connect", "first_pause", "longest_pause"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"Patience.{name} must be a number of seconds > 0, got {value}.")

    def pause(self, num_failures: int, drawn: float) -> float:
        """Seconds until the next try; `drawn` is uniform in [0, 1)."""
        return min(self.longest_pause, self.first_pause * 2.0 ** min(num_failures - 1, 30)) * (1 - drawn / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a client takes from the world; tests put their own in its place."""

    transport: httpx.BaseTransport | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = field(default_factory=lambda: random.Random().random)


def checked_url(url: str, *, allow_insecure: bool = False) -> str:
    """The server's base address without a trailing `/` or `/v1`.

    Raises:
        ConfigError: no http(s) address, one with a password in it, plain http to another machine without
            `allow_insecure`, or a host that is written in an unusual way or is link-local.
    """
    try:
        parsed = httpx.URL(url.strip())
    except (httpx.InvalidURL, TypeError, AttributeError):
        parsed = None
    shape = "The server's address must look like http://localhost:8000 or https://server.example"
    if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{shape}; got something else.")  # which may hold a password, so it is not repeated
    if parsed.userinfo:
        raise ConfigError(
            f"{shape}, without user:password. Put a token into an environment variable, named token_env."
        )
    if parsed.query or parsed.fragment:
        raise ConfigError(f"{shape}, without ? and #.")
    address = _literal_address(parsed.host)
    if address is not None and (address.is_link_local or address.is_multicast or address.is_unspecified):
        raise ConfigError(f"{parsed.host} is no address that a server can be reached at. {shape}.")
    loopback = parsed.host == "localhost" or (address is not None and address.is_loopback)
    if parsed.scheme == "http" and not loopback and not allow_insecure:
        raise ConfigError(
            f"http to {parsed.host} would send prompts and the token unencrypted, and anybody between could answer. "
            "Use https or a tunnel to localhost; in a network of your own, set allow_insecure."
        )
    return str(parsed.copy_with(path=parsed.path.rstrip("/").removesuffix("/v1"))).rstrip("/")


def _literal_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` is, or None for a name; 2130706433 and 0x7f.1 are neither."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        if re.fullmatch(r"(0[xX][0-9a-fA-F]*|[0-9]+)", host.rstrip(".").rpartition(".")[2]):
            raise ConfigError(f"write the address {host} in its usual form, such as 192.0.2.1.") from None
        return None


def _token(name: str | None) -> str | None:
    if name is None:
        return None
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigError(f"token_env names the environment variable {name}, which is not set or is empty.")
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ConfigError(f"the environment variable {name} holds no token: it has spaces or unusual characters.")
    return value


class ServerClient:
    """One server. Safe to use from several threads."""

    def __init__(
        self,
        url: str,
        *,
        token_env: str | None = None,
        allow_insecure: bool = False,
        ca_file: str | None = None,
        patience: Patience | None = None,
        num_connections: int = 8,
        role: str = "teacher",
        surroundings: Surroundings | None = None,
    ) -> None:
        """`ca_file`: certificates (PEM) that sign the server's, where the system does not know them.

        `role`: what the server is there for, in messages: "the teacher server http://...".
        """
        self.url = checked_url(url, allow_insecure=allow_insecure)
        self.name = f"the {role} server {self.url}"
        self.patience = patience or Patience()
        self._token_env = token_env
        self._world = surroundings or Surroundings()
        token = _token(token_env)
        self._redact: Callable[[str], str] = (lambda s: s) if token is None else (lambda s: s.replace(token, "***"))
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "cohobate"}
        self._client = httpx.Client(
            headers=headers if token is None else headers | {"Authorization": f"Bearer {token}"},
            transport=self._world.transport,
            verify=_certificates(ca_file) if self.url.startswith("https") else True,
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=num_connections, max_keepalive_connections=num_connections),
        )

    def __repr__(self) -> str:
        return f"ServerClient({self.url!r})"

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, *, about: str, most_bytes: int = 1 << 20) -> bytes:
        """The body of the answer; see `post`."""
        return self._ask("GET", path, None, about, most_bytes)

    def post(
        self,
        path: str,
        payload: Mapping[str, Any],
        *,
        about: str,
        most_bytes: int,
        final: Collection[int] = (),
    ) -> bytes:
        """The body of the server's answer to `payload` as JSON, at most `most_bytes` of it.

        Args:
            about: what the request is about, for messages: `rows 'a', 'b'`.
            final: statuses that asking again would not change here, although elsewhere it might: they are `Refused`.

        Raises:
            ServerUnreachable: nothing usable came until the deadline.
            Refused: a ConfigError with the server's own words.
            TooLarge: status 413.
            ServerResponseError: an answer that is no JSON, is compressed, or is too long.
        """
        content = json.dumps(payload, separators=(",", ":")).encode()
        return self._ask("POST", path, content, about, most_bytes, final)

    def _ask(
        self,
        method: str,
        path: str,
        content: bytes | None,
        about: str,
        most_bytes: int,
        final: Collection[int] = (),
    ) -> bytes:
        clock, patience = self._world.clock, self.patience
        started, failures = clock(), 0
        while True:
            deadline = min(clock() + patience.attempt, started + patience.total)
            try:
                body = self._attempt(method, path, content, about, most_bytes, deadline)
            except _Transient as failure:
                if failure.status in final:
                    refusal = self._refusal(failure.status, path, about, failure.said)
                    raise Refused(refusal, status=failure.status, said=failure.said) from None
                failures += 1
                pause = patience.pause(failures, self._world.draw())
                if failure.after is not None:
                    pause = min(max(pause, failure.after), patience.longest_pause)
                gone = clock() - started
                if gone + pause >= patience.total:
                    raise self._unreachable(about, gone, failures, failure) from None
                if failures == 1:
                    _log.warning("%s: %s; trying again for up to %.0f s.", self.name, failure, patience.total)
                self._world.sleep(pause)
            else:
                if failures:
                    _log.info("%s answers again after %d failures.", self.name, failures)
                return body

    def _unreachable(self, about: str, gone: float, failures: int, last: _Transient) -> ServerUnreachable:
        since = datetime.now(UTC) - timedelta(seconds=gone)
        return ServerUnreachable(
            f"{self.name} is unreachable since {since:%H:%M:%S} UTC: {failures} tries in "
            f"{gone:.0f} s for {about}, the last one: {last}. Nothing was trained on what is missing. Start the "
            "server again and rerun the same command."
        )

    def _attempt(
        self, method: str, path: str, content: bytes | None, about: str, most_bytes: int, deadline: float
    ) -> bytes:
        left, patience = max(deadline - self._world.clock(), 0.001), self.patience
        timeout = httpx.Timeout(min(patience.idle, left), connect=min(patience.connect, left), pool=None)
        headers = {"X-Request-Id": f"cohobate-{uuid.uuid4().hex}"}
        if content is not None:
            headers["Content-Type"] = "application/json"
        request = self._client.build_request(
            method, self.url + path, content=content, headers=headers, timeout=timeout
        )
        about = f"{about} (request {headers['X-Request-Id']})"
        try:
            response = self._client.send(request, stream=True)
            try:
                return self._body(response, path, about, most_bytes, deadline)
            finally:
                response.close()
        except httpx.ConnectError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ConfigError(
                    f"the certificate of {self.url} is not valid here: {_short(str(error))}. Name the file that signs "
                    "it as ca_file; verification cannot be turned off."
                ) from None
            raise _Transient(f"it cannot be connected to ({_short(str(error))})") from None
        except httpx.TimeoutException as error:
            raise _Transient(f"no answer in time ({type(error).__name__})") from None
        except httpx.TransportError as error:
            raise _Transient(f"the connection broke ({type(error).__name__}: {_short(str(error))})") from None

    def _body(self, response: httpx.Response, path: str, about: str, most_bytes: int, deadline: float) -> bytes:
        status = response.status_code
        if status != 200:
            said = self._said(response, deadline)
            if status in _RETRYABLE:
                raise _Transient(f"HTTP {status} {said}".strip(), _retry_after(response), status=status, said=said)
            if status == 413:
                raise TooLarge(said)
            raise Refused(self._refusal(status, path, about, said), status=status, said=said)
        kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise ServerResponseError(f"{self.url}{path} answered {about} with {_short(kind) or 'no type'}, not JSON.")
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise ServerResponseError(
                f"{self.url}{path} answered {about} compressed ({_short(encoding)}), which was not asked for and is "
                "not expanded. Turn compression off between here and the server."
            )
        return self._read(response, about, most_bytes, deadline)

    def _read(self, response: httpx.Response, about: str, most_bytes: int, deadline: float) -> bytes:
        declared = response.headers.get("content-length", "")
        parts, size = [], 0
        if not (declared.isdigit() and len(declared) < 19 and int(declared) > most_bytes):
            for part in response.iter_raw():
                parts.append(part)
                size += len(part)
                if size > most_bytes:
                    break
                if self._world.clock() > deadline:
                    raise _Transient(f"the answer took too long ({size} bytes until then)")
            else:
                return b"".join(parts)
        raise ServerResponseError(
            f"{self.url} answered {about} with more than the {most_bytes} bytes that it can need. It was not read on."
        )

    def _said(self, response: httpx.Response, deadline: float) -> str:
        """The server's words on why it did not answer, as one short line."""
        body = b""
        if response.headers.get("content-encoding", "identity").strip().lower() == "identity":
            for part in response.iter_raw():
                body += part
                if len(body) > _MOST_OF_AN_ERROR or self._world.clock() > deadline:
                    break
        text = body[:_MOST_OF_AN_ERROR].decode("utf-8", "replace")
        try:
            found = json.loads(text)
            found = found.get("error", found) if isinstance(found, dict) else found
            found = found.get("message", found.get("detail", text)) if isinstance(found, dict) else text
            text = found if isinstance(found, str) else text
        except (ValueError, RecursionError):
            pass
        return _short(self._redact(text))

    def _refusal(self, status: int, path: str, about: str, said: str) -> str:
        where, says = self.name, f" It says: {said}" if said else ""
        if status in (401, 403):
            token = (
                f"The token in the environment variable {self._token_env} was sent"
                if self._token_env
                else "No token was sent; name the environment variable that holds one as token_env"
            )
            return f"{where} refuses access (HTTP {status}). {token}.{says}"
        if 300 <= status < 400:
            return (
                f"{where} answers {path} with a redirect (HTTP {status}), which is not followed. Give the final URL."
            )
        if status == 404:
            return f"{where} has no {path} or not this model (HTTP 404).{says}"
        return f"{where} declined {about} (HTTP {status}).{says}"


def _certificates(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"ca_file={ca_file!r} cannot be read as certificates: {error}.") from None


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "").strip()
    return float(value) if value.isdigit() and len(value) < 7 else None


def _short(text: str) -> str:
    """One printable line, not longer than a message should quote of what a server said."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return line if len(line) <= _QUOTED else line[: _QUOTED - 1] + "…"
