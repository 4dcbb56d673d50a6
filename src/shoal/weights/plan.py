"""The plan of a push for one server, answered pair by pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.types.weights import Box, PairDigests
from shoal.weights.assignment import Assignment
from shoal.weights.buckets import Bucket, Piece
from shoal.weights.geometry import Geometry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServerPlan:
    """What every trainer rank sends to every worker of one server, in buckets. Arrays inside; Bucket objects are made when asked for."""

    server_id: str
    plan_hash: str
    num_bytes: int
    num_buckets: int
    num_pieces: int
    geometry: Geometry = field(repr=False)
    assignment: Assignment = field(repr=False)
    transports: Mapping[tuple[int, int], str] = field(repr=False)
    rows: Mapping[tuple[int, int], int] = field(repr=False)

    @property
    def largest_bucket_bytes(self) -> int:
        """Bytes of the largest bucket, 0 without any: what a rank holds beyond its shard."""
        ends = self.assignment.bytes_before[self.assignment.bucket_starts]
        return int((ends[1:] - ends[:-1]).max(initial=0))

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(rank, worker_rank) with something to send, sorted."""
        return tuple(self.rows)

    def transport_of(self, rank: int, worker_rank: int) -> str:
        """How the pair's buckets travel. Raises: KeyError: the pair has nothing to send."""
        return self.transports[rank, worker_rank]

    def num_buckets_of(self, rank: int, worker_rank: int) -> int:
        """Buckets of a pair; 0 for one that has nothing to send."""
        row = self.rows.get((rank, worker_rank))
        return 0 if row is None else int(self.assignment.pair_buckets[row + 1] - self.assignment.pair_buckets[row])

    def bytes_of(self, rank: int, worker_rank: int) -> int:
        """Bytes of a pair in the serving dtype; 0 for one that has nothing to send."""
        row = self.rows.get((rank, worker_rank))
        if row is None:
            return 0
        first, last = self.assignment.pair_starts[row], self.assignment.pair_starts[row + 1]
        return int(self.assignment.bytes_before[last] - self.assignment.bytes_before[first])

    def buckets(self, rank: int, worker_rank: int) -> tuple[Bucket, ...]:
        """The pair's buckets in the order of sending; () for one that has nothing to send."""
        row = self.rows.get((rank, worker_rank))
        if row is None:
            return ()
        first, last = (int(self.assignment.pair_starts[row + end]) for end in (0, 1))
        pieces = self._pieces(first, last)
        low, high = (int(self.assignment.pair_buckets[row + end]) for end in (0, 1))
        starts = self.assignment.bucket_starts[low : high + 1].tolist()
        dtypes = self.geometry.dtypes[self.assignment.order[starts[:-1]]].tolist()
        before = self.assignment.bytes_before[starts].tolist()
        return tuple(
            Bucket(
                rank=rank,
                worker_rank=worker_rank,
                index=index,
                dtype=self.geometry.dtype_table[dtype],
                pieces=tuple(pieces[starts[index] - first : starts[index + 1] - first]),
                num_bytes=before[index + 1] - before[index],
            )
            for index, dtype in enumerate(dtypes)
        )

    def coverage_fault(self, pairs: Sequence[PairDigests]) -> str | None:
        """Why the digests are not exactly one, with its encoding, for each bucket of the plan; None if they are."""
        seen: set[tuple[int, int]] = set()
        for pair in pairs:
            key = pair.rank, pair.worker_rank
            if key not in self.rows:
                return f"{_pair(key)} was written but not planned"
            if key in seen:
                return f"{_pair(key)} is reported twice"
            seen.add(key)
            planned = self.num_buckets_of(*key)
            if len(pair.xxh3) != planned or len(pair.encodings) != planned:
                got = f"{len(pair.xxh3)} digests and {len(pair.encodings)} encodings"
                return f"{_pair(key)} has {planned} buckets, beginning with {self._first_parameter(key)}, but {got}"
        absent = next((key for key in self.rows if key not in seen), None)
        return None if absent is None else f"{_pair(absent)}, beginning with {self._first_parameter(absent)}, was planned but not written"

    def _first_parameter(self, key: tuple[int, int]) -> str:
        piece = int(self.assignment.order[self.assignment.pair_starts[self.rows[key]]])
        return self.geometry.parameter_table[int(self.geometry.parameters[piece])].name

    def _pieces(self, first: int, last: int) -> list[Piece]:
        geometry, rows = self.geometry, self.assignment.order[first:last]
        columns = zip(
            geometry.parameters[rows].tolist(),
            geometry.tensors[rows].tolist(),
            geometry.num_dims[rows].tolist(),
            map(tuple, geometry.source_offsets[rows].tolist()),
            map(tuple, geometry.target_offsets[rows].tolist()),
            map(tuple, geometry.sizes[rows].tolist()),
            strict=True,
        )
        return [
            Piece(
                parameter=geometry.parameter_table[parameter].name,
                source_name=geometry.tensor_table[tensor].name,
                source_box=Box(offsets=source[:dims], sizes=sizes[:dims]),
                parameter_box=Box(offsets=target[:dims], sizes=sizes[:dims]),
            )
            for parameter, tensor, dims, source, target, sizes in columns
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PushPlan:
    """The plans of all servers, and why those that have none are left out; by server_id."""

    servers: dict[str, ServerPlan]
    errors: dict[str, str]


def _pair(key: tuple[int, int]) -> str:
    return f"rank {key[0]} to worker {key[1]}"
