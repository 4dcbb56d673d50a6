"""Arithmetic on boxes: intersection, bounds, and exact cover."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.types.weights import Box


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return Box(offsets=(0,) * len(shape), sizes=tuple(shape))


def contains(outer: Box, inner: Box) -> bool:
    """Whether `inner` has the dims of `outer`, no negative extent, and lies inside it."""
    if not len(outer.offsets) == len(outer.sizes) == len(inner.offsets) == len(inner.sizes):
        return False
    return all(
        inner_size >= 0 and outer_offset <= inner_offset and inner_offset + inner_size <= outer_offset + outer_size
        for outer_offset, outer_size, inner_offset, inner_size in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )


def intersect(left: Box, right: Box) -> Box | None:
    """The common part of two boxes of the same tensor; None if there is none."""
    offsets = tuple(map(max, left.offsets, right.offsets))
    ends = tuple(
        min(left_offset + left_size, right_offset + right_size)
        for left_offset, left_size, right_offset, right_size in zip(left.offsets, left.sizes, right.offsets, right.sizes, strict=True)
    )
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return Box(offsets=offsets, sizes=sizes) if all(size > 0 for size in sizes) else None


def move(box: Box, *, origin: Box, target: Box) -> Box:
    """Carry a box inside `origin` over to the same place inside `target`."""
    offsets = tuple(
        offset - origin_offset + target_offset
        for offset, origin_offset, target_offset in zip(box.offsets, origin.offsets, target.offsets, strict=True)
    )
    return Box(offsets=offsets, sizes=box.sizes)


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes of the same tensor that share an element; None if all are disjoint.

    Sweeps along the first dim, so that row shards cost n log n.
    """
    active: list[Box] = []
    for box in sorted((box for box in boxes if box.num_elements > 0), key=_start):
        active = [other for other in active if _end(other) > _start(box)]
        for other in active:
            if intersect(box, other) is not None:
                return other, box
        active.append(box)
    return None


def cover_fault(target: Box, parts: Sequence[Box]) -> str | None:
    """Why the parts do not cover every element of `target` exactly once; None if they do."""
    for part in parts:
        if not contains(target, part):
            return f"{describe(part)} lies outside {describe(target)}"
    overlap = find_overlap(parts)
    if overlap is not None:
        return f"{describe(overlap[0])} and {describe(overlap[1])} overlap"
    missing = target.num_elements - sum(part.num_elements for part in parts)
    return f"{missing} of {target.num_elements} elements of {describe(target)} are missing" if missing else None


def describe(box: Box) -> str:
    """A box as text: [0:4, 8:16]."""
    if len(box.offsets) != len(box.sizes):
        return f"offsets {list(box.offsets)} with sizes {list(box.sizes)}"
    return "[" + ", ".join(f"{offset}:{offset + size}" for offset, size in zip(box.offsets, box.sizes, strict=True)) + "]"


def _start(box: Box) -> int:
    return box.offsets[0] if box.offsets else 0


def _end(box: Box) -> int:
    return box.offsets[0] + box.sizes[0] if box.offsets else 1
