"""WeightSinkService over gRPC: convert, ask the sink, convert back."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from shoal.codec.enums import inflight_mode
from shoal.codec.layouts import source_layout_from_proto
from shoal.codec.weights import (
    pairs_from_proto,
    piece_pairs_to_proto,
    sink_committed_to_proto,
    sink_planned_to_proto,
    sink_prepared_to_proto,
    sink_verified_to_proto,
)
from shoal.rpc.v1 import weights_pb2, weights_pb2_grpc
from shoal.weights.transports.grpc_sink import add_bulk_handler
from shoal_rollout.weight_sink import WeightSink

SERVICE_NAME = "shoal.rpc.v1.WeightSinkService"
_Context = grpc.aio.ServicerContext[object, object]


class WeightSinkServicer(weights_pb2_grpc.WeightSinkServiceServicer):
    """Serves one `WeightSink`; errors become statuses in the server's interceptor."""

    def __init__(self, sink: WeightSink) -> None:
        self._sink = sink

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with a server, the bulk stream included."""
        weights_pb2_grpc.add_WeightSinkServiceServicer_to_server(self, server)
        add_bulk_handler(server, self._sink.write_buckets)

    async def PrepareSink(self, request: weights_pb2.PrepareSinkRequest, context: _Context) -> weights_pb2.PrepareSinkResponse:
        """PREPARE, first half."""
        return sink_prepared_to_proto(await self._sink.prepare(request.push_id, request.policy_version, request.expires_s))

    async def PlanSink(self, request: weights_pb2.PlanSinkRequest, context: _Context) -> weights_pb2.PlanSinkResponse:
        """PREPARE, second half."""
        source = source_layout_from_proto(request.source)
        return sink_planned_to_proto(await self._sink.plan(request.push_id, request.policy_version, request.plan_hash, source))

    async def VerifySink(self, request: weights_pb2.VerifySinkRequest, context: _Context) -> weights_pb2.VerifySinkResponse:
        """VERIFY."""
        pairs = pairs_from_proto(request.pairs)
        return sink_verified_to_proto(await self._sink.verify(request.push_id, request.policy_version, request.plan_hash, pairs))

    async def CommitSink(self, request: weights_pb2.CommitSinkRequest, context: _Context) -> weights_pb2.CommitSinkResponse:
        """COMMIT."""
        inflight = inflight_mode.from_proto(request.inflight)
        left_s = context.time_remaining()
        timeout_s = 0.0 if left_s is None else left_s
        return sink_committed_to_proto(await self._sink.commit(request.push_id, request.policy_version, inflight, timeout_s))

    async def AbortSink(self, request: weights_pb2.AbortSinkRequest, context: _Context) -> weights_pb2.AbortSinkResponse:
        """ABORT."""
        return weights_pb2.AbortSinkResponse(served_policy_version=await self._sink.abort(request.push_id))

    async def DigestSink(self, request: weights_pb2.DigestSinkRequest, context: _Context) -> weights_pb2.DigestSinkResponse:
        """Audit."""
        pairs = await self._sink.digest(request.policy_version, request.plan_hash)
        return weights_pb2.DigestSinkResponse(pairs=piece_pairs_to_proto(pairs))

    async def WriteBuckets(
        self, request_iterator: AsyncIterator[weights_pb2.WriteBucketsRequest], context: _Context
    ) -> weights_pb2.WriteBucketsResponse:
        """TRANSFER over grpc; a server that was made by `add_to` answers it without parsing every message."""
        num_buckets, num_bytes = await self._sink.write_buckets(message.SerializeToString() async for message in request_iterator)
        return weights_pb2.WriteBucketsResponse(num_buckets=num_buckets, num_bytes=num_bytes)
