"""From what loading wrote to what is staged: regions whose two boxes have the same sizes, and exact coverage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.types import Box, SinkRegion
from shoal.weights import boxes
from shoal_rollout.load_recorder import RecordedCopy, RecordedLoad


@dataclass(frozen=True, slots=True)
class StagedParameter:
    """How one engine parameter is staged: its shape there, and what belongs where. What no region covers is zero.

    A stack of matrices that are separate tensors in the checkpoint is staged as one matrix: [E, M, N] as [E * M, N].
    """

    shape: tuple[int, ...]
    regions: tuple[SinkRegion, ...]


def stage(load: RecordedLoad, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StagedParameter]:
    """Find the staged form of every parameter that loading wrote to.

    Args:
        shapes: Shape by parameter name.
    Returns: by name; parameters that were not written to are left out.
    Raises: ConfigError: an element of one is written never or twice, or its parts have different ranks; names the parameter.
    """
    copies: dict[str, list[RecordedCopy]] = {}
    # Loading the same tensor into the same place again changes nothing.
    for copy in dict.fromkeys(load.copies):
        copies.setdefault(copy.parameter, []).append(copy)
    return {name: _stage_one(name, shapes[name], found, load.zeros.get(name, ())) for name, found in copies.items()}


def _stage_one(name: str, shape: tuple[int, ...], copies: Sequence[RecordedCopy], zeros: Sequence[Box]) -> StagedParameter:
    ranks = {len(copy.source_box.sizes) for copy in copies}
    num_leading = len(shape) - max(ranks)
    if len(ranks) > 1 or num_leading < 0:
        msg = f"engine parameter {name} of {len(shape)} dims is loaded from checkpoint tensors of {sorted(ranks)} dims"
        raise ConfigError(msg)
    staged_shape = _flat_shape(shape, num_leading)
    regions = tuple(_region(name, copy, shape, num_leading) for copy in copies)
    padding = [part for box in zeros for part in _split(box, num_leading)]
    parts = [region.parameter_box for region in regions] + [_flat_box(part, shape, num_leading) for part in padding]
    fault = boxes.cover_fault(boxes.whole(staged_shape), parts)
    if fault is not None:
        msg = f"engine parameter {name} is not loaded from the checkpoint exactly once: {fault}"
        raise ConfigError(msg)
    return StagedParameter(staged_shape, regions)


def _region(name: str, copy: RecordedCopy, shape: tuple[int, ...], num_leading: int) -> SinkRegion:
    box = copy.parameter_box
    if all(size == 1 for size in box.sizes[:num_leading]):
        parameter_box = _flat_box(box, shape, num_leading)
        if parameter_box.sizes == copy.source_box.sizes:
            return SinkRegion(parameter=name, source_name=copy.source_name, source_box=copy.source_box, parameter_box=parameter_box)
    msg = f"engine parameter {name} is written from {copy.source_name} in a way that is not a copy of a rectangle of the same shape"
    raise ConfigError(msg)


def _flat_shape(shape: tuple[int, ...], num_leading: int) -> tuple[int, ...]:
    return (math.prod(shape[: num_leading + 1]), *shape[num_leading + 1 :]) if num_leading else shape


def _flat_box(box: Box, shape: tuple[int, ...], num_leading: int) -> Box:
    """The box in the flat shape; its leading extents must be 1."""
    if not num_leading:
        return box
    offset = 0
    for start, extent in zip(box.offsets[: num_leading + 1], shape[: num_leading + 1], strict=True):
        offset = offset * extent + start
    return Box(offsets=(offset, *box.offsets[num_leading + 1 :]), sizes=box.sizes[num_leading:])


def _split(box: Box, num_leading: int) -> list[Box]:
    """The box in parts whose leading extents are 1."""
    leading = [range(start, start + size) for start, size in zip(box.offsets[:num_leading], box.sizes[:num_leading], strict=True)]
    sizes = (1,) * num_leading + box.sizes[num_leading:]
    return [Box(offsets=(*at, *box.offsets[num_leading:]), sizes=sizes) for at in itertools.product(*leading)]
