"""What a sink's process needs beside staging, by transport: where it is reached, and what it does when a push begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from shoal.config.models import PushSection
from shoal.types.weights import SinkLayout
from shoal.weights.plan import ServerPlan
from shoal.weights.transports.base import PieceTarget
from tests.helpers.wire_receivers import CollectiveServer, GrpcReceiver


class Receiver(Protocol):
    """One server's receiving end."""

    def endpoint(self, worker_rank: int) -> str | None:
        """The worker's address; None if its staging buffer has one itself."""
        ...

    def arm(self, push_id: str, policy_version: int, plan: ServerPlan, num_ranks: int) -> str:
        """Begin to listen for a push; answers the collective group, if any."""
        ...

    def disarm(self) -> None:
        """The push is over, or given up: nothing is written from now on."""
        ...

    def close(self) -> None: ...


class DirectReceiver:
    """For transports that write into staging themselves."""

    def endpoint(self, worker_rank: int) -> str | None:
        return None

    def arm(self, push_id: str, policy_version: int, plan: ServerPlan, num_ranks: int) -> str:
        return ""

    def disarm(self) -> None:
        pass

    def close(self) -> None:
        pass


def _direct(push: PushSection, layout: SinkLayout, targets: Mapping[int, PieceTarget]) -> Receiver:
    return DirectReceiver()


RECEIVERS: dict[str, Callable[[PushSection, SinkLayout, Mapping[int, PieceTarget]], Receiver]] = {
    "shm": _direct,
    "grpc": GrpcReceiver,
    "collective": CollectiveServer,
    "cuda_ipc": _direct,
}
"""Makes the receiving end of a transport from the settings, the layout as the test asked for it, and staging by worker rank."""
