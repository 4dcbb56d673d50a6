"""Messages of the bulk stream are the proto's, read and written without protobuf's copies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.codec.bucket_stream import BucketPart, StreamHead, part_from_bytes, part_to_bytes, written_from_bytes, written_to_bytes
from shoal.errors import CodecError
from shoal.rpc.v1 import weights_pb2
from shoal.types.weights import BucketEncoding

HEADS = st.none() | st.builds(
    StreamHead,
    push_id=st.text(min_size=1, max_size=200),
    policy_version=st.integers(0, 2**62),
    rank=st.integers(0, 2**31 - 1),
    worker_rank=st.integers(0, 2**31 - 1),
)
PARTS = st.builds(
    BucketPart,
    bucket=st.integers(0, 2**31 - 1),
    encoding=st.sampled_from(BucketEncoding),
    offset_bytes=st.integers(0, 2**62),
    encoded_bytes=st.integers(0, 2**62),
    data=st.binary(max_size=300).map(memoryview),
)


def message_of(part: BucketPart, head: StreamHead | None) -> weights_pb2.WriteBucketsRequest:
    message = weights_pb2.WriteBucketsRequest(
        bucket=part.bucket,
        encoding=weights_pb2.BucketEncoding.ValueType(part.encoding),
        offset_bytes=part.offset_bytes,
        encoded_bytes=part.encoded_bytes,
        data=bytes(part.data),
    )
    if head is not None:
        message.push_id, message.policy_version, message.rank, message.worker_rank = (
            head.push_id,
            head.policy_version,
            head.rank,
            head.worker_rank,
        )
    return message


@given(part=PARTS, head=HEADS)
def test_part_is_written_as_protobuf_reads_it(part: BucketPart, head: StreamHead | None) -> None:
    assert weights_pb2.WriteBucketsRequest.FromString(part_to_bytes(part, head)) == message_of(part, head)


@given(part=PARTS.filter(lambda part: part.data.nbytes > 0), head=HEADS)
def test_part_is_read_as_protobuf_writes_it(part: BucketPart, head: StreamHead | None) -> None:
    assert part_from_bytes(message_of(part, head).SerializeToString()) == (part, head)


@given(part=PARTS, head=HEADS, data=st.data())
def test_cut_part_is_refused(part: BucketPart, head: StreamHead | None, data: st.DataObject) -> None:
    raw = part_to_bytes(part, head)
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(CodecError):
        part_from_bytes(raw[:cut])


@given(raw=st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        part, head = part_from_bytes(raw)
    except CodecError:
        return
    assert weights_pb2.WriteBucketsRequest.FromString(raw) == message_of(part, head) or head is None


def test_data_before_another_field_is_refused() -> None:
    data_first = weights_pb2.WriteBucketsRequest(data=b"abc").SerializeToString()
    rest = weights_pb2.WriteBucketsRequest(bucket=1, encoding=weights_pb2.BUCKET_ENCODING_DENSE).SerializeToString()
    with pytest.raises(CodecError, match="data field last"):
        part_from_bytes(data_first + rest)


def test_encoding_that_no_bucket_has_is_refused() -> None:
    with pytest.raises(CodecError, match="cannot be read"):
        part_from_bytes(weights_pb2.WriteBucketsRequest(push_id="p", data=b"abc").SerializeToString())


def test_written_makes_a_round_trip() -> None:
    assert written_from_bytes(written_to_bytes(3, 1 << 40)) == (3, 1 << 40)
    assert written_from_bytes(weights_pb2.WriteBucketsResponse(num_buckets=2, num_bytes=5).SerializeToString()) == (2, 5)
