"""Shared memory on one host: the engine worker's staging buffer is a file on a tmpfs that both ends map.

A plain mapped file, not `multiprocessing.shared_memory`: a reader of the latter removes the segment for everyone when it exits
(python/cpython#104291). Only the sink removes the file. A sink never changes a file's size: it makes a new file, and a source notices
the other inode. Access past the end of a mapped file, or to a page that a full tmpfs cannot give, would kill the process with SIGBUS,
therefore both ends reserve the memory before they touch it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import CapacityError, TransportError
from shoal.types.weights import Box, SinkParameter, SinkWorkerLayout
from shoal.weights import boxes
from shoal.weights.digest import rows_per_chunk, xxh3_of
from shoal.weights.dtypes import item_bytes

STAGING_PREFIX = "shoal-"
"""Every staging file starts with this; a supervisor finds those of killed processes by it, and by their lock, which is free then."""


@dataclass(frozen=True, slots=True)
class _Identity:
    """What must stay the same while a mapping is in use."""

    device: int
    inode: int
    num_bytes: int


class _Mapping:
    """A mapped staging file and its bytes as a tensor."""

    def __init__(self, file_descriptor: int, num_bytes: int) -> None:
        self._map = mmap.mmap(file_descriptor, num_bytes)
        self.buffer: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, parameter: SinkParameter) -> Tensor:
        """The parameter's elements inside the mapping.

        Raises: TransportError: misaligned or outside the buffer.
        """
        size = item_bytes(parameter.dtype, parameter.name)
        start = parameter.staging_offset_bytes
        end = start + boxes.whole(parameter.shape).num_elements * size
        if start % size or not 0 <= start <= end <= self.buffer.numel():
            msg = (
                f"{parameter.name} is staged at bytes {start}:{end} of {self.buffer.numel()}; "
                f"it must lie inside and start at a multiple of {size}"
            )
            raise TransportError(msg)
        return self.buffer[start:end].view(getattr(torch, parameter.dtype)).view(parameter.shape)

    def close(self) -> None:
        """Unmap the file, once nobody holds a view."""
        self.buffer = torch.empty(0, dtype=torch.uint8)
        # A view that someone still holds keeps the mapping; it goes with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()


class ShmStagingWriter:
    """`StagingWriter` over a mapped file."""

    def __init__(self, worker: SinkWorkerLayout, mapping: _Mapping, identity: _Identity) -> None:
        self._path = worker.staging_path
        self._identity = identity
        self._mapping = mapping
        self._parameters = {parameter.name: parameter for parameter in worker.parameters}

    def write(self, parameter: str, parameter_box: Box, source: Tensor) -> int:
        """See `StagingWriter.write`; casts while it copies, chunk by chunk, with no other copy in between."""
        if parameter not in self._parameters:
            msg = f"the engine worker at {self._path} has no parameter {parameter}"
            raise TransportError(msg)
        target = _box_of(self._mapping.view(self._parameters[parameter]), parameter, parameter_box)
        if target.shape != source.shape:
            msg = f"{parameter} wants {list(target.shape)} at {boxes.describe(parameter_box)}, the source has {list(source.shape)}"
            raise TransportError(msg)
        xxh3 = _copy_and_digest(target, source)
        # Checked after the bytes are written: a digest is answered only if they are in the file that the sink reads.
        _check_identity(self._path, self._identity)
        return xxh3


class ShmSourceTransport:
    """`SourceTransport` over mapped files; keeps a mapping from push to push until its path names another file."""

    def __init__(self) -> None:
        self._mappings: dict[str, tuple[_Identity, _Mapping]] = {}

    def open(self, worker: SinkWorkerLayout) -> ShmStagingWriter:
        """See `SourceTransport.open`."""
        self._drop_vanished()
        try:
            identity, mapping = self._map(worker)
        except (OSError, TransportError) as error:
            self._drop(worker.staging_path)
            if isinstance(error, OSError):
                raise _translate(error, worker.staging_path, worker.staging_bytes) from error
            raise
        return ShmStagingWriter(worker, mapping, identity)

    def close(self) -> None:
        """See `SourceTransport.close`."""
        for path in list(self._mappings):
            self._drop(path)

    @property
    def num_mappings(self) -> int:
        """Staging files mapped now."""
        return len(self._mappings)

    def _map(self, worker: SinkWorkerLayout) -> tuple[_Identity, _Mapping]:
        descriptor = os.open(worker.staging_path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            identity = _identify(os.fstat(descriptor), worker)
            kept = self._mappings.get(worker.staging_path)
            if kept is not None and kept[0] == identity:
                return kept
            self._drop(worker.staging_path)
            os.posix_fallocate(descriptor, 0, identity.num_bytes)
            self._mappings[worker.staging_path] = identity, _Mapping(descriptor, identity.num_bytes)
            return self._mappings[worker.staging_path]
        finally:
            os.close(descriptor)

    def _drop_vanished(self) -> None:
        """Let go of files that no path names any more, else a replaced server's memory would stay pinned."""
        for path, (identity, _) in list(self._mappings.items()):
            try:
                _check_identity(path, identity)
            except TransportError:
                self._drop(path)

    def _drop(self, path: str) -> None:
        kept = self._mappings.pop(path, None)
        if kept is not None:
            kept[1].close()


