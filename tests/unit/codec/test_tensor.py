"""Tensors on the wire."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from shoal.codec.tensor import (
    dtype_from_proto,
    dtype_name,
    dtype_to_proto,
    numpy_dtype,
    tensor_from_bytes,
    tensor_from_proto,
    tensor_to_bytes,
    tensor_to_proto,
)
from shoal.errors import CodecError
from shoal.rpc.v1 import common_pb2

NAMES = ["float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "bool"]
_NUMPY_TYPES = [np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.bool_]


def _same_bits(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


@given(
    st.sampled_from(_NUMPY_TYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)))
)
def test_tensor_round_trip_keeps_every_bit(array: NDArray[Any]) -> None:
    # NaN payloads, infinities, -0.0, empty and scalar tensors included.
    assert _same_bits(tensor_from_proto(tensor_to_proto(array)), array)
    assert _same_bits(tensor_from_bytes(tensor_to_bytes(array)), array)


def test_tensor_bfloat16_round_trip_keeps_values_and_type() -> None:
    array = np.array([[1.5, -0.0], [float("inf"), float("nan")]]).astype(ml_dtypes.bfloat16)
    message = tensor_to_proto(array)
    assert message.dtype == common_pb2.DATA_TYPE_BFLOAT16
    # 1.5 is 0x3fc0, low byte first.
    assert message.data_le[:2] == b"\xc0\x3f"
    assert _same_bits(tensor_from_proto(message), array)


def test_tensor_is_row_major_and_little_endian_for_any_layout() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    expected = b"".join(i.to_bytes(4, "little") for i in range(6))
    for variant in (array, np.asfortranarray(array), array.astype(">i4"), np.repeat(array, 2, axis=1)[:, ::2]):
        message = tensor_to_proto(variant)
        assert message.data_le == expected
        assert np.array_equal(tensor_from_proto(message), array)


def test_tensor_from_proto_is_read_only() -> None:
    array = tensor_from_proto(tensor_to_proto(np.zeros(3, np.float32)))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [([3], 11), ([3], 13), ([3], 0), ([0], 4), ([], 0), ([2, 2], 12), ([1 << 40], 4), ([1 << 31, 1 << 31], 16), ([1 << 62, 1 << 62], 0)],
)
def test_tensor_wrong_byte_length_is_refused_before_allocating(shape: list[int], num_bytes: int) -> None:
    message = common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_FLOAT32, shape=shape, data_le=bytes(num_bytes))
    with pytest.raises(CodecError, match=f"but carries {num_bytes}"):
        tensor_from_proto(message)


@pytest.mark.parametrize("shape", [[-1], [2, -2], [-2, -2], [1] * 33])
def test_tensor_impossible_shape_is_refused(shape: list[int]) -> None:
    message = common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_UINT8, shape=shape, data_le=bytes(4))
    with pytest.raises(CodecError, match="shape"):
        tensor_from_proto(message)


def test_tensor_empty_with_overflowing_extents_is_refused() -> None:
    message = common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_FLOAT32, shape=[0, 1 << 62, 1 << 62], data_le=b"")
    with pytest.raises(CodecError, match="not possible"):
        tensor_from_proto(message)


def test_tensor_bool_other_than_0_and_1_is_refused() -> None:
    message = common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_BOOL, shape=[2], data_le=b"\x01\x02")
    with pytest.raises(CodecError, match="other than 0 and 1"):
        tensor_from_proto(message)


def test_tensor_unset_dtype_is_refused() -> None:
    with pytest.raises(CodecError, match="data type 0 is unknown"):
        tensor_from_proto(common_pb2.Tensor(shape=[0]))


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1j]), np.array([1], np.uint16), np.array([object()])])
def test_tensor_other_dtypes_are_not_sent(array: NDArray[Any]) -> None:
    with pytest.raises(CodecError, match="cannot be sent"):
        tensor_to_proto(array)


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x08"])
def test_tensor_from_bytes_refuses_other_bytes(data: bytes) -> None:
    with pytest.raises(CodecError, match="not a Tensor"):
        tensor_from_bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_dtype_names_round_trip(name: str) -> None:
    assert dtype_from_proto(dtype_to_proto(name)) == name
    assert dtype_name(numpy_dtype(name)) == name


def test_dtype_every_wire_value_has_a_name() -> None:
    assert sorted(dtype_from_proto(number) for number in common_pb2.DataType.values() if number) == sorted(NAMES)
    with pytest.raises(CodecError, match="'complex64' is unknown"):
        dtype_to_proto("complex64")
