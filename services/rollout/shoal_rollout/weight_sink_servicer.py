"""WeightSinkService over gRPC: convert, ask the sink, convert back."""

from __future__ import annotations

import grpc

from shoal.codec.weights import copy_digest_from_proto, sink_committed_to_proto, sink_layout_to_proto, sink_verified_to_proto
from shoal.rpc.v1 import weights_pb2, weights_pb2_grpc
from shoal_rollout.weight_sink import WeightSink

SERVICE_NAME = "shoal.rpc.v1.WeightSinkService"
_Context = grpc.aio.ServicerContext[object, object]


class WeightSinkServicer(weights_pb2_grpc.WeightSinkServiceServicer):
    """Serves one `WeightSink`; errors become statuses in the server's interceptor."""

    def __init__(self, sink: WeightSink) -> None:
        self._sink = sink

    async def PrepareSink(self, request: weights_pb2.PrepareSinkRequest, context: _Context) -> weights_pb2.PrepareSinkResponse:
        """PREPARE."""
        layout, served_version = await self._sink.prepare(request.push_id, request.policy_version)
        return weights_pb2.PrepareSinkResponse(layout=sink_layout_to_proto(layout), served_policy_version=served_version)

    async def VerifySink(self, request: weights_pb2.VerifySinkRequest, context: _Context) -> weights_pb2.VerifySinkResponse:
        """VERIFY."""
        digests = [copy_digest_from_proto(digest) for digest in request.digests]
        return sink_verified_to_proto(await self._sink.verify(request.push_id, request.policy_version, request.plan_hash, digests))

    async def CommitSink(self, request: weights_pb2.CommitSinkRequest, context: _Context) -> weights_pb2.CommitSinkResponse:
        """COMMIT."""
        return sink_committed_to_proto(await self._sink.commit(request.push_id, request.policy_version))

    async def AbortSink(self, request: weights_pb2.AbortSinkRequest, context: _Context) -> weights_pb2.AbortSinkResponse:
        """ABORT."""
        return weights_pb2.AbortSinkResponse(served_policy_version=await self._sink.abort(request.push_id))
