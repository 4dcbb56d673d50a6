"""WeightSourceService on rank 0, and the same commands on every rank.

Rank 0 hands each call to its gang as a named command with protobuf bytes; `WeightCommands` answers it on every rank, rank 0 included;
the servicer puts the answers together. No collective is entered, so a push never waits inside one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shoal.codec.layouts import sink_targets_from_proto, source_layout_from_proto, source_layout_to_proto
from shoal.codec.weights import (
    planned_servers_from_proto,
    planned_servers_to_proto,
    source_digests_from_proto,
    source_digests_to_proto,
    source_transferred_from_proto,
    source_transferred_to_proto,
)
from shoal.errors import InternalError
from shoal.rpc.v1 import weights_pb2, weights_pb2_grpc
from shoal.types.weights import PlannedServer, ServerTransfer, SourceLayout, SourceTransferred
from shoal_trainer.weight_source import WeightSource

SERVICE_NAME = "shoal.rpc.v1.WeightSourceService"
DESCRIBE, PREPARE, TRANSFER, ABORT, DIGEST = (
    "weights.describe",
    "weights.prepare",
    "weights.transfer",
    "weights.abort",
    "weights.digest",
)


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
        self._decoded: tuple[bytes, SourceLayout] | None = None

    def handlers(self) -> Mapping[str, Callable[[bytes], bytes]]:
        """The commands that a rank must be able to run."""
        return {
            DESCRIBE: self._describe,
            PREPARE: self._prepare,
            TRANSFER: self._transfer,
            ABORT: self._abort,
            DIGEST: self._digest,
        }

    def _describe(self, _payload: bytes) -> bytes:
        layout = source_layout_to_proto(self._source.describe())
        return weights_pb2.DescribeSourceResponse(layout=layout, policy_version=self._policy_version()).SerializeToString()

    def _prepare(self, payload: bytes) -> bytes:
        message = weights_pb2.PrepareRankRequest.FromString(payload)
        request = message.request
        planned = self._source.prepare(
            request.push_id, request.policy_version, self._layout(message.source), sink_targets_from_proto(request.sinks)
        )
        return planned_servers_to_proto(planned).SerializeToString()

    def _transfer(self, payload: bytes) -> bytes:
        request = weights_pb2.TransferSourceRequest.FromString(payload)
        transferred = self._source.transfer(request.push_id, dict(request.collective_groups))
        return source_transferred_to_proto(transferred).SerializeToString()

    def _abort(self, payload: bytes) -> bytes:
        self._source.abort(weights_pb2.AbortSourceRequest.FromString(payload).push_id)
        return b""

    def _digest(self, payload: bytes) -> bytes:
        request = weights_pb2.DigestSourceRequest.FromString(payload)
        return source_digests_to_proto(self._source.digest(request.policy_version, dict(request.plan_hashes))).SerializeToString()

    def _layout(self, message: weights_pb2.SourceLayout) -> SourceLayout:
        """Decode the gang's layout, once while it stays the same: that of a large gang has many boxes."""
        data = message.SerializeToString(deterministic=True)
        if self._decoded is None or self._decoded[0] != data:
            self._decoded = data, source_layout_from_proto(message)
        return self._decoded[1]


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
        """Plan on every rank; all must come to the same plans."""
        described = await self._describe(context.time_remaining())
        payload = weights_pb2.PrepareRankRequest(request=request, source=described.layout).SerializeToString()
        results = await self._gang.run(PREPARE, payload, context.time_remaining())
        planned = [planned_servers_from_proto(weights_pb2.PrepareSourceResponse.FromString(result)) for result in results]
        return planned_servers_to_proto(_join_planned(planned))

    async def TransferSource(
        self,
        request: weights_pb2.TransferSourceRequest,
        context: Any,  # noqa: ANN401
    ) -> weights_pb2.TransferSourceResponse:
        """Send from every rank."""
        results = await self._gang.run(TRANSFER, request.SerializeToString(), context.time_remaining())
        answers = [source_transferred_from_proto(weights_pb2.TransferSourceResponse.FromString(result)) for result in results]
        return source_transferred_to_proto(_join_transferred(answers))

    async def AbortSource(
        self,
        request: weights_pb2.AbortSourceRequest,
        context: Any,  # noqa: ANN401
    ) -> weights_pb2.AbortSourceResponse:
        """Forget the push on every rank."""
        await self._gang.run(ABORT, request.SerializeToString(), context.time_remaining())
        return weights_pb2.AbortSourceResponse()

    async def DigestSource(
        self,
        request: weights_pb2.DigestSourceRequest,
        context: Any,  # noqa: ANN401
    ) -> weights_pb2.DigestSourceResponse:
        """Digest on every rank."""
        results = await self._gang.run(DIGEST, request.SerializeToString(), context.time_remaining())
        answers = [source_digests_from_proto(weights_pb2.DigestSourceResponse.FromString(result)) for result in results]
        joined = {
            server_id: tuple(itertools.chain.from_iterable(answer[server_id] for answer in answers)) for server_id in request.plan_hashes
        }
        return source_digests_to_proto(joined)

    async def _describe(self, timeout_s: float) -> weights_pb2.DescribeSourceResponse:
        results = await self._gang.run(DESCRIBE, b"", timeout_s)
        answers = [weights_pb2.DescribeSourceResponse.FromString(result) for result in results]
        versions = [answer.policy_version for answer in answers]
        if len(set(versions)) != 1:
            msg = f"ranks hold policy versions {versions}; restart the gang"
            raise InternalError(msg)
        return weights_pb2.DescribeSourceResponse(layout=_join_layouts([answer.layout for answer in answers]), policy_version=versions[0])


