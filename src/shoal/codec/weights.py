"""Layouts and digests of a weight push."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.codec.tensor import dtype_from_proto, dtype_to_proto
from shoal.errors import CodecError
from shoal.rpc.v1 import weights_pb2
from shoal.types import (
    Box,
    CopyDigest,
    SinkCommitted,
    SinkLayout,
    SinkParameter,
    SinkRegion,
    SinkVerified,
    SinkWorkerLayout,
    SourcePrepared,
    SourceShard,
    SourceTransferred,
)


def box_to_proto(box: Box) -> weights_pb2.Box:
    """Convert a box."""
    return weights_pb2.Box(offsets=box.offsets, sizes=box.sizes)


def box_from_proto(message: weights_pb2.Box) -> Box:
    """Convert a box. Raises CodecError if offsets and sizes differ in number or are negative."""
    box = Box(offsets=tuple(message.offsets), sizes=tuple(message.sizes))
    if len(box.offsets) != len(box.sizes) or any(value < 0 for value in (*box.offsets, *box.sizes)):
        raise CodecError(f"box offsets {list(box.offsets)} and sizes {list(box.sizes)} do not fit; one of each per dim, none negative")
    return box


def source_shard_to_proto(shard: SourceShard) -> weights_pb2.SourceShard:
    """Convert what one rank holds of one tensor."""
    return weights_pb2.SourceShard(
        name=shard.name, shape=shard.shape, dtype=dtype_to_proto(shard.dtype), rank=shard.rank, box=box_to_proto(shard.box)
    )


def source_shard_from_proto(message: weights_pb2.SourceShard) -> SourceShard:
    """Convert what one rank holds of one tensor. Raises CodecError if the box is not inside the shape."""
    shape = _shape(message.name, message.shape)
    box = box_from_proto(message.box)
    check_inside(f"shard of {message.name} on rank {message.rank}", box, shape)
    return SourceShard(name=message.name, shape=shape, dtype=dtype_from_proto(message.dtype), rank=message.rank, box=box)


def sink_region_to_proto(region: SinkRegion) -> weights_pb2.SinkRegion:
    """Convert one region."""
    return weights_pb2.SinkRegion(
        parameter=region.parameter,
        source_name=region.source_name,
        source_box=box_to_proto(region.source_box),
        parameter_box=box_to_proto(region.parameter_box),
    )


def sink_region_from_proto(message: weights_pb2.SinkRegion) -> SinkRegion:
    """Convert one region. Raises CodecError for an impossible box."""
    return SinkRegion(
        parameter=message.parameter,
        source_name=message.source_name,
        source_box=box_from_proto(message.source_box),
        parameter_box=box_from_proto(message.parameter_box),
    )


def sink_parameter_to_proto(parameter: SinkParameter) -> weights_pb2.SinkParameter:
    """Convert one engine parameter."""
    return weights_pb2.SinkParameter(
        name=parameter.name,
        shape=parameter.shape,
        dtype=dtype_to_proto(parameter.dtype),
        staging_offset_bytes=parameter.staging_offset_bytes,
    )


def sink_parameter_from_proto(message: weights_pb2.SinkParameter) -> SinkParameter:
    """Convert one engine parameter. Raises CodecError for an unknown dtype, a negative extent or offset."""
    if message.staging_offset_bytes < 0:
        raise CodecError(f"staging offset of {message.name} is {message.staging_offset_bytes}; it must be >= 0")
    return SinkParameter(
        name=message.name,
        shape=_shape(message.name, message.shape),
        dtype=dtype_from_proto(message.dtype),
        staging_offset_bytes=message.staging_offset_bytes,
    )


def sink_worker_layout_to_proto(layout: SinkWorkerLayout) -> weights_pb2.SinkWorkerLayout:
    """Convert one worker's layout."""
    return weights_pb2.SinkWorkerLayout(
        worker_rank=layout.worker_rank,
        parameters=[sink_parameter_to_proto(parameter) for parameter in layout.parameters],
        regions=[sink_region_to_proto(region) for region in layout.regions],
        staging_path=layout.staging_path,
        staging_bytes=layout.staging_bytes,
    )


def sink_worker_layout_from_proto(message: weights_pb2.SinkWorkerLayout) -> SinkWorkerLayout:
    """Convert one worker's layout. Raises CodecError for an impossible shape, box or dtype."""
    return SinkWorkerLayout(
        worker_rank=message.worker_rank,
        parameters=tuple(sink_parameter_from_proto(parameter) for parameter in message.parameters),
        regions=tuple(sink_region_from_proto(region) for region in message.regions),
        staging_path=message.staging_path,
        staging_bytes=message.staging_bytes,
    )


