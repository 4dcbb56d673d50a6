"""Copying and digesting tensors in parts that stay in a core's cache, so that bytes cross the memory bus once for both."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

CHUNK_BYTES = 1 << 20
"""Largest part: small enough for a level-2 cache, large enough that the interpreter's share stays below 2 %."""
_TEAM_CHUNK_BYTES = 8 << 20
"""Largest part of a cast by a team of torch's threads: each part makes them wait for one another, long on a busy machine."""
_SPLIT_BYTES = 4 << 20
"""From here on a second thread pays."""

_Pair = tuple[Tensor, Tensor]


def as_array(tensor: Tensor) -> NDArray[np.generic]:
    """A NumPy view of a CPU tensor; bfloat16, which NumPy lacks, as 16-bit integers."""
    tensor = tensor.detach()
    array: NDArray[np.generic] = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def row_chunks(*tensors: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of one shape at the same places.

    Returns: views of each that follow one another in row-major order, at most `chunk_bytes` of the first; none of an empty tensor.
    """
    first = tensors[0]
    if first.nbytes <= chunk_bytes:
        if first.numel():
            yield tensors
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    row_bytes = tensors[0][0].numel() * first.element_size()
    if row_bytes > chunk_bytes:
        for row in range(first.shape[0]):
            yield from row_chunks(*(tensor[row] for tensor in tensors), chunk_bytes=chunk_bytes)
        return
    rows = chunk_bytes // row_bytes
    for start in range(0, tensors[0].shape[0], rows):
        yield tuple(tensor[start : start + rows] for tensor in tensors)


def update_digest(digest: xxhash.xxh3_64, tensor: Tensor) -> None:
    """Add a tensor's elements, row-major, to a digest; the hash itself runs without the interpreter's lock."""
    if tensor.device.type != "cpu":
        tensor = tensor.contiguous().cpu()
    if tensor.is_contiguous():
        digest.update(_as_bytes(tensor).data)
        return
    for (chunk,) in row_chunks(tensor):
        digest.update(np.ascontiguousarray(as_array(chunk)).reshape(-1).view(np.uint8).data)


def copy_elements(target: Tensor, source: Tensor) -> None:
    """Copy between tensors of one shape, with a cast where dtypes differ.

    NumPy copies what needs no cast: it uses this thread alone, where torch may start a team of threads in every thread that copies.
    """
    if target.dtype == source.dtype and target.device.type == source.device.type == "cpu":
        np.copyto(as_array(target), as_array(source))
    else:
        with torch.no_grad():
            target.copy_(source)


class ChunkCopier:
    """Copies pieces into mapped memory and digests what it wrote; a second thread copies along where the process has more than one.

    May be used by several threads at once; one of them at a time gets the second thread.
    """

    def __init__(self) -> None:
        self._helper = ThreadPoolExecutor(1, "push-copy") if torch.get_num_threads() > 1 else None
        self._helper_free = threading.Lock()

    def write(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> int:
        """Copy each source into its target.

        Reading back what was written makes the digest one of the staged bytes, not of what was meant to be there.

        Args:
            targets: CPU tensors of one dtype.
            sources: of the same shapes, any floating dtype, strides and device.
        Returns: xxh3-64 of the targets' bytes, one after another.
        """
        digest = xxhash.xxh3_64()
        if any(source.device.type != "cpu" for source in sources):
            # One transfer for each piece: every copy from a device waits for it.
            for target, source in zip(targets, sources, strict=True):
                copy_elements(target, source)
                update_digest(digest, target)
            return digest.intdigest()
        if not self._write_split(targets, sources, digest):
            for target, source in zip(targets, sources, strict=True):
                _copy_and_digest(target, source, digest)
        return digest.intdigest()

    def close(self) -> None:
        """End the second thread."""
        if self._helper is not None:
            self._helper.shutdown()

    def _write_split(self, targets: Sequence[Tensor], sources: Sequence[Tensor], digest: xxhash.xxh3_64) -> bool:
        """Let the second thread copy the end of the pieces, if there is one and it is idle; torch casts with threads of its own."""
        num_bytes = sum(target.nbytes for target, source in zip(targets, sources, strict=True) if target.dtype == source.dtype)
        if self._helper is None or num_bytes < _SPLIT_BYTES or not self._helper_free.acquire(blocking=False):
            return False
        try:
            own, others = _halves(list(zip(targets, sources, strict=True)))
            rest = self._helper.submit(_copy_all, others)
            try:
                for target, source in own:
                    _copy_and_digest(target, source, digest)
            finally:
                # Nothing is written any more once this returns, not after an error either.
                rest.result()
            for target, _ in others:
                update_digest(digest, target)
        finally:
            self._helper_free.release()
        return True


def _copy_and_digest(target: Tensor, source: Tensor, digest: xxhash.xxh3_64) -> None:
    if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
        _copy_and_digest_bytes(_as_bytes(target), _as_bytes(source), digest)
        return
    by_team = target.dtype != source.dtype and torch.get_num_threads() > 1
    for part, part_source in row_chunks(target, source, chunk_bytes=_TEAM_CHUNK_BYTES if by_team else CHUNK_BYTES):
        copy_elements(part, part_source)
        update_digest(digest, part)


def _copy_and_digest_bytes(target: NDArray[np.uint8], source: NDArray[np.uint8], digest: xxhash.xxh3_64) -> None:
    """The most frequent case, with as little of the interpreter as can be."""
    for start in range(0, target.size, CHUNK_BYTES):
        part = target[start : start + CHUNK_BYTES]
        np.copyto(part, source[start : start + CHUNK_BYTES])
        digest.update(part.data)


def _as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return as_array(tensor).reshape(-1).view(np.uint8)


def _copy_all(pairs: Sequence[_Pair]) -> None:
    for target, source in pairs:
        copy_elements(target, source)


def _halves(pairs: Sequence[_Pair]) -> tuple[list[_Pair], list[_Pair]]:
    """Cut pieces in the middle of their bytes; few large parts, so that two threads seldom wait for the interpreter's lock."""
    left = sum(target.nbytes for target, _ in pairs) // 2
    first: list[_Pair] = []
    second: list[_Pair] = []
    for target, source in pairs:
        if target.is_contiguous() and source.is_contiguous():
            target, source = target.view(-1), source.view(-1)
        row_bytes = target.nbytes // target.shape[0] if target.numel() else 1
        rows = min(max(left, 0) // row_bytes, target.shape[0]) if target.numel() else 0
        first.append((target[:rows], source[:rows]))
        second.append((target[rows:], source[rows:]))
        left -= target.nbytes
    return first, second
