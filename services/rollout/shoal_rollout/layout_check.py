"""Compares what a model computes with and what its checkpoint holds where its layout says so: a sample of every parameter."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from shoal.errors import ConfigError
from shoal.types import Box, SinkRegion
from shoal_rollout.checkpoint_shapes import CheckpointReader
from shoal_rollout.engine_parameters import EngineParameter
from shoal_rollout.expert_weights import forget_orders
from shoal_rollout.live_weights import live_boxes, slices
from shoal_rollout.staged_layout import StagedParameter

_MAX_EXTENT = 4
_MAX_REGIONS = 4


def check_layout(parameters: Iterable[EngineParameter], staged: Mapping[str, StagedParameter], folder: Path) -> None:
    """Check some elements of the regions of every parameter.

    Raises: ConfigError: one differs, or cannot be read; names the parameter.
    """
    rng = random.Random(0)
    try:
        with CheckpointReader(folder) as checkpoint:
            for parameter in parameters:
                layout = staged[parameter.name]
                for region in rng.sample(layout.regions, min(_MAX_REGIONS, len(layout.regions))):
                    _check_region(parameter, layout, _part(region, rng), checkpoint)
    finally:
        forget_orders()


def _check_region(parameter: EngineParameter, layout: StagedParameter, region: SinkRegion, checkpoint: CheckpointReader) -> None:
    expected = checkpoint.read(region.source_name, slices(region.source_box)).to(parameter.meta.dtype)
    forms = live_boxes(parameter, layout.shape, region.parameter_box)
    if not forms or not all(torch.equal(form.cpu(), expected) for form in forms):
        msg = f"engine parameter {parameter.name} does not hold what loading copied into it from {region.source_name}"
        raise ConfigError(msg)


def _part(region: SinkRegion, rng: random.Random) -> SinkRegion:
    """A small box somewhere inside a region."""
    sizes = tuple(min(size, _MAX_EXTENT) for size in region.source_box.sizes)
    starts = tuple(rng.randint(0, whole - size) for whole, size in zip(region.source_box.sizes, sizes, strict=True))
    return SinkRegion(
        parameter=region.parameter,
        source_name=region.source_name,
        source_box=_moved(region.source_box, starts, sizes),
        parameter_box=_moved(region.parameter_box, starts, sizes),
    )


def _moved(box: Box, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    return Box(offsets=tuple(map(sum, zip(box.offsets, starts, strict=True))), sizes=sizes)
