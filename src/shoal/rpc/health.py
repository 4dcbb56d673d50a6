"""Truthful gRPC health: a service is NOT_SERVING until told otherwise.

Speaks grpc.health.v1. Own servicer because the stock one starts with SERVING and can be set only from a coroutine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal.config.models import SecuritySection
from shoal.errors import DeadlineError, NotFoundError, UnavailableError
from shoal.rpc.catalogue import from_rpc_error
from shoal.rpc.channel import open_channel

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Health of a process: one state for all of its services and for "" (the whole server)."""

    def __init__(self) -> None:
        self._names = {""}
        self._serving = False
        self._changed = asyncio.Event()

    def add_service(self, name: str) -> None:
        """Add a service name that may be asked for."""
        self._names.add(name)
        self._notify()

    def set_serving(self, serving: bool) -> None:
        """Set the state of every name; watchers hear of it."""
        self._serving = serving
        self._notify()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: object) -> health_pb2.HealthCheckResponse:
        """Answer the current state; NOT_FOUND for an unknown name, as the health protocol says."""
        status = self._status(request.service)
        if status == _UNKNOWN:
            raise NotFoundError(f"no service {request.service!r} here; known: {sorted(self._names)}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: object) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Stream the state at once and at each change."""
        last = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()

    def _status(self, name: str) -> int:
        if name not in self._names:
            return _UNKNOWN
        return _SERVING if self._serving else _NOT_SERVING

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def is_serving(address: str, security: SecuritySection, *, timeout_s: float, service_name: str = "") -> bool:
    """Ask a server's health once; False if it answers NOT_SERVING or is unreachable.

    Raises: NotFoundError: the server has no service of that name.
    """
    async with open_channel(address, security) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service_name), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            mapped = from_rpc_error(error, peer=f"health of {address}")
            if isinstance(mapped, UnavailableError | DeadlineError):
                return False
            raise mapped from error
        return bool(answer.status == _SERVING)
