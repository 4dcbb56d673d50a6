"""The service's end of the pipe to a grader, on the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from shoal_reward.grading.frames import FrameReader, frame

_RECEIVE_BYTES = 1 << 18


class GraderChannel:
    """Sends and receives frames without blocking. A grader that does not read costs memory only: what it was given is bounded."""

    def __init__(self, pipe: socket.socket, on_frame: Callable[[int, bytes], None], on_end: Callable[[], None]) -> None:
        """Listen at once.

        Args:
            on_frame: called with the number and the payload of each frame.
            on_end: called when the far end is closed; call `close` then.
        """
        pipe.setblocking(False)
        self._pipe = pipe
        self._on_frame = on_frame
        self._on_end = on_end
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe, self._receive)

    def send(self, frames: list[tuple[int, bytes]]) -> None:
        """Send frames, as far as they go now, the rest when the grader reads on."""
        had_unsent = bool(self._unsent)
        for sequence, payload in frames:
            self._unsent += frame(sequence, payload)
        if not had_unsent:
            self._send_more()

    def drain(self) -> None:
        """Take what a grader that has ended left in the pipe."""
        while self._receive():
            pass

    def close(self) -> None:
        """Stop listening; what is unsent is lost. Repeating is harmless."""
        if self._pipe.fileno() == -1:
            return
        self._loop.remove_reader(self._pipe)
        self._loop.remove_writer(self._pipe)
        self._pipe.close()

    def _receive(self) -> bool:
        if self._pipe.fileno() == -1:
            return False
        try:
            received = self._pipe.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        if not received:
            # Readable for ever from now on.
            self._loop.remove_reader(self._pipe)
            self._on_end()
            return False
        for sequence, payload in self._reader.feed(received):
            self._on_frame(sequence, payload)
        return True

    def _send_more(self) -> None:
        try:
            del self._unsent[: self._pipe.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The grader has ended, which is noticed where its end is.
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._pipe, self._send_more)
        else:
            self._loop.remove_writer(self._pipe)
