"""From strided views to boxes: which rectangular part of a row-major tensor a view shows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.types import Box


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def box_of_view(shape: Sequence[int], offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Box | None:
    """Find the box that a view shows, if it is one.

    Dims of size 1 may have been dropped from or added to the view; apart from those its dims must be the tensor's, in order.

    Args:
        shape: Extents of the row-major tensor that owns the storage.
        offset: First element of the view, in elements from the tensor's first one.
        sizes: Extents of the view.
        strides: Strides of the view, in elements.
    Returns: The box in the tensor's coordinates, or None for anything else (transposed, flattened, stepped, broadcast).
    """
    extents = [1] * len(shape)
    base_strides = row_major_strides(shape)
    dim = 0
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        while dim < len(shape) and (shape[dim] == 1 or base_strides[dim] != stride):
            dim += 1
        if dim == len(shape):
            return None
        extents[dim] = size
        dim += 1
    return _placed(shape, base_strides, offset, tuple(extents))


def _placed(shape: Sequence[int], strides: Sequence[int], offset: int, extents: tuple[int, ...]) -> Box | None:
    """The box of these extents at an element offset; None if it leaves the tensor or runs over the end of a row."""
    if math.prod(extents) == 0:
        return Box(offsets=(0,) * len(shape), sizes=extents)
    starts = []
    for extent, stride, size in zip(shape, strides, extents, strict=True):
        start, offset = divmod(offset, stride)
        if start + size > extent:
            return None
        starts.append(start)
    return Box(offsets=tuple(starts), sizes=extents) if offset == 0 else None
