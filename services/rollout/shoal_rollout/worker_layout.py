"""Plain-data form of a worker's layout, buckets and digests, as they cross to the engine's worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from shoal.types import Box, SinkParameter, SinkRegion, SinkWorkerLayout
from shoal.types.weights import BucketEncoding, PairDigests, PieceDigests, Place
from shoal.weights.buckets import Bucket, Piece
from shoal.weights.dtypes import item_bytes

Plain: TypeAlias = Any
"""Lists, strings and numbers: what vLLM's message format carries."""
ALIGNMENT_BYTES = 64
"""Staged parameters start at cache lines, which the packing kernels like."""


def place_parameters(shapes: Sequence[tuple[str, tuple[int, ...], str]]) -> tuple[tuple[SinkParameter, ...], int]:
    """Lay parameters out one after another in a staging buffer.

    Args:
        shapes: Name, shape and dtype of each parameter.
    Returns: The placed parameters and the buffer's size in bytes, at least 1 cache line.
    """
    placed = []
    end = 0
    for name, shape, dtype in shapes:
        parameter = SinkParameter(name=name, shape=shape, dtype=dtype, staging_offset_bytes=end)
        placed.append(parameter)
        num_bytes = _num_elements(shape) * item_bytes(dtype, name)
        end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(placed), max(end, ALIGNMENT_BYTES)


def layout_to_plain(layout: SinkWorkerLayout) -> Plain:
    """Turn a layout into plain data."""
    return [
        layout.worker_rank,
        [[p.name, list(p.shape), p.dtype, p.staging_offset_bytes] for p in layout.parameters],
        [[r.parameter, r.source_name, _plain_box(r.source_box), _plain_box(r.parameter_box)] for r in layout.regions],
        layout.staging_bytes,
        [layout.place.host_id, layout.place.device],
        [[transport, address] for transport, address in layout.endpoints.items()],
    ]


def layout_from_plain(plain: Plain) -> SinkWorkerLayout:
    """Turn plain data into a layout."""
    worker_rank, parameters, regions, staging_bytes, (host_id, device), endpoints = plain
    return SinkWorkerLayout(
        worker_rank=worker_rank,
        parameters=tuple(
            SinkParameter(name=name, shape=tuple(shape), dtype=dtype, staging_offset_bytes=offset)
            for name, shape, dtype, offset in parameters
        ),
        regions=tuple(
            SinkRegion(parameter=parameter, source_name=source, source_box=_box(source_box), parameter_box=_box(parameter_box))
            for parameter, source, source_box, parameter_box in regions
        ),
        staging_bytes=staging_bytes,
        place=Place(host_id=host_id, device=device),
        endpoints=dict(endpoints),
    )


def buckets_to_plain(buckets: Sequence[Bucket]) -> Plain:
    """Turn buckets into plain data."""
    return [
        [
            bucket.rank,
            bucket.worker_rank,
            bucket.index,
            bucket.dtype,
            bucket.num_bytes,
            [[p.parameter, p.source_name, _plain_box(p.source_box), _plain_box(p.parameter_box)] for p in bucket.pieces],
        ]
        for bucket in buckets
    ]


def buckets_from_plain(plain: Plain) -> tuple[Bucket, ...]:
    """Turn plain data into buckets."""
    return tuple(
        Bucket(
            rank=rank,
            worker_rank=worker_rank,
            index=index,
            dtype=dtype,
            num_bytes=num_bytes,
            pieces=tuple(
                Piece(parameter=parameter, source_name=source, source_box=_box(source_box), parameter_box=_box(parameter_box))
                for parameter, source, source_box, parameter_box in pieces
            ),
        )
        for rank, worker_rank, index, dtype, num_bytes, pieces in plain
    )


def pairs_to_plain(pairs: Sequence[PairDigests]) -> Plain:
    """Turn digests of buckets into plain data."""
    return [[pair.rank, pair.worker_rank, list(pair.xxh3), [int(encoding) for encoding in pair.encodings]] for pair in pairs]


def pairs_from_plain(plain: Plain) -> list[PairDigests]:
    """Turn plain data into digests of buckets."""
    return [
        PairDigests(rank=rank, worker_rank=worker_rank, xxh3=tuple(xxh3), encodings=tuple(BucketEncoding(code) for code in encodings))
        for rank, worker_rank, xxh3, encodings in plain
    ]


def pieces_to_plain(pieces: Sequence[PieceDigests]) -> Plain:
    """Turn digests of pieces into plain data."""
    return [[pair.rank, pair.worker_rank, list(pair.xxh3)] for pair in pieces]


def pieces_from_plain(plain: Plain) -> list[PieceDigests]:
    """Turn plain data into digests of pieces."""
    return [PieceDigests(rank=rank, worker_rank=worker_rank, xxh3=tuple(xxh3)) for rank, worker_rank, xxh3 in plain]


def _plain_box(box: Box) -> Plain:
    return [list(box.offsets), list(box.sizes)]


def _box(plain: Plain) -> Box:
    return Box(offsets=tuple(plain[0]), sizes=tuple(plain[1]))


def _num_elements(shape: Sequence[int]) -> int:
    return Box(offsets=tuple(shape), sizes=tuple(shape)).num_elements
