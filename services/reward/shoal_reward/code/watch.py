"""Reading from and writing to a sandboxed process within bounds: time, bytes, and what it leaves in its folder."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal_reward.code.inside.wire import HEADER_BYTES, pack, unpack
from shoal_reward.code.settings import CodeLimits

if TYPE_CHECKING:
    from shoal_reward.code.inside.wire import Message

_LOOK_S = 0.05
_CHUNK_BYTES = 1 << 16


class AnswerError(Exception):
    """The answer is to blame: it ended, took too long, or gave or wrote too much."""


class Watch:
    """Waits for pipes until a deadline, and looks at folders meanwhile. Pipes must not block."""

    def __init__(self, *, folders: Sequence[str], limits: CodeLimits, seconds: float) -> None:
        """Args: folders: of the sandboxed processes. limits: of their files. seconds: from now to the deadline."""
        self._folders = folders
        self._limits = limits
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._look_at = time.monotonic() + _LOOK_S

    def remaining_s(self) -> float:
        """Time until the deadline, in seconds.

        Raises: AnswerError: none is left, or the folders hold too much.
        """
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self.look()
        if now >= self._deadline:
            raise AnswerError(f"it was not done within {self._seconds:.3g} s")
        return self._deadline - now

    def wait(self, interests: dict[int, int]) -> dict[int, int]:
        """Wait until one of some pipes is ready.

        Args: interests: pipe -> events of poll.
        Returns: ready pipe -> its events.
        Raises: AnswerError: as remaining_s.
        """
        poll = select.poll()
        for fd, events in interests.items():
            poll.register(fd, events)
        while True:
            if ready := poll.poll(max(1.0, min(self.remaining_s(), _LOOK_S) * 1000)):
                return dict(ready)

    def write(self, fd: int, message: Message) -> None:
        """Write a message.

        Raises: AnswerError: as remaining_s, or the reader is gone.
        """
        view = memoryview(pack(message))
        while view:
            self.wait({fd: select.POLLOUT})
            view = view[write_some(fd, view) :]

    def read(self, fd: int, max_bytes: int) -> Message:
        """Read a message.

        Raises: AnswerError: as remaining_s, the writer is gone, or what it wrote is no message of at most max_bytes.
        """
        size = int.from_bytes(self._read(fd, HEADER_BYTES), "little")
        if size > max_bytes:
            raise AnswerError(f"it gave {size} bytes, at most {max_bytes} are taken")
        try:
            return unpack(self._read(fd, size))
        except (ValueError, RecursionError):
            raise AnswerError("it wrote into the pipe of its values") from None

    def look(self) -> None:
        """Look at the folders now.

        Raises: AnswerError: they hold too much.
        """
        for folder in self._folders:
            sizes = _sizes(folder, self._limits.num_files)
            if len(sizes) > self._limits.num_files or sum(sizes) > self._limits.file_bytes:
                raise AnswerError(f"its files passed {self._limits.num_files} in number or {self._limits.file_bytes} bytes")

    def _read(self, fd: int, size: int) -> bytes:
        read = bytearray()
        while len(read) < size:
            self.wait({fd: select.POLLIN})
            if not (part := os.read(fd, min(size - len(read), _CHUNK_BYTES))):
                raise AnswerError("its process ended")
            read += part
        return bytes(read)


def write_some(fd: int, view: memoryview) -> int:
    """Write what a pipe takes.

    Raises: AnswerError: the reader is gone.
    """
    try:
        return os.write(fd, view[:_CHUNK_BYTES])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        raise AnswerError("its process ended") from None


def _sizes(folder: str, num_files: int) -> list[int]:
    """Bytes on disk of the first files of a folder; a file that is removed meanwhile counts nothing."""
    sizes: list[int] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                # A sparse file is as long as its length where it is read, and as large as its blocks on disk.
                sizes.append(entry.stat(follow_symlinks=False).st_blocks * 512)
            except FileNotFoundError:
                continue
            if len(sizes) > num_files:
                break
    return sizes
