"""The trainer's side of a plan: which ranks hold which box of which tensor, checked and ready to be met by engine regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shoal.errors import TransportError
from shoal.types.weights import SourceLayout, SourceTensor
from shoal.weights import boxes
from shoal.weights.box_table import BoxTable, Ints, Sweep

TIED_HEAD = "lm_head.weight"
"""Absent on either side where it is tied to the embedding."""
_EMBEDDING_SUFFIX = "embed_tokens.weight"


class Meeting(NamedTuple):
    """Where regions meet shards; [P] rows. region: row of the regions; shard: row of the index; offsets, sizes [P, D]: the common part."""

    region: Ints
    shard: Ints
    offsets: Ints
    sizes: Ints


class SourceIndex:
    """The distinct boxes of every tensor and their holders.

    Tensors are in the order of their names, whatever the layout's order. `holder_starts` [boxes + 1] cuts `holder_ranks` by box; ranks of a
    box ascend.
    """

    def __init__(self, layout: SourceLayout) -> None:
        """Check and index a layout. Raises: TransportError: a tensor twice, or not covered exactly once by its shards; names it."""
        self.places = layout.places
        self.tensors = tuple(sorted(layout.tensors, key=lambda tensor: tensor.name))
        self.index_of = {tensor.name: index for index, tensor in enumerate(self.tensors)}
        check_unique([tensor.name for tensor in self.tensors], "trained tensor")
        shards, ranks = self._held_boxes()
        distinct, self.holder_starts, self.holder_ranks = _group_holders(shards, ranks)
        self._check_cover(distinct)
        self._sweep = Sweep(distinct)
        order = self._sweep.order
        self.holder_starts, self.holder_ranks = _reorder(self.holder_starts, self.holder_ranks, order)

    @property
    def width(self) -> int:
        """D of the boxes."""
        return self._sweep.table.width

    def resolve(self, name: str, parameter: str) -> int:
        """Index of the tensor that a parameter asks for; the embedding stands in for a tied head.

        Raises: TransportError: no rank holds it.
        """
        index = self.index_of.get(name)
        if index is None and name == TIED_HEAD:
            embeddings = [index for name, index in self.index_of.items() if name.endswith(_EMBEDDING_SUFFIX)]
            index = embeddings[0] if len(embeddings) == 1 else None
        if index is None:
            msg = f"{parameter} needs {name}, which no trainer rank holds"
            raise TransportError(msg)
        return index

    def meet(self, regions: BoxTable) -> Meeting:
        """All non-empty intersections of the shards with regions, which lie inside their tensors and are not empty."""
        shards = self._sweep.table.widen(regions.width)
        regions = regions.widen(shards.width)
        region_ends, shard_ends = regions.ends, shards.ends
        parts = []
        for row, shard in self._sweep.candidates(regions):
            starts = np.maximum(regions.offsets[row], shards.offsets[shard])
            sizes = np.minimum(region_ends[row], shard_ends[shard]) - starts
            real = (sizes > 0).all(axis=1)
            parts.append(Meeting(row[real], shard[real], starts[real], sizes[real]))
        none = Meeting(np.zeros(0, np.int64), np.zeros(0, np.int64), *np.zeros((2, 0, shards.width), np.int64))
        return Meeting(*(np.concatenate(columns) for columns in zip(none, *parts, strict=True)))

    def _held_boxes(self) -> tuple[BoxTable, Ints]:
        """Every non-empty box of every rank, and the ranks."""
        held = [(index, shard) for index, tensor in enumerate(self.tensors) for shard in tensor.shards]
        table = BoxTable.of([index for index, _ in held], [shard.box for _, shard in held])
        ranks = np.fromiter((shard.rank for _, shard in held), np.int64, len(held))
        unplaced = np.flatnonzero((ranks < 0) | (ranks >= len(self.places)))
        if unplaced.size:
            index, shard = held[int(unplaced[0])]
            msg = f"rank {shard.rank} holds a part of {self.tensors[index].name}, but the layout places only {len(self.places)} ranks"
            raise TransportError(msg)
        outside = table.outside([tensor.shape for tensor in self.tensors])
        if outside.size:
            index, shard = held[int(outside[0])]
            self._refuse(index, f"{boxes.describe(shard.box)} of rank {shard.rank} lies outside")
        live = np.flatnonzero((table.sizes > 0).all(axis=1))
        return table.take(live), ranks[live]

    def _check_cover(self, distinct: BoxTable) -> None:
        overlap = distinct.find_overlap()
        if overlap is not None:
            left, right = (boxes.describe(distinct.box(row)) for row in overlap)
            self._refuse(int(distinct.owners[overlap[0]]), f"{left} and {right} overlap")
        held = np.zeros(len(self.tensors), np.int64)
        np.add.at(held, distinct.owners, distinct.sizes.prod(axis=1))
        for index, tensor in enumerate(self.tensors):
            wanted = boxes.whole(tensor.shape).num_elements
            if held[index] != wanted:
                self._refuse(index, f"{wanted - held[index]} of {wanted} elements are missing")

    def _refuse(self, index: int, fault: str) -> None:
        tensor: SourceTensor = self.tensors[index]
        msg = f"the trainer's shards of {tensor.name} do not make up the tensor {list(tensor.shape)}: {fault}"
        raise TransportError(msg)


def _group_holders(shards: BoxTable, ranks: Ints) -> tuple[BoxTable, Ints, Ints]:
    """Distinct boxes, and the ranks that hold each as (starts, ranks)."""
    order = np.lexsort((ranks, *shards.sizes.T, *shards.offsets.T, shards.owners))
    shards, ranks = shards.take(order), ranks[order]
    is_new = np.ones(len(ranks), np.bool_)
    keys = np.concatenate((shards.owners[:, None], shards.offsets, shards.sizes), axis=1)
    is_new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    is_other_rank = is_new.copy()
    is_other_rank[1:] |= ranks[1:] != ranks[:-1]
    group = np.cumsum(is_new) - 1
    counts = np.bincount(group[is_other_rank], minlength=int(is_new.sum()))
    return shards.take(np.flatnonzero(is_new)), np.concatenate(([0], np.cumsum(counts))).astype(np.int64), ranks[is_other_rank]


def _reorder(starts: Ints, ranks: Ints, order: Ints) -> tuple[Ints, Ints]:
    """The same groups of ranks in another order of the boxes."""
    counts = np.diff(starts)[order]
    ends = np.cumsum(counts)
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(ends - counts, counts)
    return np.concatenate(([0], ends)).astype(np.int64), ranks[np.repeat(starts[:-1][order], counts) + within]


def check_unique(names: Sequence[str | int], what: str) -> None:
    """Raises: TransportError: a name appears twice; names it."""
    seen: set[str | int] = set()
    for name in names:
        if name in seen:
            msg = f"{what} {name!r} appears twice"
            raise TransportError(msg)
        seen.add(name)
