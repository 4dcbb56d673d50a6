"""JSON requests to one server, with a limit on open ones, retries inside a deadline and errors that say what happened.

A sample keeps its turn under the limit from its first try to its last, pauses included: when a server fails, the others wait instead of
joining in. Every failure is an exception, which is an error of its sample; none is a score.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from shoal.errors import CapacityError, CodecError, ConfigError, DeadlineError, InvalidRequestError, UnavailableError
from shoal_reward.remote.retry import is_retried, pause_s, read_retry_after
from shoal_reward.remote.settings import EndpointSection

_OK = 200
_FIRST_REDIRECT, _FIRST_REFUSAL = 300, 400
_EXCERPT_CHARS = 200
_MAX_KEY_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class _Failure:
    """A try that may be made again. retry_after_s: what the server asked for."""

    reason: str
    retry_after_s: float | None = None
    is_timeout: bool = False


@dataclass(frozen=True, slots=True)
class _Connections:
    """Clients of one connection each that nobody uses at present; the last one used is taken first, since it is the likeliest to be open.

    One client with many connections would look at all of them for each request: a fifth of the requests a second at 64 connections.
    """

    verify: ssl.SSLContext
    key: str = field(repr=False)
    free: list[httpx.AsyncClient] = field(default_factory=list)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[httpx.AsyncClient]:
        client = self.free.pop() if self.free else self._new()
        try:
            yield client
        finally:
            self.free.append(client)

    def _new(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        # The environment's proxies and .netrc must not see tokens and responses. Times are kept outside.
        return httpx.AsyncClient(verify=self.verify, limits=limits, timeout=None, follow_redirects=False, trust_env=False)  # noqa: S113


_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]] = WeakKeyDictionary()


def _turns(settings: EndpointSection) -> asyncio.Semaphore:
    """The limit that all scorers of the running event loop with this url and max_open share."""
    turns = _TURNS.setdefault(asyncio.get_running_loop(), {})
    key = (settings.url, settings.max_open)
    if key not in turns:
        turns[key] = asyncio.Semaphore(settings.max_open)
    return turns[key]


class JsonEndpoint:
    """Posts JSON to one server."""

    def __init__(self, settings: EndpointSection) -> None:
        """Open nothing yet.

        Raises: ConfigError: api_key_file or ca_file cannot be read.
        """
        self._settings = settings
        # Connections belong to the event loop that opened them.
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = WeakKeyDictionary()
        _read_key(settings.api_key_file)
        self._verify = _verification(settings)

    def __repr__(self) -> str:
        """Name the server; the token is in no attribute that a repr reaches."""
        return f"JsonEndpoint({self._settings.url!r})"

    async def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Post a body and return the JSON object of the answer.

        Args:
            path: behind the base address, with a leading slash.
            body: what json can write.
        Raises:
            InvalidRequestError: a redirect, or a 4xx other than 429.
            CodecError: 200 without a JSON object.
            CapacityError: too long an answer.
            UnavailableError: no try got through.
            DeadlineError: none did, and the last one ran out of time.
        """
        content = json.dumps(body, allow_nan=False).encode()
        async with _turns(self._settings):
            return await self._post_until_answered(path, content)

    async def _post_until_answered(self, path: str, content: bytes) -> dict[str, Any]:
        deadline = time.monotonic() + self._settings.deadline_s
        num_tries = 0
        while True:
            num_tries += 1
            outcome = await self._try_once(path, content, deadline - time.monotonic())
            if not isinstance(outcome, _Failure):
                return outcome
            delay_s = self._pause_s(num_tries, outcome)
            if num_tries >= self._settings.max_tries or time.monotonic() + delay_s >= deadline:
                raise self._given_up(outcome, num_tries)
            await asyncio.sleep(delay_s)

    def _pause_s(self, num_tries: int, failure: _Failure) -> float:
        settings = self._settings
        return pause_s(num_tries, backoff_s=settings.backoff_s, max_backoff_s=settings.max_backoff_s, retry_after_s=failure.retry_after_s)

    def _given_up(self, failure: _Failure, num_tries: int) -> Exception:
        kind = DeadlineError if failure.is_timeout else UnavailableError
        tries = "1 try" if num_tries == 1 else f"{num_tries} tries"
        wish = "" if failure.retry_after_s is None else f" and asked for a pause of {failure.retry_after_s:g} s"
        return kind(f"{self._settings.url} {failure.reason}{wish}; given up after {tries} (deadline_s {self._settings.deadline_s:g})")

    async def _try_once(self, path: str, content: bytes, remaining_s: float) -> dict[str, Any] | _Failure:
        timeout_s = min(self._settings.timeout_s, remaining_s)
        connections = self._connections_here()
        try:
            # httpx's own timeouts are per read: a server that sends a byte now and then would never hit them.
            async with connections.one() as client, asyncio.timeout(timeout_s):
                return await self._exchange(client, connections.key, path, content)
        except TimeoutError:
            return _Failure(f"did not answer within {timeout_s:.3g} s", is_timeout=True)
        except httpx.TransportError as error:
            return _Failure(f"cannot be reached or broke off ({type(error).__name__}: {error})")

    async def _exchange(self, client: httpx.AsyncClient, key: str, path: str, content: bytes) -> dict[str, Any] | _Failure:
        # Compressed answers could be small on the wire and huge here.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        async with client.stream("POST", f"{self._settings.url}{path}", content=content, headers=headers) as answer:
            text = await self._read(answer)
            if is_retried(answer.status_code):
                reason = f"answered {answer.status_code}: {_excerpt(text, key)}"
                return _Failure(reason, read_retry_after(answer.headers.get("Retry-After")))
            self._check_status(answer, text, key)
            return self._object(text, key)

    async def _read(self, answer: httpx.Response) -> str:
        limit = self._settings.max_response_bytes
        received = bytearray()
        async for chunk in answer.aiter_raw():
            received += chunk
            if len(received) > limit:
                raise CapacityError(f"{self._settings.url} sent more than max_response_bytes, {limit}: the answer was dropped")
        return received.decode("utf-8", "replace")

    def _check_status(self, answer: httpx.Response, text: str, key: str) -> None:
        status = answer.status_code
        if status == _OK:
            return
        if _FIRST_REDIRECT <= status < _FIRST_REFUSAL:
            raise InvalidRequestError(f"{self._settings.url} answered {status}: redirects are refused, write the final address into url")
        raise InvalidRequestError(f"{self._settings.url} answered {status}, which is not tried again: {_excerpt(text, key)}")

    def _object(self, text: str, key: str) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            what = f"without JSON ({type(error).__name__})"
            raise CodecError(f"{self._settings.url} answered 200 {what}: {_excerpt(text, key)}") from None
        if not isinstance(answer, dict):
            raise CodecError(f"{self._settings.url} answered 200 with {type(answer).__name__}, not a JSON object: {_excerpt(text, key)}")
        return answer

    def _connections_here(self) -> _Connections:
        loop = asyncio.get_running_loop()
        found = self._connections.get(loop)
        if found is None:
            found = self._connections[loop] = _Connections(self._verify, _read_key(self._settings.api_key_file))
        return found


def _verification(settings: EndpointSection) -> ssl.SSLContext:
    if settings.url.startswith("http://"):
        # Reading the system's certificates takes long and nothing would be checked against them.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if settings.ca_file is None:
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca_file {settings.ca_file} cannot be read ({error}): name a PEM file of certificates") from None


def _read_key(file: str | None) -> str:
    if file is None:
        return ""
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"api_key_file {file} cannot be read ({error.strerror}): name a file that holds the token") from None
    key = content.decode("ascii", "replace").strip()
    # The value itself must not be in the message.
    if not key or len(content) > _MAX_KEY_BYTES or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"api_key_file {file} does not hold one token: write the token alone, on one line")
    return key


def _excerpt(text: str, key: str) -> str:
    shown = text.replace(key, "***") if key else text
    shown = " ".join(shown.split())
    return repr(shown if len(shown) <= _EXCERPT_CHARS else shown[: _EXCERPT_CHARS - 1] + "…")
