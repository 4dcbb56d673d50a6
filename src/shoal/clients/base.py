"""What all clients share: one channel, deadlines, the error catalogue and the retry of idempotent calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ClassVar, Protocol, Self, TypeVar

import grpc

from shoal.config.models import SecuritySection
from shoal.errors import UnavailableError
from shoal.rpc.catalogue import from_rpc_error
from shoal.rpc.channel import open_channel
from shoal.rpc.retry import MAX_ATTEMPTS, call_idempotent

_Request = TypeVar("_Request", contravariant=True)
_Response = TypeVar("_Response", covariant=True)


class UnaryMethod(Protocol[_Request, _Response]):
    """A unary method of a generated stub."""

    def __call__(self, request: _Request, *, timeout: float | None = None) -> Awaitable[_Response]:
        """Start the call."""


class ServiceClient:
    """Base of the clients: owns the channel. Use it on the event loop that created it."""

    max_attempts: ClassVar[int] = MAX_ATTEMPTS
    """How often an idempotent call is made before an unavailable service is reported."""

    def __init__(self, address: str, security: SecuritySection) -> None:
        """Open a lazy channel.

        Raises: ConfigError: the address is not host:port, or a PEM file cannot be read.
        """
        self.address = address
        self._channel = open_channel(address, security)
        self._closed = False

    async def close(self) -> None:
        """Close the channel; calls in flight end with UnavailableError."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _call(self, method: UnaryMethod[_Request, _Response], request: _Request, timeout_s: float) -> _Response:
        """Run one call without a retry. Raises ShoalError."""
        with self._translated():
            return await method(request, timeout=timeout_s)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what gRPC raises into ShoalErrors, a channel that was closed under a call included."""
        if self._closed:
            raise UnavailableError(f"the connection to {self._peer} was closed: the service has left or was replaced")
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer=self._peer) from error
        except asyncio.CancelledError as error:
            # gRPC cancels the calls of a channel that is closed; nobody has asked the caller's task to stop then.
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise UnavailableError(f"the connection to {self._peer} was closed while it was called") from error
            raise

    async def _call_idempotent(self, method: UnaryMethod[_Request, _Response], request: _Request, timeout_s: float) -> _Response:
        """Run one call, again while the service is unavailable. Raises ShoalError."""
        call: Callable[[float], Awaitable[_Response]] = lambda left_s: self._call(method, request, left_s)  # noqa: E731 - typed
        return await call_idempotent(call, timeout_s, max_attempts=self.max_attempts)

    @property
    def _peer(self) -> str:
        return f"{type(self).__name__.removesuffix('Client').lower()} at {self.address}"
