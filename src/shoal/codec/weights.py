"""Answers and digests of a weight push; its layouts are in `shoal.codec.layouts`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from shoal.codec.layouts import (
    check_distinct,
    not_negative,
    sink_layout_from_proto,
    sink_layout_to_proto,
    staged_version_from_proto,
    staged_version_to_proto,
)
from shoal.errors import CodecError
from shoal.rpc.v1 import weights_pb2
from shoal.types import (
    BucketEncoding,
    PairDigests,
    PieceDigests,
    PlannedServer,
    ServerTransfer,
    SinkCommitted,
    SinkPlanned,
    SinkPrepared,
    SinkVerified,
    SourceTransferred,
)

_NUMBER_OF: dict[BucketEncoding, weights_pb2.BucketEncoding.ValueType] = {
    BucketEncoding.DENSE: weights_pb2.BUCKET_ENCODING_DENSE,
    BucketEncoding.DELTA: weights_pb2.BUCKET_ENCODING_DELTA,
    BucketEncoding.UNCHANGED: weights_pb2.BUCKET_ENCODING_UNCHANGED,
}
_ENCODING_OF: dict[int, BucketEncoding] = {int(number): encoding for encoding, number in _NUMBER_OF.items()}


def bucket_encoding_to_proto(encoding: BucketEncoding) -> weights_pb2.BucketEncoding.ValueType:
    """Return the wire number of an encoding."""
    return _NUMBER_OF[encoding]


def bucket_encoding_from_proto(number: int) -> BucketEncoding:
    """Return the encoding of a wire number. Raises CodecError for UNSPECIFIED or an unknown one."""
    encoding = _ENCODING_OF.get(number)
    if encoding is None:
        names = ", ".join(member.name for member in BucketEncoding)
        raise CodecError(f"bucket encoding {number} is unknown; the sender must set one of {names}")
    return encoding


def sink_prepared_to_proto(prepared: SinkPrepared) -> weights_pb2.PrepareSinkResponse:
    """Convert the sink's answer of PREPARE."""
    return weights_pb2.PrepareSinkResponse(
        layout=sink_layout_to_proto(prepared.layout),
        served_policy_version=prepared.served_version,
        staged=None if prepared.staged is None else staged_version_to_proto(prepared.staged),
    )


def sink_prepared_from_proto(message: weights_pb2.PrepareSinkResponse) -> SinkPrepared:
    """Convert the sink's answer of PREPARE. Raises CodecError for a layout or version that cannot be."""
    return SinkPrepared(
        layout=sink_layout_from_proto(message.layout),
        served_version=not_negative("served_policy_version", message.served_policy_version),
        staged=staged_version_from_proto(message.staged) if message.HasField("staged") else None,
    )


def sink_planned_to_proto(planned: SinkPlanned) -> weights_pb2.PlanSinkResponse:
    """Convert the sink's answer of planning."""
    return weights_pb2.PlanSinkResponse(num_buckets=planned.num_buckets, collective_group=planned.collective_group)


def sink_planned_from_proto(message: weights_pb2.PlanSinkResponse) -> SinkPlanned:
    """Convert the sink's answer of planning. Raises CodecError for a negative count."""
    return SinkPlanned(num_buckets=not_negative("num_buckets", message.num_buckets), collective_group=message.collective_group)


def sink_verified_to_proto(verified: SinkVerified) -> weights_pb2.VerifySinkResponse:
    """Convert the answer of VERIFY."""
    return weights_pb2.VerifySinkResponse(num_bytes=verified.num_bytes, verify_ms=verified.verify_ms)


def sink_verified_from_proto(message: weights_pb2.VerifySinkResponse) -> SinkVerified:
    """Convert the answer of VERIFY. Raises CodecError for a negative number."""
    return SinkVerified(num_bytes=not_negative("num_bytes", message.num_bytes), verify_ms=_duration_ms("verify_ms", message.verify_ms))


def sink_committed_to_proto(committed: SinkCommitted) -> weights_pb2.CommitSinkResponse:
    """Convert the answer of COMMIT."""
    return weights_pb2.CommitSinkResponse(
        policy_version=committed.policy_version, pause_ms=committed.pause_ms, num_aborted=committed.num_aborted
    )


