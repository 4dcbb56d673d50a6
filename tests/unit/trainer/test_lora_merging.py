"""What is served of a matrix with an adapter: the values of peft's own merge, the same bits however it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from shoal_trainer import merging
from shoal_trainer.distributed import RankContext
from shoal_trainer.merging import MergedWeight
from shoal_trainer.models import load_policy, named_shards
from shoal_trainer.source_layout import HeldTensors, local_tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shoal.errors import TransportError
from shoal.types.weights import Box
from shoal.weights import boxes
from tests.helpers.adapters import LORA, adapted_policy, lora_config, served_by
from tests.helpers.layouts import box
from tests.helpers.trainer_bench import run_config, save_policy
from tests.helpers.weight_source import fake_ranks

CPU = torch.device("cpu")
SHAPE, RANK, SCALE = (37, 41), 5, 2.4


def factors(shape: tuple[int, int] = SHAPE) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    base, down, up = (torch.randn(size, generator=generator) for size in (shape, (RANK, shape[1]), (shape[0], RANK)))
    return base, down, up


def merged(base: Tensor, down: Tensor, up: Tensor) -> MergedWeight:
    weight = MergedWeight("w", nn.Parameter(base, requires_grad=False), nn.Parameter(down), nn.Parameter(up), SCALE, lambda: 0)
    weight.gather(CPU)
    return weight


def exact(base: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return torch.addmm(base.double(), up.double(), down.double(), alpha=SCALE)


def random_boxes(shape: tuple[int, int], count: int) -> list[Box]:
    """Some of them rows, columns or single elements, for which libraries have ways of their own."""
    generator = torch.Generator().manual_seed(2)
    cuts = [[_two(torch.randperm(size + 1, generator=generator)) for size in shape] for _ in range(count)]
    rows, columns = [(0, shape[0])], [(0, shape[1])]
    cuts += [[(at, at + 1), *columns] for at in (0, shape[0] - 1)] + [[*rows, (at, at + 1)] for at in (0, shape[1] - 1)]
    return [box(*cut) for cut in [*cuts, [(3, 4), (5, 6)]]]


def _two(numbers: Tensor) -> tuple[int, int]:
    first, second = sorted(numbers[:2].tolist())
    return first, second


def of(whole: Tensor, part: Box) -> Tensor:
    return whole[tuple(slice(offset, offset + size) for offset, size in zip(part.offsets, part.sizes, strict=True))]


@pytest.mark.parametrize("shape", [SHAPE, (1, 41), (37, 1), (300, 1100)])
def test_merged_weight_has_the_same_bits_in_every_part(shape: tuple[int, int]) -> None:
    parts = factors(shape)
    tensors = HeldTensors({"w": merged(*parts)}, 0)
    whole = tensors.piece("w", boxes.whole(shape))
    assert torch.allclose(whole.double(), exact(*parts), atol=1e-5)
    for part in random_boxes(shape, 25) if min(shape) > 5 else [boxes.whole(shape)]:
        assert torch.equal(tensors.piece("w", part), of(whole, part)), part
        assert torch.equal(tensors.piece("w", part, torch.bfloat16), of(whole, part).bfloat16()), part


def test_parts_of_small_tiles_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "TILE_ROWS", 8)
    monkeypatch.setattr(merging, "TILE_COLUMNS", 16)
    test_merged_weight_has_the_same_bits_in_every_part(SHAPE)


def test_merged_weight_is_trained_and_has_the_shape_and_dtype_of_its_base() -> None:
    base, down, up = factors()
    tensors = HeldTensors({"w": merged(base, down, up), "frozen": nn.Parameter(base, requires_grad=False)}, 0)
    assert not tensors.is_frozen("w")
    assert tensors.is_frozen("frozen")
    first, second = tensors.describe()
    assert (first.shape, first.dtype, first.shards) == (second.shape, second.dtype, second.shards)


def sharded(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize("world_size", [2, 3, 4, 40])
def test_every_rank_computes_its_rows(world_size: int) -> None:
    base, down, up = factors()
    expected, seen = exact(base, down, up), set()
    for rank in fake_ranks(world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        # The fake process group sends nothing, so A is gathered already.
        weight = MergedWeight(
            "w", sharded(base, mesh, [Shard(0)]), sharded(down, mesh, [Replicate()]), sharded(up, mesh, [Shard(0)]), SCALE, lambda: 0
        )
        weight.gather(CPU)
        tensors = HeldTensors({"w": weight}, rank)
        (described,) = tensors.describe()
        for shard in described.shards:
            seen.add(shard.box)
            assert torch.allclose(tensors.piece("w", shard.box).double(), of(expected, shard.box), atol=1e-5)
        local = local_tensor(weight.shard())
        assert torch.equal(local, torch.cat([tensors.piece("w", shard.box) for shard in described.shards] or [local]))
    assert boxes.cover_fault(boxes.whole(SHAPE), tuple(seen)) is None


def test_rows_without_their_adapter_are_refused() -> None:
    base, down, up = factors()
    for rank in fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        weight = MergedWeight(
            "w", sharded(base, mesh, [Shard(0)]), sharded(down, mesh, [Replicate()]), sharded(up, mesh, [Shard(1)]), SCALE, lambda: 0
        )
        weight.gather(CPU)
        with pytest.raises(TransportError, match=r"rows \d+:\d+ of w, but not of its adapter"):
            HeldTensors({"w": weight}, rank).piece("w", box((19 * rank, 19 * rank + 2), (0, 2)))


def test_adapter_of_an_older_version_is_refused() -> None:
    version = 0
    weight = MergedWeight("w", *factors(), SCALE, lambda: version)
    tensors = HeldTensors({"w": weight}, 0)
    for _ in range(2):
        with pytest.raises(TransportError, match=f"and the policy is {version}; gather it after every update"):
            tensors.piece("w", boxes.whole(SHAPE))
        weight.gather(CPU)
        tensors.piece("w", boxes.whole(SHAPE))
        version += 1


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), ("llama", False)])
def test_served_weights_are_the_base_models_names_with_the_values_of_pefts_merge(
    tmp_path: Path, context: RankContext, architecture: str, tied: bool
) -> None:
    folder = save_policy(tmp_path / "model", architecture, tied=tied)
    config = lora_config(folder)
    policy = adapted_policy(config, context)
    served = served_by(policy, config, context)
    plain = load_policy(str(folder), run_config(folder).model, run_config(folder).actor, context, trainable=True)
    assert list(served.parameters) == list(named_shards(plain))
    tensors = HeldTensors(served.parameters, 0)
    assert {name for name in served.parameters if not tensors.is_frozen(name)} == {f"{name}.weight" for name in served.adapted_layers}
    found = {one.name: tensors.piece(one.name, boxes.whole(one.shape)) for one in tensors.describe()}
    layers = {name.removeprefix("language_model."): module for name, module in policy.named_modules()}
    for name, value in found.items():
        expected = named_shards(plain)[name].full_tensor().detach()
        layer = layers[name.removesuffix(".weight")] if name.removesuffix(".weight") in served.adapted_layers else None
        if layer is not None:
            expected = expected + layer.get_delta_weight("default").full_tensor().detach()
        assert torch.allclose(value, expected, atol=1e-6), name
    assert served.lora is not None
    assert served.lora.rank == LORA["rank"]
