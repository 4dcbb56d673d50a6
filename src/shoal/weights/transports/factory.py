"""The one door to the transports: one object for all of them on the trainer's side, one staging buffer on the engine's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from shoal.config.models import PushSection, SecuritySection
from shoal.errors import TransportError
from shoal.types.weights import SinkWorkerLayout
from shoal.weights.transports.base import LinkRequest, SourceLink, SourceTransport, StagingBuffer
from shoal.weights.transports.shm import ShmSourceTransport, ShmStaging


class _OneTransport(Protocol):
    """The trainer's end of one transport."""

    def prepare(self, worker: SinkWorkerLayout) -> None: ...

    def open(self, request: LinkRequest) -> SourceLink: ...

    def close(self) -> None: ...


class _AllTransports:
    """`SourceTransport`: each is made when it is first asked for, so that an unused one costs no import, thread or port."""

    def __init__(self, makers: dict[str, Callable[[], _OneTransport]]) -> None:
        self._makers = makers
        self._made: dict[str, _OneTransport] = {}
        self._lock = threading.Lock()

    def prepare(self, worker: SinkWorkerLayout, transport: str) -> None:
        """See `SourceTransport.prepare`."""
        self._get(transport).prepare(worker)

    def open(self, request: LinkRequest, transport: str) -> SourceLink:
        """See `SourceTransport.open`."""
        return self._get(transport).open(request)

    def close(self) -> None:
        """See `SourceTransport.close`."""
        with self._lock:
            while self._made:
                self._made.popitem()[1].close()

    def _get(self, transport: str) -> _OneTransport:
        if transport not in self._makers:
            raise TransportError(f"there is no transport {transport!r}; push.transport takes {', '.join(self._makers)}")
        with self._lock:
            if transport not in self._made:
                self._made[transport] = self._makers[transport]()
            return self._made[transport]


def open_source_transport(push: PushSection, security: SecuritySection) -> SourceTransport:
    """The trainer's end of every transport.

    Args:
        push: folders, bucket size and streams.
        security: how the grpc transport reaches a server.
    """

    def grpc() -> _OneTransport:
        from shoal.weights.transports.grpc_source import GrpcSourceTransport

        return GrpcSourceTransport(push, security)

    def collective() -> _OneTransport:
        from shoal.weights.transports.collective_source import CollectiveSourceTransport

        return CollectiveSourceTransport(push)

    def cuda_ipc() -> _OneTransport:
        from shoal.weights.transports.cuda_ipc import CudaIpcSourceTransport

        return CudaIpcSourceTransport()

    return _AllTransports({"shm": ShmSourceTransport, "grpc": grpc, "collective": collective, "cuda_ipc": cuda_ipc})


def open_staging(push: PushSection, name: str, num_bytes: int, device: str) -> StagingBuffer:
    """The engine worker's end: allocates `num_bytes` of staging.

    A worker on a GPU stages there, which cuda_ipc and collective reach; with push.transport shm or grpc it stages in host memory.

    Args:
        name: unique among all workers of the host, `<run id>-...`: what is left of a killed run is found by `shoal-<run id>-*`.
        device: where the worker computes: "cpu", "cuda" or "cuda:<index>".
    Raises: CapacityError: no space. TransportError: it cannot be created.
    """
    if device.startswith("cuda") and push.transport not in ("shm", "grpc"):
        from shoal.weights.transports.cuda_ipc import CudaStaging

        return CudaStaging(push.shm_dir, name, num_bytes, device)
    return ShmStaging(push.shm_dir, name, num_bytes)
