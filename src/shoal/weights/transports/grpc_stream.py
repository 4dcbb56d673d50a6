"""One client stream of the grpc transport, fed by a bounded queue."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

import grpc

from shoal.codec.bucket_stream import WEIGHT_SINK_SERVICE, WRITE_BUCKETS, BucketPart, StreamHead, part_to_bytes, written_from_bytes
from shoal.errors import DeadlineError, TransportError

METHOD = f"/{WEIGHT_SINK_SERVICE}/{WRITE_BUCKETS}"
# gRPC ends a call at its deadline; this is for one that it should leave hanging.
_GRACE_S = 2.0


class PartQueue(Iterator[bytes]):
    """Hands messages to gRPC's thread, which iterates over it; holds a bounded number of them.

    open -> ended: `end`, what is queued is still taken. Either -> dropped: `drop`, both sides stop at once.
    """

    def __init__(self, max_parts: int) -> None:
        self._max_parts = max_parts
        self._messages: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._ended = self._dropped = False

    def put(self, message: bytes, deadline_s: float) -> bool:
        """Wait for room, then queue a message; False if nobody takes messages any more.

        Raises: DeadlineError: no room by then (`time.monotonic`).
        """
        with self._changed:
            has_room = self._changed.wait_for(self._has_room_or_dropped, max(deadline_s - time.monotonic(), 0.0))
            if not has_room:
                raise DeadlineError("the stream took nothing until its deadline passed; is the server stopped, or the network slow?")
            if self._dropped:
                return False
            self._messages.append(message)
            self._changed.notify_all()
            return True

    def end(self) -> None:
        """No more messages will come."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def drop(self) -> None:
        """Forget what is queued and let everyone go."""
        with self._changed:
            self._dropped = True
            self._messages.clear()
            self._changed.notify_all()

    def __next__(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._ended or self._dropped)
            if not self._messages:
                raise StopIteration
            message = self._messages.popleft()
            self._changed.notify_all()
            return message

    def _has_room_or_dropped(self) -> bool:
        return self._dropped or len(self._messages) < self._max_parts


class PartStream:
    """Sends the parts of whole buckets, and compares at the end what the sink took.

    Args:
        max_queued: messages between `send` and gRPC.
        timeout_s: deadline of the call.
    """

    def __init__(self, channel: grpc.Channel, head: StreamHead, *, max_queued: int, timeout_s: float) -> None:
        self._head: StreamHead | None = head
        self._queue = PartQueue(max_queued)
        self._deadline_s = time.monotonic() + timeout_s + _GRACE_S
        self._num_buckets = self._num_bytes = 0
        method: grpc.StreamUnaryMultiCallable[bytes, tuple[int, int]] = channel.stream_unary(METHOD, None, written_from_bytes)
        self._call = method.future(self._queue, timeout=timeout_s)
        self._call.add_done_callback(lambda _: self._queue.drop())

    def send(self, part: BucketPart) -> None:
        """Queue a part.

        Raises: grpc.RpcError: the call has failed. TransportError: the sink ended it early. DeadlineError.
        """
        message = part_to_bytes(part, self._head)
        self._head = None
        if not self._queue.put(message, self._deadline_s):
            self._call.result(timeout=_GRACE_S)
            raise TransportError("the server ended the stream before it had everything; see its log")
        self._num_bytes += part.data.nbytes

    def end_bucket(self) -> None:
        """Count a bucket whose parts have all been sent."""
        self._num_buckets += 1

    def end(self) -> None:
        """Say that no part follows."""
        self._queue.end()

    def wait_written(self) -> None:
        """Wait for the sink's answer, after `end`.

        Raises: grpc.RpcError: the call has failed. TransportError: the sink took another amount than was sent. DeadlineError.
        """
        try:
            taken = self._call.result(timeout=max(self._deadline_s - time.monotonic(), 0.0))
        except grpc.FutureTimeoutError as error:
            raise DeadlineError("the server did not answer the stream in time") from error
        except grpc.FutureCancelledError as error:
            raise TransportError("the stream was closed before the server had answered") from error
        if taken != (self._num_buckets, self._num_bytes):
            msg = f"the server took {taken[0]} buckets of {taken[1]} bytes, sent were {self._num_buckets} of {self._num_bytes}"
            raise TransportError(msg)

    def cancel(self) -> None:
        """End the call, and with it gRPC's thread; harmless after the answer."""
        self._queue.drop()
        self._call.cancel()
