"""Layouts of a weight push: what trainer ranks hold and what engine workers need.

A big gang's layout has some hundred thousand boxes, most of them equal between layers: equal ones are decoded once and shared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from shoal.codec.tensor import dtype_from_proto, dtype_to_proto, numpy_dtype
from shoal.errors import CodecError
from shoal.rpc.v1 import weights_pb2
from shoal.types import (
    Box,
    Place,
    SinkLayout,
    SinkParameter,
    SinkRegion,
    SinkTarget,
    SinkWorkerLayout,
    SourceLayout,
    SourceTensor,
    StagedVersion,
    TensorShard,
)

DEVICES = ("cpu", "cuda")

# Bytes of a message to its value.
_Boxes = dict[bytes, Box]
_Shards = dict[bytes, TensorShard]


def box_to_proto(box: Box) -> weights_pb2.Box:
    """Convert a box."""
    return weights_pb2.Box(offsets=box.offsets, sizes=box.sizes)


def box_from_proto(message: weights_pb2.Box) -> Box:
    """Convert a box. Raises CodecError if offsets and sizes differ in number or are negative."""
    offsets, sizes = tuple(message.offsets), tuple(message.sizes)
    if len(offsets) != len(sizes) or (sizes and (min(offsets) < 0 or min(sizes) < 0)):
        raise CodecError(f"box offsets {list(offsets)} and sizes {list(sizes)} do not fit; one of each per dim, none negative")
    return Box(offsets=offsets, sizes=sizes)


def place_to_proto(place: Place) -> weights_pb2.Place:
    """Convert a place."""
    return weights_pb2.Place(host_id=place.host_id, device=place.device)


def place_from_proto(message: weights_pb2.Place) -> Place:
    """Convert a place. Raises CodecError without a host_id or for an unknown device."""
    if not message.host_id or message.device not in DEVICES:
        raise CodecError(f"place {message.host_id!r} on {message.device!r} is not possible; give a host_id and one of {', '.join(DEVICES)}")
    return Place(host_id=message.host_id, device=message.device)


def tensor_shard_to_proto(shard: TensorShard) -> weights_pb2.TensorShard:
    """Convert what one rank holds of a tensor."""
    return weights_pb2.TensorShard(rank=shard.rank, box=box_to_proto(shard.box))


def tensor_shard_from_proto(message: weights_pb2.TensorShard) -> TensorShard:
    """Convert what one rank holds of a tensor. Raises CodecError for a negative rank or an impossible box."""
    return TensorShard(rank=not_negative("rank of a shard", message.rank), box=box_from_proto(message.box))


def source_tensor_to_proto(tensor: SourceTensor) -> weights_pb2.SourceTensor:
    """Convert one Hugging Face tensor and its shards."""
    return weights_pb2.SourceTensor(
        name=tensor.name,
        shape=tensor.shape,
        dtype=dtype_to_proto(tensor.dtype),
        shards=[tensor_shard_to_proto(shard) for shard in tensor.shards],
        frozen=tensor.frozen,
    )


def source_tensor_from_proto(message: weights_pb2.SourceTensor) -> SourceTensor:
    """Convert one tensor and its shards. Raises CodecError for an impossible shape or dtype, or a shard that is not inside."""
    return _source_tensor(message, {})


def _source_tensor(message: weights_pb2.SourceTensor, inside: dict[tuple[int, ...], _Shards]) -> SourceTensor:
    """Decode a tensor; `inside` keeps, by shape, the shards that have been found to lie in it."""
    shape = _shape(message.name, message.shape)
    known = inside.setdefault(shape, {})
    shards = []
    for shard_message in message.shards:
        key = shard_message.SerializeToString()
        shard = known.get(key)
        if shard is None:
            shard = tensor_shard_from_proto(shard_message)
            check_inside(f"shard of {message.name} on rank {shard.rank}", shard.box, shape)
            known[key] = shard
        shards.append(shard)
    dtype = dtype_from_proto(message.dtype)
    return SourceTensor(name=message.name, shape=shape, dtype=dtype, shards=tuple(shards), frozen=message.frozen)


def source_layout_to_proto(layout: SourceLayout) -> weights_pb2.SourceLayout:
    """Convert what a gang holds."""
    return weights_pb2.SourceLayout(
        source_id=layout.source_id,
        tensors=[source_tensor_to_proto(tensor) for tensor in layout.tensors],
        places=[place_to_proto(place) for place in layout.places],
    )


def source_layout_from_proto(message: weights_pb2.SourceLayout) -> SourceLayout:
    """Convert what a whole gang holds.

    Raises: CodecError: no source_id, a tensor twice, a rank without a place, or a tensor that cannot be.
    """
    if not message.source_id:
        raise CodecError("a source layout has no source_id; every start of a gang must make one")
    inside: dict[tuple[int, ...], _Shards] = {}
    tensors = tuple(_source_tensor(tensor, inside) for tensor in message.tensors)
    check_distinct("tensors of a source layout", [tensor.name for tensor in tensors])
    top_rank = max((shard.rank for known in inside.values() for shard in known.values()), default=-1)
    if top_rank >= len(message.places):
        raise CodecError(f"a source layout has a shard on rank {top_rank} but places of {len(message.places)} ranks; give one per rank")
    return SourceLayout(source_id=message.source_id, tensors=tensors, places=tuple(place_from_proto(place) for place in message.places))


def sink_region_to_proto(region: SinkRegion) -> weights_pb2.SinkRegion:
    """Convert one region."""
    return weights_pb2.SinkRegion(
        parameter=region.parameter,
        source_name=region.source_name,
        source_box=box_to_proto(region.source_box),
        parameter_box=box_to_proto(region.parameter_box),
    )


def sink_region_from_proto(message: weights_pb2.SinkRegion) -> SinkRegion:
    """Convert one region. Raises CodecError for an impossible box, or boxes of different sizes."""
    return _sink_region(message, {})


def _sink_region(message: weights_pb2.SinkRegion, known: _Boxes) -> SinkRegion:
    source_box, parameter_box = _box(message.source_box, known), _box(message.parameter_box, known)
    if source_box.sizes != parameter_box.sizes:
        raise CodecError(
            f"region of {message.parameter}: {list(source_box.sizes)} of {message.source_name} do not fit {list(parameter_box.sizes)}; "
            "the sizes of both boxes must be equal"
        )
    return SinkRegion(parameter=message.parameter, source_name=message.source_name, source_box=source_box, parameter_box=parameter_box)


def _box(message: weights_pb2.Box, known: _Boxes) -> Box:
    key = message.SerializeToString()
    box = known.get(key)
    if box is None:
        box = known[key] = box_from_proto(message)
    return box


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
    return SinkParameter(
        name=message.name,
        shape=_shape(message.name, message.shape),
        dtype=dtype_from_proto(message.dtype),
        staging_offset_bytes=not_negative(f"staging offset of {message.name}", message.staging_offset_bytes),
    )


def sink_worker_layout_to_proto(layout: SinkWorkerLayout) -> weights_pb2.SinkWorkerLayout:
    """Convert one worker's layout."""
    return weights_pb2.SinkWorkerLayout(
        worker_rank=layout.worker_rank,
        parameters=[sink_parameter_to_proto(parameter) for parameter in layout.parameters],
        regions=[sink_region_to_proto(region) for region in layout.regions],
        staging_bytes=layout.staging_bytes,
        place=place_to_proto(layout.place),
        endpoints=dict(layout.endpoints),
    )


