"""What every transport does with the pieces of a bucket: digest, compare, pack, and write into staged parameters.

The bytes of a bucket are its pieces one after another, each row-major, in the serving dtype. None of these functions holds more than one
bucket beyond what it is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import TransportError
from shoal.weights import boxes
from shoal.weights.buckets import Bucket
from shoal.weights.delta import Delta, check_delta, value_dtype
from shoal.weights.dtypes import is_castable, item_bytes
from shoal.weights.transports.base import PieceTarget
from shoal.weights.transports.chunks import as_array, copy_elements, row_chunks, update_digest

# Received bytes are only read.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of a name that a push carries. Raises: TransportError: another name."""
    item_bytes(dtype, "the bucket")
    found: torch.dtype = getattr(torch, dtype)
    return found


def check_pieces(bucket: Bucket, pieces: Sequence[Tensor]) -> None:
    """Refuse pieces that are not the bucket's. Raises: TransportError: other number, shape, or a dtype that is not cast."""
    if len(pieces) != len(bucket.pieces):
        raise TransportError(f"bucket {bucket.index} has {len(bucket.pieces)} pieces, {len(pieces)} were given; plan the push again")
    for piece, tensor in zip(bucket.pieces, pieces, strict=True):
        if tuple(tensor.shape) != piece.parameter_box.sizes:
            msg = f"{piece.parameter} wants {list(piece.parameter_box.sizes)} at {boxes.describe(piece.parameter_box)}"
            raise TransportError(f"{msg}, the source has {list(tensor.shape)} of {piece.source_name}; plan the push again")
        if not is_castable(_name(tensor.dtype), bucket.dtype):
            raise TransportError(
                f"{piece.source_name} is {_name(tensor.dtype)} and {piece.parameter} {bucket.dtype}; a push casts floats only"
            )


def target_pieces(target: PieceTarget, bucket: Bucket) -> list[Tensor]:
    """The bucket's pieces in staging. Raises: TransportError: unknown, outside, or of another dtype than the bucket."""
    return [_target_piece(target, bucket, number) for number in range(len(bucket.pieces))]


def bucket_digest(target: PieceTarget, bucket: Bucket) -> int:
    """xxh3-64 of the bucket's staged bytes. Raises: as target_pieces."""
    digest = xxhash.xxh3_64()
    for number in range(len(bucket.pieces)):
        update_digest(digest, _target_piece(target, bucket, number))
    return digest.intdigest()


def digest_of(pieces: Sequence[Tensor], dtype: str) -> int:
    """xxh3-64 of pieces as they would be staged.

    Args:
        pieces: any shapes, strides, device and floating dtype.
        dtype: serving dtype that they are cast to, chunk by chunk.
    """
    digest, serving = xxhash.xxh3_64(), torch_dtype(dtype)
    for piece in pieces:
        if piece.dtype == serving:
            update_digest(digest, piece)
        else:
            for (chunk,) in row_chunks(piece.detach()):
                update_digest(digest, chunk.to(serving))
    return digest.intdigest()


def canonical_digest(piece: Tensor, dtype: str) -> int:
    """xxh3-64 of a piece in the serving dtype, by value: an engine may compute with 0.0 where -0.0 was sent, and with another NaN."""
    digest, serving = xxhash.xxh3_64(), torch_dtype(dtype)
    for (chunk,) in row_chunks(piece.detach()):
        update_digest(digest, _canonical(chunk.to(serving)) if serving.is_floating_point else chunk.to(serving))
    return digest.intdigest()


def _canonical(values: Tensor) -> Tensor:
    """Positive zeros and one NaN: torch's sums and casts make other ones in a vector than in the elements that fill none."""
    sums = values + 0.0
    return sums.masked_fill_(sums.isnan(), torch.nan)


def pack_bucket(bucket: Bucket, pieces: Sequence[Tensor]) -> Tensor:
    """Make the bytes of a bucket.

    Args:
        pieces: one for each piece of the bucket, on one device, any strides and floating dtype.
    Returns: [num_bytes] uint8, on the pieces' device.
    Raises: TransportError: other shapes.
    """
    check_pieces(bucket, pieces)
    packed = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=pieces[0].device if pieces else "cpu")
    start = 0
    for piece in pieces:
        end = start + piece.numel() * item_bytes(bucket.dtype, "the bucket")
        copy_elements(packed[start:end].view(torch_dtype(bucket.dtype)).view(piece.shape), piece)
        start = end
    return packed


def write_dense(target: PieceTarget, bucket: Bucket, data: Tensor | bytes | memoryview, offset_bytes: int) -> None:
    """Write a part of a bucket's bytes into staging; the part may begin and end anywhere, inside an element too.

    Args:
        data: [N] uint8.
        offset_bytes: where in the bucket's bytes they belong.
    Raises: TransportError: they reach beyond the bucket, then nothing is written; or as target_pieces.
    """
    source = data if isinstance(data, Tensor) else torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0)
    end_bytes = offset_bytes + source.numel()
    if not 0 <= offset_bytes <= end_bytes <= bucket.num_bytes:
        raise TransportError(f"bytes {offset_bytes}:{end_bytes} do not lie in bucket {bucket.index} of {bucket.num_bytes}; push again")
    start = 0
    for number, piece in enumerate(bucket.pieces):
        end = start + piece.parameter_box.num_elements * item_bytes(bucket.dtype, piece.parameter)
        low, high = max(start, offset_bytes), min(end, end_bytes)
        if low < high:
            view = _target_piece(target, bucket, number)
            _write_range(
                (view if view.dim() else view.view(1)).view(torch.uint8), low - start, source[low - offset_bytes : high - offset_bytes]
            )
        start = end


