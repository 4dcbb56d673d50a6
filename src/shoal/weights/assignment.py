"""Which rank sends which piece, and in which bucket.

P pieces, Q pairs of (rank, worker) with something to send, B buckets.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.weights.box_table import Ints
from shoal.weights.geometry import Geometry, as_bytes
from shoal.weights.source_index import SourceIndex

_MAX_ROTATIONS = 256
"""More ways to begin with one holder or another would spread no better, and each is planned by itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Pieces sorted by pair and bucket.

    order [P]: rows of the geometry. Pair q has the pieces pair_starts[q] : pair_starts[q + 1] of that order, and the buckets
    pair_buckets[q] : pair_buckets[q + 1]; bucket b has the pieces bucket_starts[b] : bucket_starts[b + 1]. bytes_before [P + 1]: bytes of
    all earlier pieces.
    """

    order: Ints
    pair_ranks: Ints
    pair_workers: Ints
    pair_starts: Ints
    pair_buckets: Ints
    bucket_starts: Ints
    bytes_before: Ints
    digest: bytes


def num_rotations(source: SourceIndex) -> int:
    """How many assignments of replicated shards are told apart; 1 if nothing is replicated."""
    counts = np.unique(np.diff(source.holder_starts))
    return min(math.lcm(*counts.tolist()), _MAX_ROTATIONS) if counts.size else 1


def assign(geometry: Geometry, source: SourceIndex, rotation: int, bucket_bytes: int) -> Assignment:
    """Choose ranks, sort pieces by pair, and pack them.

    Args:
        rotation: which of equally loaded holders goes first.
    """
    ranks = choose_ranks(geometry.shards, geometry.num_bytes, source, rotation)
    order = np.argsort(ranks, kind="stable")
    ranks, workers, dtypes, frozen = ranks[order], geometry.worker_ranks[order], geometry.dtypes[order], geometry.frozen[order]
    bytes_before = np.concatenate(([0], np.cumsum(geometry.num_bytes[order]))).astype(np.int64)
    is_pair = np.ones(len(order), np.bool_)
    is_pair[1:] = (ranks[1:] != ranks[:-1]) | (workers[1:] != workers[:-1])
    is_group = is_pair.copy()
    is_group[1:] |= (dtypes[1:] != dtypes[:-1]) | (frozen[1:] != frozen[:-1])
    pairs = np.flatnonzero(is_pair)
    buckets = pack(bytes_before, np.flatnonzero(is_group), bucket_bytes)
    digest = hashlib.sha256(as_bytes(ranks))
    for column in (order, buckets):
        digest.update(as_bytes(column))
    return Assignment(
        order=order,
        pair_ranks=ranks[pairs],
        pair_workers=workers[pairs],
        pair_starts=np.append(pairs, len(order)),
        pair_buckets=np.append(np.searchsorted(buckets, pairs), len(buckets)),
        bucket_starts=np.append(buckets, len(order)),
        bytes_before=bytes_before,
        digest=digest.digest(),
    )


def choose_ranks(shards: Ints, num_bytes: Ints, source: SourceIndex, rotation: int) -> Ints:
    """[P] the rank that sends each piece: sole holders first, then the largest piece to the holder with the fewest bytes.

    Args:
        shards: [P] row of the source index that each piece comes from.
        num_bytes: [P].
    """
    starts = source.holder_starts
    ranks = source.holder_ranks[starts[shards]]
    shared = np.flatnonzero(starts[shards + 1] - starts[shards] > 1)
    if not shared.size:
        return ranks
    sole = np.ones(len(ranks), np.bool_)
    sole[shared] = False
    loads = np.zeros(len(source.places), np.int64)
    np.add.at(loads, ranks[sole], num_bytes[sole])
    # Pieces of equal size stay in canonical order.
    shared = shared[np.argsort(-num_bytes[shared], kind="stable")]
    ranks[shared] = _deal(_holder_sets(shards[shared], source), num_bytes[shared].tolist(), loads.tolist(), rotation)
    return ranks


def _holder_sets(shards: Ints, source: SourceIndex) -> list[tuple[int, ...]]:
    distinct, inverse = np.unique(shards, return_inverse=True)
    starts = source.holder_starts
    sets = [tuple(source.holder_ranks[starts[shard] : starts[shard + 1]].tolist()) for shard in distinct]
    return [sets[index] for index in inverse.tolist()]


def _deal(holder_sets: Sequence[tuple[int, ...]], num_bytes: Sequence[int], loads: list[int], rotation: int) -> list[int]:
    """Each piece to its least loaded holder; of equal ones the first behind the rotation.

    Each set keeps a heap of (load, turn, rank). A load only grows, so an outdated top is put back with its present load.
    """
    heaps: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    chosen = []
    for holders, size in zip(holder_sets, num_bytes, strict=True):
        heap = heaps.get(holders)
        if heap is None:
            heap = heaps[holders] = [(loads[rank], (turn - rotation) % len(holders), rank) for turn, rank in enumerate(holders)]
            heapq.heapify(heap)
        while heap[0][0] != loads[heap[0][2]]:
            _, turn, rank = heap[0]
            heapq.heapreplace(heap, (loads[rank], turn, rank))
        load, turn, rank = heap[0]
        loads[rank] = load + size
        heapq.heapreplace(heap, (load + size, turn, rank))
        chosen.append(rank)
    return chosen


def pack(bytes_before: Ints, group_starts: Ints, bucket_bytes: int) -> Ints:
    """First piece of every bucket: a group is filled into buckets in order, the next one begins where a piece does not fit any more.

    Args:
        bytes_before: [P + 1] bytes of all earlier pieces; none is larger than a bucket.
        group_starts: first piece of every group that shares no bucket with others.
    """
    limits = np.append(group_starts[1:], len(bytes_before) - 1)
    starts = [group_starts]
    current = group_starts
    while current.size:
        following = np.searchsorted(bytes_before, bytes_before[current] + bucket_bytes, side="right") - 1
        goes_on = following < limits
        current, limits = following[goes_on], limits[goes_on]
        starts.append(current)
    return np.sort(np.concatenate(starts)).astype(np.int64)
