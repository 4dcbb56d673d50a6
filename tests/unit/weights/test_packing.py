"""Packing in parts gives the bytes and the digest of packing whole."""

from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.errors import TransportError
from shoal.types.weights import Box
from shoal.weights.buckets import Bucket, Piece
from shoal.weights.transports.packing import host_pieces, pack_whole, packed_parts
from shoal.weights.transports.pieces import pack_bucket

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16"])


def bucket_of(tensors: list[Tensor], dtype: str) -> Bucket:
    pieces = []
    for index, tensor in enumerate(tensors):
        box = Box(offsets=(0,) * tensor.dim(), sizes=tuple(tensor.shape))
        pieces.append(Piece(parameter=f"p{index}", source_name=f"s{index}", source_box=box, parameter_box=box))
    num_bytes = sum(tensor.numel() for tensor in tensors) * getattr(torch, dtype).itemsize
    return Bucket(rank=0, worker_rank=0, index=0, dtype=dtype, pieces=tuple(pieces), num_bytes=num_bytes)


def tensors_of(shapes: list[tuple[int, ...]], strided: list[bool]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for index, shape in enumerate(shapes):
        is_strided = bool(shape) and strided[index % len(strided)]
        tensor = torch.randn((*shape[:-1], shape[-1] * 2) if is_strided else shape, generator=generator)
        made.append(tensor[..., ::2] if is_strided else tensor)
    return made


@given(
    shapes=SHAPES,
    strided=st.lists(st.booleans(), min_size=1, max_size=3),
    dtype=DTYPES,
    buffer_bytes=st.integers(2, 40).map(lambda n: 8 * n),
)
def test_parts_joined_are_the_bucket(shapes: list[tuple[int, ...]], strided: list[bool], dtype: str, buffer_bytes: int) -> None:
    tensors = tensors_of(shapes, strided)
    bucket = bucket_of(tensors, dtype)
    digest = xxhash.xxh3_64()
    buffer = torch.empty(buffer_bytes, dtype=torch.uint8)
    parts = [bytes(part) for part in packed_parts(bucket, host_pieces(bucket, tensors), buffer, digest)]
    expected = pack_bucket(bucket, tensors).numpy().tobytes()
    assert b"".join(parts) == expected
    assert digest.intdigest() == xxhash.xxh3_64_intdigest(expected)
    assert all(0 < len(part) <= buffer_bytes for part in parts)


@given(shapes=SHAPES, strided=st.lists(st.booleans(), min_size=1, max_size=3), dtype=DTYPES)
def test_whole_bucket_fits_a_buffer_of_its_size(shapes: list[tuple[int, ...]], strided: list[bool], dtype: str) -> None:
    tensors = tensors_of(shapes, strided)
    bucket = bucket_of(tensors, dtype)
    buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
    expected = pack_bucket(bucket, tensors)
    assert pack_whole(bucket, host_pieces(bucket, tensors), buffer) == xxhash.xxh3_64_intdigest(expected.numpy().data)
    assert torch.equal(buffer, expected)


def test_parts_of_a_large_bucket_are_nearly_full() -> None:
    tensors = [torch.randn(1000, 1000), torch.randn(37), torch.randn(200, 300).T]
    bucket = bucket_of(tensors, "float32")
    buffer = torch.empty(1 << 20, dtype=torch.uint8)
    sizes = [part.nbytes for part in packed_parts(bucket, tensors, buffer, xxhash.xxh3_64())]
    assert sum(sizes) == bucket.num_bytes
    assert min(sizes[:-1]) > 0.7 * (1 << 20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_pieces_are_read_where_they_are_between_small_and_strided_ones(dtype: str) -> None:
    tensors = [torch.randn(5), torch.randn(700, 500), torch.randn(3), torch.randn(300, 400).T, torch.randn(1 << 16), torch.randn(7)]
    bucket = bucket_of(tensors, dtype)
    digest, buffer = xxhash.xxh3_64(), torch.empty(1 << 19, dtype=torch.uint8)
    parts = []
    for part in packed_parts(bucket, tensors, buffer, digest):
        assert part.nbytes <= buffer.numel()
        parts.append(bytes(part))
    expected = pack_bucket(bucket, tensors).numpy().tobytes()
    assert b"".join(parts) == expected
    assert digest.intdigest() == xxhash.xxh3_64_intdigest(expected)


def test_pieces_of_another_shape_are_refused() -> None:
    bucket = bucket_of([torch.zeros(2, 3)], "float32")
    with pytest.raises(TransportError, match="wants"):
        host_pieces(bucket, [torch.zeros(3, 2)])