def write_delta(target: PieceTarget, bucket: Bucket, delta: Delta) -> None:
    """Write the changed elements of a bucket into staging.

    Raises: TransportError: positions or values do not fit the bucket, then nothing is written; or as target_pieces.
    """
    fault = check_delta(delta, bucket.dtype, bucket.num_bytes // item_bytes(bucket.dtype, "the bucket"))
    if fault is not None:
        raise TransportError(f"a delta does not fit bucket {bucket.index}: {fault}; push again")
    ends = np.cumsum([piece.parameter_box.num_elements for piece in bucket.pieces], dtype=np.int64)
    cuts = [0, *np.searchsorted(delta.positions, ends).tolist()]
    for number, end in enumerate(ends.tolist()):
        part = slice(cuts[number], cuts[number + 1])
        if part.start < part.stop:
            view = _target_piece(target, bucket, number)
            _write_elements(view, delta.positions[part] - (end - view.numel()), delta.values[part])


def find_delta(bucket: Bucket, old: Sequence[Tensor], new: Sequence[Tensor]) -> Delta | None:
    """Find the elements whose bits changed: -0.0 differs from 0.0, and a NaN equals the same NaN.

    Args:
        old, new: one for each piece of the bucket, in the serving dtype.
    Returns: the delta; None if so much changed that positions, values and their encoding take more memory than the bucket.
    Raises: TransportError: other shapes or another dtype.
    """
    for pieces in (old, new):
        check_pieces(bucket, pieces)
        if any(piece.dtype != torch_dtype(bucket.dtype) for piece in pieces):
            raise TransportError(f"a delta compares pieces in the serving dtype {bucket.dtype}; cast them first")
    most = bucket.num_bytes // (9 + 2 * item_bytes(bucket.dtype, "the bucket"))
    positions, values, start, count = [], [], 0, 0
    for pair in zip(old, new, strict=True):
        for before, after in row_chunks(*pair):
            where, what = _changed(before, after)
            count += where.size
            if count > most:
                return None
            positions.append(where + start)
            values.append(what)
            start += before.numel()
    joined = np.concatenate(values) if values else np.empty(0, dtype=value_dtype(bucket.dtype))
    return Delta(positions=np.concatenate(positions) if positions else np.empty(0, dtype=np.int64), values=joined)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _target_piece(target: PieceTarget, bucket: Bucket, number: int) -> Tensor:
    piece = bucket.pieces[number]
    view = target.piece(piece.parameter, piece.parameter_box)
    if view.dtype != torch_dtype(bucket.dtype):
        raise TransportError(f"{piece.parameter} is staged as {_name(view.dtype)}, the bucket has {bucket.dtype}; plan the push again")
    return view


def _write_range(view: Tensor, start: int, data: Tensor) -> None:
    """Write bytes into the row-major bytes of a view of any strides, whole rows at once."""
    if view.is_contiguous():
        copy_elements(view.view(-1)[start : start + data.numel()], data)
        return
    row_bytes = view[0].numel()
    row, skipped = divmod(start, row_bytes)
    rows = 0 if skipped else data.numel() // row_bytes
    if rows:
        done = rows * row_bytes
        copy_elements(view[row : row + rows], data[:done].view(rows, *view.shape[1:]))
    else:
        done = min(data.numel(), row_bytes - skipped)
        _write_range(view[row], skipped, data[:done])
    if done < data.numel():
        _write_range(view, start + done, data[done:])


def _write_elements(view: Tensor, where: NDArray[np.int64], values: NDArray[np.generic]) -> None:
    if view.device.type == "cpu":
        array = as_array(view)
        if view.is_contiguous():
            array.reshape(-1)[where] = values
        else:
            array[np.unravel_index(where, array.shape)] = values
        return
    indices = torch.unravel_index(torch.tensor(where, device=view.device), view.shape)
    view[indices] = torch.tensor(values, device=view.device).view(view.dtype)


def _changed(before: Tensor, after: Tensor) -> tuple[NDArray[np.int64], NDArray[np.generic]]:
    """Row-major positions of the elements that differ in any bit, and the new ones."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[before.element_size()]
    if before.device.type != "cpu":
        differs = before.view(bits) != after.view(bits)
        return differs.flatten().nonzero().flatten().cpu().numpy(), as_array(after[differs].cpu())
    mask = as_array(before.view(bits)) != as_array(after.view(bits))
    where = np.flatnonzero(mask)
    return where, as_array(after).reshape(-1)[where] if after.is_contiguous() else as_array(after)[mask]