class ShmSinkTransport:
    """`SinkTransport` over a mapped file that this object creates, keeps locked, and removes.

    Args:
        folder: a tmpfs, such as /dev/shm; it must be the same for both ends.
        name: `<run id>-...` with a random part, since an existing file is refused; the file is `shoal-<name>`.
        num_bytes: size of the staging buffer, at least 1.
    Raises: TransportError: the file exists, or the folder cannot be written. CapacityError: no space in the folder.
    """

    def __init__(self, folder: str, name: str, num_bytes: int) -> None:
        self._path = Path(folder) / f"{STAGING_PREFIX}{name}"
        self._mapping: _Mapping | None = None
        try:
            self._descriptor = _create_locked(self._path)
        except OSError as error:
            raise _translate(error, str(self._path), num_bytes) from error
        try:
            os.posix_fallocate(self._descriptor, 0, num_bytes)
            self._mapping = _Mapping(self._descriptor, num_bytes)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            raise _translate(error, str(self._path), num_bytes) from error

    @property
    def address(self) -> str:
        """Path of the staging file."""
        return str(self._path)

    def tensor(self, parameter: SinkParameter) -> Tensor:
        """See `SinkTransport.tensor`."""
        return self._open_mapping().view(parameter)

    def digest(self, parameter: SinkParameter, parameter_box: Box) -> int:
        """See `SinkTransport.digest`."""
        return xxh3_of(_as_array(_box_of(self.tensor(parameter), parameter.name, parameter_box)))

    def close(self) -> None:
        """See `SinkTransport.close`."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)

    def _open_mapping(self) -> _Mapping:
        if self._mapping is None:
            msg = f"staging file {self._path} is closed; create a new one"
            raise TransportError(msg)
        return self._mapping


def _create_locked(path: Path) -> int:
    """Create the file and lock it for as long as its descriptor is open, so that a sweep of stale files leaves it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        # A sweep came between creating and locking, and has removed it.
        os.close(descriptor)


def _copy_and_digest(target: Tensor, source: Tensor) -> int:
    """Copy in row chunks and digest each while it is in the cache.

    Reading back what was written makes the digest one of the staged bytes, not of what was meant to be there.
    """
    if source.device.type != "cpu":
        # One transfer for the whole box: every copy from a device waits for it.
        target.copy_(source)
        return xxh3_of(_as_array(target))
    digest = xxhash.xxh3_64()
    if target.dim() == 0:
        target, source = target.view(1), source.reshape(1)
    rows = rows_per_chunk(tuple(target.shape), target.element_size())
    with torch.no_grad():
        for start in range(0, target.shape[0], rows):
            chunk = target[start : start + rows]
            chunk.copy_(source[start : start + rows])
            digest.update(np.ascontiguousarray(_as_array(chunk)).reshape(-1).view(np.uint8).data)
    return digest.intdigest()


def _as_array(tensor: Tensor) -> NDArray[np.generic]:
    """A NumPy view of a CPU tensor; bfloat16, which NumPy lacks, as 16-bit integers."""
    array: NDArray[np.generic] = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _box_of(tensor: Tensor, name: str, box: Box) -> Tensor:
    if not boxes.contains(boxes.whole(tensor.shape), box):
        msg = f"{name} has shape {list(tensor.shape)}; box {boxes.describe(box)} lies outside"
        raise TransportError(msg)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _identify(status: os.stat_result, worker: SinkWorkerLayout) -> _Identity:
    if not stat.S_ISREG(status.st_mode):
        msg = f"{worker.staging_path} is not a regular file; a staging buffer is a file on a tmpfs"
        raise TransportError(msg)
    if status.st_size != worker.staging_bytes or status.st_size == 0:
        msg = f"{worker.staging_path} has {status.st_size} bytes, the engine worker promised {worker.staging_bytes}"
        raise TransportError(msg)
    return _Identity(status.st_dev, status.st_ino, status.st_size)


def _check_identity(path: str, identity: _Identity) -> None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError as error:
        raise _translate(error, path, identity.num_bytes) from error
    if _Identity(status.st_dev, status.st_ino, status.st_size) != identity:
        msg = f"{path} is no longer the file that was opened; its engine worker was replaced"
        raise TransportError(msg)


def _translate(error: OSError, path: str, num_bytes: int) -> CapacityError | TransportError:
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return CapacityError(f"no space for {num_bytes} bytes of staging at {path}; enlarge the tmpfs (push.shm_dir) or free some of it")
    return TransportError(f"staging file {path} cannot be opened: {error.strerror}; is the engine worker alive and on the same host?")