def sink_committed_from_proto(message: weights_pb2.CommitSinkResponse) -> SinkCommitted:
    """Convert the answer of COMMIT. Raises CodecError for a negative number."""
    return SinkCommitted(
        policy_version=not_negative("committed policy_version", message.policy_version),
        pause_ms=_duration_ms("pause_ms", message.pause_ms),
        num_aborted=not_negative("num_aborted", message.num_aborted),
    )


def planned_server_to_proto(server_id: str, planned: PlannedServer) -> weights_pb2.PlannedServer:
    """Convert what the source planned for one server."""
    return weights_pb2.PlannedServer(server_id=server_id, plan_hash=planned.plan_hash, num_bytes=planned.num_bytes)


def planned_server_from_proto(message: weights_pb2.PlannedServer) -> tuple[str, PlannedServer]:
    """Return server_id and what was planned for it. Raises CodecError without a plan hash or for a negative size."""
    if not message.plan_hash:
        raise CodecError(f"the plan of server {message.server_id!r} has no plan_hash; the source must give one")
    num_bytes = not_negative(f"num_bytes of server {message.server_id}", message.num_bytes)
    return message.server_id, PlannedServer(plan_hash=message.plan_hash, num_bytes=num_bytes)


def planned_servers_to_proto(servers: Mapping[str, PlannedServer]) -> weights_pb2.PrepareSourceResponse:
    """Convert the source's answer of PREPARE, by server_id."""
    return weights_pb2.PrepareSourceResponse(servers=[planned_server_to_proto(*item) for item in servers.items()])


def planned_servers_from_proto(message: weights_pb2.PrepareSourceResponse) -> dict[str, PlannedServer]:
    """Convert the source's answer of PREPARE. Raises CodecError if a server appears twice."""
    check_distinct("planned servers", [server.server_id for server in message.servers])
    return dict(planned_server_from_proto(server) for server in message.servers)


def pair_digests_to_proto(pair: PairDigests) -> weights_pb2.PairDigests:
    """Convert the bucket digests of one pair. Raises CodecError unless every bucket has a digest and an encoding."""
    _check_same_length(pair)
    return weights_pb2.PairDigests(
        rank=pair.rank, worker_rank=pair.worker_rank, xxh3=pair.xxh3, encodings=[_NUMBER_OF[encoding] for encoding in pair.encodings]
    )


def pair_digests_from_proto(message: weights_pb2.PairDigests) -> PairDigests:
    """Convert the bucket digests of one pair.

    Raises: CodecError: a negative rank, an encoding that is not set, or not one digest and one encoding for each bucket.
    """
    try:
        encodings = tuple([_ENCODING_OF[number] for number in message.encodings])
    except KeyError as error:
        raise CodecError(f"pair ({message.rank}, {message.worker_rank}): bucket encoding {error} is unknown; set one per bucket") from error
    rank, worker_rank = _pair(message)
    pair = PairDigests(rank=rank, worker_rank=worker_rank, xxh3=tuple(message.xxh3), encodings=encodings)
    _check_same_length(pair)
    return pair


def pairs_to_proto(pairs: Iterable[PairDigests]) -> list[weights_pb2.PairDigests]:
    """Convert the bucket digests of all pairs of a server."""
    return [pair_digests_to_proto(pair) for pair in pairs]


def pairs_from_proto(messages: Iterable[weights_pb2.PairDigests]) -> tuple[PairDigests, ...]:
    """Convert the bucket digests of all pairs of a server. Raises CodecError if a pair appears twice."""
    pairs = tuple(pair_digests_from_proto(message) for message in messages)
    check_distinct("pairs (rank, worker_rank)", [(pair.rank, pair.worker_rank) for pair in pairs])
    return pairs


def piece_digests_to_proto(pair: PieceDigests) -> weights_pb2.PieceDigests:
    """Convert the piece digests of one pair."""
    return weights_pb2.PieceDigests(rank=pair.rank, worker_rank=pair.worker_rank, xxh3=pair.xxh3)


