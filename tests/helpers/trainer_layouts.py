"""What test ranks run to show which boxes they hold: every kind of sharding, in one gang of four processes.

Gangs of fewer ranks are meshes over the first of them. Each rank leaves `<folder>/rank-<rank>.pt`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from shoal_trainer.distributed import RankContext
from shoal_trainer.source_layout import HeldTensors
from shoal_trainer.weight_servicer import _join_layouts
from shoal_trainer.weight_source import WeightSource
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from shoal.codec.layouts import source_layout_from_proto, source_layout_to_proto
from shoal.config.models import PushSection, RunConfig, SecuritySection
from shoal.types.weights import SinkLayout
from shoal.weights.transports.factory import open_source_transport
from tests.helpers.layouts import sink_worker, stack_rows, staged
from tests.helpers.weight_source import StagingServer, identity

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

MODULE_LAYOUTS = {"plain": 4, "tp 2": 2, "fsdp x tp": 4, "hsdp": 4, "fsdp 1": 1, "fsdp 2": 2, "fsdp 3": 3, "fsdp 4": 4}
"""Layouts of all tensors of SHAPES; by name: ranks that take part."""


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
    """Build every layout, save what this rank holds of it, and push it."""
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
    built = {name: build() for name, build in scenarios.items()}
    held = {name: _held(context.rank, parameters) for name, parameters in built.items()}
    pushed = {name: _push(context.rank, num_ranks, name, built[name], folder) for name, num_ranks in MODULE_LAYOUTS.items()}
    torch.save({"held": held, "pushed": pushed}, folder / f"rank-{context.rank}.pt")


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


def _push(rank: int, num_ranks: int, name: str, parameters: Parameters, folder: Path) -> dict[str, Any]:
    """Push a layout into a server of two workers; rank 0 is also that server, and answers whether it holds every tensor."""
    takes_part = rank < num_ranks
    server = StagingServer(two_workers(name), str(folder)) if rank == 0 else None
    (target,) = _from_rank_0([None if server is None else server.target()])
    settings = PushSection()
    transport = open_source_transport(settings, SecuritySection())
    source = WeightSource(parameters, identity(rank, num_ranks), transport, settings, policy_version=lambda: 1)
    layouts = _from_all(source.describe())[:num_ranks]
    joined = source_layout_from_proto(_join_layouts([source_layout_to_proto(layout) for layout in layouts]))
    sent = None
    with CommDebugMode() as collectives:  # type: ignore[no-untyped-call]
        if takes_part:
            (planned,) = source.prepare("push", 1, joined, [target]).values()
            if server is not None:
                server.plan(joined, planned.plan_hash, settings)
            sent = source.transfer("push", {}).servers[name]
    transfers = _from_all(sent)[:num_ranks]
    source.close()
    outcome = {"collectives": collectives.get_total_counts(), "errors": [transfer.error for transfer in transfers]}
    if server is not None:
        server.verify(1, [pair for transfer in transfers for pair in transfer.pairs])
        full = full_tensors()
        found = [server.parameters(worker) for worker in (0, 1)]
        outcome["equal"] = all(torch.equal(torch.cat([one[key] for one in found if key in one]), full[key]) for key in SHAPES)
        outcome["senders"] = sorted({pair.rank for transfer in transfers for pair in transfer.pairs})
        server.close()
    return outcome


def two_workers(server_id: str) -> SinkLayout:
    """Each worker takes a half of the rows of every tensor."""
    workers = []
    for worker_rank in range(2):
        rows = {name: (worker_rank * shape[0] // 2, (worker_rank + 1) * shape[0] // 2) for name, shape in SHAPES.items()}
        held = {name: (start, end) for name, (start, end) in rows.items() if end > start}
        parameters, staging_bytes = staged({name: (end - start, *SHAPES[name][1:]) for name, (start, end) in held.items()})
        regions = [region for name, (start, end) in held.items() for region in stack_rows(name, [(name, SHAPES[name], start, end)])]
        workers.append(sink_worker(worker_rank, parameters, regions, staging_bytes, {}))
    return SinkLayout(server_id=server_id, workers=tuple(workers))


def _from_rank_0(values: list[Any]) -> list[Any]:
    dist.broadcast_object_list(values, src=0)
    return values


def _from_all(value: Any) -> list[Any]:  # noqa: ANN401
    values: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(values, value)
    return values


def assemble(full: Tensor, pieces: Sequence[tuple[Sequence[int], Sequence[int], Tensor]]) -> Tensor:
    """Put pieces into an empty tensor; what no piece covers stays NaN."""
    whole = torch.full_like(full, float("nan"))
    for offsets, sizes, values in pieces:
        whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))] = values
    return whole
