"""Reads back the weights that a model computes with, in whatever form the engine keeps them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.types import Box
from shoal_rollout.engine_parameters import EngineParameter, Holder
from shoal_rollout.expert_weights import is_packed_experts, unpack_experts
from shoal_rollout.weight_swap import is_packed_linear

_UNIT_BYTES = 4 << 20
"""Upper bound of the unit vectors that one product takes."""


def live_values(parameter: EngineParameter) -> Tensor | None:
    """What the model computes with now, with the shape and dtype of creation.

    A packed linear is applied to unit vectors: products with 0 and 1 and their sums are exact for finite weights, whatever the order
    and the precision of the sum. Zeros may come back with the other sign. A tied weight is read in every form; elements that
    are not the same everywhere are NaN.

    Returns: a new tensor or a view of the live one; None if the engine keeps nothing readable.
    """
    first = parameter.holders[0]
    if is_packed_experts(first.module, first.attribute):
        return unpack_experts(first.module, first.attribute, parameter.meta, 0, parameter.meta.shape[0])
    forms = [_columns(holder, 0, holder.meta.shape[1]) for holder in parameter.holders if is_packed_linear(holder)]
    if first.live.numel() > 0:
        if first.live.shape != parameter.meta.shape:
            return None
        forms.append(first.live.data.to(parameter.meta.dtype))
    return _agreed(forms) if forms else None


def live_boxes(parameter: EngineParameter, staged_shape: tuple[int, ...], box: Box) -> list[Tensor]:
    """A box of what the model computes with, in every form in which the engine keeps it; cheaper than `live_values`.

    Args:
        staged_shape: The shape in which the parameter is staged; box is in its coordinates.
    """
    first = parameter.holders[0]
    if is_packed_experts(first.module, first.attribute):
        return _expert_boxes(first, staged_shape, box)
    forms = []
    for holder in parameter.holders:
        if is_packed_linear(holder):
            columns = _columns(holder, box.offsets[1], box.sizes[1])
            forms.append(columns[box.offsets[0] : box.offsets[0] + box.sizes[0]])
    if first.live.numel() > 0:
        forms.append(first.live.data.to(parameter.meta.dtype).view(staged_shape)[slices(box)])
    return forms


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index of a tensor."""
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))


def _expert_boxes(holder: Holder, staged_shape: tuple[int, ...], box: Box) -> list[Tensor]:
    """A box inside one expert, or across experts if those are one tensor in the checkpoint."""
    rows = holder.meta.shape[1] if len(staged_shape) < holder.meta.dim() else 1
    expert, last = box.offsets[0] // rows, (box.offsets[0] + box.sizes[0] - 1) // rows
    part = unpack_experts(holder.module, holder.attribute, holder.meta, expert, last - expert + 1)
    if part is None:
        return []
    flat = part.reshape(-1, *staged_shape[1:])
    return [flat[slices(Box(offsets=(box.offsets[0] - expert * rows, *box.offsets[1:]), sizes=box.sizes))]]


def _columns(holder: Holder, first: int, count: int) -> Tensor:
    """Some columns of a packed weight."""
    num_outputs, num_inputs = holder.meta.shape
    linear: Any = holder.module.cpu_linear
    weight = torch.empty((num_outputs, count), dtype=holder.meta.dtype)
    step = max(1, _UNIT_BYTES // (num_inputs * holder.meta.dtype.itemsize))
    for start in range(0, count, step):
        width = min(step, count - start)
        units = torch.zeros((width, num_inputs), dtype=holder.meta.dtype)
        units.diagonal(first + start).fill_(1)
        weight[:, start : start + width] = linear(units, holder.live, None).t()
    return weight


def _agreed(forms: list[Tensor]) -> Tensor:
    values, *others = forms
    for other in others:
        if not torch.equal(values, other):
            values = torch.where(values == other, values, float("nan"))
    return values
