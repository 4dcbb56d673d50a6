"""Random layouts of a push for property tests, and plans carried out on arrays of element numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import EllipsisType

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.types.weights import Box, SinkLayout, SinkParameter, SinkRegion, SourceLayout, SourceTensor
from shoal.weights import boxes
from shoal.weights.plan import ServerPlan
from tests.helpers.layouts import ITEM_BYTES, fsdp_boxes, sink_worker, source_layout, source_tensor, staged

UNWRITTEN = -1

Held = list[tuple[int, Box]]
Elements = dict[tuple[int, str], NDArray[np.int64]]


def slices(box: Box) -> tuple[slice | EllipsisType, ...]:
    """A box as an index that gives a view even of a scalar."""
    return (*(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)), ...)


def element_numbers(source: SourceLayout) -> dict[str, NDArray[np.int64]]:
    """Every tensor filled with numbers that occur nowhere else."""
    numbers, end = {}, 0
    for tensor in sorted(source.tensors, key=lambda tensor: tensor.name):
        count = math.prod(tensor.shape)
        numbers[tensor.name] = np.arange(end, end + count, dtype=np.int64).reshape(tensor.shape)
        end += count
    return numbers


def wanted_elements(source: SourceLayout, sink: SinkLayout) -> Elements:
    """What every worker's parameters must hold after a push, straight from the regions; padding stays unwritten."""
    numbers = element_numbers(source)
    wanted = _unwritten(sink)
    for worker in sink.workers:
        for region in worker.regions:
            target = wanted[worker.worker_rank, region.parameter]
            target[slices(region.parameter_box)] = numbers[region.source_name][slices(region.source_box)]
    return wanted


def carry_out(plan: ServerPlan, source: SourceLayout, sink: SinkLayout) -> Elements:
    """Copy element numbers as the plan says; every rank holds only its shards, and nothing may be written twice."""
    numbers = element_numbers(source)
    held = {
        (rank, tensor.name): _held_by(rank, tensor, numbers[tensor.name]) for rank in range(len(source.places)) for tensor in source.tensors
    }
    written = _unwritten(sink)
    for rank, worker_rank in plan.pairs():
        for bucket in plan.buckets(rank, worker_rank):
            for piece in bucket.pieces:
                assert boxes.contains(boxes.whole(numbers[piece.source_name].shape), piece.source_box)
                assert boxes.contains(boxes.whole(written[worker_rank, piece.parameter].shape), piece.parameter_box)
                part = held[rank, piece.source_name][slices(piece.source_box)]
                target = written[worker_rank, piece.parameter][slices(piece.parameter_box)]
                assert (part != UNWRITTEN).all(), f"rank {rank} does not hold {piece}"
                assert (target == UNWRITTEN).all(), f"{piece} is written twice"
                target[...] = part
    return written


def _held_by(rank: int, tensor: SourceTensor, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    held = np.full(tensor.shape, UNWRITTEN, np.int64)
    for shard in tensor.shards:
        if shard.rank == rank:
            held[slices(shard.box)] = numbers[slices(shard.box)]
    return held


def _unwritten(sink: SinkLayout) -> Elements:
    return {
        (worker.worker_rank, parameter.name): np.full(parameter.shape, UNWRITTEN, np.int64)
        for worker in sink.workers
        for parameter in worker.parameters
    }


def _cuts(draw: st.DrawFn, size: int, num_parts: int) -> list[tuple[int, int]]:
    """Random uneven parts of [0, size), some of them empty."""
    inner = sorted(draw(st.lists(st.integers(0, size), min_size=num_parts - 1, max_size=num_parts - 1)))
    return list(zip([0, *inner], [*inner, size], strict=True))


def _part(box: Box, dim: int, start: int, end: int) -> Box:
    return Box(
        offsets=(*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :]),
        sizes=(*box.sizes[:dim], end - start, *box.sizes[dim + 1 :]),
    )


def _fsdp(draw: st.DrawFn, shape: tuple[int, ...], num_ranks: int) -> Held:
    return fsdp_boxes(shape, num_ranks)


def _uneven(draw: st.DrawFn, shape: tuple[int, ...], num_ranks: int) -> Held:
    """Cut along one dim at random places."""
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = _cuts(draw, shape[dim], num_ranks)
    return [(rank, _part(boxes.whole(shape), dim, start, end)) for rank, (start, end) in enumerate(cuts)]


