"""What the servers got last from this rank, to find out what changed since: its slices in the serving dtype.

A slice is a box that this rank holds of a tensor. It is brought up to date in place once all servers of a push are done with it, so the
shadow costs one copy of the shard in the serving dtype and nothing more. Every slice tells its version: one that could not be brought up
to date, or came new with another plan, is no base for a delta.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.types.weights import Box
from shoal.weights.buckets import Bucket, Piece
from shoal_trainer.source_layout import HeldTensors


@dataclass(slots=True)
class _Slice:
    """values: with the shape of the held box, once there was a push. version: of the policy; None while it is of none."""

    dtype: str
    values: Tensor | None = None
    version: int | None = None


class Shadow:
    """This rank's shadow. Threads may read it side by side; `require` and `update` are for when nobody reads.

    Args:
        tensors: the live parameters.
    """

    def __init__(self, tensors: HeldTensors) -> None:
        self._tensors = tensors
        self._slices: dict[tuple[str, Box], _Slice] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all slices."""
        return sum(one.values.nbytes for one in self._slices.values() if one.values is not None)

    def require(self, buckets: Iterable[Bucket]) -> None:
        """Say which buckets are to be compared from now on; slices that none of them touches are let go."""
        required: dict[tuple[str, Box], _Slice] = {}
        for bucket in buckets:
            for piece in bucket.pieces:
                key = self._key(piece)
                kept = self._slices.get(key)
                # Servers of different dtypes share no shadow: the first one has it, the others get everything.
                required.setdefault(key, kept if kept is not None and kept.dtype == bucket.dtype else _Slice(bucket.dtype))
        self._slices = required

    def pieces(self, bucket: Bucket, version: int) -> list[Tensor] | None:
        """A bucket's pieces as they were in some version, in the serving dtype; None if the shadow does not hold that version."""
        views = [self._view(piece, bucket.dtype, version) for piece in bucket.pieces]
        found = [view for view in views if view is not None]
        return found if len(found) == len(views) else None

    def update(self, version: int) -> None:
        """Bring every slice to the parameters as they are, which is the given version."""
        for (name, box), one in self._slices.items():
            if one.version == version:
                continue
            if one.values is None:
                one.values = torch.empty(box.sizes, dtype=getattr(torch, one.dtype), device=self._tensors.device(name))
            # Of no version while it is half copied.
            one.version = None
            self._tensors.copy_piece(name, box, one.values)
            one.version = version

    def _view(self, piece: Piece, dtype: str, version: int) -> Tensor | None:
        _, held = key = self._key(piece)
        one = self._slices.get(key)
        if one is None or one.values is None or one.dtype != dtype or one.version != version:
            return None
        view = one.values
        for dim, (offset, size) in enumerate(zip(piece.source_box.offsets, piece.source_box.sizes, strict=True)):
            view = view.narrow(dim, offset - held.offsets[dim], size)
        return view

    def _key(self, piece: Piece) -> tuple[str, Box]:
        return piece.source_name, self._tensors.holder(piece.source_name, piece.source_box).box
