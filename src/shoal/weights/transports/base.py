"""What a transport offers to the two ends of a push; neither end knows one by name.

The source (a trainer rank) opens the staging buffer of an engine worker and writes boxes of its parameters. The sink (an engine worker)
owns the staging buffer: it alone creates and removes it. Calls are synchronous; an object is used by one thread at a time.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shoal.types.weights import Box, SinkParameter, SinkWorkerLayout


class StagingWriter(Protocol):
    """One engine worker's staging buffer, seen from a trainer rank."""

    def write(self, parameter: str, parameter_box: Box, source: Tensor) -> int:
        """Write a box of an engine parameter, cast to its serving dtype.

        Args:
            parameter: name in the worker's layout.
            parameter_box: where the elements go, in the parameter's coordinates.
            source: tensor with the shape of the box, any strides, any floating dtype.
        Returns: xxh3-64 of the written bytes, row-major over the box.
        Raises: TransportError: unknown parameter, a box outside it, other shape, or the staging buffer is gone.
        """
        ...


class SourceTransport(Protocol):
    """The trainer's end."""

    def open(self, worker: SinkWorkerLayout) -> StagingWriter:
        """Reach the staging buffer that the layout names; reused if it is the one opened last time.

        Raises: TransportError: it does not exist or does not have the promised size.
            CapacityError: its memory cannot be had.
        """
        ...

    def close(self) -> None:
        """Let go of every staging buffer; removes none."""
        ...


class SinkTransport(Protocol):
    """The engine worker's end: owns one staging buffer."""

    @property
    def address(self) -> str:
        """What `SinkWorkerLayout.staging_path` carries to the source."""
        ...

    def tensor(self, parameter: SinkParameter) -> Tensor:
        """The parameter's staged elements, a view of the buffer with the parameter's shape and dtype."""
        ...

    def digest(self, parameter: SinkParameter, parameter_box: Box) -> int:
        """xxh3-64 of the staged bytes of a box, row-major; compare with the source's.

        Raises: TransportError: a box outside the parameter.
        """
        ...

    def close(self) -> None:
        """Remove the staging buffer, once; repeating does nothing."""
        ...
