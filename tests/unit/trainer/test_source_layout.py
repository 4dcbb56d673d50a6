"""Boxes from placements, each rank in turn under a fake process group; real ranks are in the integration tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import pytest
import torch
import torch.distributed as dist
from shoal_trainer.source_layout import HeldTensors, held_boxes
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.errors import TransportError
from shoal.types.weights import Box
from shoal.weights import boxes
from tests.helpers.layouts import box

FULL = torch.arange(5 * 4 * 3, dtype=torch.float32).reshape(5, 4, 3)


@contextmanager
def as_rank(rank: int, mesh_shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=prod(mesh_shape))
    try:
        yield init_device_mesh("cpu", mesh_shape)
    finally:
        dist.destroy_process_group()


def sharded(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Cut a tensor that every rank has; src_data_rank=None sends nothing."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def check_rank(full: Tensor, parameter: DTensor, rank: int) -> set[Box]:
    """What a rank names is what it holds; answers the boxes."""
    tensors = HeldTensors({"w": parameter}, rank)
    (described,) = tensors.describe()
    assert {shard.rank for shard in described.shards} <= {rank}
    found = {shard.box for shard in described.shards}
    for one in found:
        assert torch.equal(tensors.piece("w", one), full[tuple(slice(o, o + s) for o, s in zip(one.offsets, one.sizes, strict=True))])
    assert sum(one.num_elements for one in found) == parameter.to_local().numel()
    return found


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((1,), [Shard(0)]),
        ((3,), [Shard(0)]),
        ((4,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((2,), [Shard(2)]),
        ((2,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 3), [Shard(0), Shard(0)]),
        ((3,), [_StridedShard(0, split_factor=2)]),
        ((2, 2, 2), [Shard(1), _StridedShard(0, split_factor=2), Shard(0)]),
    ],
)
def test_held_boxes_hold_what_they_say_and_cover_the_tensor(mesh_shape: tuple[int, ...], placements: Sequence[Placement]) -> None:
    seen: set[Box] = set()
    for rank in range(prod(mesh_shape)):
        with as_rank(rank, mesh_shape) as mesh:
            seen |= check_rank(FULL, sharded(FULL, mesh, placements), rank)
    assert boxes.cover_fault(boxes.whole(tuple(FULL.shape)), tuple(seen)) is None


@pytest.mark.parametrize(("num_rows", "mesh_shape"), [(7, (3, 2)), (22, (3, 4)), (9, (4, 2)), (5, (2, 4)), (3, (2, 2)), (13, (3, 4))])
def test_held_boxes_of_uneven_tensor_parallel_rows_are_those_that_fsdp_cuts(num_rows: int, mesh_shape: tuple[int, int]) -> None:
    full = torch.arange(num_rows * 2, dtype=torch.float32).reshape(num_rows, 2)
    seen: set[Box] = set()
    for rank in range(prod(mesh_shape)):
        with as_rank(rank, mesh_shape) as mesh:
            fsdp, tp = divmod(rank, mesh_shape[1])
            local = chunk(chunk(full, mesh_shape[1], tp), mesh_shape[0], fsdp)
            placements = [_StridedShard(0, split_factor=mesh_shape[1]), Shard(0)]
            parameter = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
            seen |= check_rank(full, parameter, rank)
    assert boxes.cover_fault(boxes.whole(tuple(full.shape)), tuple(seen)) is None


def chunk(tensor: Tensor, num_chunks: int, index: int) -> Tensor:
    """As torch.chunk, with empty chunks at the end."""
    size = -(-tensor.shape[0] // num_chunks)
    return tensor[index * size : (index + 1) * size]


def test_tensors_of_empty_shards_are_described_without_boxes() -> None:
    with as_rank(3, (4,)) as mesh:
        (described,) = HeldTensors({"w": sharded(FULL, mesh, [Shard(0)])}, 3).describe()
        assert (described.name, described.shape, described.dtype, described.shards) == ("w", (5, 4, 3), "float32", ())


def test_pieces_of_what_another_rank_holds_are_refused() -> None:
    with as_rank(1, (2,)) as mesh:
        tensors = HeldTensors({"w": sharded(FULL, mesh, [Shard(0)])}, 1)
        assert torch.equal(tensors.piece("w", box((3, 4), (1, 3), (0, 3))), FULL[3:4, 1:3])
        for name, where in (("w", box((2, 4), (0, 4), (0, 3))), ("v", box((3, 4)))):
            with pytest.raises(TransportError, match=f"rank 1 does not hold .* of {name}"):
                tensors.piece(name, where)


def test_plain_tensors_and_scalars_are_whole() -> None:
    tensors = HeldTensors({"w": FULL, "s": torch.tensor(7.0)}, 0)
    assert [tensor.shards[0].box for tensor in tensors.describe()] == [boxes.whole((5, 4, 3)), boxes.whole(())]
    assert tensors.piece("s", boxes.whole(())).item() == 7.0


def test_pieces_follow_the_live_parameter() -> None:
    parameter = torch.nn.Parameter(FULL.clone())
    tensors = HeldTensors({"w": parameter}, 0)
    with torch.no_grad():
        parameter.add_(1.0)
    piece = tensors.piece("w", box((0, 1), (0, 1), (0, 3)))
    assert torch.equal(piece, FULL[:1, :1] + 1)
    assert not piece.requires_grad


def test_partial_sums_are_refused_with_a_reason() -> None:
    with as_rank(0, (2,)) as mesh:
        parameter = DTensor.from_local(FULL, mesh, [Partial()], run_check=False)
        with pytest.raises(TransportError, match=r"w has placement .*still to be added over ranks"):
            held_boxes("w", parameter)


def test_a_local_part_of_another_shape_than_its_placement_says_is_refused() -> None:
    with as_rank(0, (2,)) as mesh:
        parameter = DTensor.from_local(FULL, mesh, [Shard(0)], run_check=False, shape=FULL.shape, stride=FULL.stride())
        with pytest.raises(TransportError, match=r"w of shape \[5, 4, 3\] holds a local part of shape \[5, 4, 3\], which"):
            held_boxes("w", parameter)
