"""WeightSourceService on rank 0, and the same commands on every rank.

Rank 0 hands each call to its gang as a named command with protobuf bytes; `WeightCommands` answers it on every rank, rank 0 included;
the servicer puts the answers together. No collective is entered, so a push never waits inside one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shoal.codec.weights import (
    sink_layout_from_proto,
    source_prepared_to_proto,
    source_shard_from_proto,
    source_shard_to_proto,
    source_transferred_to_proto,
)
from shoal.errors import InternalError
from shoal.rpc.v1 import weights_pb2, weights_pb2_grpc
from shoal.types.weights import SourcePrepared, SourceTransferred
from shoal_trainer.weight_source import WeightSource

SERVICE_NAME = "shoal.rpc.v1.WeightSourceService"
DESCRIBE, PREPARE, TRANSFER, ABORT = "weights.describe", "weights.prepare", "weights.transfer", "weights.abort"


class WeightGang(Protocol):
    """Runs a command on every rank; the trainer's gang."""

    async def run(self, command: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Answer one result per rank, in order of rank; raises what the first failing rank raised."""
        ...


class WeightCommands:
    """One rank's side: command name to a function from request bytes to answer bytes.

    Args:
        source: this rank's weight source.
        policy_version: tells the version that the parameters hold now.
    """

    def __init__(self, source: WeightSource, policy_version: Callable[[], int]) -> None:
        self._source = source
        self._policy_version = policy_version

    def handlers(self) -> Mapping[str, Callable[[bytes], bytes]]:
        """The commands that a rank must be able to run."""
        return {DESCRIBE: self._describe, PREPARE: self._prepare, TRANSFER: self._transfer, ABORT: self._abort}

    def _describe(self, _payload: bytes) -> bytes:
        shards = [source_shard_to_proto(shard) for shard in self._source.describe()]
        return weights_pb2.DescribeSourceResponse(shards=shards, policy_version=self._policy_version()).SerializeToString()

    def _prepare(self, payload: bytes) -> bytes:
        message = weights_pb2.PrepareRankRequest.FromString(payload)
        plan_hash, num_copies, num_bytes = self._source.prepare(
            message.request.push_id,
            message.request.policy_version,
            [source_shard_from_proto(shard) for shard in message.shards],
            [sink_layout_from_proto(sink) for sink in message.request.sinks],
        )
        prepared = SourcePrepared(plan_hash=plan_hash, num_copies=num_copies, num_bytes=num_bytes)
        return source_prepared_to_proto(prepared).SerializeToString()

    def _transfer(self, payload: bytes) -> bytes:
        started_s = time.monotonic()
        digests = self._source.transfer(weights_pb2.TransferSourceRequest.FromString(payload).push_id)
        transferred = SourceTransferred(
            digests=digests, num_bytes=self._source.transferred_bytes, transfer_ms=(time.monotonic() - started_s) * 1e3
        )
        return source_transferred_to_proto(transferred).SerializeToString()

    def _abort(self, payload: bytes) -> bytes:
        self._source.abort(weights_pb2.AbortSourceRequest.FromString(payload).push_id)
        return b""


class WeightSourceServicer(weights_pb2_grpc.WeightSourceServiceServicer):
    """The wire of the actor gang's weight source."""

    def __init__(self, gang: WeightGang) -> None:
        self._gang = gang

    async def DescribeSource(
        self,
        request: weights_pb2.DescribeSourceRequest,
        context: Any,  # noqa: ANN401
    ) -> weights_pb2.DescribeSourceResponse:
        """Put the shards of all ranks together."""
        return await self._describe(context.time_remaining())

    async def PrepareSource(
        self,
        request: weights_pb2.PrepareSourceRequest,
        context: Any,  # noqa: ANN401
    ) -> weights_pb2.PrepareSourceResponse:
        """Plan on every rank; all must come to the same plan."""
        described = await self._describe(context.time_remaining())
        payload = weights_pb2.PrepareRankRequest(request=request, shards=described.shards).SerializeToString()
        results = await self._gang.run(PREPARE, payload, context.time_remaining())
        return _join_prepared([weights_pb2.PrepareSourceResponse.FromString(result) for result in results])

    async def TransferSource(
        self,
        request: weights_pb2.TransferSourceRequest,
        context: Any,  # noqa: ANN401
    ) -> weights_pb2.TransferSourceResponse:
        """Write on every rank."""
        results = await self._gang.run(TRANSFER, request.SerializeToString(), context.time_remaining())
        return _join_transferred([weights_pb2.TransferSourceResponse.FromString(result) for result in results])

    async def AbortSource(
        self,
        request: weights_pb2.AbortSourceRequest,
        context: Any,  # noqa: ANN401
    ) -> weights_pb2.AbortSourceResponse:
        """Forget the push on every rank."""
        await self._gang.run(ABORT, request.SerializeToString(), context.time_remaining())
        return weights_pb2.AbortSourceResponse()

    async def _describe(self, timeout_s: float) -> weights_pb2.DescribeSourceResponse:
        results = await self._gang.run(DESCRIBE, b"", timeout_s)
        answers = [weights_pb2.DescribeSourceResponse.FromString(result) for result in results]
        versions = {answer.policy_version for answer in answers}
        if len(versions) != 1:
            msg = f"ranks hold policy versions {[answer.policy_version for answer in answers]}; restart the gang"
            raise InternalError(msg)
        shards = [shard for answer in answers for shard in answer.shards]
        return weights_pb2.DescribeSourceResponse(shards=shards, policy_version=versions.pop())


def _join_prepared(answers: Sequence[weights_pb2.PrepareSourceResponse]) -> weights_pb2.PrepareSourceResponse:
    hashes = {answer.plan_hash for answer in answers}
    if len(hashes) != 1:
        msg = f"ranks planned differently: {[answer.plan_hash[:12] for answer in answers]}; do all run the same Shoal?"
        raise InternalError(msg)
    return weights_pb2.PrepareSourceResponse(
        plan_hash=hashes.pop(),
        num_copies=sum(answer.num_copies for answer in answers),
        num_bytes=sum(answer.num_bytes for answer in answers),
    )


def _join_transferred(answers: Sequence[weights_pb2.TransferSourceResponse]) -> weights_pb2.TransferSourceResponse:
    """Digests of the servers that every rank could write to; the slowest rank's time."""
    by_rank = [{sink.server_id: sink.digests for sink in answer.sinks} for answer in answers]
    complete = [server_id for server_id in by_rank[0] if all(server_id in sinks for sinks in by_rank)]
    return weights_pb2.TransferSourceResponse(
        sinks=[
            weights_pb2.SinkDigests(server_id=server_id, digests=[digest for sinks in by_rank for digest in sinks[server_id]])
            for server_id in complete
        ],
        num_bytes=sum(answer.num_bytes for answer in answers),
        transfer_ms=max(answer.transfer_ms for answer in answers),
    )
