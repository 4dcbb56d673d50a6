"""Buckets over plain memory, for tests of what transports do with pieces."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.types.weights import Box
from shoal.weights import boxes
from shoal.weights.buckets import Bucket, Piece
from shoal.weights.dtypes import ITEM_BYTES
from shoal.weights.transports.base import LinkRequest
from shoal.weights.transports.shm import ShmSourceTransport
from shoal.weights.transports.staging import ParameterPieces, parameter_view
from tests.helpers.layouts import staged


class PlainStaging:
    """A worker's staging in this process's memory; `target` hands out its pieces."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        parameters, num_bytes = staged(shapes, dtype)
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.parameters = {one.name: parameter_view(self.buffer, one) for one in parameters}
        self.target = ParameterPieces(parameters, lambda one: parameter_view(self.buffer, one), "here")


def bucket_of(where: Sequence[tuple[str, Box]], dtype: str) -> Bucket:
    """One bucket of boxes of parameters; source tensors have the shape of the boxes."""
    pieces = tuple(Piece(parameter=name, source_name=name, source_box=boxes.whole(box.sizes), parameter_box=box) for name, box in where)
    num_elements = sum(box.num_elements for _, box in where)
    return Bucket(rank=0, worker_rank=0, index=0, dtype=dtype, pieces=pieces, num_bytes=num_elements * ITEM_BYTES[dtype])


def tensors_of(bucket: Bucket, seed: int = 0) -> list[Tensor]:
    """Random pieces in the bucket's dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(one.parameter_box.sizes, generator=generator).to(getattr(torch, bucket.dtype)) for one in bucket.pieces]


def write_and_exit(request: LinkRequest, bucket: Bucket, value: float) -> None:
    """A trainer rank in a process of its own that ends without closing anything."""
    link = ShmSourceTransport().open(request)
    link.write_dense(bucket, [torch.full(piece.parameter_box.sizes, value) for piece in bucket.pieces])
    os._exit(0)
