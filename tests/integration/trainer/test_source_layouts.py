"""What real ranks say that they hold is what they hold and what a server gets, for every kind of sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.types.weights import Box
from shoal.weights import boxes
from tests.helpers.trainer_bench import run_config, run_ranks
from tests.helpers.trainer_layouts import MODULE_LAYOUTS, NUM_RANKS, PLACED, SHAPES, assemble, full_tensors, layouts_job

pytestmark = pytest.mark.timeout(240)

Held = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Held]:
    folder = tmp_path_factory.mktemp("layouts")
    run_ranks(layouts_job, run_config(folder / "model"), NUM_RANKS, folder)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(NUM_RANKS)]


def check(ranks: list[Held], layout: str, name: str) -> list[set[Box]]:
    """Every piece has the elements of its box, and together they are the tensor, each once; answers the boxes by rank."""
    full = full_tensors()[name]
    by_rank: list[set[Box]] = []
    for held in ranks:
        pieces = held["held"][layout]["pieces"].get(name, [])
        by_rank.append({Box(offsets=tuple(offsets), sizes=tuple(sizes)) for offsets, sizes, _ in pieces})
        for offsets, sizes, values in pieces:
            cut = full[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
            assert torch.equal(values, cut), (layout, name, offsets)
    assert boxes.cover_fault(boxes.whole(tuple(full.shape)), tuple(set().union(*by_rank))) is None
    everything = [piece for held in ranks for piece in held["held"][layout]["pieces"].get(name, [])]
    assert torch.equal(assemble(full, everything), full)
    return by_rank


@pytest.mark.parametrize("layout", MODULE_LAYOUTS)
def test_ranks_hold_the_boxes_that_they_name(ranks: list[Held], layout: str) -> None:
    for name in SHAPES:
        check(ranks, layout, name)


@pytest.mark.parametrize("placed", PLACED)
def test_ranks_hold_the_boxes_that_placements_cut(ranks: list[Held], placed: str) -> None:
    check(ranks, f"placed {placed}", "placed")


def test_empty_shards_are_held_by_nobody(ranks: list[Held]) -> None:
    assert [len(boxes_of_rank) for boxes_of_rank in check(ranks, "fsdp 4", "gate")] == [1, 0, 0, 0]


def test_a_fused_tensor_leaves_a_rank_several_boxes(ranks: list[Held]) -> None:
    assert [len(boxes_of_rank) for boxes_of_rank in check(ranks, "placed fused", "placed")][:2] == [3, 3]


def test_replicated_parts_are_held_by_every_replica(ranks: list[Held]) -> None:
    for layout in ("hsdp", "plain"):
        by_rank = check(ranks, layout, "up.weight")
        assert by_rank[0] == by_rank[2]
        assert by_rank[1] == by_rank[3]


def test_fsdp_of_tensor_parallel_rows_cuts_what_tensor_parallelism_left(ranks: list[Held]) -> None:
    # 7 rows: tensor parallel 4 + 3, each then over two ranks.
    rows = [next(iter(held)).offsets[0] for held in check(ranks, "fsdp x tp", "up.weight")]
    assert rows == [0, 4, 2, 6]


def test_boxes_are_found_without_any_collective(ranks: list[Held]) -> None:
    assert {layout["collectives"] for held in ranks for layout in held["held"].values()} == {0}


@pytest.mark.parametrize("layout", MODULE_LAYOUTS)
def test_a_server_gets_every_tensor_without_any_collective(ranks: list[Held], layout: str) -> None:
    outcome = ranks[0]["pushed"][layout]
    assert outcome["errors"] == [""] * MODULE_LAYOUTS[layout]
    assert outcome["equal"]
    assert {held["pushed"][layout]["collectives"] for held in ranks} == {0}
    # Replicas share the work.
    assert outcome["senders"] == list(range(MODULE_LAYOUTS[layout]))
