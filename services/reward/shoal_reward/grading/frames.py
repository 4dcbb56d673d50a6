"""What goes over the pipe between the service and a grader: a number and bytes, behind their length.

The first frame to a grader holds its order (see `order`) and the first one back what it offers (DescribeRewardResponse), both under the
number GREETING; a grader that cannot load its scorers answers why, under REFUSAL. After that come a ScoreRequest and its ScoreResponse
under any other number. A response without results says that the call of a batch scorer failed: its samples are to be sent one by one.
"""

from __future__ import annotations

import struct

from shoal.errors import CodecError
from shoal.rpc.settings import MAX_MESSAGE_BYTES

GREETING = 0
FIRST_SEQUENCE = 1
REFUSAL = (1 << 64) - 1
MAX_PAYLOAD_BYTES = MAX_MESSAGE_BYTES + (1 << 20)
_HEADER = struct.Struct("<IQ")


def frame(sequence: int, payload: bytes) -> bytes:
    """Put the header before a payload."""
    return _HEADER.pack(len(payload), sequence) + payload


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[tuple[int, bytes]]:
        """Take bytes as they came and return the frames that are complete: number and payload.

        Raises: CodecError: a frame is longer than any that is ever sent.
        """
        self._buffer += received
        frames, start = [], 0
        while (payload_at := start + _HEADER.size) <= len(self._buffer):
            length, sequence = _HEADER.unpack_from(self._buffer, start)
            if length > MAX_PAYLOAD_BYTES:
                raise CodecError(f"a frame between service and grader has {length} bytes, at most {MAX_PAYLOAD_BYTES} are sent")
            end = payload_at + length
            if end > len(self._buffer):
                break
            frames.append((sequence, bytes(self._buffer[payload_at:end])))
            start = end
        del self._buffer[:start]
        return frames
