"""The one door to a transport: `push.transport` names it."""

from __future__ import annotations

from shoal.config.models import PushSection
from shoal.weights.transports.base import SinkTransport, SourceTransport
from shoal.weights.transports.shm import ShmSinkTransport, ShmSourceTransport


def open_source_transport(push: PushSection) -> SourceTransport:
    """The trainer's end, as `push.transport` says."""
    match push.transport:
        case "shm":
            return ShmSourceTransport()


def open_sink_transport(push: PushSection, name: str, num_bytes: int) -> SinkTransport:
    """The engine worker's end: allocates `num_bytes` of staging.

    Args:
        name: unique among all workers of the host, `<run id>-...`: what is left of a killed run is found by `shoal-<run id>-*`.
    Raises: CapacityError: no space. TransportError: it cannot be created.
    """
    match push.transport:
        case "shm":
            return ShmSinkTransport(push.shm_dir, name, num_bytes)
