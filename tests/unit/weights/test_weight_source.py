"""One rank's source: shards from DTensor placements (each rank in turn under a fake process group) and the copying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from shoal_trainer.weight_source import WeightSource, local_box
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.errors import StateError, TransportError
from shoal.types.weights import Box, SinkLayout, SourceShard
from shoal.weights import boxes
from shoal.weights.transports.shm import ShmSourceTransport
from shoal.weights.verification import verify_staging
from tests.helpers.layouts import box
from tests.helpers.shm_sink import ShmSink, expected_parameters

FULL = torch.arange(5 * 4 * 3, dtype=torch.float32).reshape(5, 4, 3)


@contextmanager
def as_rank(rank: int, mesh_shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    world_size = 1
    for size in mesh_shape:
        world_size *= size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", mesh_shape)
    finally:
        dist.destroy_process_group()


def sharded(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Cut a tensor that every rank has; src_data_rank=None sends nothing."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((1,), [Shard(0)]),
        ((2,), [Shard(0)]),
        ((3,), [Shard(0)]),
        ((4,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((2,), [Shard(2)]),
        ((2,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
    ],
)
def test_local_boxes_hold_what_they_say_and_cover_the_tensor(mesh_shape: tuple[int, ...], placements: Sequence[Placement]) -> None:
    seen: set[Box] = set()
    for rank in range(torch.Size(mesh_shape).numel()):
        with as_rank(rank, mesh_shape) as mesh:
            parameter = sharded(FULL, mesh, placements)
            where = local_box("w", parameter)
            index = tuple(slice(offset, offset + size) for offset, size in zip(where.offsets, where.sizes, strict=True))
            assert torch.equal(parameter.to_local(), FULL[index])
            seen.add(where)
    assert boxes.cover_fault(boxes.whole(FULL.shape), [where for where in seen if where.num_elements]) is None


def test_describe_leaves_empty_shards_out() -> None:
    with as_rank(3, (4,)) as mesh:
        source = WeightSource({"w": sharded(FULL, mesh, [Shard(0)])}, 3, 4, ShmSourceTransport())
        assert source.describe() == []
    with as_rank(2, (4,)) as mesh:
        source = WeightSource({"w": sharded(FULL, mesh, [Shard(0)])}, 2, 4, ShmSourceTransport())
        assert source.describe() == [SourceShard(name="w", shape=(5, 4, 3), dtype="float32", rank=2, box=box((4, 5), (0, 4), (0, 3)))]


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=2)])
def test_other_placements_are_refused(placement: Placement) -> None:
    with as_rank(0, (2,)) as mesh:
        parameter = DTensor.from_local(FULL, mesh, [placement], run_check=False, shape=FULL.shape, stride=FULL.stride())
        with pytest.raises(TransportError, match="w has placements"):
            local_box("w", parameter)


def small_source(version: list[int] | None = None) -> WeightSource:
    held = None if version is None else lambda: version[0]
    return WeightSource({"w": FULL.clone(), "s": torch.tensor(7.0)}, 0, 1, ShmSourceTransport(), held)


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[ShmSink]:
    made = ShmSink.copying("rollout-0", {"w": (5, 4, 3), "s": ()}, str(tmp_path))
    yield made
    made.close()


def check_staged(sink: ShmSink, layout: SinkLayout, source: WeightSource, push_id: str) -> None:
    digests = source.transfer(push_id)["rollout-0"]
    assert sum(verify_staging(layout.workers[0], digests, sink.digest_of(0))) == source.transferred_bytes == (60 + 1) * 4
    expected = expected_parameters(layout.workers[0], {"w": FULL, "s": torch.tensor(7.0)})
    assert all(torch.equal(sink.staged(0)[name], expected[name]) for name in expected)


def test_transfer_writes_and_may_be_repeated(sink: ShmSink) -> None:
    source = small_source()
    layout = sink.stage()
    plan_hash, num_copies, num_bytes = source.prepare("p", 1, source.describe(), [layout])
    assert (len(plan_hash), num_copies, num_bytes) == (64, 2, 61 * 4)
    check_staged(sink, layout, source, "p")
    check_staged(sink, layout, source, "p")
    source.close()


def test_transfer_leaves_out_a_server_that_cannot_be_written(sink: ShmSink, tmp_path: Path) -> None:
    dead = ShmSink.copying("rollout-1", {"w": (5, 4, 3), "s": ()}, str(tmp_path))
    source = small_source()
    layouts = [sink.stage(), dead.stage()]
    source.prepare("p", 1, source.describe(), layouts)
    dead.close()
    assert list(source.transfer("p")) == ["rollout-0"]
    assert source.transferred_bytes == 61 * 4


def test_transfer_wants_the_prepared_push(sink: ShmSink) -> None:
    source = small_source()
    with pytest.raises(StateError, match="push p is not prepared on rank 0"):
        source.transfer("p")
    source.prepare("p", 1, source.describe(), [sink.stage()])
    source.abort("other")
    assert "rollout-0" in source.transfer("p")
    source.abort("p")
    source.abort("p")
    with pytest.raises(StateError, match="push p is not prepared"):
        source.transfer("p")


def test_a_failed_prepare_forgets_the_push_before(sink: ShmSink) -> None:
    source = small_source()
    layout = sink.stage()
    source.prepare("p", 1, source.describe(), [layout])
    with pytest.raises(TransportError):
        source.prepare("q", 1, [], [layout])
    with pytest.raises(StateError, match="push p is not prepared"):
        source.transfer("p")


def test_only_the_held_version_is_pushed(sink: ShmSink) -> None:
    version = [1]
    source = small_source(version)
    layout = sink.stage()
    with pytest.raises(StateError, match="holds policy version 1, the push is for 2"):
        source.prepare("p", 2, source.describe(), [layout])
    source.prepare("p", 1, source.describe(), [layout])
    version[0] = 2
    with pytest.raises(StateError, match="holds policy version 2, the push is for 1"):
        source.transfer("p")
    assert not sink.staged(0)["w"].any()


def test_prepare_refuses_shards_of_strange_ranks(sink: ShmSink) -> None:
    source = small_source()
    shard = SourceShard(name="w", shape=(5, 4, 3), dtype="float32", rank=1, box=boxes.whole((5, 4, 3)))
    with pytest.raises(TransportError, match=r"ranks \[1\] do not belong to a gang of 1"):
        source.prepare("p", 1, [shard], [sink.stage()])
