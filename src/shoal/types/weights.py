"""Layouts and digests of a weight push. Plain Python: the coordinator uses them without torch.

A tensor is named by its Hugging Face name on the trainer's side (source) and by its engine parameter on the rollout side (sink).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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
class SourceShard:
    """What one trainer rank holds of one Hugging Face tensor. dtype is a codec dtype name such as "float32"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rank: int
    box: Box


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
    """What one engine worker (tensor-parallel rank) needs."""

    worker_rank: int
    parameters: tuple[SinkParameter, ...]
    regions: tuple[SinkRegion, ...]
    staging_path: str
    staging_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkLayout:
    """All workers of one rollout server."""

    server_id: str
    workers: tuple[SinkWorkerLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDigest:
    """xxh3-64 of the bytes written into one box of one engine parameter, in row-major order of the box."""

    worker_rank: int
    parameter: str
    parameter_box: Box
    xxh3: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkVerified:
    """Answer of VERIFY: bytes checked and how long that took."""

    num_bytes: int
    verify_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCommitted:
    """Answer of COMMIT: the version now served and how long serving was paused."""

    policy_version: int
    pause_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePrepared:
    """Answer of the source's PREPARE: hash and size of the whole plan."""

    plan_hash: str
    num_copies: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTransferred:
    """Answer of TRANSFER: one digest per copy, by server_id."""

    digests: dict[str, list[CopyDigest]]
    num_bytes: int
    transfer_ms: float
