"""What the push walk pushes: a few checkpoint tensors, and engines that fuse, cut and cast them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import torch
from shoal_rollout.worker_sink import Apply
from torch import Tensor

from shoal.types import Box, SinkRegion
from shoal.weights import boxes
from tests.helpers.layouts import columns_of, rows_of

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (64, 32),
    "q": (48, 33),
    "k": (24, 33),
    "v": (24, 33),
    "down": (30, 52),
    "base": (40, 32),
    "norm": (37,),
    "bias": (5,),
}
FROZEN = frozenset({"embed", "base"})
REPLICATED = frozenset({"bias"})
Versions = Mapping[str, Tensor]
"""Every checkpoint tensor, float32."""


class WalkModel:
    """One worker's model: q, k and v fused by rows, down cut by columns, the rest whole. It computes with `weights`.

    Args:
        norm_dtype: serving dtype of `norm`; the others are bfloat16.
    """

    def __init__(self, worker: int, num_workers: int, norm_dtype: str) -> None:
        regions: list[SinkRegion] = []
        at = 0
        for name in ("q", "k", "v"):
            rows = SHAPES[name][0] // num_workers
            source = rows_of(SHAPES[name], worker * rows, (worker + 1) * rows)
            regions.append(SinkRegion(parameter="qkv", source_name=name, source_box=source, parameter_box=rows_of((96, 33), at, at + rows)))
            at += rows
        columns = 52 // num_workers
        cut = columns_of(SHAPES["down"], worker * columns, (worker + 1) * columns)
        regions.append(SinkRegion(parameter="down", source_name="down", source_box=cut, parameter_box=boxes.whole((30, columns))))
        for name in ("embed", "base", "norm", "bias"):
            whole = boxes.whole(SHAPES[name])
            regions.append(SinkRegion(parameter=name, source_name=name, source_box=whole, parameter_box=whole))
        shapes = {"qkv": (at, 33), "down": (30, columns), **{name: SHAPES[name] for name in ("embed", "base", "norm", "bias")}}
        self.regions = tuple(regions)
        self.parameters = tuple((name, shape, norm_dtype if name == "norm" else "bfloat16") for name, shape in shapes.items())
        self.weights = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in self.parameters}

    def prepare_swap(self, staged: Callable[[str], Tensor], changed: Collection[str]) -> Iterator[Apply | None]:
        """Copy what changed, one parameter a step."""
        for name in sorted(changed):
            yield partial(self.weights.__setitem__, name, staged(name).clone())

    def live(self, parameter: str) -> Tensor | None:
        """What the model computes with."""
        return self.weights[parameter]

    def expected(self, version: Versions) -> dict[str, Tensor]:
        """Every parameter as a version makes it, straight from the regions."""
        found = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in self.parameters}
        for region in self.regions:
            target = _view(found[region.parameter], region.parameter_box)
            target.copy_(_view(version[region.source_name], region.source_box))
        return found


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """The first parameter whose bits differ, or "". A cast may choose a NaN's bits, so every NaN equals every other."""
    for name, wanted in expected.items():
        bits = torch.int16 if wanted.dtype == torch.bfloat16 else torch.int32
        differs = (found[name].view(bits) != wanted.view(bits)) & ~(found[name].isnan() & wanted.isnan())
        if bool(differs.any()):
            return f"{int(differs.sum())} elements of {name}, first {differs.nonzero()[0].tolist()}"
    return ""


def _view(tensor: Tensor, box: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
