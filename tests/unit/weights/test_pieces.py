"""Pieces of a bucket: digests, packing, writing and comparing agree with each other and with naive loops, bit by bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.errors import TransportError
from shoal.types.weights import Box
from shoal.weights import boxes
from shoal.weights.delta import Delta
from shoal.weights.transports.chunks import CHUNK_BYTES, as_array
from shoal.weights.transports.pieces import (
    bucket_digest,
    canonical_digest,
    digest_of,
    find_delta,
    pack_bucket,
    write_delta,
    write_dense,
)
from tests.helpers.layouts import box, columns_of
from tests.helpers.transport_pieces import PlainStaging, bucket_of, tensors_of

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (6, 8), "cube": (3, 4, 5), "vector": (7,), "scalar": (), "empty": (0, 4)}
SCALAR = Box(offsets=(), sizes=())
WHERE = [
    ("matrix", columns_of((6, 8), 2, 5)),
    ("cube", box((1, 3), (1, 3), (2, 5))),
    ("scalar", SCALAR),
    ("empty", boxes.whole((0, 4))),
    ("vector", box((0, 7))),
]
BUCKET = bucket_of(WHERE, "bfloat16")
DTYPES = ["float32", "bfloat16", "float16", "float64"]


def raw(pieces: list[Tensor]) -> bytes:
    """The bytes of a bucket by their definition."""
    return b"".join(np.ascontiguousarray(as_array(piece)).tobytes() for piece in pieces)


def staged_bytes(staging: PlainStaging) -> bytes:
    return staging.buffer.numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_and_packing_are_of_the_row_major_bytes(dtype: str) -> None:
    bucket = bucket_of(WHERE, dtype)
    pieces = [torch.randn(box.sizes[::-1]).permute(tuple(reversed(range(len(box.sizes))))) for _, box in WHERE]
    cast = [piece.to(getattr(torch, dtype)) for piece in pieces]
    expected = xxhash.xxh3_64(raw(cast)).intdigest()
    assert digest_of(pieces, dtype) == expected
    assert digest_of(cast, dtype) == expected
    packed = pack_bucket(bucket, pieces)
    assert packed.numpy().tobytes() == raw(cast)
    assert packed.numel() == bucket.num_bytes


@given(cuts=st.lists(st.integers(0, BUCKET.num_bytes), max_size=6), as_bytes=st.booleans())
def test_write_dense_takes_parts_that_begin_and_end_anywhere(cuts: list[int], as_bytes: bool) -> None:
    staging, pieces = PlainStaging(SHAPES, "bfloat16"), tensors_of(BUCKET)
    packed = pack_bucket(BUCKET, pieces)
    edges = [0, *sorted(cuts), BUCKET.num_bytes]
    for start, end in itertools.pairwise(edges):
        part = packed[start:end]
        write_dense(staging.target, BUCKET, part.numpy().tobytes() if as_bytes else part, start)
    assert bucket_digest(staging.target, BUCKET) == digest_of(pieces, "bfloat16")
    expected = PlainStaging(SHAPES, "bfloat16")
    for one, piece in zip(BUCKET.pieces, pieces, strict=True):
        expected.target.piece(one.parameter, one.parameter_box).copy_(piece)
    assert staged_bytes(staging) == staged_bytes(expected)


@pytest.mark.parametrize(
    ("num_bytes", "offset"), [(3, BUCKET.num_bytes - 2), (1, -1), (BUCKET.num_bytes + 1, 0), (0, BUCKET.num_bytes + 1)]
)
def test_write_dense_refuses_what_lies_outside(num_bytes: int, offset: int) -> None:
    staging = PlainStaging(SHAPES, "bfloat16")
    with pytest.raises(TransportError, match="do not lie in bucket 0"):
        write_dense(staging.target, BUCKET, b"\1" * num_bytes, offset)
    assert not staging.buffer.any()


@settings(max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(["bfloat16", "float16", "float32"]))
def test_delta_turns_the_old_bucket_into_the_new_one(data: st.DataObject, dtype: str) -> None:
    bucket = bucket_of(WHERE, dtype)
    old = tensors_of(bucket)
    new = [piece.clone() for piece in old]
    flat = [(number, at) for number, piece in enumerate(new) for at in range(piece.numel())]
    changed = data.draw(st.sets(st.integers(0, len(flat) - 1), max_size=2))
    for element in changed:
        number, at = flat[element]
        new[number].view(-1)[at] = data.draw(st.sampled_from([3.5, float("inf"), float("nan")]))
    staging = PlainStaging(SHAPES, dtype)
    write_dense(staging.target, bucket, pack_bucket(bucket, old), 0)
    delta = find_delta(bucket, old, new)
    assert delta is not None
    assert delta.positions.tolist() == sorted(changed)
    write_delta(staging.target, bucket, delta)
    assert bucket_digest(staging.target, bucket) == digest_of(new, dtype)


def test_delta_sees_the_sign_of_zero_and_the_bits_of_nan() -> None:
    bucket = bucket_of([("vector", box((0, 7))), ("matrix", boxes.whole((6, 8)))], "float32")
    old = [torch.zeros(7), torch.zeros(6, 8)]
    old[0][1] = float("nan")
    new = [piece.clone() for piece in old]
    new[0][3] = -0.0
    new[1].view(torch.int32)[2, 2] = 0x7FC00001
    delta = find_delta(bucket, old, new)
    assert delta is not None
    assert delta.positions.tolist() == [3, 7 + 18]
    assert delta.values.view(np.uint32).tolist() == [0x80000000, 0x7FC00001]


def test_delta_of_too_many_changes_is_none() -> None:
    bucket = bucket_of([("vector", box((0, 1300)))], "bfloat16")
    old = torch.zeros(1300, dtype=torch.bfloat16)
    for num_changed, found in ((200, True), (201, False), (1300, False)):
        new = old.clone()
        new[:num_changed] = 1
        assert (find_delta(bucket, [old], [new]) is not None) is found


def test_delta_compares_strided_pieces() -> None:
    bucket = bucket_of([("matrix", boxes.whole((40, 50)))], "bfloat16")
    old, new = torch.zeros(50, 40, dtype=torch.bfloat16).T, torch.zeros(40, 50, dtype=torch.bfloat16)
    new[3, 7] = 2
    delta = find_delta(bucket, [old], [new])
    assert delta is not None
    assert delta.positions.tolist() == [3 * 50 + 7]


def test_delta_wants_the_serving_dtype() -> None:
    pieces = [piece.float() for piece in tensors_of(BUCKET)]
    with pytest.raises(TransportError, match="serving dtype bfloat16"):
        find_delta(BUCKET, pieces, pieces)


@pytest.mark.parametrize("positions", [[-1], [0, BUCKET.num_bytes // 2], [4, 3], [2, 2]])
def test_write_delta_refuses_positions_outside_and_writes_nothing(positions: list[int]) -> None:
    staging = PlainStaging(SHAPES, "bfloat16")
    delta = Delta(positions=np.array(positions), values=np.ones(len(positions), dtype=np.int16))
    with pytest.raises(TransportError, match="a delta does not fit bucket 0"):
        write_delta(staging.target, BUCKET, delta)
    assert not staging.buffer.any()


def test_pack_refuses_other_shapes_numbers_and_kinds() -> None:
    pieces = tensors_of(BUCKET)
    with pytest.raises(TransportError, match=r"has 5 pieces, 4 were given"):
        pack_bucket(BUCKET, pieces[:-1])
    with pytest.raises(TransportError, match=r"vector wants \[7\].*the source has \[6\]"):
        pack_bucket(BUCKET, [*pieces[:-1], pieces[-1][:-1]])
    with pytest.raises(TransportError, match="vector is int64"):
        pack_bucket(BUCKET, [*pieces[:-1], torch.zeros(7, dtype=torch.int64)])


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (("nobody", box((0, 1))), "no parameter nobody"),
        (("vector", box((4, 8))), r"vector has shape \[7\].*\[4:8\] lies outside"),
        (("vector", boxes.whole((1, 7))), "lies outside"),
    ],
)
def test_pieces_that_staging_lacks_are_refused(where: tuple[str, Box], words: str) -> None:
    staging = PlainStaging(SHAPES, "bfloat16")
    bucket = bucket_of([where], "bfloat16")
    with pytest.raises(TransportError, match=words):
        write_dense(staging.target, bucket, b"\1" * bucket.num_bytes, 0)
    with pytest.raises(TransportError, match=words):
        bucket_digest(staging.target, bucket)
    assert not staging.buffer.any()


def test_bucket_of_another_dtype_than_staging_is_refused() -> None:
    staging = PlainStaging(SHAPES, "bfloat16")
    with pytest.raises(TransportError, match="vector is staged as bfloat16, the bucket has float32"):
        bucket_digest(staging.target, bucket_of([("vector", box((0, 7)))], "float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_canonical_digest_takes_zeros_for_equal_and_nothing_else(dtype: str) -> None:
    piece = torch.randn(5, 6)
    piece[2, 3] = 0.0
    signed = piece.clone()
    signed[2, 3] = -0.0
    assert canonical_digest(piece, dtype) == canonical_digest(signed, dtype) == digest_of([piece], dtype) != digest_of([signed], dtype)
    assert canonical_digest(piece, dtype) == canonical_digest(piece.to(getattr(torch, dtype)), dtype)
    signed[0, 0] *= 1.5
    assert canonical_digest(signed, dtype) != canonical_digest(piece, dtype)


@pytest.mark.parametrize(("dtype", "bits", "codes"), [("bfloat16", torch.int16, (0x7FC0, -1)), ("float32", torch.int32, (0x7FC00000, -1))])
def test_canonical_digest_takes_every_nan_for_equal(dtype: str, bits: torch.dtype, codes: tuple[int, int]) -> None:
    # 37 elements: torch treats the last ones, which fill no vector, otherwise.
    nans = [torch.full((37,), code, dtype=bits).view(getattr(torch, dtype)) for code in codes]
    assert canonical_digest(nans[0], dtype) == canonical_digest(nans[1], dtype)
    nans[1][36] = 1.0
    assert canonical_digest(nans[0], dtype) != canonical_digest(nans[1], dtype)


def test_canonical_digest_does_not_depend_on_strides() -> None:
    piece = torch.randn(700, 900)
    strided = piece.T.contiguous().T
    assert canonical_digest(strided, "bfloat16") == canonical_digest(piece, "bfloat16")


def test_integers_are_carried_as_they_are() -> None:
    bucket = bucket_of([("table", boxes.whole((3, 4)))], "int32")
    piece = torch.arange(12, dtype=torch.int32).view(3, 4)
    assert pack_bucket(bucket, [piece]).numpy().tobytes() == piece.numpy().tobytes()
    assert canonical_digest(piece, "int32") == digest_of([piece], "int32")


def test_digest_of_many_chunks_equals_one_of_all_bytes() -> None:
    wide = torch.randn(9, 3 * CHUNK_BYTES // 16 + 11)
    assert digest_of([wide[:, 3:-3]], "float32") == xxhash.xxh3_64(wide[:, 3:-3].contiguous().numpy().tobytes()).intdigest()
