"""Who copies what where: a pure function from the two layouts of a push to copy lists.

Trainer shards and sink regions are boxes of the same Hugging Face tensor; each non-empty intersection is one copy. Because the distinct
shard boxes of a tensor are checked to cover it exactly once, and the regions of an engine parameter to be disjoint, every destination
element of every region is written exactly once.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from shoal.errors import TransportError
from shoal.types.weights import Box, CopyDigest, SinkLayout, SinkParameter, SinkRegion, SinkWorkerLayout, SourceShard
from shoal.weights import boxes
from shoal.weights.dtypes import is_castable, item_bytes

TIED_HEAD = "lm_head.weight"
"""Absent on either side where it is tied to the embedding."""
_EMBEDDING_SUFFIX = "embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One box that one trainer rank writes into one engine worker.

    source_box is in coordinates of the whole Hugging Face tensor, parameter_box in those of the worker's parameter.
    """

    rank: int
    server_id: str
    worker_rank: int
    parameter: str
    source_name: str
    source_box: Box
    parameter_box: Box
    num_bytes: int

    @property
    def key(self) -> tuple[str, int, str, Box]:
        """Identity of the destination: server, worker, parameter, box."""
        return self.server_id, self.worker_rank, self.parameter, self.parameter_box


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    """All copies of a push, in a canonical order."""

    copies: tuple[Copy, ...]
    plan_hash: str
    num_bytes: int
    _by_rank: Mapping[int, tuple[Copy, ...]] = field(repr=False)

    def copies_of(self, rank: int) -> tuple[Copy, ...]:
        """The copies that one trainer rank carries out; () for a rank that holds nothing."""
        return self._by_rank.get(rank, ())

    def coverage_fault(self, server_id: str, digests: Sequence[CopyDigest]) -> str | None:
        """Why the digests are not exactly one for each copy into a server; None if they are."""
        planned = {copy.key[1:] for copy in self.copies if copy.server_id == server_id}
        written = [(digest.worker_rank, digest.parameter, digest.parameter_box) for digest in digests]
        unplanned = next((key for key in written if key not in planned), None)
        if unplanned is not None:
            return f"{_target(unplanned)} was written but not planned"
        absent = min(planned.difference(written), key=_target, default=None)
        if absent is not None:
            return f"{_target(absent)} was planned but not written"
        return f"{len(written)} digests for {len(planned)} copies" if len(written) != len(planned) else None


@dataclass(frozen=True, slots=True)
class _Need:
    """One intersection before a rank is chosen for it."""

    server_id: str
    worker_rank: int
    region: SinkRegion
    source_name: str
    source_box: Box
    num_bytes: int
    holders: tuple[int, ...]


