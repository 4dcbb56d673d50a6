"""Plain-data form of a worker's layout and digests, as they cross to the engine's worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from shoal.types import Box, CopyDigest, SinkParameter, SinkRegion, SinkWorkerLayout
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
        layout.staging_path,
        layout.staging_bytes,
    ]


def layout_from_plain(plain: Plain) -> SinkWorkerLayout:
    """Turn plain data into a layout."""
    worker_rank, parameters, regions, staging_path, staging_bytes = plain
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
        staging_path=staging_path,
        staging_bytes=staging_bytes,
    )


def digests_to_plain(digests: Sequence[CopyDigest]) -> Plain:
    """Turn digests into plain data."""
    return [[d.worker_rank, d.parameter, _plain_box(d.parameter_box), d.xxh3] for d in digests]


def digests_from_plain(plain: Plain) -> list[CopyDigest]:
    """Turn plain data into digests."""
    return [CopyDigest(worker_rank=rank, parameter=name, parameter_box=_box(box), xxh3=xxh3) for rank, name, box, xxh3 in plain]


def _plain_box(box: Box) -> Plain:
    return [list(box.offsets), list(box.sizes)]


def _box(plain: Plain) -> Box:
    return Box(offsets=tuple(plain[0]), sizes=tuple(plain[1]))


def _num_elements(shape: Sequence[int]) -> int:
    return Box(offsets=tuple(shape), sizes=tuple(shape)).num_elements
