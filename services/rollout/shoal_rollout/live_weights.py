"""Reads back the weights that a model computes with, in whatever form the engine keeps them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
        return unpack_experts(first.module, first.attribute, parameter.meta)
    forms = [_unpacked(holder, parameter.meta) for holder in parameter.holders if is_packed_linear(holder)]
    live = first.live
    if live.numel() > 0:
        if live.shape != parameter.meta.shape:
            return None
        forms.append(live.data.to(parameter.meta.dtype))
    return _agreed(forms) if forms else None


def _unpacked(holder: Holder, meta: Tensor) -> Tensor:
    num_inputs = meta.shape[1]
    linear: Any = holder.module.cpu_linear
    weight = torch.empty(meta.shape, dtype=meta.dtype)
    step = max(1, _UNIT_BYTES // (num_inputs * meta.dtype.itemsize))
    for start in range(0, num_inputs, step):
        count = min(step, num_inputs - start)
        units = torch.zeros((count, num_inputs), dtype=meta.dtype)
        units.diagonal(start).fill_(1)
        weight[:, start : start + count] = linear(units, holder.live, None).t()
    return weight


def _agreed(forms: list[Tensor]) -> Tensor:
    values, *others = forms
    for other in others:
        if not torch.equal(values, other):
            values = torch.where(values == other, values, float("nan"))
    return values
