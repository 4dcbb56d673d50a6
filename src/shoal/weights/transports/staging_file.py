"""Files on a tmpfs that an engine worker owns: who made one, who maps it, and whether it is still the same and alive.

A plain mapped file, not `multiprocessing.shared_memory`: a reader of the latter removes the segment for everyone when it exits
(python/cpython#104291). Only the owner removes the file. It never changes a file's size: it makes a new file, and a reader notices
the other inode. It holds a lock for as long as it lives, and a reader notices when nobody does. Access past the end of a mapped file, or
to a page that a full tmpfs cannot give, would kill the process with SIGBUS, therefore both ends reserve the memory before they touch it.
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
from torch import Tensor

from shoal.errors import CapacityError, TransportError

STAGING_PREFIX = "shoal-"
"""Every staging file starts with this; a supervisor finds those of killed processes by it, and by their lock, which is free then."""
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True)
class Identity:
    """What must stay the same while a file is in use."""

    device: int
    inode: int
    num_bytes: int


class OwnedFile:
    """A file that this process creates, keeps locked, and removes.

    Args:
        folder: a tmpfs, such as /dev/shm; it must be the same for both ends.
        name: unique, with a random part, since an existing file is refused; the file is `shoal-<name>`.
        num_bytes: memory to reserve, at least 1.
    Raises: TransportError: the file exists, or the folder cannot be written. CapacityError: no space in the folder.
    """

    def __init__(self, folder: str, name: str, num_bytes: int) -> None:
        self._path = Path(folder) / f"{STAGING_PREFIX}{name}"
        self._open = False
        try:
            self.descriptor = _create_locked(self._path)
        except OSError as error:
            raise translate(error, str(self._path), num_bytes) from error
        self._open = True
        try:
            os.posix_fallocate(self.descriptor, 0, num_bytes)
        except OSError as error:
            self.close()
            raise translate(error, str(self._path), num_bytes) from error

    @property
    def path(self) -> str:
        """Where it is."""
        return str(self._path)

    @property
    def identity(self) -> Identity:
        """What a reader checks it by. Raises: OSError: closed."""
        status = os.fstat(self.descriptor)
        return Identity(status.st_dev, status.st_ino, status.st_size)

    def close(self) -> None:
        """Remove the file, once, and let go of the lock."""
        if self._open:
            self._open = False
            self._path.unlink(missing_ok=True)
            os.close(self.descriptor)


class MappedBytes:
    """A mapped file and its bytes as a tensor."""

    def __init__(self, file_descriptor: int, num_bytes: int) -> None:
        self._map = mmap.mmap(file_descriptor, num_bytes)
        # Through NumPy, which keeps the map from being closed under a view; torch.frombuffer does not, and the next access would be fatal.
        self.buffer: Tensor = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))
        # Page tables are filled now instead of by one fault for every page of the first push; older kernels cannot.
        with contextlib.suppress(OSError):
            self._map.madvise(_MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Unmap the file, once nobody holds a view."""
        self.buffer = torch.empty(0, dtype=torch.uint8)
        # A view that someone still holds keeps the mapping; it goes with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()


class PeerFile:
    """Another process's staging file, mapped.

    Args:
        path: where its owner made it.
        num_bytes: the size that the owner promised.
    Raises: TransportError: absent, other size, not a regular file, or its owner is gone. CapacityError: its memory cannot be had.
    """

    def __init__(self, path: str, num_bytes: int) -> None:
        self.path = path
        try:
            descriptor = open_peer(path)
            try:
                self.identity = identify(descriptor, path, num_bytes)
                os.posix_fallocate(descriptor, 0, num_bytes)
                self._mapping = MappedBytes(descriptor, num_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise translate(error, path, num_bytes) from error
        # Held by whoever writes, so that a file which is let go meanwhile stays mapped for them.
        self.buffer = self._mapping.buffer

    def check(self) -> None:
        """Raises: TransportError: the path names another file by now, or nobody owns it."""
        check_owned(self.path, self.identity)

    def close(self) -> None:
        """Let go of the mapping; the file stays."""
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._mapping.close()


def check_same(path: str, identity: Identity) -> None:
    """Raises: TransportError: the path names another file by now, or none."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError as error:
        raise translate(error, path, identity.num_bytes) from error
    if Identity(status.st_dev, status.st_ino, status.st_size) != identity:
        raise TransportError(f"{path} is no longer the file that was opened; its engine worker was replaced, push again")


def check_owned(path: str, identity: Identity) -> None:
    """Raises: TransportError: the path names another file by now, or its owner was killed."""
    try:
        descriptor = open_peer(path)
    except OSError as error:
        raise translate(error, path, identity.num_bytes) from error
    try:
        if identify(descriptor, path, None) != identity:
            raise TransportError(f"{path} is no longer the file that was opened; its engine worker was replaced, push again")
    finally:
        os.close(descriptor)


def open_peer(path: str) -> int:
    """A descriptor of another process's staging file. Raises: OSError."""
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def identify(descriptor: int, path: str, num_bytes: int | None) -> Identity:
    """What is behind a descriptor.

    Args:
        num_bytes: the promised size; None if any will do.
    Raises: TransportError: not a regular file, another size, or nobody holds its lock.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise TransportError(f"{path} is not a regular file; a staging buffer is a file on a tmpfs")
    if status.st_size == 0 or (num_bytes is not None and status.st_size != num_bytes):
        raise TransportError(f"{path} has {status.st_size} bytes, the engine worker promised {num_bytes}")
    _check_locked(descriptor, path)
    return Identity(status.st_dev, status.st_ino, status.st_size)


def translate(error: OSError, path: str, num_bytes: int) -> CapacityError | TransportError:
    """The error that a caller gets for one of the system's."""
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return CapacityError(f"no space for {num_bytes} bytes of staging at {path}; enlarge the tmpfs (push.shm_dir) or free some of it")
    return TransportError(f"staging file {path} cannot be opened: {error.strerror}; is the engine worker alive and on the same host?")


def _create_locked(path: Path) -> int:
    """Create the file and lock it for as long as its descriptor is open, so that a sweep of stale files leaves it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        # A sweep came between creating and locking, and has removed it.
        os.close(descriptor)


def _check_locked(descriptor: int, path: str) -> None:
    """The owner locks exclusively, so a shared lock can be had only once it is gone; several readers may look at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    raise TransportError(f"nobody holds the staging file {path}; its engine worker was killed, let it register again")
