"""Changed elements of a bucket, and their lossless wire format.

The gaps between positions are stored in the narrowest of 1, 2 or 4 bytes for the whole bucket: an entry below the largest number M of that
width skips so many unchanged elements and names the next one as changed; an entry equal to M skips M elements and names none. Layout,
little endian:

    "SHD1" | u8 gap bytes | u8 value bytes | u16 zero | u64 changed elements C | u64 entries E | E gaps | C values

Nothing that is decoded is used before counts, length and the last position were checked, so damaged bytes cannot lead outside a bucket;
that they are the right bytes is for the bucket's digest to say.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.errors import CodecError
from shoal.weights.dtypes import item_bytes

_HEADER = struct.Struct("<4sBBHQQ")
_MAGIC = b"SHD1"
_GAP_DTYPES: dict[int, np.dtype[np.unsignedinteger]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_MAX_ELEMENTS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Changed elements of a bucket: positions in its elements (pieces one after another, row-major), and their new values.

    positions: [C] int64, increasing. values: [C] in the serving dtype, bfloat16 as int16 bits.
    """

    positions: NDArray[np.int64]
    values: NDArray[np.generic]


def value_dtype(dtype: str) -> np.dtype[np.generic]:
    """The NumPy dtype that carries the values of a serving dtype. Raises: TransportError: a dtype that a push cannot carry."""
    item_bytes(dtype, "the bucket")
    return np.dtype(np.int16) if dtype == "bfloat16" else np.dtype(dtype)


def check_delta(delta: Delta, dtype: str, num_elements: int) -> str | None:
    """Why a delta does not fit a bucket of `num_elements` of a serving dtype; None if it does."""
    positions, values = delta.positions, delta.values
    if positions.shape != values.shape or positions.ndim != 1:
        return f"{positions.shape} positions for {values.shape} values"
    if values.dtype != value_dtype(dtype):
        return f"values are {values.dtype}, {dtype} is carried as {value_dtype(dtype)}"
    if not positions.size:
        return None
    if positions[0] < 0 or positions[-1] >= num_elements:
        return f"positions {positions[0]} to {positions[-1]} of a bucket of {num_elements} elements"
    return None if bool(np.all(positions[1:] > positions[:-1])) else "positions do not increase"


def encoded_size(delta: Delta) -> int:
    """Bytes of `encode_delta(delta)`, without making them."""
    return _size(delta, *_choose_width(_gaps(delta.positions)))


def encode_delta(delta: Delta) -> bytes:
    """Write a delta as bytes.

    Args:
        delta: positions increasing and not negative.
    Returns: the format that the module describes.
    """
    gaps = _gaps(delta.positions)
    width, num_entries = _choose_width(gaps)
    header = _HEADER.pack(_MAGIC, width, delta.values.itemsize, 0, delta.positions.size, num_entries)
    values = np.ascontiguousarray(delta.values, dtype=delta.values.dtype.newbyteorder("<"))
    return b"".join((header, _entries(gaps, width, num_entries).data, values.view(np.uint8).data))


def decode_delta(data: bytes | memoryview, dtype: str, num_elements: int) -> Delta:
    """Read a delta for a bucket.

    Args:
        data: what `encode_delta` wrote.
        dtype: the bucket's serving dtype.
        num_elements: elements of the bucket; every position is below it.
    Returns: the delta; values are a read-only view of `data`.
    Raises: CodecError: truncated, damaged, of another dtype, or a position outside of the bucket.
    """
    view = memoryview(data)
    width, num_changed, num_entries = _read_header(view, dtype, num_elements)
    values_start = _HEADER.size + num_entries * width
    entries = np.frombuffer(view[_HEADER.size : values_start], dtype=_GAP_DTYPES[width])
    values = np.frombuffer(view[values_start:], dtype=value_dtype(dtype).newbyteorder("<"))
    return Delta(positions=_positions(entries, num_changed, num_elements), values=values.astype(value_dtype(dtype), copy=False))


