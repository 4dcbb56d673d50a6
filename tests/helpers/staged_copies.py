"""A push without its transports: stages a checkpoint folder for one engine model, region by region, and swaps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from shoal.types import Box, SinkRegion

if TYPE_CHECKING:
    from shoal_rollout.engine_model import EngineModel


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """Load every tensor of a checkpoint folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def trained_tensors(folder: Path) -> dict[str, Tensor]:
    """The parameters of the Hugging Face model of a folder, as a trainer holds them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def stage_copies(model: EngineModel, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What staging holds after a dense push: regions copied and cast, the rest zero."""
    regions: dict[str, list[SinkRegion]] = {name: [] for name, _, _ in model.parameters}
    for region in model.regions:
        regions[region.parameter].append(region)
    return {name: stage_regions(shape, getattr(torch, dtype), regions[name], source) for name, shape, dtype in model.parameters}


def stage_regions(shape: tuple[int, ...], dtype: torch.dtype, regions: Iterable[SinkRegion], source: Mapping[str, Tensor]) -> Tensor:
    """What staging holds of one parameter."""
    staged = torch.zeros(shape, dtype=dtype)
    for region in regions:
        staged[slices_of(region.parameter_box)] = source[region.source_name][slices_of(region.source_box)].to(dtype)
    return staged


def swap(model: EngineModel, staged: Mapping[str, Tensor], changed: Collection[str] | None = None) -> list[object]:
    """Exchange the named parameters, all by default; returns what was replaced. In copies mode staging is overwritten before the swap."""
    names = staged.keys() if changed is None else changed
    mine = {name: tensor.clone() for name, tensor in staged.items()}
    applies = [apply for apply in model.prepare_swap(mine.__getitem__, names) if apply is not None]
    if model.mode == "copies":
        for tensor in mine.values():
            tensor.view(-1).view(torch.uint8).fill_(0x7F)
    with torch.no_grad():
        return [apply() for apply in applies]


def live_bytes(model: EngineModel) -> dict[str, bytes]:
    """The values that the model computes with, by parameter."""
    found = {}
    for name, shape, dtype in model.parameters:
        live = model.live(name)
        assert live is not None, name
        assert tuple(live.shape) == shape
        assert str(live.dtype) == f"torch.{dtype}"
        found[name] = as_bytes(live)
    return found


def as_bytes(tensor: Tensor) -> bytes:
    """A tensor's elements with zeros made positive, row-major."""
    return (tensor.detach() + 0.0).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def slices_of(box: Box) -> tuple[slice, ...]:
    """The box as an index of a tensor."""
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
