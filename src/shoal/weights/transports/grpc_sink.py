"""The rollout server's end of the grpc transport: streams of buckets, checked and written to the workers' staging.

    receiver = BulkReceiver(targets)                   # the workers' mapped staging
    add_bulk_handler(server, receiver.write)
    receiver.arm(push_id, policy_version, plan)        # PlanSink
    receiver.disarm()                                  # before VERIFY looks at staging, and whenever a push ends

Everything that a message says is compared with the plan before a byte of staging is touched, so a wrong, late or damaged stream ends with
an error and harms nothing but the bucket it was about. All but deltas happens on the event loop: a part is at most 1 MiB.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc

from shoal.codec.bucket_stream import (
    MAX_PART_BYTES,
    WEIGHT_SINK_SERVICE,
    WRITE_BUCKETS,
    BucketPart,
    StreamHead,
    part_from_bytes,
    written_to_bytes,
)
from shoal.errors import InvalidRequestError, StateError, TransportError
from shoal.rpc.allocator import keep_freed_memory
from shoal.types.weights import BucketEncoding
from shoal.weights.buckets import Bucket
from shoal.weights.delta import Delta, decode_delta
from shoal.weights.dtypes import item_bytes
from shoal.weights.plan import ServerPlan
from shoal.weights.transports.base import PieceTarget
from shoal.weights.transports.pieces import write_delta, write_dense

# Elements of a delta that are written without looking whether the push still goes on.
_DELTA_SLICE = 1 << 16

WriteParts = Callable[[AsyncIterator[bytes]], Awaitable[tuple[int, int]]]


def add_bulk_handler(server: grpc.aio.Server, write: WriteParts) -> None:
    """Answer WriteBuckets of the weight sink's service with `write`; call it after the generated `add_..._to_server`.

    Its messages come as they are on the wire; the generated handler would let protobuf copy their data.
    """

    async def handle(messages: AsyncIterator[bytes], context: Any) -> tuple[int, int]:  # noqa: ANN401 - grpcio's own type is generic
        return await write(messages)

    keep_freed_memory()

    def to_bytes(written: tuple[int, int]) -> bytes:
        return written_to_bytes(*written)

    # grpcio's stubs cannot tell that without a deserialiser a message stays bytes.
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(handle, None, to_bytes)
    server.add_registered_method_handlers(WEIGHT_SINK_SERVICE, {WRITE_BUCKETS: handler})


class ArmedPush:
    """What the current push may write: the plan's pairs that come over grpc, each bucket once.

    `lock` is held while a thread writes a slice of a delta; after `disarm` none does.
    """

    def __init__(self, push_id: str, policy_version: int, plan: ServerPlan) -> None:
        self.push_id = push_id
        self.policy_version = policy_version
        self.lock = threading.Lock()
        self._plan = plan
        self._pairs = {pair for pair in plan.pairs() if plan.transport_of(*pair) == "grpc"}
        self._buckets: dict[tuple[int, int], tuple[Bucket, ...]] = {}
        self._claimed: set[tuple[int, int, int]] = set()
        self._disarmed = False

    def buckets(self, head: StreamHead) -> tuple[Bucket, ...]:
        """The pair's buckets. Raises: StateError: another push. InvalidRequestError: a pair that the plan does not send over grpc."""
        if (head.push_id, head.policy_version) != (self.push_id, self.policy_version):
            msg = f"push {head.push_id} of version {head.policy_version} is not being received; the current one is {self.push_id}"
            raise StateError(f"{msg} of version {self.policy_version}")
        pair = head.rank, head.worker_rank
        if pair not in self._pairs:
            msg = f"the plan sends nothing over grpc from rank {head.rank} to worker {head.worker_rank}; compare the plans' hashes"
            raise InvalidRequestError(msg)
        if pair not in self._buckets:
            self._buckets[pair] = self._plan.buckets(*pair)
        return self._buckets[pair]

    def claim(self, bucket: Bucket) -> None:
        """Give a bucket to one stream. Raises: InvalidRequestError: it has been written, or another stream is at it."""
        if _key(bucket) in self._claimed:
            raise InvalidRequestError(f"{_name(bucket)} came already in push {self.push_id}; send each bucket once")
        self._claimed.add(_key(bucket))

    def release(self, bucket: Bucket) -> None:
        """Take back a bucket whose stream failed in the middle."""
        self._claimed.discard(_key(bucket))

    def check(self) -> None:
        """Raises: StateError: the push has ended, or another has begun."""
        if self._disarmed:
            raise StateError(f"push {self.push_id} is no longer received; it was verified, aborted or replaced")

    def disarm(self) -> None:
        """Let nothing be written any more."""
        # Set before the lock is waited for: a thread that takes it again and again would else write all it has first.
        self._disarmed = True
        with self.lock:
            return


