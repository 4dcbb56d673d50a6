"""Tensors on the wire: dtype, shape and little-endian bytes, with the sizes checked before anything is allocated."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from shoal.errors import CodecError
from shoal.rpc.v1 import common_pb2

MAX_DIMS = 32

# bfloat16 is no numpy dtype of its own.
_BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_NUMPY_OF: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": _BFLOAT16,
    "float16": np.dtype(np.float16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
_PROTO_OF: dict[str, common_pb2.DataType.ValueType] = {
    "float32": common_pb2.DATA_TYPE_FLOAT32,
    "float64": common_pb2.DATA_TYPE_FLOAT64,
    "bfloat16": common_pb2.DATA_TYPE_BFLOAT16,
    "float16": common_pb2.DATA_TYPE_FLOAT16,
    "int32": common_pb2.DATA_TYPE_INT32,
    "int64": common_pb2.DATA_TYPE_INT64,
    "uint8": common_pb2.DATA_TYPE_UINT8,
    "bool": common_pb2.DATA_TYPE_BOOL,
}
_NAME_OF: dict[int, str] = {number: name for name, number in _PROTO_OF.items()}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a codec dtype name such as "float32" or "bfloat16".

    Raises: CodecError: the name is unknown.
    """
    dtype = _NUMPY_OF.get(name)
    if dtype is None:
        raise CodecError(f"dtype {name!r} is unknown; use one of {', '.join(_NUMPY_OF)}")
    return dtype


@functools.lru_cache(maxsize=64)  # numpy computes the name anew at each access, and every record needs several
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the codec name of a numpy dtype of any byte order.

    Raises: CodecError: the dtype cannot travel.
    """
    if dtype.name not in _NUMPY_OF:
        raise CodecError(f"dtype {dtype.name!r} cannot be sent; convert to one of {', '.join(_NUMPY_OF)}")
    return str(dtype.name)


def dtype_to_proto(name: str) -> common_pb2.DataType.ValueType:
    """Return the wire value of a codec dtype name. Raises CodecError for an unknown one."""
    numpy_dtype(name)
    return _PROTO_OF[name]


def dtype_from_proto(number: int) -> str:
    """Return the codec dtype name of a wire value. Raises CodecError for UNSPECIFIED or an unknown one."""
    name = _NAME_OF.get(number)
    if name is None:
        raise CodecError(f"data type {number} is unknown; the sender must set one of {', '.join(_NUMPY_OF)}")
    return name


def tensor_to_proto(array: NDArray[Any]) -> common_pb2.Tensor:
    """Copy an array of any layout into a message. NaN and infinities are kept.

    Raises: CodecError: the dtype cannot travel.
    """
    name = dtype_name(array.dtype)
    little = _NUMPY_OF[name].newbyteorder("<")
    return common_pb2.Tensor(dtype=_PROTO_OF[name], shape=array.shape, data_le=array.astype(little, copy=False).tobytes())


def tensor_from_proto(message: common_pb2.Tensor) -> NDArray[Any]:
    """Return the array of a message as a read-only view of its bytes.

    Raises: CodecError: the dtype is unknown, the shape is negative, or the bytes are not exactly product(shape) elements.
    """
    name = dtype_from_proto(message.dtype)
    dtype = _NUMPY_OF[name]
    shape = _checked_shape(message.shape)
    expected = math.prod(shape) * dtype.itemsize
    data = message.data_le
    if len(data) != expected:
        raise CodecError(f"tensor {name}{list(shape)} needs {expected} bytes but carries {len(data)}; the message is cut or mislabelled")
    if name == "bool" and data.translate(None, b"\x00\x01"):
        raise CodecError(f"tensor bool{list(shape)} holds bytes other than 0 and 1; the message is mislabelled")
    try:
        return np.frombuffer(data, dtype=dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)
    except ValueError as error:
        # An empty tensor whose other extents overflow numpy's sizes.
        raise CodecError(f"tensor shape {list(shape)} is not possible: {error}") from error


def vector_from_proto(message: common_pb2.Tensor, dtype: str, what: str) -> NDArray[Any]:
    """Return a one-dimensional tensor of an expected dtype; `what` names it in errors.

    Raises: CodecError: as tensor_from_proto, or other dtype or number of dims.
    """
    try:
        array = tensor_from_proto(message)
    except CodecError as error:
        raise CodecError(f"{what}: {error}") from error
    if array.ndim != 1 or array.dtype != numpy_dtype(dtype):
        raise CodecError(f"{what} is {array.dtype.name}{list(array.shape)}; it must be a vector of {dtype}")
    return array


def tensor_to_bytes(array: NDArray[Any]) -> bytes:
    """Serialise an array as a Tensor message, as columns are stored."""
    return tensor_to_proto(array).SerializeToString()


def tensor_from_bytes(data: bytes) -> NDArray[Any]:
    """Parse what tensor_to_bytes wrote. Raises CodecError if it is not a Tensor message."""
    return tensor_from_proto(parse(common_pb2.Tensor(), data))


def parse(message: Any, data: bytes) -> Any:  # noqa: ANN401 - returns its argument, whatever message that is
    """Parse bytes into a message and return it.

    Raises: CodecError: the bytes are not such a message.
    """
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise CodecError(f"{len(data)} bytes are not a {message.DESCRIPTOR.name}: {error}") from error
    return message


def _checked_shape(shape: Any) -> tuple[int, ...]:  # noqa: ANN401 - protobuf's repeated container
    checked = tuple(int(extent) for extent in shape)
    if len(checked) > MAX_DIMS or any(extent < 0 for extent in checked):
        raise CodecError(f"tensor shape {list(checked)[:MAX_DIMS]} is not possible; extents are >= 0 and at most {MAX_DIMS} dims")
    return checked