def sink_worker_layout_from_proto(message: weights_pb2.SinkWorkerLayout) -> SinkWorkerLayout:
    """Convert one worker's layout.

    Raises: CodecError: an impossible shape, box, dtype or place; a parameter twice or beyond staging; a region outside its parameter.
    """
    return _sink_worker_layout(message, {})


def _sink_worker_layout(message: weights_pb2.SinkWorkerLayout, known: _Boxes) -> SinkWorkerLayout:
    layout = SinkWorkerLayout(
        worker_rank=not_negative("worker_rank", message.worker_rank),
        parameters=tuple(sink_parameter_from_proto(parameter) for parameter in message.parameters),
        regions=tuple(_sink_region(region, known) for region in message.regions),
        staging_bytes=not_negative(f"staging_bytes of worker {message.worker_rank}", message.staging_bytes),
        place=place_from_proto(message.place),
        endpoints=dict(message.endpoints),
    )
    _check_worker(layout)
    return layout


def _check_worker(layout: SinkWorkerLayout) -> None:
    check_distinct(f"parameters of worker {layout.worker_rank}", [parameter.name for parameter in layout.parameters])
    for parameter in layout.parameters:
        end = parameter.staging_offset_bytes + math.prod(parameter.shape) * numpy_dtype(parameter.dtype).itemsize
        if end > layout.staging_bytes:
            raise CodecError(f"{parameter.name} ends at byte {end} of staging, which has {layout.staging_bytes}; both come from the worker")
    shapes = {parameter.name: parameter.shape for parameter in layout.parameters}
    for region in layout.regions:
        shape = shapes.get(region.parameter)
        if shape is None:
            raise CodecError(f"a region of worker {layout.worker_rank} is for {region.parameter}, which is not among its parameters")
        check_inside(f"region of {region.parameter}", region.parameter_box, shape)


