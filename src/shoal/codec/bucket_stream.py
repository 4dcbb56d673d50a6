"""Messages of the bulk stream, without protobuf's copies of the data.

A message is `WriteBucketsRequest` on the wire, its data field last. Building and parsing it through protobuf copies the data three times,
which halves what a stream reaches; here it is joined to a serialised header, and found by skipping over the header's fields.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from shoal.errors import CodecError
from shoal.rpc.v1 import weights_pb2
from shoal.types.weights import BucketEncoding

WRITE_BUCKETS = "WriteBuckets"
WEIGHT_SINK_SERVICE = "shoal.rpc.v1.WeightSinkService"
MAX_PART_BYTES = 1 << 20
"""Data of one message at most."""

_VARINT, _LENGTH_DELIMITED = 0, 2
_DATA_KEY = weights_pb2.WriteBucketsRequest.DATA_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHead:
    """What the first message of a stream names: the push and the pair that all its buckets belong to."""

    push_id: str
    policy_version: int
    rank: int
    worker_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPart:
    """A part of one encoded bucket.

    bucket counts within the pair; data lies at offset_bytes of the encoded bucket, which has encoded_bytes in all.
    """

    bucket: int
    encoding: BucketEncoding
    offset_bytes: int
    encoded_bytes: int
    data: memoryview


def part_to_bytes(part: BucketPart, head: StreamHead | None) -> bytes:
    """Serialise a message; copies the data once. The first message of a stream has a head, the others None."""
    message = weights_pb2.WriteBucketsRequest(
        bucket=part.bucket,
        encoding=weights_pb2.BucketEncoding.ValueType(part.encoding),
        offset_bytes=part.offset_bytes,
        encoded_bytes=part.encoded_bytes,
    )
    if head is not None:
        message.push_id, message.policy_version = head.push_id, head.policy_version
        message.rank, message.worker_rank = head.rank, head.worker_rank
    return b"".join((message.SerializeToString(), bytes((_DATA_KEY,)), _varint(part.data.nbytes), part.data))


def part_from_bytes(raw: bytes) -> tuple[BucketPart, StreamHead | None]:
    """Parse a message; its data is a view of `raw`.

    Raises: CodecError: not a `WriteBucketsRequest` with its data last, or an encoding that no bucket has.
    """
    header_end, data_start = _find_data(raw)
    try:
        message = weights_pb2.WriteBucketsRequest.FromString(raw[:header_end])
        encoding = BucketEncoding(message.encoding)
    except (DecodeError, ValueError) as error:
        raise CodecError(f"a message of the bulk stream cannot be read: {error}; are both ends of the same version?") from error
    part = BucketPart(
        bucket=message.bucket,
        encoding=encoding,
        offset_bytes=message.offset_bytes,
        encoded_bytes=message.encoded_bytes,
        data=memoryview(raw)[data_start:],
    )
    return part, _head_of(message) if message.push_id else None


def _head_of(message: weights_pb2.WriteBucketsRequest) -> StreamHead:
    return StreamHead(push_id=message.push_id, policy_version=message.policy_version, rank=message.rank, worker_rank=message.worker_rank)


def written_to_bytes(num_buckets: int, num_bytes: int) -> bytes:
    """Serialise the answer to a stream."""
    return weights_pb2.WriteBucketsResponse(num_buckets=num_buckets, num_bytes=num_bytes).SerializeToString()


def written_from_bytes(raw: bytes) -> tuple[int, int]:
    """Buckets and bytes that the sink took."""
    message = weights_pb2.WriteBucketsResponse.FromString(raw)
    return message.num_buckets, message.num_bytes


def _find_data(raw: bytes) -> tuple[int, int]:
    """Where the header ends and where the data, which must be the last field, starts."""
    at = 0
    while at < len(raw):
        key_at = at
        key, at = _read_varint(raw, at)
        if key & 7 == _VARINT:
            _, at = _read_varint(raw, at)
        elif key & 7 == _LENGTH_DELIMITED:
            size, at = _read_varint(raw, at)
            if key == _DATA_KEY and at + size == len(raw):
                return key_at, at
            at += size
        else:
            break
        if key == _DATA_KEY or at > len(raw):
            break
    raise CodecError(f"a message of {len(raw)} bytes of the bulk stream is cut, or does not end with its data; send the data field last")


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            break
        value |= (raw[at] & 0x7F) << shift
        at += 1
        if raw[at - 1] < 0x80:
            return value, at
    raise CodecError("a message of the bulk stream has a broken length; it was damaged, or is no WriteBucketsRequest")


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
