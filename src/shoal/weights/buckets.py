"""The unit of sending and checking: some pieces that one trainer rank has for one engine worker."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.types.weights import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box that a rank writes into one engine parameter.

    source_box is in coordinates of the whole Hugging Face tensor, parameter_box in those of the worker's parameter; sizes are equal.
    """

    parameter: str
    source_name: str
    source_box: Box
    parameter_box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Pieces of one serving dtype, all trained or all frozen, at most `push.bucket_bytes`. index counts within (rank, worker_rank)."""

    rank: int
    worker_rank: int
    index: int
    dtype: str
    pieces: tuple[Piece, ...]
    num_bytes: int
