"""Who sends what where: a pure function from the two layouts of a push to buckets for every pair of trainer rank and engine worker.

Trainer shards and engine regions are boxes of the same Hugging Face tensor; each non-empty intersection is a piece. Because the distinct
shard boxes of a tensor are checked to cover it exactly once, and the regions of an engine parameter to be disjoint, every destination
element of every region is written exactly once. The plan of a server depends on no other server, and not on the order of its input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from shoal.errors import TransportError
from shoal.types.weights import Place, SinkLayout, SourceLayout
from shoal.weights.assignment import Assignment, assign, num_rotations
from shoal.weights.dtypes import ITEM_BYTES
from shoal.weights.geometry import Geometry, build_geometry
from shoal.weights.places import choose_transport
from shoal.weights.plan import PushPlan, ServerPlan
from shoal.weights.sink_index import SinkIndex
from shoal.weights.source_index import SourceIndex, check_unique

_SharedKey = tuple[object, ...]


def plan_server(source: SourceLayout, sink: SinkLayout, *, bucket_bytes: int, transport: str) -> ServerPlan:
    """Plan one server's part of a push: the same result, and hash, for the same layouts in any order.

    Args:
        source: what every trainer rank holds; a box that several ranks hold is sent by one of them, balanced by bytes.
        sink: what the server's workers need.
        bucket_bytes: largest unit of sending, at least one element.
        transport: a transport's name, or auto.
    Raises: TransportError: a tensor or parameter that is missing, shaped otherwise, or not covered exactly once (names it), or a pair that
        no transport connects.
    """
    return _Planner(source, bucket_bytes=bucket_bytes, transport=transport).plan(sink)


def plan_push(source: SourceLayout, sinks: Sequence[SinkLayout], *, bucket_bytes: int, transport: str) -> PushPlan:
    """Plan a push to several servers, each as `plan_server` does; servers of equal layout share the work.

    Raises: TransportError: the trainer's own layout has a fault, or a server appears twice. A fault of one server is in `errors`.
    """
    check_unique([sink.server_id for sink in sinks], "server")
    planner = _Planner(source, bucket_bytes=bucket_bytes, transport=transport)
    plan = PushPlan(servers={}, errors={})
    for sink in sorted(sinks, key=lambda sink: sink.server_id):
        try:
            plan.servers[sink.server_id] = planner.plan(sink)
        except TransportError as error:
            plan.errors[sink.server_id] = str(error)
    return plan


class _Planner:
    """One source against any number of sinks."""

    def __init__(self, source: SourceLayout, *, bucket_bytes: int, transport: str) -> None:
        if bucket_bytes < max(ITEM_BYTES.values()):
            msg = f"bucket_bytes is {bucket_bytes}; it must hold an element of every dtype: at least {max(ITEM_BYTES.values())}"
            raise TransportError(msg)
        self._source = SourceIndex(source)
        self._num_rotations = num_rotations(self._source)
        self._bucket_bytes, self._transport = bucket_bytes, transport
        self._geometries: dict[_SharedKey, Geometry] = {}
        self._assignments: dict[tuple[int, int], Assignment] = {}

    def plan(self, sink: SinkLayout) -> ServerPlan:
        geometry = self._geometry(sink)
        assignment = self._assign(geometry, _stable_hash(sink.server_id) % self._num_rotations)
        pairs = list(zip(assignment.pair_ranks.tolist(), assignment.pair_workers.tolist(), strict=True))
        transports = self._choose_transports(sink, pairs)
        return ServerPlan(
            server_id=sink.server_id,
            plan_hash=_hash_plan(sink.server_id, geometry, assignment, transports),
            num_bytes=int(assignment.bytes_before[-1]),
            num_buckets=len(assignment.bucket_starts) - 1,
            num_pieces=len(assignment.order),
            geometry=geometry,
            assignment=assignment,
            transports=transports,
            rows={pair: row for row, pair in enumerate(pairs)},
        )

    def _geometry(self, sink: SinkLayout) -> Geometry:
        key = tuple((worker.worker_rank, worker.parameters, worker.regions, worker.staging_bytes) for worker in sink.workers)
        if key not in self._geometries:
            self._geometries[key] = build_geometry(self._source, SinkIndex(sink, self._source), self._bucket_bytes)
        return self._geometries[key]

    def _assign(self, geometry: Geometry, rotation: int) -> Assignment:
        key = id(geometry), rotation
        if key not in self._assignments:
            self._assignments[key] = assign(geometry, self._source, rotation, self._bucket_bytes)
        return self._assignments[key]

    def _choose_transports(self, sink: SinkLayout, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], str]:
        workers = {worker.worker_rank: worker for worker in sink.workers}
        chosen: dict[tuple[Place, int], str] = {}
        transports = {}
        for rank, worker_rank in pairs:
            link = self._source.places[rank], worker_rank
            if link not in chosen:
                chosen[link] = choose_transport(self._transport, link[0], workers[worker_rank])
            transports[rank, worker_rank] = chosen[link]
        return transports


def _stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _hash_plan(server_id: str, geometry: Geometry, assignment: Assignment, transports: Mapping[tuple[int, int], str]) -> str:
    digest = hashlib.sha256(f"{server_id!r}\n".encode())
    digest.update(geometry.digest)
    digest.update(assignment.digest)
    for (rank, worker_rank), transport in transports.items():
        digest.update(f"{rank} {worker_rank} {transport}\n".encode())
    return digest.hexdigest()
