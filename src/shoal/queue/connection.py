"""Redis clients with explicit timeouts and retries, and one translation of their errors.

redis-py's own defaults (5 s socket timeout, 10 retries) make a blocking read that is longer than 5 s fail late, so no
blocking read here is longer than BLOCK_SLICE_S, well inside SOCKET_TIMEOUT_S. A client that blocks does not retry by
itself: a lost reply means that an entry may be pending, which only the caller can look up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.exceptions
import redis.retry

from shoal.config.masking import mask_url
from shoal.errors import CapacityError, ConfigError, ShoalError, StateError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 10.0
BLOCK_SLICE_S = 1.0
NUM_RETRIES = 8
"""With the back-off below about 4 s in all: a Redis restart is survived."""

_BACKOFF = redis.backoff.ExponentialWithJitterBackoff(base=0.05, cap=1.0)


def open_async(url: str, *, blocking: bool = False) -> redis.asyncio.Redis:
    """An asyncio client; it connects on first use.

    Args:
        url: redis://, rediss:// or unix:// address.
        blocking: for blocking reads; such a client does not retry by itself.
    Raises: ConfigError: the url is not a Redis address.
    """
    retry = redis.asyncio.retry.Retry(_BACKOFF, 0 if blocking else NUM_RETRIES)
    with _readable(url):
        return redis.asyncio.Redis.from_url(url, retry=retry, **_options(url))


def open_sync(url: str) -> redis.Redis:
    """A blocking client for idempotent commands; it connects on first use.

    Raises: ConfigError: the url is not a Redis address.
    """
    with _readable(url):
        return redis.Redis.from_url(url, retry=redis.retry.Retry(_BACKOFF, NUM_RETRIES), **_options(url))


def check_reachable(url: str) -> None:
    """Ask the server for an answer, once.

    Raises: ConfigError: the url is not a Redis address. UnavailableError: unreachable, or refusing the credentials.
    """
    with _readable(url):
        client = redis.Redis.from_url(url, retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0), **_options(url))
    try:
        with translated(url, "checking the address"):
            client.ping()
    finally:
        client.close()


@contextmanager
def translated(url: str, doing: str) -> Iterator[None]:
    """Turn Redis errors inside the block into Shoal's, saying what was being done and where.

    Raises:
        UnavailableError: unreachable, loading or refusing the credentials.
        CapacityError: the server is out of memory.
        StateError: the server refused the command.
    """
    try:
        yield
    except redis.exceptions.RedisError as error:
        raise _to_shoal(error, url, doing) from error


def _options(url: str) -> dict[str, Any]:
    # Protocol 2 pins the shape of stream replies.
    options: dict[str, Any] = {"socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": CONNECT_TIMEOUT_S, "protocol": 2}
    # A unix socket's connection class does not know keepalive.
    return options if url.startswith("unix://") else {**options, "socket_keepalive": True}


@contextmanager
def _readable(url: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"redis.url {mask_url(url)!r} is not a Redis address: use redis://HOST:PORT/0 ({error})") from error


def _to_shoal(error: redis.exceptions.RedisError, url: str, doing: str) -> ShoalError:
    where = mask_url(url)
    if isinstance(error, redis.exceptions.AuthenticationError):
        return UnavailableError(f"Redis at {where} refused the credentials while {doing}: check user and password in redis.url")
    if isinstance(error, redis.exceptions.ConnectionError | redis.exceptions.TimeoutError):
        return UnavailableError(
            f"Redis at {where} cannot be reached while {doing} ({error}): start the server, or correct redis.url (--set redis.url=...)"
        )
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return CapacityError(
            f"Redis at {where} is out of memory while {doing}: raise its maxmemory or lower coordinator.max_pending_groups"
        )
    return StateError(f"Redis at {where} refused a command while {doing}: {error}")