def sink_layout_to_proto(layout: SinkLayout) -> weights_pb2.SinkLayout:
    """Convert one server's layout."""
    return weights_pb2.SinkLayout(server_id=layout.server_id, workers=[sink_worker_layout_to_proto(worker) for worker in layout.workers])


def sink_layout_from_proto(message: weights_pb2.SinkLayout) -> SinkLayout:
    """Convert one server's layout. Raises CodecError without a server_id, for a worker_rank twice, or a worker that cannot be."""
    if not message.server_id:
        raise CodecError("a sink layout has no server_id; the rollout server must name itself")
    known: _Boxes = {}
    workers = tuple(_sink_worker_layout(worker, known) for worker in message.workers)
    check_distinct(f"workers of {message.server_id}", [worker.worker_rank for worker in workers])
    return SinkLayout(server_id=message.server_id, workers=workers)


def staged_version_to_proto(staged: StagedVersion) -> weights_pb2.StagedVersion:
    """Convert what a staging buffer holds."""
    return weights_pb2.StagedVersion(source_id=staged.source_id, policy_version=staged.policy_version)


def staged_version_from_proto(message: weights_pb2.StagedVersion) -> StagedVersion:
    """Convert what a staging buffer holds. Raises CodecError without a source_id or for a negative version."""
    if not message.source_id:
        raise CodecError(f"staged version {message.policy_version} has no source_id; leave the field out if staging holds nothing complete")
    return StagedVersion(source_id=message.source_id, policy_version=not_negative("staged policy_version", message.policy_version))


def sink_target_to_proto(target: SinkTarget) -> weights_pb2.SinkTarget:
    """Convert one server that a push goes to."""
    staged = None if target.staged is None else staged_version_to_proto(target.staged)
    return weights_pb2.SinkTarget(layout=sink_layout_to_proto(target.layout), staged=staged, dense=target.dense)


def sink_target_from_proto(message: weights_pb2.SinkTarget) -> SinkTarget:
    """Convert one server that a push goes to. Raises CodecError as sink_layout_from_proto."""
    staged = staged_version_from_proto(message.staged) if message.HasField("staged") else None
    return SinkTarget(layout=sink_layout_from_proto(message.layout), staged=staged, dense=message.dense)


def sink_targets_from_proto(messages: Iterable[weights_pb2.SinkTarget]) -> tuple[SinkTarget, ...]:
    """Convert all servers of a push. Raises CodecError if one is named twice."""
    targets = tuple(sink_target_from_proto(message) for message in messages)
    check_distinct("servers of a push", [target.layout.server_id for target in targets])
    return targets


def check_inside(what: str, box: Box, shape: tuple[int, ...]) -> None:
    """Raise CodecError unless the box lies inside the shape; `what` names it."""
    fits = len(box.offsets) == len(shape) and all(
        offset + size <= extent for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True)
    )
    if not fits:
        raise CodecError(f"{what}: box at {list(box.offsets)} of {list(box.sizes)} is not inside shape {list(shape)}")


def check_distinct(what: str, names: Sequence[object]) -> None:
    """Raise CodecError if something is named twice; `what` says what these are."""
    if len(set(names)) != len(names):
        twice = sorted(str(name) for name, count in Counter(names).items() if count > 1)
        raise CodecError(f"{what}: {', '.join(twice)} given twice; give each once")


def not_negative(what: str, value: int) -> int:
    """Return a number that must not be negative. Raises CodecError if it is."""
    if value < 0:
        raise CodecError(f"{what} is {value}; it must be >= 0")
    return value


def _shape(name: str, extents: Iterable[int]) -> tuple[int, ...]:
    shape = tuple(extents)
    if shape and min(shape) < 0:
        raise CodecError(f"shape of {name} is {list(shape)}; extents must be >= 0")
    return shape
