"""What a server listens to beside its workers: the streams of the grpc transport; and the names that the collective one meets under."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from functools import partial

from shoal.errors import StateError
from shoal.types import SinkWorkerLayout
from shoal.weights.plan import ServerPlan
from shoal.weights.transports.grpc_sink import BulkReceiver
from shoal.weights.transports.staging import ParameterPieces, parameter_view
from shoal.weights.transports.staging_file import PeerFile


class CollectiveGroups:
    """Names of process groups of one server with the trainer's ranks.

    Groups live from push to push under the same name, as long as the gang is the same and every push was received whole; else both sides
    must form new ones.
    """

    def __init__(self, server_id: str) -> None:
        # A restarted server must not meet ranks that still have its predecessor's groups.
        self._prefix = f"{server_id}-{secrets.token_hex(4)}"
        self._count = 0
        self._source_id = ""
        self._is_whole = False
        self.current = ""

    def begin(self, plan: ServerPlan, source_id: str) -> str:
        """The name for a push; empty if its plan uses no groups."""
        self.current = ""
        if any(plan.transport_of(*pair) == "collective" for pair in plan.pairs()):
            if not self._is_whole or source_id != self._source_id:
                self._count += 1
            self._source_id, self._is_whole = source_id, False
            self.current = f"{self._prefix}-{self._count}"
        return self.current

    def end(self) -> None:
        """The push was received whole."""
        self._is_whole = bool(self.current)


class SinkReceivers:
    """Maps staging files when a plan sends something over grpc, and keeps them mapped until they are replaced."""

    def __init__(self) -> None:
        self._files: dict[str, PeerFile] = {}
        self._bulk: BulkReceiver | None = None

    def arm(self, push_id: str, policy_version: int, plan: ServerPlan, workers: Sequence[SinkWorkerLayout]) -> None:
        """Accept the streams of a push, if its plan has any.

        Raises: TransportError: a staging file is gone. CapacityError: its memory cannot be had.
        """
        self.disarm()
        if any(plan.transport_of(*pair) == "grpc" for pair in plan.pairs()):
            self._map(workers)
            self._bulk = BulkReceiver({worker.worker_rank: self._pieces(worker) for worker in workers})
            self._bulk.arm(push_id, policy_version, plan)

    def disarm(self) -> None:
        """Refuse every stream from now on, running ones too."""
        if self._bulk is not None:
            self._bulk.disarm()
            self._bulk = None

    async def write(self, messages: AsyncIterator[bytes]) -> tuple[int, int]:
        """Write what a stream of buckets brings; see `BulkReceiver.write`."""
        if self._bulk is None:
            raise StateError("no push is received over grpc here; it was verified, aborted, or never planned")
        return await self._bulk.write(messages)

    def close(self) -> None:
        """Let go of everything."""
        self.disarm()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _map(self, workers: Sequence[SinkWorkerLayout]) -> None:
        wanted = {worker.endpoints["shm"]: worker.staging_bytes for worker in workers}
        for path in self._files.keys() - wanted.keys():
            self._files.pop(path).close()
        for path, num_bytes in wanted.items():
            if path not in self._files:
                self._files[path] = PeerFile(path, num_bytes)

    def _pieces(self, worker: SinkWorkerLayout) -> ParameterPieces:
        file = self._files[worker.endpoints["shm"]]
        return ParameterPieces(worker.parameters, partial(parameter_view, file.buffer), file.path)
