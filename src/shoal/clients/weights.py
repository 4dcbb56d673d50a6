"""Clients of the two ends of a weight push. Every stage is idempotent under (push_id, policy_version)."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.clients.base import ServiceClient
from shoal.codec.weights import (
    copy_digest_to_proto,
    sink_committed_from_proto,
    sink_layout_from_proto,
    sink_layout_to_proto,
    sink_verified_from_proto,
    source_prepared_from_proto,
    source_shard_from_proto,
    source_transferred_from_proto,
)
from shoal.config.models import SecuritySection
from shoal.rpc.v1 import weights_pb2, weights_pb2_grpc
from shoal.types import CopyDigest, SinkCommitted, SinkLayout, SinkVerified, SourcePrepared, SourceShard, SourceTransferred

__all__ = ["SinkCommitted", "SinkVerified", "SourcePrepared", "SourceTransferred", "WeightSinkClient", "WeightSourceClient"]


class WeightSinkClient(ServiceClient):
    """Drives the engine's end of a push on one rollout server."""

    def __init__(self, address: str, security: SecuritySection) -> None:
        super().__init__(address, security)
        self._stub = weights_pb2_grpc.WeightSinkServiceStub(self._channel)

    async def prepare(self, push_id: str, policy_version: int, *, timeout_s: float) -> tuple[SinkLayout, int]:
        """Allocate staging; return the server's layout and the version it serves now."""
        request = weights_pb2.PrepareSinkRequest(push_id=push_id, policy_version=policy_version)
        answer = await self._call_idempotent(self._stub.PrepareSink, request, timeout_s)
        return sink_layout_from_proto(answer.layout), answer.served_policy_version

    async def verify(
        self, push_id: str, policy_version: int, plan_hash: str, digests: Sequence[CopyDigest], *, timeout_s: float
    ) -> SinkVerified:
        """Check the staged bytes against every copy's digest.

        Raises: StateError: a digest or the coverage does not match, or the stage is wrong.
        """
        request = weights_pb2.VerifySinkRequest(
            push_id=push_id,
            policy_version=policy_version,
            plan_hash=plan_hash,
            digests=[copy_digest_to_proto(digest) for digest in digests],
        )
        return sink_verified_from_proto(await self._call_idempotent(self._stub.VerifySink, request, timeout_s))

    async def commit(self, push_id: str, policy_version: int, *, timeout_s: float) -> SinkCommitted:
        """Swap the staged version in. Raises StateError if it was not verified."""
        request = weights_pb2.CommitSinkRequest(push_id=push_id, policy_version=policy_version)
        return sink_committed_from_proto(await self._call_idempotent(self._stub.CommitSink, request, timeout_s))

    async def abort(self, push_id: str, *, timeout_s: float) -> int:
        """Drop staging; return the version that goes on. Raises StateError if it was committed already."""
        answer = await self._call_idempotent(self._stub.AbortSink, weights_pb2.AbortSinkRequest(push_id=push_id), timeout_s)
        return answer.served_policy_version


class WeightSourceClient(ServiceClient):
    """Drives the trainer's end of a push on the actor gang."""

    def __init__(self, address: str, security: SecuritySection) -> None:
        super().__init__(address, security)
        self._stub = weights_pb2_grpc.WeightSourceServiceStub(self._channel)

    async def describe(self, *, timeout_s: float) -> tuple[list[SourceShard], int]:
        """Return what every rank holds, and the policy version it holds."""
        answer = await self._call_idempotent(self._stub.DescribeSource, weights_pb2.DescribeSourceRequest(), timeout_s)
        return [source_shard_from_proto(shard) for shard in answer.shards], answer.policy_version

    async def prepare(self, push_id: str, policy_version: int, sinks: Sequence[SinkLayout], *, timeout_s: float) -> SourcePrepared:
        """Let every rank plan its copies against the sinks."""
        request = weights_pb2.PrepareSourceRequest(
            push_id=push_id, policy_version=policy_version, sinks=[sink_layout_to_proto(sink) for sink in sinks]
        )
        return source_prepared_from_proto(await self._call_idempotent(self._stub.PrepareSource, request, timeout_s))

    async def transfer(self, push_id: str, *, timeout_s: float) -> SourceTransferred:
        """Let every rank write its slices; return a digest per copy, by server."""
        request = weights_pb2.TransferSourceRequest(push_id=push_id)
        return source_transferred_from_proto(await self._call_idempotent(self._stub.TransferSource, request, timeout_s))

    async def abort(self, push_id: str, *, timeout_s: float) -> None:
        """Drop the plan."""
        await self._call_idempotent(self._stub.AbortSource, weights_pb2.AbortSourceRequest(push_id=push_id), timeout_s)
