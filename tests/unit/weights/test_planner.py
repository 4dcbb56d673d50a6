"""The planner: exact cover by property tests, and every refusal."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import TransportError
from shoal.types.weights import Box, CopyDigest, SinkLayout, SinkParameter, SinkRegion, SinkWorkerLayout, SourceShard
from shoal.weights import boxes
from shoal.weights.planner import Copy, PushPlan, plan_copies
from tests.helpers.layouts import (
    LAYER,
    box,
    columns_of,
    decoder_shapes,
    decoder_sink,
    decoder_worker,
    fsdp_shards,
    rows_of,
    stack_rows,
    staged,
)

QKV = f"{LAYER}.self_attn.qkv_proj.weight"
Q = f"{LAYER}.self_attn.q_proj.weight"


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))))


def expected_elements(layout: SinkLayout) -> dict[tuple[int, str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
    """Destination element to the source element that belongs there, straight from the regions."""
    return {
        (worker.worker_rank, region.parameter, target): (region.source_name, source)
        for worker in layout.workers
        for region in worker.regions
        for target, source in zip(elements(region.parameter_box), elements(region.source_box), strict=True)
    }


def check_plan(plan: PushPlan, shards: Sequence[SourceShard], layout: SinkLayout) -> None:
    """Each destination element exactly once, from the right source element, which the copying rank holds."""
    held = {(shard.rank, shard.name, element) for shard in shards for element in elements(shard.box)}
    written: Counter[tuple[int, str, tuple[int, ...]]] = Counter()
    expected = expected_elements(layout)
    for copy in plan.copies:
        for target, source in zip(elements(copy.parameter_box), elements(copy.source_box), strict=True):
            assert expected[copy.worker_rank, copy.parameter, target] == (copy.source_name, source)
            assert (copy.rank, copy.source_name, source) in held
            written[copy.worker_rank, copy.parameter, target] += 1
    assert written == Counter(expected.keys())


def cuts(size: int, num_parts: int, draw: st.DrawFn) -> list[tuple[int, int]]:
    """Random uneven parts of [0, size), some of them empty."""
    inner = sorted(draw(st.lists(st.integers(0, size), min_size=num_parts - 1, max_size=num_parts - 1)))
    return list(zip([0, *inner], [*inner, size], strict=True))


@st.composite
def random_push(draw: st.DrawFn) -> tuple[list[SourceShard], SinkLayout]:
    """1-D or 2-D tensors on 1-4 ranks (cut along a random dim, or replicated), fused into TP 1-2 parameters."""
    num_ranks, tp, num_dims = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    width = draw(st.integers(1, 4))
    shapes = {f"t{index}": (draw(st.integers(1, 5)) * tp, *([width] * (num_dims - 1))) for index in range(draw(st.integers(1, 3)))}
    shards = []
    for name, shape in shapes.items():
        if draw(st.booleans()):
            dim = draw(st.integers(0, num_dims - 1))
            parts = [
                box(*((start, end) if d == dim else (0, size) for d, size in enumerate(shape)))
                for start, end in cuts(shape[dim], num_ranks, draw)
            ]
        else:
            parts = [box(*((0, size) for size in shape))] * num_ranks
        shards += [
            SourceShard(name=name, shape=shape, dtype="float32", rank=rank, box=part)
            for rank, part in enumerate(parts)
            if part.num_elements
        ]
    workers = []
    for worker_rank in range(tp):
        regions = stack_rows(
            "fused", [(name, shape, worker_rank * shape[0] // tp, (worker_rank + 1) * shape[0] // tp) for name, shape in shapes.items()]
        )
        rows = sum(region.parameter_box.sizes[0] for region in regions)
        parameters, staging_bytes = staged({"fused": (rows, *([width] * (num_dims - 1)))})
        workers.append(
            SinkWorkerLayout(
                worker_rank=worker_rank, parameters=parameters, regions=tuple(regions), staging_path="", staging_bytes=staging_bytes
            )
        )
    return shards, SinkLayout(server_id="rollout-0", workers=tuple(workers))


@given(random_push())
@settings(max_examples=150, deadline=None)
def test_plan_copies_writes_every_element_once_for_random_layouts(push: tuple[list[SourceShard], SinkLayout]) -> None:
    shards, layout = push
    check_plan(plan_copies(shards, [layout]), shards, layout)


@given(random_push(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_plan_copies_does_not_depend_on_the_order_of_its_input(push: tuple[list[SourceShard], SinkLayout], shuffler: random.Random) -> None:
    shards, layout = push
    workers = [replace(worker, regions=tuple(shuffler.sample(worker.regions, len(worker.regions)))) for worker in reversed(layout.workers)]
    shuffled = replace(layout, workers=tuple(workers))
    assert plan_copies(shuffler.sample(shards, len(shards)), [shuffled]) == plan_copies(shards, [layout])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("separate_head", [False, True])
@pytest.mark.parametrize(("num_ranks", "tp"), [(1, 1), (2, 2), (3, 2), (4, 1)])
def test_plan_copies_reshards_a_decoder(num_ranks: int, tp: int, separate_head: bool, tied: bool) -> None:
    shards = fsdp_shards(decoder_shapes(tied=tied), num_ranks)
    layout = decoder_sink("rollout-0", tp, separate_head=separate_head)
    plan = plan_copies(shards, [layout])
    if tied and separate_head:
        layout = with_tied_head(layout)
    check_plan(plan, shards, layout)


def with_tied_head(layout: SinkLayout) -> SinkLayout:
    """What the plan must do when the trainer has no head of its own: take the embedding."""
    workers = [
        replace(
            worker,
            regions=tuple(
                replace(region, source_name="model.embed_tokens.weight") if region.source_name == "lm_head.weight" else region
                for region in worker.regions
            ),
        )
        for worker in layout.workers
    ]
    return replace(layout, workers=tuple(workers))


def test_plan_copies_meets_shards_of_two_dims() -> None:
    shape = (4, 6)
    shards = [
        SourceShard(name="w", shape=shape, dtype="float32", rank=2 * i + j, box=box((2 * i, 2 * i + 2), (3 * j, 3 * j + 3)))
        for i in range(2)
        for j in range(2)
    ]
    parameters, staging_bytes = staged({"p": (4, 2)})
    region = SinkRegion(parameter="p", source_name="w", source_box=columns_of(shape, 2, 4), parameter_box=columns_of((4, 2), 0, 2))
    worker = SinkWorkerLayout(worker_rank=0, parameters=parameters, regions=(region,), staging_path="", staging_bytes=staging_bytes)
    layout = SinkLayout(server_id="rollout-0", workers=(worker,))
    plan = plan_copies(shards, [layout])
    check_plan(plan, shards, layout)
    assert len(plan.copies) == 4


def test_plan_copies_balances_replicated_tensors_by_bytes() -> None:
    shapes = {f"t{index}": (size,) for index, size in enumerate([8, 7, 5, 4, 3, 3, 1, 1])}
    shards = [
        SourceShard(name=name, shape=shape, dtype="float32", rank=rank, box=box((0, shape[0])))
        for name, shape in shapes.items()
        for rank in range(2)
    ]
    parameters, staging_bytes = staged(shapes)
    regions = tuple(region for name, shape in shapes.items() for region in stack_rows(name, [(name, shape, 0, shape[0])]))
    worker = SinkWorkerLayout(worker_rank=0, parameters=parameters, regions=regions, staging_path="", staging_bytes=staging_bytes)
    plan = plan_copies(shards, [SinkLayout(server_id="rollout-0", workers=(worker,))])
    assert [sum(copy.num_bytes for copy in plan.copies_of(rank)) for rank in range(2)] == [64, 64]


def test_plan_counts_bytes_in_the_serving_dtype() -> None:
    shards = fsdp_shards(decoder_shapes(tied=False), 2)
    assert (
        plan_copies(shards, [decoder_sink("a", 2, dtype="bfloat16")]).num_bytes * 2 == plan_copies(shards, [decoder_sink("a", 2)]).num_bytes
    )


def test_plan_hash_is_pinned_and_changes_with_the_layouts() -> None:
    shards = fsdp_shards(decoder_shapes(tied=True), 2)
    one = plan_copies(shards, [decoder_sink("a", 2)]).plan_hash
    assert one == plan_copies(shards, [decoder_sink("a", 2)]).plan_hash
    moved = replace(decoder_sink("a", 2), workers=tuple(decoder_worker(rank, 2, separate_head=True, staging_path="/b") for rank in (0, 1)))
    others = [[decoder_sink("b", 2)], [decoder_sink("a", 1)], [decoder_sink("a", 2), decoder_sink("b", 2)], [moved]]
    hashes = {plan_copies(shards, sinks).plan_hash for sinks in others} | {
        plan_copies(fsdp_shards(decoder_shapes(tied=True), 1), [decoder_sink("a", 2)]).plan_hash
    }
    assert len(hashes) == 5
    assert one not in hashes
    assert re.fullmatch("[0-9a-f]{64}", one)


def test_plan_covers_several_servers_and_answers_by_rank() -> None:
    shards = fsdp_shards(decoder_shapes(tied=False), 3)
    sinks = [decoder_sink("b", 2), decoder_sink("a", 1)]
    plan = plan_copies(shards, sinks)
    by_rank = [copy for rank in range(3) for copy in plan.copies_of(rank)]
    assert sorted(by_rank, key=str) == sorted(plan.copies, key=str)
    assert all(copy.rank == rank for rank in range(3) for copy in plan.copies_of(rank))
    assert plan.copies_of(3) == ()
    assert {copy.server_id for copy in plan.copies} == {"a", "b"}


def digest_of(copy: Copy) -> CopyDigest:
    return CopyDigest(worker_rank=copy.worker_rank, parameter=copy.parameter, parameter_box=copy.parameter_box, xxh3=0)


def test_coverage_fault_wants_one_digest_per_copy() -> None:
    plan = plan_copies(fsdp_shards(decoder_shapes(tied=False), 2), [decoder_sink("a", 2), decoder_sink("b", 1)])
    digests = [digest_of(copy) for copy in plan.copies if copy.server_id == "a"]
    assert plan.coverage_fault("a", digests) is None
    assert "was planned but not written" in str(plan.coverage_fault("a", digests[1:]))
    assert digests[0].parameter in str(plan.coverage_fault("a", digests[1:]))
    assert "digests for" in str(plan.coverage_fault("a", [*digests, digests[0]]))
    assert "was written but not planned" in str(plan.coverage_fault("b", digests))


def refusal(shards: Sequence[SourceShard], layout: SinkLayout) -> str:
    with pytest.raises(TransportError) as caught:
        plan_copies(shards, [layout])
    return str(caught.value)


def change_worker(layout: SinkLayout, **changes: object) -> SinkLayout:
    return replace(layout, workers=(replace(layout.workers[0], **changes), *layout.workers[1:]))  # type: ignore[arg-type]


def test_plan_refuses_a_missing_source_tensor() -> None:
    shapes = decoder_shapes(tied=False)
    del shapes[Q]
    message = refusal(fsdp_shards(shapes, 2), decoder_sink("a", 2))
    assert QKV in message
    assert Q in message


def test_plan_refuses_a_source_of_another_shape() -> None:
    shapes = decoder_shapes(tied=False) | {Q: (6, 8)}
    message = refusal(fsdp_shards(shapes, 2), decoder_sink("a", 2))
    assert QKV in message
    assert "[6, 8]" in message


def test_plan_refuses_ranks_that_disagree_on_a_shape() -> None:
    shards = fsdp_shards({"w": (4, 2)}, 2)
    shards[1] = replace(shards[1], shape=(6, 2))
    assert "w is float32[6, 2] on rank 1" in refusal(shards, decoder_sink("a", 1))


def test_plan_refuses_shards_with_a_hole_or_an_overlap() -> None:
    shards = fsdp_shards(decoder_shapes(tied=False), 2)
    without_rank_1 = [shard for shard in shards if not (shard.name == Q and shard.rank == 1)]
    message = refusal(without_rank_1, decoder_sink("a", 2))
    assert Q in message
    assert "missing" in message
    overlapping = [replace(shard, box=rows_of(shard.shape, 3, 8)) if shard.name == Q and shard.rank == 1 else shard for shard in shards]
    assert "overlap" in refusal(overlapping, decoder_sink("a", 2))


def test_plan_refuses_a_trained_tensor_that_the_server_does_not_take() -> None:
    shapes = decoder_shapes(tied=False) | {"model.extra.weight": (3,)}
    assert "model.extra.weight" in refusal(fsdp_shards(shapes, 1), decoder_sink("a", 1))


def test_plan_refuses_regions_that_overlap_leave_the_parameter_or_are_missing() -> None:
    shards, layout = fsdp_shards(decoder_shapes(tied=False), 2), decoder_sink("a", 2)
    regions = layout.workers[0].regions
    assert "overlapping" in refusal(shards, change_worker(layout, regions=(*regions, regions[0])))
    moved = replace(regions[0], parameter_box=rows_of((9, 8), 5, 9))
    assert "lies outside" in refusal(shards, change_worker(layout, regions=(moved, *regions[1:])))
    assert "has no region" in refusal(shards, change_worker(layout, regions=regions[1:]))
    assert regions[0].parameter in refusal(shards, change_worker(layout, regions=regions[1:]))
    unlisted = replace(regions[0], parameter="nobody")
    assert "nobody" in refusal(shards, change_worker(layout, regions=(*regions, unlisted)))
    narrowed = replace(regions[0], parameter_box=rows_of((4, 8), 0, 2))
    assert "sizes differ" in refusal(shards, change_worker(layout, regions=(narrowed, *regions[1:])))


def test_plan_refuses_parameters_that_overlap_or_overflow_in_staging() -> None:
    shards, layout = fsdp_shards(decoder_shapes(tied=False), 2), decoder_sink("a", 2)
    parameters = layout.workers[0].parameters
    shared = replace(parameters[1], staging_offset_bytes=parameters[0].staging_offset_bytes + 4)
    assert "inside" in refusal(shards, change_worker(layout, parameters=(parameters[0], shared, *parameters[2:])))
    assert "ends at byte" in refusal(shards, change_worker(layout, staging_bytes=layout.workers[0].staging_bytes - 64))


def test_plan_refuses_unknown_and_uncastable_dtypes() -> None:
    shards, layout = fsdp_shards(decoder_shapes(tied=False), 2), decoder_sink("a", 2)
    for dtype, words in (("float8", "carries"), ("int32", "not cast")):
        parameters = tuple(replace(parameter, dtype=dtype) for parameter in layout.workers[0].parameters)
        assert words in refusal(shards, change_worker(layout, parameters=parameters))


def test_plan_refuses_a_server_twice() -> None:
    with pytest.raises(TransportError, match="server 'a' appears twice"):
        plan_copies(fsdp_shards(decoder_shapes(tied=False), 1), [decoder_sink("a", 1), decoder_sink("a", 1)])


def test_plan_takes_scalars() -> None:
    scalar = Box(offsets=(), sizes=())
    shards = [SourceShard(name="s", shape=(), dtype="float32", rank=rank, box=scalar) for rank in range(2)]
    parameter = SinkParameter(name="p", shape=(), dtype="float32", staging_offset_bytes=0)
    region = SinkRegion(parameter="p", source_name="s", source_box=scalar, parameter_box=scalar)
    worker = SinkWorkerLayout(worker_rank=0, parameters=(parameter,), regions=(region,), staging_path="", staging_bytes=4)
    plan = plan_copies(shards, [SinkLayout(server_id="a", workers=(worker,))])
    assert [(copy.rank, copy.num_bytes) for copy in plan.copies] == [(0, 4)]


def test_planning_work_grows_with_the_copies_not_with_ranks_times_regions() -> None:
    """Regions meet their shards by bisection: with 64 ranks a region of one row compares one shard."""
    shape = (64, 2)
    shards = fsdp_shards({"w": shape}, 64)
    parameters, staging_bytes = staged({f"p{row}": (1, 2) for row in range(64)})
    regions = tuple(region for row in range(64) for region in stack_rows(f"p{row}", [("w", shape, row, row + 1)]))
    worker = SinkWorkerLayout(worker_rank=0, parameters=parameters, regions=regions, staging_path="", staging_bytes=staging_bytes)
    compared = Counter[str]()
    original = boxes.intersect
    with pytest.MonkeyPatch.context() as patch:

        def counted(left: Box, right: Box) -> Box | None:
            compared["calls"] += 1
            return original(left, right)

        patch.setattr(boxes, "intersect", counted)
        plan = plan_copies(shards, [SinkLayout(server_id="a", workers=(worker,))])
    assert [copy.rank for copy in sorted(plan.copies, key=lambda copy: copy.source_box.offsets)] == list(range(64))
    assert compared["calls"] <= 64
