"""What a transport offers to the two ends of a push; neither end knows one by name.

A trainer rank opens a link to an engine worker and writes the buckets that the plan gives this pair, in the plan's order. The worker owns
a staging buffer, which holds every engine parameter whole; what a link writes is there, complete, once `finish` has returned. Calls are
synchronous; an object is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal.types.weights import Box, SinkParameter, SinkWorkerLayout
from shoal.weights.buckets import Bucket
from shoal.weights.delta import Delta as Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRequest:
    """One rank's wish to write to one worker in one push.

    worker_ranks: all workers of the server, and world_size: all ranks of the gang: what a collective group consists of.
    """

    push_id: str
    policy_version: int
    rank: int
    world_size: int
    server_id: str
    worker: SinkWorkerLayout
    num_workers: int
    collective_group: str
    timeout_s: float


class SourceLink(Protocol):
    """One rank's way into one worker's staging, for one push."""

    def write_dense(self, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        """Write all elements of a bucket.

        Args:
            bucket: the next one that has anything to send.
            pieces: one tensor per piece of the bucket, with its shape, any strides, any floating dtype; cast to the serving dtype.
        Returns: xxh3-64 of the bucket's bytes in the serving dtype.
        Raises: TransportError: other shapes, or the worker is gone. CapacityError: its memory cannot be had. DeadlineError.
        """
        ...

    def write_delta(self, bucket: Bucket, delta: Delta) -> None:
        """Write the changed elements of a bucket; the others stay as staging holds them. Raises: as write_dense."""
        ...

    def finish(self) -> None:
        """Wait until everything written is in staging. Raises: as write_dense."""
        ...

    def close(self) -> None:
        """Let go; without `finish` before it, the worker may hold a part of what was written."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes that crossed the link so far."""
        ...


class SourceTransport(Protocol):
    """The trainer's end of every transport; keeps mappings, channels and groups from push to push.

    May be used by several threads at once; each of its links by one.
    """

    def prepare(self, worker: SinkWorkerLayout, transport: str) -> None:
        """Do in PREPARE what the first `open` would take long for, such as mapping a worker's memory. Raises: as open."""
        ...

    def open(self, request: LinkRequest, transport: str) -> SourceLink:
        """Reach a worker's staging through a named transport.

        Raises: TransportError: it is gone, or does not have the promised size. CapacityError. DeadlineError.
        """
        ...

    def close(self) -> None:
        """Let go of everything; removes no staging."""
        ...


class StagingBuffer(Protocol):
    """The engine worker's end: owns the buffer that holds every engine parameter."""

    @property
    def endpoint(self) -> tuple[str, str]:
        """The transport that writes here directly ("shm" or "cuda_ipc") and its address."""
        ...

    def view(self, parameter: SinkParameter) -> Tensor:
        """The parameter's staged elements, a view with the parameter's shape and dtype."""
        ...

    def close(self) -> None:
        """Remove the buffer, once; repeating does nothing."""
        ...


class PieceTarget(Protocol):
    """Anything that hands out staged parameters, on either end."""

    def piece(self, parameter: str, box: Box) -> Tensor:
        """A view of a box of a parameter. Raises: TransportError: unknown, or outside."""
        ...
