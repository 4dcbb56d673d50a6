"""One server's receiving end over grpc and over the collective transport, for the tests that hold every transport to one contract."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import ExitStack

from shoal.config.models import PushSection
from shoal.types.weights import SinkLayout
from shoal.weights.buckets import Bucket
from shoal.weights.plan import ServerPlan
from shoal.weights.transports.base import PieceTarget
from shoal.weights.transports.collective_sink import CollectiveReceiver, CollectiveStore, ReceiverState
from shoal.weights.transports.grpc_sink import BulkReceiver
from tests.helpers.bulk_server import bulk_server

TIMEOUT_S = 20.0


class GrpcReceiver:
    """A gRPC server that all workers share."""

    def __init__(self, push: PushSection, layout: SinkLayout, targets: Mapping[int, PieceTarget]) -> None:
        self._bulk = BulkReceiver(targets)
        self._stack = ExitStack()
        self._address = self._stack.enter_context(bulk_server(self._bulk))

    def endpoint(self, worker_rank: int) -> str | None:
        return self._address

    def arm(self, push_id: str, policy_version: int, plan: ServerPlan, num_ranks: int) -> str:
        self._bulk.arm(push_id, policy_version, plan)
        return ""

    def disarm(self) -> None:
        self._bulk.disarm()

    def close(self) -> None:
        self._stack.close()


class CollectiveServer:
    """A receiver for each worker; one group name until a push fails."""

    def __init__(self, push: PushSection, layout: SinkLayout, targets: Mapping[int, PieceTarget]) -> None:
        self._store = CollectiveStore("127.0.0.1")
        self._receivers = {rank: CollectiveReceiver(target, rank) for rank, target in targets.items()}
        self._names = itertools.count()
        self._group = ""
        self._fresh = True

    def endpoint(self, worker_rank: int) -> str | None:
        return self._store.address

    def arm(self, push_id: str, policy_version: int, plan: ServerPlan, num_ranks: int) -> str:
        if self._fresh:
            self._group = f"group-{next(self._names)}"
        for worker_rank, receiver in self._receivers.items():
            receiver.start(
                push_id,
                policy_version,
                buckets_by_rank(plan, worker_rank),
                group=self._group,
                address=self._store.address,
                timeout_s=TIMEOUT_S,
            )
        self._fresh = True
        return self._group

    def disarm(self) -> None:
        self._fresh = any(receiver.state is not ReceiverState.RECEIVED for receiver in self._receivers.values())
        for receiver in self._receivers.values():
            receiver.stop()

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        self._store.close()


def buckets_by_rank(plan: ServerPlan, worker_rank: int) -> dict[int, tuple[Bucket, ...]]:
    """What a worker gets over the collective transport."""
    ranks = [rank for rank, worker in plan.pairs() if worker == worker_rank and plan.transport_of(rank, worker) == "collective"]
    return {rank: plan.buckets(rank, worker_rank) for rank in ranks}
