"""Pieces of one server's plan before ranks are chosen; equal for all servers of equal layout.

Every non-empty intersection of an engine region with a shard is a piece; one larger than a bucket is cut along leading dims. P pieces,
D dims, in canonical order: worker, dtype, trained before frozen, place in staging.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from shoal.types.weights import SinkParameter, SourceTensor
from shoal.weights.box_table import Ints, widen
from shoal.weights.sink_index import SinkIndex
from shoal.weights.source_index import SourceIndex


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Geometry:
    """Columns by piece: worker_ranks, parameters and tensors (indices), dtypes (indices), frozen (0 or 1), shards (rows of the source
    index), num_bytes [P]; source_offsets in the tensor, target_offsets in the parameter, sizes [P, D], of which num_dims [P] are real.
    """

    parameter_table: tuple[SinkParameter, ...]
    tensor_table: tuple[SourceTensor, ...]
    dtype_table: tuple[str, ...]
    worker_ranks: Ints
    parameters: Ints
    tensors: Ints
    dtypes: Ints
    frozen: Ints
    shards: Ints
    num_bytes: Ints
    source_offsets: Ints
    target_offsets: Ints
    sizes: Ints
    num_dims: Ints
    digest: bytes


def build_geometry(source: SourceIndex, sink: SinkIndex, bucket_bytes: int) -> Geometry:
    """All pieces of a server, each at most `bucket_bytes` large."""
    live = np.flatnonzero((sink.sources.sizes > 0).all(axis=1))
    regions, targets = sink.sources.take(live), sink.targets.take(live)
    meeting = source.meet(regions)
    width = meeting.offsets.shape[1]
    shift = widen(targets.offsets - regions.offsets, width, 0)
    items = sink.item_bytes[targets.owners][meeting.region]
    rows, starts, sizes = split_boxes(meeting.sizes, items, bucket_bytes)
    region = meeting.region[rows]
    source_offsets = meeting.offsets[rows] + starts
    target_offsets = source_offsets + shift[region]
    parameters = targets.owners[region]
    inside = (target_offsets * sink.strides(width)[parameters]).sum(axis=1)
    address = sink.staging_offsets[parameters] + inside * items[rows]
    workers, dtypes = sink.worker_of[parameters], sink.dtype_order[parameters]
    tensors = regions.owners[region]
    frozen = np.array([tensor.frozen for tensor in source.tensors], np.int64)[tensors]
    order = np.lexsort((address, frozen, dtypes, workers))
    columns = {
        "worker_ranks": workers[order],
        "parameters": parameters[order],
        "tensors": tensors[order],
        "dtypes": dtypes[order],
        "frozen": frozen[order],
        "shards": meeting.shard[rows][order],
        "num_bytes": (sizes.prod(axis=1) * items[rows])[order],
        "source_offsets": source_offsets[order],
        "target_offsets": target_offsets[order],
        "sizes": sizes[order],
        "num_dims": regions.num_dims[region][order],
    }
    return Geometry(
        parameter_table=tuple(sink.parameters),
        tensor_table=source.tensors,
        dtype_table=sink.dtypes,
        digest=_digest(source, sink, columns),
        **columns,
    )


def split_boxes(sizes: Ints, items: Ints, bucket_bytes: int) -> tuple[Ints, Ints, Ints]:
    """Cut boxes that are larger than a bucket: whole rows first, further dims where one row is larger.

    Args:
        sizes: [N, D] elements along each dim.
        items: [N] bytes of an element, at most bucket_bytes.
    Returns: rows [P] of the box each part belongs to, its starts [P, D] within the box, its sizes [P, D]; parts of a box are row-major.
    """
    inner = items[:, None] * np.concatenate((np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1], np.ones((len(sizes), 1), np.int64)), axis=1)
    chunks = np.minimum(sizes, np.maximum(bucket_bytes // inner, 1))
    counts = -(-sizes // chunks)
    num_parts = counts.prod(axis=1)
    rows = np.repeat(np.arange(len(sizes), dtype=np.int64), num_parts)
    if len(rows) == len(sizes):
        return rows, np.zeros_like(sizes), sizes
    rest = np.arange(len(rows), dtype=np.int64) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    starts = np.zeros((len(rows), sizes.shape[1]), np.int64)
    for dim in reversed(range(sizes.shape[1])):
        rest, at = np.divmod(rest, counts[rows, dim])
        starts[:, dim] = at * chunks[rows, dim]
    return rows, starts, np.minimum(chunks[rows], sizes[rows] - starts)


def _digest(source: SourceIndex, sink: SinkIndex, columns: dict[str, Ints]) -> bytes:
    """sha256 over both sides' names, shapes and dtypes, places in staging, and every piece; `shards` is left to the chosen ranks."""
    digest = hashlib.sha256(b"shoal-push-plan-3\n")
    for tensor in source.tensors:
        digest.update(f"{tensor.name!r} {tensor.shape} {tensor.dtype}\n".encode())
    for worker in sink.workers:
        digest.update(f"worker {worker.worker_rank} {worker.staging_bytes}\n".encode())
    for index, parameter in enumerate(sink.parameters):
        place = f"{sink.worker_of[index]} {parameter.staging_offset_bytes}"
        digest.update(f"{place} {parameter.name!r} {parameter.shape} {parameter.dtype}\n".encode())
    for name in sorted(columns.keys() - {"shards"}):
        digest.update(f"{name} {columns[name].shape}\n".encode())
        digest.update(as_bytes(columns[name]))
    return digest.digest()


def as_bytes(column: Ints) -> memoryview:
    """The column as little-endian bytes, so that machines agree on its hash."""
    return np.ascontiguousarray(column, "<i8").reshape(-1).view(np.uint8).data
