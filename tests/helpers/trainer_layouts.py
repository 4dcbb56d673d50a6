"""What test ranks run to show which boxes they hold: every kind of sharding, in one gang of four processes.

Gangs of fewer ranks are meshes over the first of them. Each rank leaves `<folder>/rank-<rank>.pt`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from shoal_trainer.distributed import RankContext
from shoal_trainer.source_layout import HeldTensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from shoal.config.models import RunConfig

NUM_RANKS = 4

Parameters: TypeAlias = Mapping[str, Tensor]

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (11, 8),
    "up.weight": (7, 8),
    "up.bias": (7,),
    "down.weight": (8, 7),
    "norm.weight": (8,),
    "gate": (1,),
}
"""Uneven over two, three and four ranks; `gate` leaves all ranks but one empty."""

PLACED: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows of columns": ((2, 2), (Shard(0), Shard(1))),
    "rows of rows": ((2, 2), (Shard(0), Shard(0))),
    "columns": ((4,), (Shard(1),)),
    "replicated": ((4,), (Replicate(),)),
    "replicated rows": ((2, 2), (Replicate(), Shard(0))),
    "fused": ((2,), (_StridedShard(0, split_factor=3),)),
    "fused columns of rows": ((2, 2), (Shard(0), _StridedShard(1, split_factor=2))),
    "strided rows of rows": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
}
"""By name: mesh and placements of one [13, 9] tensor."""
PLACED_SHAPE = (13, 9)


def full_tensors() -> dict[str, Tensor]:
    """Every tensor whole; no two elements are equal."""
    shapes = SHAPES | {"placed": PLACED_SHAPE}
    return {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1000 * at
        for at, (name, shape) in enumerate(shapes.items())
    }


class Layer(nn.Module):
    """The tensors of SHAPES; its forward is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 7)
        self.down = nn.Linear(7, 8, bias=False)
        self.norm = nn.RMSNorm(8)
        self.gate = nn.Parameter(torch.zeros(1))
        full = full_tensors()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(full[name])


def layouts_job(context: RankContext, config: RunConfig, folder: Path) -> None:
    """Build every layout and save what this rank holds of it."""
    meshes = {
        size: init_device_mesh("cpu", (size,)) if size == NUM_RANKS else DeviceMesh("cpu", list(range(size)))
        for size in range(1, NUM_RANKS + 1)
    }
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    scenarios: dict[str, Callable[[], Parameters]] = {
        "plain": lambda: dict(Layer().named_parameters()),
        "tp 2": partial(_tp, meshes[2]),
        "fsdp x tp": partial(_fsdp_tp, grid),
        "hsdp": partial(_fsdp, grid),
        **{f"fsdp {size}": partial(_fsdp, mesh) for size, mesh in meshes.items()},
        **{f"placed {name}": partial(_placed, name, meshes, grid) for name in PLACED},
    }
    held = {name: _held(context.rank, build()) for name, build in scenarios.items()}
    torch.save(held, folder / f"rank-{context.rank}.pt")


def _fsdp(mesh: DeviceMesh) -> Parameters:
    if mesh.get_coordinate() is None:
        return {}
    layer = Layer()
    fully_shard(layer, mesh=mesh)
    return dict(layer.named_parameters())


def _tp(mesh: DeviceMesh) -> Parameters:
    return {} if mesh.get_coordinate() is None else dict(_parallel(mesh).named_parameters())


def _fsdp_tp(grid: DeviceMesh) -> Parameters:
    layer = _parallel(grid["tp"])
    fully_shard(layer, mesh=grid["dp"])
    return dict(layer.named_parameters())


def _parallel(mesh: DeviceMesh) -> Layer:
    layer = Layer()
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(layer, mesh, plan)
    return layer


def _placed(name: str, meshes: Mapping[int, DeviceMesh], grid: DeviceMesh) -> Parameters:
    shape, placements = PLACED[name]
    mesh = grid if len(shape) == 2 else meshes[shape[0]]
    if mesh.get_coordinate() is None:
        return {}
    return {"placed": distribute_tensor(full_tensors()["placed"], mesh, placements, src_data_rank=None)}


def _held(rank: int, parameters: Parameters) -> dict[str, Any]:
    """Boxes and their elements, and how many collectives it took to find them."""
    with CommDebugMode() as collectives:  # type: ignore[no-untyped-call]
        tensors = HeldTensors(parameters, rank)
        pieces = {
            tensor.name: [(shard.box.offsets, shard.box.sizes, tensors.piece(tensor.name, shard.box).clone()) for shard in tensor.shards]
            for tensor in tensors.describe()
        }
    return {"pieces": pieces, "collectives": collectives.get_total_counts()}


def assemble(full: Tensor, pieces: Sequence[tuple[Sequence[int], Sequence[int], Tensor]]) -> Tensor:
    """Put pieces into an empty tensor; what no piece covers stays NaN."""
    whole = torch.full_like(full, float("nan"))
    for offsets, sizes, values in pieces:
        whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))] = values
    return whole
