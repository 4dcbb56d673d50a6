"""Layouts, plans' answers and digests of a weight push. Plain Python: the coordinator uses them without torch.

A tensor is named by its Hugging Face name on the trainer's side (source) and by its engine parameter on the rollout side (sink).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """An axis-aligned part of a tensor: [offset, offset + size) along each dim; () for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements inside the box."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one end of a link runs.

    host_id is equal for two processes that can map each other's staging files; device is "cpu" or "cuda".
    """

    host_id: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """A box of a tensor that a trainer rank holds."""

    rank: int
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """One Hugging Face tensor and who holds what of it. dtype is a codec dtype name such as "float32".

    Replicated boxes appear for every rank that holds them; a rank may hold several boxes. frozen: it is not trained; its pieces share no
    bucket with others, so that none of it is sent twice.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: tuple[TensorShard, ...]
    frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLayout:
    """What a whole gang holds. source_id differs for every start of the gang; places are by rank."""

    source_id: str
    tensors: tuple[SourceTensor, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRegion:
    """A region of an engine parameter and the part of a Hugging Face tensor that belongs there (same sizes)."""

    parameter: str
    source_name: str
    source_box: Box
    parameter_box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkParameter:
    """One engine parameter and where it starts in the worker's staging buffer; row-major there."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    staging_offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkWorkerLayout:
    """What one engine worker (tensor-parallel rank) needs, and how each offered transport reaches it.

    endpoints: transport name to address: "shm" a path, "grpc" host:port, "collective" host:port of a store, "cuda_ipc" a memory handle.
    """

    worker_rank: int
    parameters: tuple[SinkParameter, ...]
    regions: tuple[SinkRegion, ...]
    staging_bytes: int
    place: Place
    endpoints: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkLayout:
    """All workers of one rollout server."""

    server_id: str
    workers: tuple[SinkWorkerLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVersion:
    """Which complete version a server's staging holds, and of which gang."""

    source_id: str
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkPrepared:
    """Answer of the sink's PREPARE. staged is None if staging holds no complete version."""

    layout: SinkLayout
    served_version: int
    staged: StagedVersion | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkPlanned:
    """Answer of the sink's planning. collective_group is empty unless the collective transport is used."""

    num_buckets: int
    collective_group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTarget:
    """One server that a push goes to. dense: send everything, whatever its staging holds."""

    layout: SinkLayout
    staged: StagedVersion | None
    dense: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedServer:
    """What the source planned for one server."""

    plan_hash: str
    num_bytes: int


class BucketEncoding(IntEnum):
    """How a bucket crossed the link; numbers as in the proto."""

    DENSE = 1
    DELTA = 2
    UNCHANGED = 3


class InflightMode(StrEnum):
    """What happens to requests that are running at COMMIT."""

    KEEP = "keep"
    ABORT = "abort"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDigests:
    """The buckets that one trainer rank has for one engine worker, in the plan's order; one entry per bucket.

    xxh3 is the digest of the bucket's complete bytes in the serving dtype: its pieces one after another, each row-major.
    """

    rank: int
    worker_rank: int
    xxh3: tuple[int, ...]
    encodings: tuple[BucketEncoding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceDigests:
    """Digests of the pieces of one pair, in the plan's order: xxh3-64 of the serving-dtype values with zeros made positive."""

    rank: int
    worker_rank: int
    xxh3: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkVerified:
    """Answer of VERIFY: bytes checked and how long that took."""

    num_bytes: int
    verify_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCommitted:
    """Answer of COMMIT: the version now served, how long serving was paused, and requests that were aborted."""

    policy_version: int
    pause_ms: float
    num_aborted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTransfer:
    """What the ranks sent to one server. error is empty if it got everything.

    sent_bytes crossed the link; dense_bytes is what they stand for.
    """

    pairs: tuple[PairDigests, ...]
    sent_bytes: int
    dense_bytes: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTransferred:
    """Answer of TRANSFER, by server_id."""

    servers: dict[str, ServerTransfer]
    transfer_ms: float
