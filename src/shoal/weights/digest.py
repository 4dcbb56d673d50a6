"""xxh3-64 of array bytes: what both ends of a push compare."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

CHUNK_BYTES = 1 << 20
"""Bytes handled at once: a chunk stays in the cache between copying and hashing, and a strided array is never copied whole."""


def xxh3_of(array: NDArray[np.generic]) -> int:
    """Digest an array's elements in row-major order, whatever its strides.

    Args:
        array: any shape and dtype; bfloat16 as a view of another two-byte dtype.
    Returns: xxh3-64 of `array.tobytes()`.
    """
    digest = xxhash.xxh3_64()
    for chunk in row_chunks(array):
        digest.update(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
    return digest.intdigest()


def row_chunks(array: NDArray[np.generic]) -> Iterator[NDArray[np.generic]]:
    """Views that follow one another in row-major order, each of at most `CHUNK_BYTES` where a row allows."""
    if array.ndim == 0 or array.nbytes <= CHUNK_BYTES:
        yield array
        return
    rows = rows_per_chunk(array.shape, array.itemsize)
    for start in range(0, array.shape[0], rows):
        yield array[start : start + rows]


def rows_per_chunk(shape: tuple[int, ...], item_bytes: int) -> int:
    """How many entries of the first dim make up one chunk; at least 1."""
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * item_bytes
    return max(1, CHUNK_BYTES // max(1, row_bytes))