def _grid(draw: st.DrawFn, shape: tuple[int, ...], num_ranks: int) -> Held:
    """FSDP x TP: cut along two dims (the same one twice where there is only one), a rank for each cell."""
    tp = draw(st.sampled_from([count for count in range(1, num_ranks + 1) if num_ranks % count == 0]))
    dims = [draw(st.integers(0, len(shape) - 1)) for _ in range(2)]
    held = []
    for column, (start, end) in enumerate(_cuts(draw, shape[dims[0]], tp)):
        cell = _part(boxes.whole(shape), dims[0], start, end)
        for row, (inner_start, inner_end) in enumerate(_cuts(draw, cell.sizes[dims[1]], num_ranks // tp)):
            held.append((row * tp + column, _part(cell, dims[1], inner_start, inner_end)))
    return held


def _replicated(draw: st.DrawFn, shape: tuple[int, ...], num_ranks: int) -> Held:
    return [(rank, boxes.whole(shape)) for rank in range(num_ranks)]


def _hybrid(draw: st.DrawFn, shape: tuple[int, ...], num_ranks: int) -> Held:
    """Replicas of shards: rank r holds what rank r modulo the number of shards holds."""
    shards = draw(st.integers(1, num_ranks))
    cuts = _cuts(draw, shape[0], shards)
    return [(rank, _part(boxes.whole(shape), 0, *cuts[rank % shards])) for rank in range(num_ranks)]


def _scattered(draw: st.DrawFn, shape: tuple[int, ...], num_ranks: int) -> Held:
    """Several boxes on a rank: more parts than ranks, dealt at random, as strided sharding leaves them."""
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = _cuts(draw, shape[dim], 2 * num_ranks)
    return [(draw(st.integers(0, num_ranks - 1)), _part(boxes.whole(shape), dim, start, end)) for start, end in cuts]


_SHARDINGS: tuple[Callable[[st.DrawFn, tuple[int, ...], int], Held], ...] = (_fsdp, _uneven, _grid, _replicated, _hybrid, _scattered)


@st.composite
def random_source(draw: st.DrawFn, *, replicated: bool = False) -> SourceLayout:
    """Tensors of 0 to 3 dims on 1 to 5 ranks, each sharded in its own way, some of them frozen."""
    num_ranks = draw(st.integers(1, 5))
    tensors = []
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        sharding = draw(st.sampled_from(_SHARDINGS)) if shape and not replicated else _replicated
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        tensor = source_tensor(f"t{index}", shape, sharding(draw, shape, num_ranks), dtype)
        tensors.append(replace(tensor, frozen=draw(st.booleans())))
    return source_layout(draw(st.permutations(tensors)), num_ranks)


@st.composite
def random_sink(draw: st.DrawFn, source: SourceLayout, server_id: str = "rollout-0") -> SinkLayout:
    """TP 1 to 3 along a random dim of each tensor, or replicated; tensors of equal inner shape are fused, and parameters padded."""
    tp = draw(st.integers(1, 3))
    plans = {tensor.name: _tp_cuts(draw, tensor, tp) for tensor in source.tensors}
    padding = {tensor.name: draw(st.integers(0, 2)) for tensor in source.tensors}
    is_fused, dtypes = draw(st.booleans()), draw(st.lists(st.sampled_from(sorted(ITEM_BYTES)), min_size=4, max_size=4))
    workers = []
    for rank in range(tp):
        shares = {name: cuts[rank] for name, cuts in plans.items()}
        shapes, regions = _parameters(shares, padding, is_fused)
        parameters, staging_bytes = _staged_mixed(shapes, dtypes)
        workers.append(sink_worker(rank, parameters, draw(st.permutations(regions)), staging_bytes))
    return SinkLayout(server_id=server_id, workers=tuple(draw(st.permutations(workers))))


def _tp_cuts(draw: st.DrawFn, tensor: SourceTensor, tp: int) -> list[Box]:
    """The part of a tensor that each worker takes."""
    whole = boxes.whole(tensor.shape)
    if not tensor.shape or draw(st.booleans()):
        return [whole] * tp
    dim = draw(st.integers(0, len(tensor.shape) - 1))
    return [_part(whole, dim, start, end) for start, end in _cuts(draw, tensor.shape[dim], tp)]


def _parameters(shares: dict[str, Box], padding: dict[str, int], is_fused: bool) -> tuple[dict[str, tuple[int, ...]], list[SinkRegion]]:
    """A parameter for each share, or one for all shares that stack, with unwritten rows between them."""
    shapes: dict[str, tuple[int, ...]] = {}
    regions = []
    for name, share in sorted(shares.items()):
        inner = share.sizes[1:]
        parameter = f"fused{list(inner)}" if is_fused and share.sizes else f"engine.{name}"
        at = shapes[parameter][0] if parameter in shapes else 0
        target = Box(offsets=(at, *(0,) * len(inner)) if share.sizes else (), sizes=share.sizes)
        regions.append(SinkRegion(parameter=parameter, source_name=name, source_box=share, parameter_box=target))
        shapes[parameter] = (at + share.sizes[0] + padding[name], *inner) if share.sizes else ()
    return shapes, regions


def _staged_mixed(shapes: dict[str, tuple[int, ...]], dtypes: list[str]) -> tuple[tuple[SinkParameter, ...], int]:
    parameters, staging_bytes = staged(shapes)
    mixed = (replace(parameter, dtype=dtypes[index % len(dtypes)]) for index, parameter in enumerate(parameters))
    return tuple(mixed), staging_bytes


@st.composite
def random_push(draw: st.DrawFn) -> tuple[SourceLayout, SinkLayout]:
    """A trainer's layout and a server's."""
    source = draw(random_source())
    return source, draw(random_sink(source))