def sink_layout_to_proto(layout: SinkLayout) -> weights_pb2.SinkLayout:
    """Convert one server's layout."""
    return weights_pb2.SinkLayout(server_id=layout.server_id, workers=[sink_worker_layout_to_proto(worker) for worker in layout.workers])


def sink_layout_from_proto(message: weights_pb2.SinkLayout) -> SinkLayout:
    """Convert one server's layout. Raises CodecError for an impossible shape, box or dtype."""
    return SinkLayout(server_id=message.server_id, workers=tuple(sink_worker_layout_from_proto(worker) for worker in message.workers))


def copy_digest_to_proto(digest: CopyDigest) -> weights_pb2.CopyDigest:
    """Convert one digest."""
    return weights_pb2.CopyDigest(
        worker_rank=digest.worker_rank, parameter=digest.parameter, parameter_box=box_to_proto(digest.parameter_box), xxh3=digest.xxh3
    )


def copy_digest_from_proto(message: weights_pb2.CopyDigest) -> CopyDigest:
    """Convert one digest. Raises CodecError for an impossible box."""
    return CopyDigest(
        worker_rank=message.worker_rank,
        parameter=message.parameter,
        parameter_box=box_from_proto(message.parameter_box),
        xxh3=message.xxh3,
    )


def sink_verified_to_proto(verified: SinkVerified) -> weights_pb2.VerifySinkResponse:
    """Convert the answer of VERIFY."""
    return weights_pb2.VerifySinkResponse(num_bytes=verified.num_bytes, verify_ms=verified.verify_ms)


def sink_verified_from_proto(message: weights_pb2.VerifySinkResponse) -> SinkVerified:
    """Convert the answer of VERIFY."""
    return SinkVerified(num_bytes=message.num_bytes, verify_ms=message.verify_ms)


def sink_committed_to_proto(committed: SinkCommitted) -> weights_pb2.CommitSinkResponse:
    """Convert the answer of COMMIT."""
    return weights_pb2.CommitSinkResponse(policy_version=committed.policy_version, pause_ms=committed.pause_ms)


def sink_committed_from_proto(message: weights_pb2.CommitSinkResponse) -> SinkCommitted:
    """Convert the answer of COMMIT."""
    return SinkCommitted(policy_version=message.policy_version, pause_ms=message.pause_ms)


def source_prepared_to_proto(prepared: SourcePrepared) -> weights_pb2.PrepareSourceResponse:
    """Convert the source's answer of PREPARE."""
    return weights_pb2.PrepareSourceResponse(plan_hash=prepared.plan_hash, num_copies=prepared.num_copies, num_bytes=prepared.num_bytes)


def source_prepared_from_proto(message: weights_pb2.PrepareSourceResponse) -> SourcePrepared:
    """Convert the source's answer of PREPARE."""
    return SourcePrepared(plan_hash=message.plan_hash, num_copies=message.num_copies, num_bytes=message.num_bytes)


def source_transferred_to_proto(transferred: SourceTransferred) -> weights_pb2.TransferSourceResponse:
    """Convert the answer of TRANSFER."""
    return weights_pb2.TransferSourceResponse(
        sinks=[
            weights_pb2.SinkDigests(server_id=server_id, digests=[copy_digest_to_proto(digest) for digest in digests])
            for server_id, digests in transferred.digests.items()
        ],
        num_bytes=transferred.num_bytes,
        transfer_ms=transferred.transfer_ms,
    )


def source_transferred_from_proto(message: weights_pb2.TransferSourceResponse) -> SourceTransferred:
    """Convert the answer of TRANSFER. Raises CodecError if a server appears twice."""
    digests = {sink.server_id: [copy_digest_from_proto(digest) for digest in sink.digests] for sink in message.sinks}
    if len(digests) != len(message.sinks):
        raise CodecError(f"digests name a server twice: {[sink.server_id for sink in message.sinks]}; give each server once")
    return SourceTransferred(digests=digests, num_bytes=message.num_bytes, transfer_ms=message.transfer_ms)


def check_inside(what: str, box: Box, shape: tuple[int, ...]) -> None:
    """Raise CodecError unless the box lies inside the shape; `what` names it."""
    fits = len(box.offsets) == len(shape) and all(
        offset + size <= extent for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True)
    )
    if not fits:
        raise CodecError(f"{what}: box at {list(box.offsets)} of {list(box.sizes)} is not inside shape {list(shape)}")


def _shape(name: str, extents: Iterable[int]) -> tuple[int, ...]:
    shape = tuple(extents)
    if any(extent < 0 for extent in shape):
        raise CodecError(f"shape of {name} is {list(shape)}; extents must be >= 0")
    return shape
