"""Digests are of row-major bytes, whatever the strides and however large the array."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from shoal.weights.digest import CHUNK_BYTES, row_chunks, xxh3_of

BIG = np.arange(3 * CHUNK_BYTES // 4 + 5, dtype=np.float32)


@pytest.mark.parametrize(
    "array",
    [
        np.array([[1, 2], [3, 4]], dtype=np.float32).T,
        np.zeros((0, 3), dtype=np.float32),
        np.array(3.5, dtype=np.float64),
        BIG,
        BIG[: 600 * 1024].reshape(600, 1024)[:, 100:900],
        BIG[: 2 * 300 * 1024].reshape(2, 300, 1024)[:, :, ::2],
        BIG.reshape(1, -1),
    ],
)
def test_xxh3_of_equals_the_digest_of_the_row_major_bytes(array: NDArray[np.generic]) -> None:
    assert xxh3_of(array) == xxhash.xxh3_64(array.tobytes()).intdigest()


def test_xxh3_of_notices_one_element() -> None:
    changed = BIG.copy()
    changed[-1] += 1
    assert xxh3_of(changed) != xxh3_of(BIG)


def test_row_chunks_are_bounded_and_whole() -> None:
    array = BIG[: 600 * 1024].reshape(600, 1024)
    chunks = list(row_chunks(array))
    assert max(chunk.nbytes for chunk in chunks) <= CHUNK_BYTES
    assert sum(chunk.shape[0] for chunk in chunks) == 600
    assert len(chunks) > 1