def piece_digests_from_proto(message: weights_pb2.PieceDigests) -> PieceDigests:
    """Convert the piece digests of one pair. Raises CodecError for a negative rank."""
    rank, worker_rank = _pair(message)
    return PieceDigests(rank=rank, worker_rank=worker_rank, xxh3=tuple(message.xxh3))


def piece_pairs_to_proto(pairs: Iterable[PieceDigests]) -> list[weights_pb2.PieceDigests]:
    """Convert the piece digests of all pairs of a server."""
    return [piece_digests_to_proto(pair) for pair in pairs]


def piece_pairs_from_proto(messages: Iterable[weights_pb2.PieceDigests]) -> tuple[PieceDigests, ...]:
    """Convert the piece digests of all pairs of a server. Raises CodecError if a pair appears twice."""
    pairs = tuple(piece_digests_from_proto(message) for message in messages)
    check_distinct("pairs (rank, worker_rank)", [(pair.rank, pair.worker_rank) for pair in pairs])
    return pairs


def source_digests_to_proto(servers: Mapping[str, Sequence[PieceDigests]]) -> weights_pb2.DigestSourceResponse:
    """Convert the source's piece digests, by server_id."""
    return weights_pb2.DigestSourceResponse(
        servers=[
            weights_pb2.ServerPieceDigests(server_id=server_id, pairs=piece_pairs_to_proto(pairs)) for server_id, pairs in servers.items()
        ]
    )


def source_digests_from_proto(message: weights_pb2.DigestSourceResponse) -> dict[str, tuple[PieceDigests, ...]]:
    """Convert the source's piece digests. Raises CodecError if a server or a pair appears twice."""
    check_distinct("servers of piece digests", [server.server_id for server in message.servers])
    return {server.server_id: piece_pairs_from_proto(server.pairs) for server in message.servers}


def server_transfer_to_proto(server_id: str, transfer: ServerTransfer) -> weights_pb2.ServerTransfer:
    """Convert what was sent to one server."""
    return weights_pb2.ServerTransfer(
        server_id=server_id,
        pairs=pairs_to_proto(transfer.pairs),
        sent_bytes=transfer.sent_bytes,
        dense_bytes=transfer.dense_bytes,
        error=transfer.error,
    )


def server_transfer_from_proto(message: weights_pb2.ServerTransfer) -> tuple[str, ServerTransfer]:
    """Return server_id and what was sent to it. Raises CodecError for a pair twice or a negative size."""
    transfer = ServerTransfer(
        pairs=pairs_from_proto(message.pairs),
        sent_bytes=not_negative(f"sent_bytes of server {message.server_id}", message.sent_bytes),
        dense_bytes=not_negative(f"dense_bytes of server {message.server_id}", message.dense_bytes),
        error=message.error,
    )
    return message.server_id, transfer


def source_transferred_to_proto(transferred: SourceTransferred) -> weights_pb2.TransferSourceResponse:
    """Convert the answer of TRANSFER."""
    return weights_pb2.TransferSourceResponse(
        servers=[server_transfer_to_proto(*item) for item in transferred.servers.items()], transfer_ms=transferred.transfer_ms
    )


def source_transferred_from_proto(message: weights_pb2.TransferSourceResponse) -> SourceTransferred:
    """Convert the answer of TRANSFER. Raises CodecError if a server appears twice."""
    check_distinct("servers of a transfer", [server.server_id for server in message.servers])
    servers = dict(server_transfer_from_proto(server) for server in message.servers)
    return SourceTransferred(servers=servers, transfer_ms=_duration_ms("transfer_ms", message.transfer_ms))


def _pair(message: weights_pb2.PairDigests | weights_pb2.PieceDigests) -> tuple[int, int]:
    return not_negative("rank of a pair", message.rank), not_negative("worker_rank of a pair", message.worker_rank)


def _check_same_length(pair: PairDigests) -> None:
    if len(pair.xxh3) != len(pair.encodings):
        raise CodecError(
            f"pair ({pair.rank}, {pair.worker_rank}) has {len(pair.xxh3)} digests but {len(pair.encodings)} encodings; "
            "give one of each per bucket"
        )


def _duration_ms(what: str, value: float) -> float:
    if not (value >= 0 and math.isfinite(value)):
        raise CodecError(f"{what} is {value}; it must be a time >= 0")
    return value
