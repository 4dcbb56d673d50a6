"""What the bulk stream's receiving end takes and what it refuses; a refused stream writes nothing that it was not allowed to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from shoal.codec.bucket_stream import MAX_PART_BYTES, BucketPart, StreamHead, part_to_bytes
from shoal.errors import CodecError, InvalidRequestError, ShoalError, StateError, TransportError
from shoal.types.weights import Box, BucketEncoding
from shoal.weights.buckets import Bucket
from shoal.weights.delta import Delta, encode_delta
from shoal.weights.transports.base import PieceTarget
from shoal.weights.transports.grpc_sink import BulkReceiver
from shoal.weights.transports.pieces import bucket_digest, pack_bucket
from tests.helpers.wire_setting import Setting, cut

SETTING = Setting(shapes={"matrix": (64, 48), "vector": (100,)}, num_ranks=2, bucket_bytes=4096)
HEAD = StreamHead(push_id="push-1", policy_version=1, rank=0, worker_rank=0)
FULL = SETTING.full()
PLAN = SETTING.plan("grpc")
BUCKETS = PLAN.buckets(0, 0)


class Sink:
    """A receiver armed for push-1, and its staging."""

    def __init__(self) -> None:
        self.staging = SETTING.staging()[0]
        self.receiver = BulkReceiver({0: self.staging.target})
        self.receiver.arm("push-1", 1, PLAN)

    def write(self, messages: Sequence[bytes]) -> tuple[int, int]:
        return asyncio.run(self.receiver.write(stream_of(messages)))

    def is_untouched(self) -> bool:
        return not self.staging.buffer.any()


async def stream_of(messages: Sequence[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def parts_of(bucket: Bucket, part_bytes: int = 1000) -> list[BucketPart]:
    data = memoryview(pack_bucket(bucket, cut(FULL, bucket)).numpy().tobytes())
    return split(bucket, BucketEncoding.DENSE, data, part_bytes)


def split(bucket: Bucket, encoding: BucketEncoding, data: memoryview, part_bytes: int = 1000) -> list[BucketPart]:
    return [
        BucketPart(bucket=bucket.index, encoding=encoding, offset_bytes=at, encoded_bytes=len(data), data=data[at : at + part_bytes])
        for at in range(0, len(data), part_bytes)
    ]


def delta_parts(bucket: Bucket, positions: Sequence[int], part_bytes: int = 1000) -> list[BucketPart]:
    values = np.arange(len(positions), dtype=np.float32) + 7
    data = encode_delta(Delta(positions=np.array(positions, dtype=np.int64), values=values))
    return split(bucket, BucketEncoding.DELTA, memoryview(data), part_bytes)


def serialise(parts: Sequence[BucketPart], head: StreamHead | None = HEAD) -> list[bytes]:
    return [part_to_bytes(part, head if index == 0 else None) for index, part in enumerate(parts)]


def test_dense_buckets_are_written_and_counted() -> None:
    sink = Sink()
    parts = [part for bucket in BUCKETS for part in parts_of(bucket)]
    assert sink.write(serialise(parts)) == (len(BUCKETS), PLAN.bytes_of(0, 0))
    for bucket in BUCKETS:
        expected = pack_bucket(bucket, cut(FULL, bucket))
        assert bucket_digest(sink.staging.target, bucket) == digest(expected)


def digest(packed: torch.Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(packed.numpy().data))


def test_buckets_of_a_pair_come_over_several_streams_at_once() -> None:
    sink = Sink()

    async def run() -> list[tuple[int, int]]:
        streams = [serialise([part for bucket in BUCKETS[first::2] for part in parts_of(bucket)]) for first in (0, 1)]
        return list(await asyncio.gather(*(sink.receiver.write(stream_of(messages)) for messages in streams)))

    taken = asyncio.run(run())
    assert sum(buckets for buckets, _ in taken) == len(BUCKETS)
    for bucket in BUCKETS:
        assert bucket_digest(sink.staging.target, bucket) == digest(pack_bucket(bucket, cut(FULL, bucket)))


def test_delta_changes_its_elements_only() -> None:
    sink = Sink()
    positions = [0, 5, 1000]
    assert sink.write(serialise(delta_parts(BUCKETS[0], positions, part_bytes=7)))[0] == 1
    changed = sink.staging.buffer.view(torch.float32).nonzero().flatten().tolist()
    assert len(changed) == len(positions)
    assert sorted(sink.staging.buffer.view(torch.float32)[changed].tolist()) == [7.0, 8.0, 9.0]


def altered(index: int, **changes: Any) -> Callable[[list[BucketPart]], list[BucketPart]]:  # noqa: ANN401
    def alter(parts: list[BucketPart]) -> list[BucketPart]:
        return [replace(part, **changes) if number == index else part for number, part in enumerate(parts)]

    return alter


@pytest.mark.parametrize(
    ("alter", "error"),
    [
        (altered(0, bucket=len(BUCKETS)), InvalidRequestError),
        (altered(0, bucket=-1), InvalidRequestError),
        (altered(0, offset_bytes=4), InvalidRequestError),
        (altered(0, encoding=BucketEncoding.UNCHANGED), InvalidRequestError),
        (altered(0, encoding=BucketEncoding.DELTA, encoded_bytes=1 << 40), InvalidRequestError),
        (altered(0, encoded_bytes=BUCKETS[0].num_bytes - 4), InvalidRequestError),
        (altered(0, encoded_bytes=BUCKETS[0].num_bytes + 4), InvalidRequestError),
        (altered(0, data=memoryview(b"")), InvalidRequestError),
        (altered(0, data=memoryview(bytes(3))), InvalidRequestError),
        (altered(0, data=memoryview(bytes(BUCKETS[0].num_bytes + 4))), InvalidRequestError),
        (lambda parts: [], InvalidRequestError),
    ],
)
def test_wrong_first_part_is_refused_and_writes_nothing(
    alter: Callable[[list[BucketPart]], list[BucketPart]], error: type[ShoalError]
) -> None:
    sink = Sink()
    with pytest.raises(error):
        sink.write(serialise(alter(parts_of(BUCKETS[0]))))
    assert sink.is_untouched()
    # It harmed nobody: the bucket can still come.
    assert sink.write(serialise(parts_of(BUCKETS[0]))) == (1, BUCKETS[0].num_bytes)


@pytest.mark.parametrize(
    "alter",
    [
        altered(1, bucket=1),
        altered(1, offset_bytes=0),
        altered(1, offset_bytes=1004),
        altered(1, encoding=BucketEncoding.DELTA),
        altered(1, encoded_bytes=BUCKETS[0].num_bytes + 4),
        altered(2, data=memoryview(bytes(BUCKETS[0].num_bytes))),
        lambda parts: parts[:-1],
        lambda parts: parts[:-1] + parts_of(BUCKETS[1]),
    ],
)
def test_stream_that_goes_wrong_later_stays_inside_its_bucket(alter: Callable[[list[BucketPart]], list[BucketPart]]) -> None:
    sink = Sink()
    with pytest.raises((InvalidRequestError, TransportError)):
        sink.write(serialise(alter(parts_of(BUCKETS[0]))))
    for bucket in BUCKETS[1:]:
        assert bucket_digest(sink.staging.target, bucket) == digest(torch.zeros(bucket.num_bytes, dtype=torch.uint8))
    assert sink.write(serialise(parts_of(BUCKETS[0]))) == (1, BUCKETS[0].num_bytes)


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (replace(HEAD, push_id="push-0"), StateError),
        (replace(HEAD, policy_version=2), StateError),
        (replace(HEAD, rank=2), InvalidRequestError),
        (replace(HEAD, worker_rank=1), InvalidRequestError),
        (None, InvalidRequestError),
    ],
)
def test_stream_of_another_push_or_pair_is_refused(head: StreamHead | None, error: type[ShoalError]) -> None:
    sink = Sink()
    with pytest.raises(error):
        sink.write(serialise(parts_of(BUCKETS[0]), head))
    assert sink.is_untouched()


def test_second_head_in_a_stream_is_refused() -> None:
    sink = Sink()
    messages = [part_to_bytes(part, HEAD) for part in parts_of(BUCKETS[0])]
    with pytest.raises(InvalidRequestError, match="second message"):
        sink.write(messages)


def test_pair_of_another_transport_is_refused() -> None:
    sink = Sink()
    sink.receiver.arm("push-1", 1, SETTING.plan("collective"))
    with pytest.raises(InvalidRequestError, match="nothing over grpc"):
        sink.write(serialise(parts_of(BUCKETS[0])))


def test_buckets_out_of_order_and_repeated_ones_are_refused() -> None:
    sink = Sink()
    with pytest.raises(InvalidRequestError, match="plan's order"):
        sink.write(serialise([*parts_of(BUCKETS[1]), *parts_of(BUCKETS[0])]))
    with pytest.raises(InvalidRequestError, match="came already"):
        sink.write(serialise(parts_of(BUCKETS[1])))


@pytest.mark.parametrize("damage", [b"junk", b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f"])
def test_message_that_cannot_be_read_is_refused(damage: bytes) -> None:
    sink = Sink()
    with pytest.raises(CodecError):
        sink.write([damage])
    assert sink.is_untouched()


def test_damaged_delta_is_refused_and_writes_nothing() -> None:
    sink = Sink()
    [part] = delta_parts(BUCKETS[0], [0, 5, 9])
    damaged = bytearray(part.data)
    damaged[25] ^= 0xFF
    with pytest.raises(CodecError):
        sink.write(serialise([replace(part, data=memoryview(damaged[:-1]), encoded_bytes=len(damaged) - 1)]))
    beyond = delta_parts(BUCKETS[0], [BUCKETS[0].num_bytes // 4])
    with pytest.raises(CodecError):
        sink.write(serialise(beyond))
    assert sink.is_untouched()


def test_nothing_is_taken_before_arming_and_after_disarming() -> None:
    sink = Sink()
    sink.receiver.disarm()
    with pytest.raises(StateError, match="no push"):
        sink.write(serialise(parts_of(BUCKETS[0])))
    assert sink.is_untouched()


@pytest.mark.parametrize("replaced", [True, False])
def test_running_stream_ends_when_its_push_does(replaced: bool) -> None:
    sink = Sink()
    messages = serialise(parts_of(BUCKETS[0]))

    async def stream() -> AsyncIterator[bytes]:
        yield messages[0]
        if replaced:
            sink.receiver.arm("push-2", 2, PLAN)
        else:
            sink.receiver.disarm()
        sink.staging.buffer.zero_()
        for message in messages[1:]:
            yield message

    with pytest.raises(StateError, match="no longer received"):
        asyncio.run(sink.receiver.write(stream()))
    assert sink.is_untouched()


class GatedTarget:
    """Stops whoever asks for a piece until it is let go."""

    def __init__(self, target: PieceTarget) -> None:
        self._target = target
        self.entered, self.release = threading.Event(), threading.Event()

    def piece(self, parameter: str, box: Box) -> Tensor:
        self.entered.set()
        assert self.release.wait(30)
        return self._target.piece(parameter, box)


def test_delta_is_written_beside_the_loop_and_no_further_than_its_push() -> None:
    setting = Setting(shapes={"large": (1 << 18,)}, bucket_bytes=1 << 20)
    plan, staging = setting.plan("grpc"), setting.staging()[0]
    [bucket] = plan.buckets(0, 0)
    target = GatedTarget(staging.target)
    receiver = BulkReceiver({0: target})
    receiver.arm("push-1", 1, plan)
    parts = delta_parts(bucket, range(0, 1 << 18, 2), MAX_PART_BYTES)

    async def run() -> None:
        writing = asyncio.ensure_future(receiver.write(stream_of(serialise(parts))))
        # The loop runs on while a thread is inside the first slice; disarming waits for that slice only.
        await asyncio.to_thread(target.entered.wait, 30)
        disarming = asyncio.ensure_future(asyncio.to_thread(receiver.disarm))
        done, _ = await asyncio.wait({disarming}, timeout=0.1)
        assert not done
        target.release.set()
        await disarming
        with pytest.raises(StateError, match="no longer received"):
            await writing

    asyncio.run(run())
    num_written = int(staging.buffer.view(torch.float32).count_nonzero())
    assert 0 < num_written < 1 << 17
