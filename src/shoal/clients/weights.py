"""Clients of the two ends of a weight push.

Every stage is idempotent under (push_id, policy_version), so each call is repeated while its service is unavailable; but not until its
deadline: a service that is gone for good must not hold up the servers that are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.clients.base import ServiceClient
from shoal.codec.enums import inflight_mode
from shoal.codec.layouts import sink_target_to_proto, source_layout_from_proto, source_layout_to_proto
from shoal.codec.weights import (
    pairs_to_proto,
    piece_pairs_from_proto,
    planned_servers_from_proto,
    sink_committed_from_proto,
    sink_planned_from_proto,
    sink_prepared_from_proto,
    sink_verified_from_proto,
    source_digests_from_proto,
    source_transferred_from_proto,
)
from shoal.config.models import SecuritySection
from shoal.rpc.v1 import weights_pb2, weights_pb2_grpc
from shoal.types import (
    InflightMode,
    PairDigests,
    PieceDigests,
    PlannedServer,
    SinkCommitted,
    SinkPlanned,
    SinkPrepared,
    SinkTarget,
    SinkVerified,
    SourceLayout,
    SourceTransferred,
)

__all__ = ["WeightSinkClient", "WeightSourceClient"]

MAX_PUSH_ATTEMPTS = 5
"""A refused connection is reported after at most 1.5 s (the sum of the longest waits between these calls)."""


class WeightSinkClient(ServiceClient):
    """Drives the engine's end of a push on one rollout server."""

    max_attempts = MAX_PUSH_ATTEMPTS

    def __init__(self, address: str, security: SecuritySection) -> None:
        super().__init__(address, security)
        self._stub = weights_pb2_grpc.WeightSinkServiceStub(self._channel)

    async def prepare(self, push_id: str, policy_version: int, expires_s: float, *, timeout_s: float) -> SinkPrepared:
        """Allocate or reuse staging; return the server's layout, the version it serves and the one that staging holds.

        Args:
            expires_s: The server drops the push by itself after so many seconds without a COMMIT.
            timeout_s: Deadline, in seconds; as in every call here.
        Raises: ShoalError: as the server says; UnavailableError if it cannot be reached.
        """
        request = weights_pb2.PrepareSinkRequest(push_id=push_id, policy_version=policy_version, expires_s=expires_s)
        return sink_prepared_from_proto(await self._call_idempotent(self._stub.PrepareSink, request, timeout_s))

    async def plan(self, push_id: str, policy_version: int, plan_hash: str, source: SourceLayout, *, timeout_s: float) -> SinkPlanned:
        """Let the server plan its part from the trainer's layout. Raises StateError if its plan's hash differs."""
        request = weights_pb2.PlanSinkRequest(
            push_id=push_id, policy_version=policy_version, plan_hash=plan_hash, source=source_layout_to_proto(source)
        )
        return sink_planned_from_proto(await self._call_idempotent(self._stub.PlanSink, request, timeout_s))

    async def verify(
        self, push_id: str, policy_version: int, plan_hash: str, pairs: Sequence[PairDigests], *, timeout_s: float
    ) -> SinkVerified:
        """Check the staged bytes against every bucket's digest. Raises StateError if one or the coverage does not match."""
        request = weights_pb2.VerifySinkRequest(
            push_id=push_id, policy_version=policy_version, plan_hash=plan_hash, pairs=pairs_to_proto(pairs)
        )
        return sink_verified_from_proto(await self._call_idempotent(self._stub.VerifySink, request, timeout_s))

    async def commit(self, push_id: str, policy_version: int, inflight: InflightMode, *, timeout_s: float) -> SinkCommitted:
        """Swap the staged version in. Raises StateError if it was not verified, or running requests did not finish in time."""
        request = weights_pb2.CommitSinkRequest(push_id=push_id, policy_version=policy_version, inflight=inflight_mode.to_proto(inflight))
        return sink_committed_from_proto(await self._call_idempotent(self._stub.CommitSink, request, timeout_s))

    async def abort(self, push_id: str, *, timeout_s: float) -> int:
        """Drop the push; return the version that goes on. Raises StateError if it was committed already."""
        answer = await self._call_idempotent(self._stub.AbortSink, weights_pb2.AbortSinkRequest(push_id=push_id), timeout_s)
        return answer.served_policy_version

    async def digest(self, policy_version: int, plan_hash: str, *, timeout_s: float) -> tuple[PieceDigests, ...]:
        """Return the digests of the live weights, piece by piece of a plan. Raises StateError unless the version is served."""
        request = weights_pb2.DigestSinkRequest(policy_version=policy_version, plan_hash=plan_hash)
        return piece_pairs_from_proto((await self._call_idempotent(self._stub.DigestSink, request, timeout_s)).pairs)


class WeightSourceClient(ServiceClient):
    """Drives the trainer's end of a push on the actor gang."""

    max_attempts = MAX_PUSH_ATTEMPTS

    def __init__(self, address: str, security: SecuritySection) -> None:
        super().__init__(address, security)
        self._stub = weights_pb2_grpc.WeightSourceServiceStub(self._channel)

    async def describe(self, *, timeout_s: float) -> tuple[SourceLayout, int]:
        """Return what every rank holds, and the policy version it holds."""
        answer = await self._call_idempotent(self._stub.DescribeSource, weights_pb2.DescribeSourceRequest(), timeout_s)
        return source_layout_from_proto(answer.layout), answer.policy_version

    async def prepare(
        self, push_id: str, policy_version: int, sinks: Sequence[SinkTarget], *, timeout_s: float
    ) -> dict[str, PlannedServer]:
        """Let every rank plan its part for the sinks; return each server's plan. A server that cannot be planned is missing."""
        request = weights_pb2.PrepareSourceRequest(
            push_id=push_id, policy_version=policy_version, sinks=[sink_target_to_proto(sink) for sink in sinks]
        )
        return planned_servers_from_proto(await self._call_idempotent(self._stub.PrepareSource, request, timeout_s))

    async def transfer(self, push_id: str, collective_groups: Mapping[str, str], *, timeout_s: float) -> SourceTransferred:
        """Let every rank write its slices; return each server's bucket digests, and its error where it did not get everything.

        Args:
            collective_groups: server_id to `SinkPlanned.collective_group`.
        """
        request = weights_pb2.TransferSourceRequest(push_id=push_id, collective_groups=collective_groups)
        return source_transferred_from_proto(await self._call_idempotent(self._stub.TransferSource, request, timeout_s))

    async def abort(self, push_id: str, *, timeout_s: float) -> None:
        """Forget the push."""
        await self._call_idempotent(self._stub.AbortSource, weights_pb2.AbortSourceRequest(push_id=push_id), timeout_s)

    async def digest(self, policy_version: int, plan_hashes: Mapping[str, str], *, timeout_s: float) -> dict[str, tuple[PieceDigests, ...]]:
        """Return the digests of what the trainer holds, piece by piece of each server's plan.

        Args:
            plan_hashes: server_id to plan hash.
        """
        request = weights_pb2.DigestSourceRequest(policy_version=policy_version, plan_hashes=plan_hashes)
        return source_digests_from_proto(await self._call_idempotent(self._stub.DigestSource, request, timeout_s))
