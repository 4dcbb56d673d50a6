"""Parameters inside a staging buffer: views of them and of their boxes, with every bound checked before a byte is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from shoal.errors import TransportError
from shoal.types.weights import Box, SinkParameter
from shoal.weights import boxes
from shoal.weights.dtypes import item_bytes


class ParameterPieces:
    """`PieceTarget` over staged parameters.

    Args:
        parameters: those that can be asked for.
        view: a parameter's elements; `StagingBuffer.view`, or `parameter_view` of a mapping.
        place: names the worker in messages.
    """

    def __init__(self, parameters: Iterable[SinkParameter], view: Callable[[SinkParameter], Tensor], place: str) -> None:
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._view = view
        self._place = place

    def piece(self, parameter: str, box: Box) -> Tensor:
        """See `PieceTarget.piece`."""
        if parameter not in self._parameters:
            raise TransportError(f"the engine worker at {self._place} has no parameter {parameter}; prepare and plan the push again")
        return box_view(self._view(self._parameters[parameter]), parameter, box)


def parameter_view(buffer: Tensor, parameter: SinkParameter) -> Tensor:
    """A parameter's elements inside a buffer.

    Args:
        buffer: [N] uint8.
        parameter: with its dtype, shape and offset in bytes.
    Returns: a view with the parameter's shape and dtype.
    Raises: TransportError: misaligned or outside of the buffer.
    """
    size = item_bytes(parameter.dtype, parameter.name)
    start = parameter.staging_offset_bytes
    end = start + boxes.whole(parameter.shape).num_elements * size
    if start % size or not 0 <= start <= end <= buffer.numel():
        msg = f"{parameter.name} is staged at bytes {start}:{end} of {buffer.numel()}; it must lie inside and start at a multiple of {size}"
        raise TransportError(msg)
    return buffer[start:end].view(getattr(torch, parameter.dtype)).view(parameter.shape)


def box_view(tensor: Tensor, name: str, box: Box) -> Tensor:
    """A view of a box of a tensor. Raises: TransportError: other dims, or outside."""
    if not boxes.contains(boxes.whole(tensor.shape), box):
        raise TransportError(f"{name} has shape {list(tensor.shape)}; box {boxes.describe(box)} lies outside")
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor
