"""Many boxes as arrays: bounds, overlaps and intersections of hundreds of thousands of them without a Python loop.

N boxes, D dims. A box belongs to an owner (a tensor or a parameter, by index); only boxes of one owner are compared. Boxes of fewer dims
are padded with [0, 1) along trailing dims, which changes neither intersections nor the row-major order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from shoal.types.weights import Box

Ints = NDArray[np.int64]

_CANDIDATES_AT_ONCE = 1 << 21
"""Pairs that are compared in one go; bounds memory where many boxes share a row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxTable:
    """owners [N]; offsets, sizes [N, D]; num_dims [N] before padding, -1 where a box has unequal numbers of offsets and sizes."""

    owners: Ints
    offsets: Ints
    sizes: Ints
    num_dims: Ints

    @classmethod
    def of(cls, owners: Sequence[int], boxes: Sequence[Box]) -> BoxTable:
        """The boxes in the given order; D is the most dims that any of them has, at least 1."""
        width = max((max(len(box.offsets), len(box.sizes)) for box in boxes), default=1) or 1
        num_dims = np.fromiter((len(box.offsets) if len(box.offsets) == len(box.sizes) else -1 for box in boxes), np.int64, len(boxes))
        return cls(
            owners=np.array(owners, np.int64),
            offsets=pad_rows([box.offsets for box in boxes], width, 0),
            sizes=pad_rows([box.sizes for box in boxes], width, 1),
            num_dims=num_dims,
        )

    @property
    def ends(self) -> Ints:
        """[N, D] first coordinate behind each box."""
        return self.offsets + self.sizes

    @property
    def width(self) -> int:
        """D."""
        return int(self.offsets.shape[1])

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> BoxTable:
        """Some of the boxes, in the order of `rows`."""
        return BoxTable(owners=self.owners[rows], offsets=self.offsets[rows], sizes=self.sizes[rows], num_dims=self.num_dims[rows])

    def widen(self, width: int) -> BoxTable:
        """The same boxes with at least `width` dims."""
        return BoxTable(
            owners=self.owners, offsets=widen(self.offsets, width, 0), sizes=widen(self.sizes, width, 1), num_dims=self.num_dims
        )

    def box(self, row: int) -> Box:
        """One box without its padding."""
        dims = int(self.num_dims[row])
        return Box(offsets=tuple(self.offsets[row, :dims].tolist()), sizes=tuple(self.sizes[row, :dims].tolist()))

    def outside(self, shapes: Sequence[Sequence[int]]) -> Ints:
        """Rows whose box has other dims than its owner's shape, a negative size, or leaves the shape."""
        width = max(self.width, max(map(len, shapes), default=1))
        table, bounds = self.widen(width), pad_rows(shapes, width, 1)[self.owners]
        dims = np.fromiter(map(len, shapes), np.int64, len(shapes))[self.owners]
        inside = (table.offsets >= 0) & (table.sizes >= 0) & (table.ends <= bounds)
        return np.flatnonzero(~(inside.all(axis=1) & (self.num_dims == dims)))

    def find_overlap(self) -> tuple[int, int] | None:
        """Rows of two boxes of one owner that share an element; None if all are disjoint."""
        rows = np.flatnonzero((self.sizes > 0).all(axis=1))
        sweep = Sweep(self.take(rows))
        for left, right in sweep.neighbours():
            starts = np.maximum(sweep.table.offsets[left], sweep.table.offsets[right])
            ends = np.minimum(sweep.table.ends[left], sweep.table.ends[right])
            hits = np.flatnonzero((starts < ends).all(axis=1))
            if hits.size:
                return int(rows[sweep.order[left[hits[0]]]]), int(rows[sweep.order[right[hits[0]]]])
        return None


class Sweep:
    """Boxes sorted by owner and by their start along the dim in which the owner is cut most, so that neighbours are found by bisection."""

    def __init__(self, table: BoxTable) -> None:
        """Sort the boxes; none may be empty."""
        self._num_owners = int(table.owners.max(initial=-1)) + 1
        self._dim_of = _busiest_dim(table, self._num_owners)
        self._stride = int(table.ends.max(initial=0)) + 1
        keys = self._keys(table.owners, table.offsets)
        self.order: Ints = np.argsort(keys, kind="stable")
        self.table = table.take(self.order)
        self._starts = keys[self.order]
        self._ends = self._keys(self.table.owners, self.table.ends)
        self._reach = np.maximum.accumulate(self._ends)

    def neighbours(self) -> Iterator[tuple[Ints, Ints]]:
        """Pairs of sorted rows that overlap along the sweep's dim, in portions."""
        first = np.arange(1, len(self._starts) + 1, dtype=np.int64)
        return expand(first, np.searchsorted(self._starts, self._ends, side="left"))

    def candidates(self, other: BoxTable) -> Iterator[tuple[Ints, Ints]]:
        """Pairs (row of other, sorted row) that may meet, in portions; `other` lies inside the owners' shapes and is not empty."""
        low = np.searchsorted(self._reach, self._keys(other.owners, other.offsets), side="right")
        return expand(low, np.searchsorted(self._starts, self._keys(other.owners, other.ends), side="left"))

    def _keys(self, owners: Ints, coordinates: Ints) -> Ints:
        along = np.take_along_axis(coordinates, self._dim_of[owners][:, None], axis=1)[:, 0]
        return owners * np.int64(self._stride) + along


def _busiest_dim(table: BoxTable, num_owners: int) -> Ints:
    """[owners] the dim with the most distinct starts: along it the fewest boxes lie side by side."""
    counts = np.zeros((table.width, num_owners), np.int64)
    stride = int(table.offsets.max(initial=0)) + 1
    for dim in range(table.width):
        distinct = np.unique(table.owners * stride + table.offsets[:, dim])
        counts[dim] = np.bincount(distinct // stride, minlength=num_owners)
    busiest: Ints = np.argmax(counts, axis=0)
    return busiest


def expand(low: Ints, high: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Pairs (i, j) with low[i] <= j < high[i], in portions of bounded size."""
    counts = np.maximum(high - low, 0)
    totals = np.cumsum(counts)
    begin = 0
    while begin < len(counts):
        done = int(totals[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(totals, done + _CANDIDATES_AT_ONCE, side="right")))
        rows = np.repeat(np.arange(begin, end, dtype=np.int64), counts[begin:end])
        within = np.arange(len(rows), dtype=np.int64) - np.repeat(totals[begin:end] - counts[begin:end] - done, counts[begin:end])
        if len(rows):
            yield rows, low[rows] + within
        begin = end


def pad_rows(rows: Sequence[Sequence[int]], width: int, fill: int) -> Ints:
    """[N, width] rows of unequal length, filled up at the end."""
    padding = tuple((fill,) * (width - length) for length in range(width + 1))
    flat = chain.from_iterable(chain(row, padding[len(row)]) for row in rows)
    return np.fromiter(flat, np.int64, len(rows) * width).reshape(len(rows), width)


def widen(rows: Ints, width: int, fill: int) -> Ints:
    """[N, at least width] filled up at the end."""
    missing = width - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=fill) if missing > 0 else rows