class BulkReceiver:
    """Writes streams of buckets to the staging of a server's workers. One event loop uses it.

    Args:
        targets: staging by worker rank.
    """

    def __init__(self, targets: Mapping[int, PieceTarget]) -> None:
        self._targets = targets
        self._armed: ArmedPush | None = None

    def arm(self, push_id: str, policy_version: int, plan: ServerPlan) -> None:
        """Accept the streams of a push from now on, and of no other."""
        self.disarm()
        self._armed = ArmedPush(push_id, policy_version, plan)

    def disarm(self) -> None:
        """Refuse every stream, running ones too; when it returns nothing is written any more."""
        if self._armed is not None:
            self._armed.disarm()
            self._armed = None

    async def write(self, messages: AsyncIterator[bytes]) -> tuple[int, int]:
        """Write what a stream brings.

        Args:
            messages: serialised `WriteBucketsRequest`s.
        Returns: buckets and encoded bytes written.
        Raises: StateError: the push is not the armed one. InvalidRequestError, CodecError: what the stream says cannot be.
            TransportError: it ended in the middle of a bucket.
        """
        stream: _Stream | None = None
        try:
            async for raw in messages:
                part, head = part_from_bytes(raw)
                if stream is None:
                    stream = self._begin(head)
                    head = None
                if head is not None:
                    raise InvalidRequestError("a second message of a stream names a pair; open a stream for each pair")
                await stream.take(part)
            if stream is None:
                raise InvalidRequestError("the stream ended without a message; send at least one bucket")
            return stream.end()
        finally:
            if stream is not None:
                stream.close()

    def _begin(self, head: StreamHead | None) -> _Stream:
        if head is None:
            raise InvalidRequestError("the first message of a stream names no push; set push_id, policy_version, rank and worker_rank")
        if self._armed is None:
            raise StateError(f"no push is being received, so not {head.push_id} of version {head.policy_version}; prepare and plan it")
        buckets = self._armed.buckets(head)
        if head.worker_rank not in self._targets:
            raise InvalidRequestError(f"this server has no worker {head.worker_rank}; it has {sorted(self._targets)}")
        return _Stream(self._armed, self._targets[head.worker_rank], buckets)


