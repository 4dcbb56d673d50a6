"""The scripted ends of a push behind real gRPC servicers, and the layouts of a model of one tensor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from shoal.codec.enums import inflight_mode
from shoal.codec.layouts import sink_targets_from_proto, source_layout_from_proto, source_layout_to_proto
from shoal.codec.weights import (
    pairs_from_proto,
    piece_pairs_to_proto,
    planned_servers_to_proto,
    sink_committed_to_proto,
    sink_planned_to_proto,
    sink_prepared_to_proto,
    sink_verified_to_proto,
    source_digests_to_proto,
    source_transferred_to_proto,
)
from shoal.errors import StateError
from shoal.rpc.v1 import weights_pb2, weights_pb2_grpc
from shoal.types.weights import SinkLayout, SourceLayout
from tests.helpers.layouts import fsdp_source, sink_worker, stack_rows, staged
from tests.helpers.push_fakes import ScriptedSink, ScriptedSource

Context = grpc.aio.ServicerContext[Any, Any]
SHAPE = (4,)
TIMEOUT_S = 5.0


def make_source_layout() -> SourceLayout:
    """One rank with the one tensor of the fake model."""
    return fsdp_source({"w": SHAPE}, 1)


def make_layout(server_id: str) -> SinkLayout:
    """One worker that needs the whole tensor."""
    parameters, staging_bytes = staged({"w": SHAPE})
    worker = sink_worker(0, parameters, stack_rows("w", [("w", SHAPE, 0, SHAPE[0])]), staging_bytes)
    return SinkLayout(server_id=server_id, workers=(worker,))


class SinkServicer(weights_pb2_grpc.WeightSinkServiceServicer):
    """Serves a scripted sink; tells of commits."""

    def __init__(self, sink: ScriptedSink, on_commit: Callable[[int], None]) -> None:
        self._sink = sink
        self._on_commit = on_commit

    async def PrepareSink(self, request: weights_pb2.PrepareSinkRequest, context: Context) -> weights_pb2.PrepareSinkResponse:
        """As scripted."""
        prepared = await self._sink.prepare(request.push_id, request.policy_version, request.expires_s, timeout_s=TIMEOUT_S)
        return sink_prepared_to_proto(prepared)

    async def PlanSink(self, request: weights_pb2.PlanSinkRequest, context: Context) -> weights_pb2.PlanSinkResponse:
        """As scripted."""
        source = source_layout_from_proto(request.source)
        planned = await self._sink.plan(request.push_id, request.policy_version, request.plan_hash, source, timeout_s=TIMEOUT_S)
        return sink_planned_to_proto(planned)

    async def VerifySink(self, request: weights_pb2.VerifySinkRequest, context: Context) -> weights_pb2.VerifySinkResponse:
        """As scripted."""
        pairs = pairs_from_proto(request.pairs)
        verified = await self._sink.verify(request.push_id, request.policy_version, request.plan_hash, pairs, timeout_s=TIMEOUT_S)
        return sink_verified_to_proto(verified)

    async def CommitSink(self, request: weights_pb2.CommitSinkRequest, context: Context) -> weights_pb2.CommitSinkResponse:
        """As scripted."""
        inflight = inflight_mode.from_proto(request.inflight)
        committed = await self._sink.commit(request.push_id, request.policy_version, inflight, timeout_s=TIMEOUT_S)
        self._on_commit(request.policy_version)
        return sink_committed_to_proto(committed)

    async def AbortSink(self, request: weights_pb2.AbortSinkRequest, context: Context) -> weights_pb2.AbortSinkResponse:
        """As scripted."""
        return weights_pb2.AbortSinkResponse(served_policy_version=await self._sink.abort(request.push_id, timeout_s=TIMEOUT_S))

    async def WriteBuckets(
        self, requests: AsyncIterator[weights_pb2.WriteBucketsRequest], context: Context
    ) -> weights_pb2.WriteBucketsResponse:
        """No bytes exist."""
        raise StateError("a scripted sink takes no bytes")

    async def DigestSink(self, request: weights_pb2.DigestSinkRequest, context: Context) -> weights_pb2.DigestSinkResponse:
        """As scripted."""
        pairs = await self._sink.digest(request.policy_version, request.plan_hash, timeout_s=TIMEOUT_S)
        return weights_pb2.DigestSinkResponse(pairs=piece_pairs_to_proto(pairs))


class SourceServicer(weights_pb2_grpc.WeightSourceServiceServicer):
    """Serves a scripted source; tells of pushes."""

    def __init__(self, source: ScriptedSource, on_prepare: Callable[[int], None]) -> None:
        self._source = source
        self._on_prepare = on_prepare

    async def DescribeSource(self, request: object, context: Context) -> weights_pb2.DescribeSourceResponse:
        """As scripted."""
        layout, policy_version = await self._source.describe(timeout_s=TIMEOUT_S)
        return weights_pb2.DescribeSourceResponse(layout=source_layout_to_proto(layout), policy_version=policy_version)

    async def PrepareSource(self, request: weights_pb2.PrepareSourceRequest, context: Context) -> weights_pb2.PrepareSourceResponse:
        """As scripted."""
        self._on_prepare(request.policy_version)
        targets = sink_targets_from_proto(request.sinks)
        return planned_servers_to_proto(await self._source.prepare(request.push_id, request.policy_version, targets, timeout_s=TIMEOUT_S))

    async def TransferSource(self, request: weights_pb2.TransferSourceRequest, context: Context) -> weights_pb2.TransferSourceResponse:
        """As scripted."""
        transferred = await self._source.transfer(request.push_id, dict(request.collective_groups), timeout_s=TIMEOUT_S)
        return source_transferred_to_proto(transferred)

    async def AbortSource(self, request: weights_pb2.AbortSourceRequest, context: Context) -> weights_pb2.AbortSourceResponse:
        """As scripted."""
        await self._source.abort(request.push_id, timeout_s=TIMEOUT_S)
        return weights_pb2.AbortSourceResponse()

    async def DigestSource(self, request: weights_pb2.DigestSourceRequest, context: Context) -> weights_pb2.DigestSourceResponse:
        """As scripted."""
        digests = await self._source.digest(request.policy_version, dict(request.plan_hashes), timeout_s=TIMEOUT_S)
        return source_digests_to_proto(digests)