def _join_layouts(layouts: Sequence[weights_pb2.SourceLayout]) -> weights_pb2.SourceLayout:
    """What the whole gang holds, from what each rank holds."""
    described = [[(tensor.name, list(tensor.shape), tensor.dtype, tensor.frozen) for tensor in layout.tensors] for layout in layouts]
    for rank, tensors in enumerate(described):
        if tensors != described[0] or layouts[rank].source_id != layouts[0].source_id:
            differing = [theirs[0] for theirs, ours in zip(tensors, described[0], strict=False) if theirs != ours]
            msg = f"rank {rank} holds other tensors than rank 0, first {differing[:1]}; do all ranks belong to one gang?"
            raise InternalError(msg)
    joined = weights_pb2.SourceLayout(source_id=layouts[0].source_id, places=[place for layout in layouts for place in layout.places])
    for parts in zip(*(layout.tensors for layout in layouts), strict=True):
        first = parts[0]
        shards = [shard for part in parts for shard in part.shards]
        joined.tensors.add(name=first.name, shape=first.shape, dtype=first.dtype, shards=shards, frozen=first.frozen)
    return joined


def _join_planned(answers: Sequence[dict[str, PlannedServer]]) -> dict[str, PlannedServer]:
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            hashes = [{server_id: planned.plan_hash[:12] for server_id, planned in one.items()} for one in (answers[0], answer)]
            msg = f"ranks planned differently: rank 0 {hashes[0]}, rank {rank} {hashes[1]}; do all run the same Shoal?"
            raise InternalError(msg)
    return answers[0]


def _join_transferred(answers: Sequence[SourceTransferred]) -> SourceTransferred:
    """Every server over all ranks; the slowest rank's time."""
    return SourceTransferred(
        servers={server_id: _join_server([answer.servers[server_id] for answer in answers]) for server_id in answers[0].servers},
        transfer_ms=max(answer.transfer_ms for answer in answers),
    )


def _join_server(transfers: Sequence[ServerTransfer]) -> ServerTransfer:
    """A server got everything if it did so from every rank; what it got in part is of no use."""
    error = "; ".join(transfer.error for transfer in transfers if transfer.error)
    return ServerTransfer(
        pairs=() if error else tuple(pair for transfer in transfers for pair in transfer.pairs),
        sent_bytes=sum(transfer.sent_bytes for transfer in transfers),
        dense_bytes=sum(transfer.dense_bytes for transfer in transfers),
        error=error,
    )