def _gaps(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Unchanged elements before each changed one."""
    gaps = np.empty(positions.size, dtype=np.int64)
    if positions.size:
        gaps[0] = positions[0]
        np.subtract(positions[1:], positions[:-1], out=gaps[1:])
        gaps[1:] -= 1
    return gaps


def _choose_width(gaps: NDArray[np.int64]) -> tuple[int, int]:
    """The width that gives the fewest bytes, and its number of entries."""
    largest = int(gaps.max(initial=0))
    choices = []
    for width in _GAP_DTYPES:
        most = (1 << 8 * width) - 1
        num_escapes = int((gaps // most).sum()) if largest >= most else 0
        choices.append((width, gaps.size + num_escapes))
        if not num_escapes:
            break
    return min(choices, key=lambda choice: choice[0] * choice[1])


def _size(delta: Delta, width: int, num_entries: int) -> int:
    return _HEADER.size + num_entries * width + delta.values.nbytes


def _entries(gaps: NDArray[np.int64], width: int, num_entries: int) -> NDArray[np.uint8]:
    """Gaps as entries, each after as many skipping entries as it needs; as bytes."""
    dtype, most = _GAP_DTYPES[width], (1 << 8 * width) - 1
    if num_entries == gaps.size:
        return gaps.astype(dtype).view(np.uint8)
    entries = np.full(num_entries, most, dtype=dtype)
    entries[np.cumsum(gaps // most + 1) - 1] = gaps % most
    return entries.view(np.uint8)


def _read_header(view: memoryview, dtype: str, num_elements: int) -> tuple[int, int, int]:
    if len(view) < _HEADER.size:
        raise CodecError(f"a delta of {len(view)} bytes is shorter than its header; it was cut off, push again")
    magic, width, value_bytes, zero, num_changed, num_entries = _HEADER.unpack_from(view)
    if magic != _MAGIC or width not in _GAP_DTYPES or zero:
        raise CodecError(f"no delta of format {_MAGIC.decode()}: it begins with {bytes(view[:8])!r}; both ends need the same version")
    expected = _HEADER.size + num_entries * width + num_changed * value_bytes
    if value_bytes != value_dtype(dtype).itemsize or len(view) != expected:
        msg = f"a delta of {num_changed} {dtype} values and {num_entries} gaps has {len(view)} bytes and {value_bytes} per value"
        raise CodecError(f"{msg}; it was damaged on the way, push again")
    if not num_changed <= num_entries or num_changed > num_elements or num_elements > _MAX_ELEMENTS:
        raise CodecError(f"a delta of {num_changed} changes and {num_entries} gaps for {num_elements} elements; it was damaged, push again")
    return width, num_changed, num_entries


def _positions(entries: NDArray[np.unsignedinteger], num_changed: int, num_elements: int) -> NDArray[np.int64]:
    """Sum the gaps up. An int64 cannot overflow: entries are at most 2**32 long each, and a sum is refused before 2**63."""
    most = np.iinfo(entries.dtype).max
    if entries.size * (most + 1) >= 1 << 63:
        raise CodecError(f"a delta of {entries.size} gaps is too long; send smaller buckets (push.bucket_bytes)")
    names_one = entries != most
    if int(np.count_nonzero(names_one)) != num_changed or (entries.size and not names_one[-1]):
        raise CodecError(f"the gaps of a delta do not name its {num_changed} changed elements; it was damaged, push again")
    positions = np.cumsum(entries, dtype=np.int64)
    positions += np.cumsum(names_one, dtype=np.int64)
    positions -= 1
    if num_changed and int(positions[-1]) >= num_elements:
        raise CodecError(f"a delta changes element {positions[-1]} of a bucket of {num_elements}; it was damaged, push again")
    return positions if num_changed == entries.size else positions[names_one]
