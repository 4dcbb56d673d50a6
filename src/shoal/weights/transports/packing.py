"""Buckets as a run of small parts: cast, laid one after another and digested while they are in the cache.

A part is filled in a buffer of 1 MiB that is used again and again, so that packing takes no memory for a whole bucket. Fresh memory would
cost several times what the copy does.
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


def packed_parts(bucket: Bucket, pieces: Sequence[Tensor], buffer: Tensor, digest: xxhash.xxh3_64) -> Iterator[memoryview]:
    """Yield a bucket's bytes in the serving dtype, piece after piece, row-major.

    Args:
        bucket: what the pieces belong to.
        pieces: as `host_pieces` gives them.
        buffer: [P] uint8; each part yielded is a view of it, valid until the next is asked for.
        digest: fed with every part before that is yielded.
    """
    whole = memoryview(buffer.numpy().data)
    limit = max(1, buffer.numel() // _BLOCKS_PER_PART // item_bytes(bucket.dtype, "a bucket"))
    dtype = torch_dtype(bucket.dtype)
    filled = 0
    for piece in pieces:
        for block in _blocks(piece, limit):
            size = block.numel() * dtype.itemsize
            if filled + size > buffer.numel():
                yield _digested(whole[:filled], digest)
                filled = 0
            copy_elements(buffer[filled : filled + size].view(dtype).view(block.shape), block)
            filled += size
    if filled:
        yield _digested(whole[:filled], digest)


def pack_whole(bucket: Bucket, pieces: Sequence[Tensor], buffer: Tensor) -> int:
    """Fill a buffer with a bucket's bytes.

    Args:
        pieces: as `host_pieces` gives them.
        buffer: [num_bytes] uint8 on the CPU.
    Returns: xxh3-64 of the bytes.
    """
    digest = xxhash.xxh3_64()
    for _ in packed_parts(bucket, pieces, buffer, digest):
        # All fits into one part.
        continue
    return digest.intdigest()


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
