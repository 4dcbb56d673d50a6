"""Buckets as a run of small parts: cast, laid one after another and digested while they are in the cache.

A part is filled in a buffer of 1 MiB that is used again and again, so that packing takes no memory for a whole bucket. Fresh memory would
cost several times what the copy does. A large piece that needs no cast is not copied at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash
from torch import Tensor

from shoal.weights.buckets import Bucket
from shoal.weights.dtypes import item_bytes
from shoal.weights.transports.chunks import copy_elements
from shoal.weights.transports.pieces import check_pieces, torch_dtype

_BLOCKS_PER_PART = 4
_DIRECT_BYTES = 1 << 18
"""From this size on a piece that needs no cast and lies in one run is not copied into the buffer."""


def packed_parts(bucket: Bucket, pieces: Sequence[Tensor], buffer: Tensor, digest: xxhash.xxh3_64) -> Iterator[memoryview]:
    """Yield a bucket's bytes in the serving dtype, piece after piece, row-major.

    Args:
        bucket: what the pieces belong to.
        pieces: as `host_pieces` gives them.
        buffer: [P] uint8; each part yielded is a view of it or of a piece, of at most P bytes, valid until the next is asked for.
        digest: fed with every part before that is yielded.
    """
    packer = _Packer(bucket, buffer)
    for piece in pieces:
        for part in packer.parts_of(piece):
            yield _digested(part, digest)
    for part in packer.rest():
        yield _digested(part, digest)


def pack_whole(bucket: Bucket, pieces: Sequence[Tensor], buffer: Tensor) -> int:
    """Fill a buffer with a bucket's bytes.

    Args:
        pieces: as `host_pieces` gives them.
        buffer: [num_bytes] uint8 on the CPU.
    Returns: xxh3-64 of the bytes.
    """
    packer, digest = _Packer(bucket, buffer), xxhash.xxh3_64()
    # All fits into one part.
    for piece in pieces:
        for part in packer.copy(piece):
            digest.update(part)
    for part in packer.rest():
        digest.update(part)
    return digest.intdigest()


class _Packer:
    """Fills a buffer and hands it out whenever the next block does not fit."""

    def __init__(self, bucket: Bucket, buffer: Tensor) -> None:
        self._buffer = buffer
        self._whole = memoryview(buffer.numpy().data)
        self._dtype = torch_dtype(bucket.dtype)
        self._limit = max(1, buffer.numel() // _BLOCKS_PER_PART // item_bytes(bucket.dtype, "a bucket"))
        self._filled = 0

    def parts_of(self, piece: Tensor) -> Iterator[memoryview]:
        """Hand out a piece where it is if that can be read as it is, after what is in the buffer; else as `copy`."""
        if piece.dtype == self._dtype and piece.is_contiguous() and piece.nbytes >= _DIRECT_BYTES:
            yield from self.rest()
            yield from _runs(piece, self._buffer.numel())
        else:
            yield from self.copy(piece)

    def copy(self, piece: Tensor) -> Iterator[memoryview]:
        """Cast a piece into the buffer; what is full is handed out, the last part stays."""
        for block in _blocks(piece, self._limit):
            size = block.numel() * self._dtype.itemsize
            if self._filled + size > self._buffer.numel():
                yield from self.rest()
            end = self._filled + size
            copy_elements(self._buffer[self._filled : end].view(self._dtype).view(block.shape), block)
            self._filled = end

    def rest(self) -> Iterator[memoryview]:
        """What is in the buffer."""
        if self._filled:
            yield self._whole[: self._filled]
        self._filled = 0


def _runs(piece: Tensor, size: int) -> Iterator[memoryview]:
    data = memoryview(piece.view(-1).view(torch.uint8).numpy().data)
    for start in range(0, data.nbytes, size):
        yield data[start : start + size]


def host_pieces(bucket: Bucket, pieces: Sequence[Tensor]) -> list[Tensor]:
    """The pieces in this process's own memory; those of a device are cast there, which makes the transfer smaller.

    Raises: TransportError: other shapes than the bucket's pieces, or a dtype that cannot be cast to the bucket's.
    """
    check_pieces(bucket, pieces)
    return [_on_host(piece.detach(), bucket.dtype) for piece in pieces]


def _on_host(piece: Tensor, dtype: str) -> Tensor:
    return piece if piece.device.type == "cpu" else piece.to(torch_dtype(dtype)).cpu()


def _digested(part: memoryview, digest: xxhash.xxh3_64) -> memoryview:
    digest.update(part)
    return part


def _blocks(piece: Tensor, limit: int) -> Iterator[Tensor]:
    """Views that follow one another in row-major order, each of at most `limit` elements."""
    if piece.numel() <= limit:
        if piece.numel():
            yield piece
    elif piece.is_contiguous():
        yield from torch.split(piece.view(-1), limit)
    elif piece.numel() // piece.shape[0] > limit:
        for row in piece:
            yield from _blocks(row, limit)
    else:
        yield from torch.split(piece, limit * piece.shape[0] // piece.numel())