class _SourceTensor:
    """The distinct shards of one tensor, sorted so that the ones that meet a region are found by bisection."""

    def __init__(self, shards: Sequence[SourceShard]) -> None:
        first = shards[0]
        self.name, self.shape, self.dtype = first.name, first.shape, first.dtype
        holders: defaultdict[Box, set[int]] = defaultdict(set)
        for shard in shards:
            if (shard.shape, shard.dtype) != (self.shape, self.dtype):
                msg = (
                    f"{shard.name} is {shard.dtype}{list(shard.shape)} on rank {shard.rank} "
                    f"but {self.dtype}{list(self.shape)} on rank {first.rank}"
                )
                raise TransportError(msg)
            if shard.box.num_elements > 0:
                holders[shard.box].add(shard.rank)
        fault = boxes.cover_fault(boxes.whole(self.shape), tuple(holders))
        if fault is not None:
            msg = f"the trainer's shards of {self.name} do not make up the tensor {list(self.shape)}: {fault}"
            raise TransportError(msg)
        self._boxes = sorted(holders, key=lambda box: (box.offsets, box.sizes))
        self._holders = {box: tuple(sorted(ranks)) for box, ranks in holders.items()}
        self._starts = [box.offsets[0] if box.offsets else 0 for box in self._boxes]
        self._ends = list(accumulate((box.offsets[0] + box.sizes[0] if box.offsets else 1 for box in self._boxes), max))

    def parts_of(self, region: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """The parts of a box and the ranks that hold each."""
        start, end = (region.offsets[0], region.offsets[0] + region.sizes[0]) if region.offsets else (0, 1)
        for box in self._boxes[bisect_right(self._ends, start) : bisect_left(self._starts, end)]:
            part = boxes.intersect(box, region)
            if part is not None:
                yield part, self._holders[box]


def plan_copies(shards: Sequence[SourceShard], sinks: Sequence[SinkLayout]) -> PushPlan:
    """Plan a push: the same result, and hash, for the same layouts in any order.

    Args:
        shards: what every trainer rank holds; a box that several ranks hold is written by one of them, balanced by bytes.
        sinks: what every rollout server needs.
    Raises: TransportError: a source tensor or parameter that is missing, shaped otherwise, or not covered exactly once; names it.
    """
    sources = _index_sources(shards)
    sinks = sorted(sinks, key=lambda sink: sink.server_id)
    _check_unique([sink.server_id for sink in sinks], "server")
    needs: list[_Need] = []
    for sink in sinks:
        needs.extend(_needs_of(sink, sources))
    copies = tuple(sorted(_choose_ranks(needs), key=_canonical_order))
    by_rank: defaultdict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        by_rank[copy.rank].append(copy)
    return PushPlan(
        copies=copies,
        plan_hash=_hash_plan(copies, sinks),
        num_bytes=sum(copy.num_bytes for copy in copies),
        _by_rank={rank: tuple(rank_copies) for rank, rank_copies in by_rank.items()},
    )


def _index_sources(shards: Sequence[SourceShard]) -> dict[str, _SourceTensor]:
    by_name: defaultdict[str, list[SourceShard]] = defaultdict(list)
    for shard in shards:
        by_name[shard.name].append(shard)
    return {name: _SourceTensor(named) for name, named in by_name.items()}


def _needs_of(sink: SinkLayout, sources: Mapping[str, _SourceTensor]) -> Iterator[_Need]:
    _check_unique([worker.worker_rank for worker in sink.workers], f"worker rank of server {sink.server_id}")
    used: set[str] = set()
    for worker in sorted(sink.workers, key=lambda worker: worker.worker_rank):
        parameters = _check_worker(sink.server_id, worker)
        for region in worker.regions:
            source = _source_of(region, sources)
            used.add(source.name)
            item = _check_region(region, parameters[region.parameter], source)
            for part, holders in source.parts_of(region.source_box):
                yield _Need(sink.server_id, worker.worker_rank, region, source.name, part, part.num_elements * item, holders)
    unused = sorted(sources.keys() - used - {TIED_HEAD})
    if unused:
        msg = f"server {sink.server_id} takes nothing of {len(unused)} trained tensors, first {unused[0]}; do both hold the same model?"
        raise TransportError(msg)


def _check_worker(server_id: str, worker: SinkWorkerLayout) -> dict[str, SinkParameter]:
    """Every parameter has disjoint regions inside it and lies inside staging; answers the parameters by name."""
    where = f"worker {worker.worker_rank} of server {server_id}"
    _check_unique([parameter.name for parameter in worker.parameters], f"parameter of {where}")
    parameters = {parameter.name: parameter for parameter in worker.parameters}
    regions: dict[str, list[Box]] = {name: [] for name in parameters}
    for region in worker.regions:
        if region.parameter not in regions:
            msg = f"{where} wants a region of {region.parameter}, which it does not list"
            raise TransportError(msg)
        regions[region.parameter].append(region.parameter_box)
    for name, parameter_boxes in regions.items():
        _check_parameter(parameters[name], parameter_boxes, where)
    _check_staging(worker, where)
    return parameters


def _check_parameter(parameter: SinkParameter, parameter_boxes: Sequence[Box], where: str) -> None:
    target = boxes.whole(parameter.shape)
    outside = next((box for box in parameter_boxes if not boxes.contains(target, box)), None)
    if outside is not None:
        msg = f"{parameter.name} of {where} has shape {list(parameter.shape)}; region {boxes.describe(outside)} lies outside"
        raise TransportError(msg)
    overlap = boxes.find_overlap(parameter_boxes)
    if overlap is not None:
        msg = f"{parameter.name} of {where} has overlapping regions {boxes.describe(overlap[0])} and {boxes.describe(overlap[1])}"
        raise TransportError(msg)
    # Part of a parameter may stay as it is (vocabulary padding), but one that takes nothing was forgotten.
    if not parameter_boxes and target.num_elements > 0:
        msg = f"{parameter.name} of {where} has no region; no trained tensor would reach it"
        raise TransportError(msg)


def _check_staging(worker: SinkWorkerLayout, where: str) -> None:
    end, previous = 0, "the start"
    for parameter in sorted(worker.parameters, key=lambda parameter: parameter.staging_offset_bytes):
        num_bytes = boxes.whole(parameter.shape).num_elements * item_bytes(parameter.dtype, parameter.name)
        if parameter.staging_offset_bytes < end:
            msg = f"{parameter.name} of {where} is staged at byte {parameter.staging_offset_bytes}, inside {previous}"
            raise TransportError(msg)
        end, previous = parameter.staging_offset_bytes + num_bytes, parameter.name
        if end > worker.staging_bytes:
            msg = f"{parameter.name} of {where} ends at byte {end} of a staging buffer of {worker.staging_bytes}"
            raise TransportError(msg)


def _source_of(region: SinkRegion, sources: Mapping[str, _SourceTensor]) -> _SourceTensor:
    source = sources.get(region.source_name)
    if source is None and region.source_name == TIED_HEAD:
        embeddings = [tensor for name, tensor in sources.items() if name.endswith(_EMBEDDING_SUFFIX)]
        source = embeddings[0] if len(embeddings) == 1 else None
    if source is None:
        msg = f"{region.parameter} needs {region.source_name}, which no trainer rank holds"
        raise TransportError(msg)
    return source


def _check_region(region: SinkRegion, parameter: SinkParameter, source: _SourceTensor) -> int:
    """The region fits its source; answers the bytes of an element in the serving dtype."""
    if not boxes.contains(boxes.whole(source.shape), region.source_box):
        msg = (
            f"{region.parameter} needs {boxes.describe(region.source_box)} of {source.name}, "
            f"which has shape {list(source.shape)} on the trainer"
        )
        raise TransportError(msg)
    if region.source_box.sizes != region.parameter_box.sizes:
        msg = (
            f"{region.parameter} maps {boxes.describe(region.source_box)} of {source.name} "
            f"to {boxes.describe(region.parameter_box)}; the sizes differ"
        )
        raise TransportError(msg)
    if not is_castable(source.dtype, parameter.dtype):
        msg = f"{region.parameter} is {parameter.dtype} but {source.name} is {source.dtype}, which is not cast"
        raise TransportError(msg)
    return item_bytes(parameter.dtype, parameter.name)


def _choose_ranks(needs: Sequence[_Need]) -> Iterator[Copy]:
    """Give each need to a rank that holds it: sole holders first, then the largest to the rank with the fewest bytes."""
    load: defaultdict[int, int] = defaultdict(int)
    for need in sorted(needs, key=_choosing_order):
        rank = min(need.holders, key=lambda holder: (load[holder], holder))
        load[rank] += need.num_bytes
        yield Copy(
            rank=rank,
            server_id=need.server_id,
            worker_rank=need.worker_rank,
            parameter=need.region.parameter,
            source_name=need.source_name,
            source_box=need.source_box,
            parameter_box=boxes.move(need.source_box, origin=need.region.source_box, target=need.region.parameter_box),
            num_bytes=need.num_bytes,
        )


def _choosing_order(need: _Need) -> tuple[bool, int, str, int, str, tuple[int, ...], tuple[int, ...]]:
    region = need.region
    where = (need.server_id, need.worker_rank, region.parameter, region.parameter_box.offsets, need.source_box.offsets)
    return len(need.holders) > 1, -need.num_bytes, *where


def _hash_plan(copies: Sequence[Copy], sinks: Sequence[SinkLayout]) -> str:
    """sha256 over copies and staging places, one line each in canonical order."""
    digest = hashlib.sha256(b"shoal-push-plan-1\n")
    for sink in sinks:
        for worker in sorted(sink.workers, key=lambda worker: worker.worker_rank):
            digest.update(f"{sink.server_id!r} {worker.worker_rank} {worker.staging_path!r} {worker.staging_bytes}\n".encode())
            for parameter in sorted(worker.parameters, key=lambda parameter: parameter.name):
                line = f"{parameter.name!r} {parameter.shape} {parameter.dtype} {parameter.staging_offset_bytes}\n"
                digest.update(line.encode())
    for copy in copies:
        line = f"{copy.rank} {_canonical_order(copy)} {copy.source_name!r} {copy.source_box.offsets} {copy.source_box.sizes}\n"
        digest.update(line.encode())
    return digest.hexdigest()


def _canonical_order(copy: Copy) -> tuple[str, int, str, tuple[int, ...], tuple[int, ...]]:
    return copy.server_id, copy.worker_rank, copy.parameter, copy.parameter_box.offsets, copy.parameter_box.sizes


def _check_unique(names: Sequence[str | int], what: str) -> None:
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) != len(names) else None
    if twice is not None:
        msg = f"{what} {twice!r} appears twice"
        raise TransportError(msg)


def _target(key: tuple[int, str, Box]) -> str:
    return f"{boxes.describe(key[2])} of {key[1]} on worker {key[0]}"
