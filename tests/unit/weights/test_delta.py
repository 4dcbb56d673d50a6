"""The delta format: lossless, small, and harmless when damaged."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.errors import CodecError, TransportError
from shoal.weights.delta import Delta, check_delta, decode_delta, encode_delta, encoded_size, value_dtype

DTYPES = ["bfloat16", "float16", "float32", "float64", "int64", "uint8", "bool"]
HEADER_BYTES = 24


def delta_of(positions: NDArray[np.int64] | list[int], dtype: str = "bfloat16", seed: int = 0) -> Delta:
    """Random bits as values."""
    where = np.asarray(positions, dtype=np.int64)
    item = value_dtype(dtype)
    most = 2 if dtype == "bool" else 256
    raw = np.random.default_rng(seed).integers(0, most, where.size * item.itemsize, dtype=np.uint8)
    return Delta(positions=where, values=raw.view(item))


def assert_same(found: Delta, expected: Delta) -> None:
    assert np.array_equal(found.positions, expected.positions)
    assert found.positions.dtype == np.int64
    assert found.values.dtype == expected.values.dtype
    assert found.values.tobytes() == expected.values.tobytes()


gaps = st.one_of(st.integers(0, 3), st.integers(250, 260), st.integers(65530, 65540), st.integers(0, 1 << 33))


@given(gaps=st.lists(gaps, max_size=30), dtype=st.sampled_from(DTYPES), spare=st.integers(0, 2))
def test_round_trip_keeps_every_bit(gaps: list[int], dtype: str, spare: int) -> None:
    positions = np.cumsum(np.asarray(gaps, dtype=np.int64) + 1) - 1
    delta = delta_of(positions, dtype)
    data = encode_delta(delta)
    assert encoded_size(delta) == len(data)
    num_elements = (int(positions[-1]) + 1 if positions.size else 0) + spare
    assert_same(decode_delta(data, dtype, num_elements), delta)
    assert_same(decode_delta(memoryview(bytearray(data)), dtype, num_elements), delta)


@pytest.mark.parametrize(
    ("positions", "gap_bytes"),
    [
        ([0, 1, 2], 3),
        ([254], 1),
        ([255], 2),
        ([509, 510], 3),
        ([70_000 * n for n in range(1, 50)], 49 * 4),
        ([600 * n for n in range(1, 50)], 49 * 2),
    ],
)
def test_gaps_take_the_narrowest_width(positions: list[int], gap_bytes: int) -> None:
    assert encoded_size(delta_of(positions)) == HEADER_BYTES + gap_bytes + 2 * len(positions)


@pytest.mark.parametrize(("share", "limit"), [(0.015, 0.026), (0.001, 0.0022), (0.05, 0.08), (0.00001, 0.00004)])
def test_random_changes_of_bfloat16_stay_small(share: float, limit: float) -> None:
    num_elements = 8 << 20
    positions = np.flatnonzero(np.random.default_rng(1).random(num_elements) < share)
    assert encoded_size(delta_of(positions)) <= limit * 2 * num_elements


def test_nothing_changed_is_a_header() -> None:
    data = encode_delta(delta_of([]))
    assert len(data) == HEADER_BYTES
    assert_same(decode_delta(data, "bfloat16", 0), delta_of([]))


def test_every_truncation_is_refused() -> None:
    data = encode_delta(delta_of([3, 700, 701]))
    for end in range(len(data)):
        with pytest.raises(CodecError):
            decode_delta(data[:end], "bfloat16", 1000)
    with pytest.raises(CodecError):
        decode_delta(data + b"\0", "bfloat16", 1000)


@settings(max_examples=300)
@given(
    where=st.integers(0, 10_000),
    byte=st.integers(0, 255),
    positions=st.lists(st.integers(0, 2000), max_size=20, unique=True).map(sorted),
)
def test_damaged_bytes_never_lead_outside(where: int, byte: int, positions: list[int]) -> None:
    data = bytearray(encode_delta(delta_of(positions)))
    data[where % len(data)] = byte
    try:
        found = decode_delta(bytes(data), "bfloat16", 2001)
    except CodecError:
        return
    assert check_delta(found, "bfloat16", 2001) is None


@given(data=st.binary(max_size=80), num_elements=st.integers(0, 300))
def test_random_bytes_never_lead_outside(data: bytes, num_elements: int) -> None:
    for head in (b"", struct.pack("<4sBBHQQ", b"SHD1", 1, 2, 0, len(data) // 3, len(data) - len(data) // 3 * 2)):
        try:
            found = decode_delta(head + data, "bfloat16", num_elements)
        except CodecError:
            continue
        assert check_delta(found, "bfloat16", num_elements) is None


def header(width: int = 1, item: int = 2, changed: int = 1, entries: int = 1) -> bytes:
    return struct.pack("<4sBBHQQ", b"SHD1", width, item, 0, changed, entries)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "shorter than its header"),
        (b"SHD2" + header()[4:] + b"\0\0\0", "both ends need the same version"),
        (header(width=3) + b"\0\0\0", "both ends need the same version"),
        (header(item=4) + b"\0\0\0\0\0", "damaged on the way"),
        (header(changed=2) + b"\0\0\0\0\0", "2 changes and 1 gaps"),
        (header(changed=1, entries=1) + b"\xff\0\0", "do not name its 1 changed"),
        (header(changed=1, entries=2) + b"\x00\xff\0\0", "do not name its 1 changed"),
        (header(changed=1, entries=2) + b"\x00\x00\0\0", "do not name its 1 changed"),
        (header(changed=1, entries=2) + b"\xff\x00\0\0", "changes element 255 of a bucket of 100"),
        (header(changed=1 << 62, entries=1 << 62), "damaged"),
        (header(changed=0, entries=1) + b"\xff", "do not name"),
    ],
)
def test_decode_names_what_is_wrong(data: bytes, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        decode_delta(data, "bfloat16", 100)


def test_dtype_that_no_push_carries_is_refused() -> None:
    with pytest.raises(TransportError, match="complex64"):
        decode_delta(encode_delta(delta_of([1])), "complex64", 10)


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (delta_of([0, 10]), "positions 0 to 10 of a bucket of 10"),
        (delta_of([-1, 3]), "positions -1 to 3"),
        (delta_of([3, 3]), "do not increase"),
        (delta_of([1, 5, 4, 6]), "do not increase"),
        (delta_of([1], "float32"), "values are float32"),
        (Delta(positions=np.array([1, 2]), values=np.zeros(1, dtype=np.int16)), r"\(2,\) positions for \(1,\) values"),
    ],
)
def test_check_delta_names_what_does_not_fit(delta: Delta, words: str) -> None:
    fault = check_delta(delta, "bfloat16", 10)
    assert fault is not None
    assert re.search(words, fault)


def test_check_delta_takes_what_fits() -> None:
    assert check_delta(delta_of([0, 9]), "bfloat16", 10) is None
    assert check_delta(delta_of([]), "bfloat16", 0) is None