class _Stream:
    """One running stream. between buckets -> inside one -> between buckets; the bucket inside is claimed."""

    def __init__(self, armed: ArmedPush, target: PieceTarget, buckets: Sequence[Bucket]) -> None:
        self._armed = armed
        self._target = target
        self._buckets = buckets
        self._current: Bucket | None = None
        self._encoding = BucketEncoding.DENSE
        self._encoded_bytes = self._offset = 0
        self._delta = bytearray()
        self._last_index = -1
        self._num_buckets = self._num_bytes = 0

    async def take(self, part: BucketPart) -> None:
        """Write a part. Raises: as `BulkReceiver.write`."""
        self._armed.check()
        bucket = self._current
        if bucket is None:
            bucket = self._current = self._start(part)
        self._check_part(bucket, part)
        if part.encoding is BucketEncoding.DENSE:
            write_dense(self._target, bucket, part.data, part.offset_bytes)
        else:
            self._delta += part.data
        self._offset += part.data.nbytes
        if self._offset == self._encoded_bytes:
            if part.encoding is BucketEncoding.DELTA:
                await asyncio.to_thread(self._apply_delta, bucket, bytes(self._delta))
            self._finish_bucket()

    def end(self) -> tuple[int, int]:
        """The totals. Raises: TransportError: in the middle of a bucket."""
        if self._current is not None:
            msg = f"the stream ended at byte {self._offset} of {self._encoded_bytes} of {_name(self._current)}; push again"
            raise TransportError(msg)
        return self._num_buckets, self._num_bytes

    def close(self) -> None:
        """Give back a bucket that did not come whole."""
        if self._current is not None:
            self._armed.release(self._current)

    def _start(self, part: BucketPart) -> Bucket:
        if not self._last_index < part.bucket < len(self._buckets):
            msg = (
                f"bucket {part.bucket} after {self._last_index} of a pair with {len(self._buckets)} buckets; send them in the plan's order"
            )
            raise InvalidRequestError(msg)
        bucket = self._buckets[part.bucket]
        _check_size(bucket, part)
        self._armed.claim(bucket)
        self._last_index = part.bucket
        self._encoding, self._encoded_bytes, self._offset = part.encoding, part.encoded_bytes, 0
        return bucket

    def _check_part(self, bucket: Bucket, part: BucketPart) -> None:
        if (part.bucket, part.encoding, part.encoded_bytes) != (bucket.index, self._encoding, self._encoded_bytes):
            msg = f"bucket {part.bucket} ({part.encoding.name}, {part.encoded_bytes} bytes) came before the end of {_name(bucket)}"
            raise InvalidRequestError(f"{msg} ({self._encoding.name}, {self._encoded_bytes} bytes)")
        size = part.data.nbytes
        if part.offset_bytes != self._offset or not 0 < size <= min(MAX_PART_BYTES, self._encoded_bytes - self._offset):
            msg = (
                f"{size} bytes at {part.offset_bytes} of {_name(bucket)}, whose next part starts at {self._offset} of {self._encoded_bytes}"
            )
            raise InvalidRequestError(f"{msg} and has 1 to {MAX_PART_BYTES} bytes")
        if part.encoding is BucketEncoding.DENSE and size % item_bytes(bucket.dtype, _name(bucket)):
            raise InvalidRequestError(f"{size} bytes of {_name(bucket)} cut an element of {bucket.dtype} in two; send whole elements")

    def _finish_bucket(self) -> None:
        self._num_buckets += 1
        self._num_bytes += self._encoded_bytes
        self._current = None
        self._delta = bytearray()

    def _apply_delta(self, bucket: Bucket, data: bytes) -> None:
        """Runs in a thread, a slice at a time, so that `disarm` waits for a slice only."""
        delta = decode_delta(data, bucket.dtype, bucket.num_bytes // item_bytes(bucket.dtype, _name(bucket)))
        for start in range(0, delta.positions.size, _DELTA_SLICE):
            part = slice(start, start + _DELTA_SLICE)
            with self._armed.lock:
                self._armed.check()
                write_delta(self._target, bucket, Delta(positions=delta.positions[part], values=delta.values[part]))


def _check_size(bucket: Bucket, part: BucketPart) -> None:
    if part.encoding is BucketEncoding.DENSE and part.encoded_bytes == bucket.num_bytes:
        return
    if part.encoding is BucketEncoding.DELTA and 0 < part.encoded_bytes <= bucket.num_bytes:
        return
    msg = f"{_name(bucket)} has {bucket.num_bytes} bytes and came as {part.encoding.name} with {part.encoded_bytes}"
    raise InvalidRequestError(f"{msg}; send it dense, or as a delta that is not larger")


def _key(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.rank, bucket.worker_rank, bucket.index


def _name(bucket: Bucket) -> str:
    return f"bucket {bucket.index} of rank {bucket.rank} for worker {bucket.worker_rank}"
