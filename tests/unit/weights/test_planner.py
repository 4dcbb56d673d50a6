"""The planner: exact cover, packing and balance by property tests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.types.weights import BucketEncoding, PairDigests, Place, SinkLayout, SinkRegion, SourceLayout
from shoal.weights import box_table, boxes
from shoal.weights.buckets import Bucket
from shoal.weights.dtypes import ITEM_BYTES
from shoal.weights.plan import ServerPlan
from shoal.weights.planner import plan_push, plan_server
from tests.helpers.layouts import (
    HERE,
    box,
    columns_of,
    decoder_shapes,
    decoder_sink,
    fsdp_source,
    sink_worker,
    source_layout,
    source_tensor,
    stack_rows,
    staged,
)
from tests.helpers.random_push import carry_out, random_push, random_sink, random_source, wanted_elements

Item = TypeVar("Item")

BUCKET_BYTES = st.sampled_from([8, 12, 24, 100, 1 << 20])


def plan_one(source: SourceLayout, sink: SinkLayout, bucket_bytes: int = 1 << 20) -> ServerPlan:
    return plan_server(source, sink, bucket_bytes=bucket_bytes, transport="auto")


def all_buckets(plan: ServerPlan) -> list[Bucket]:
    return [bucket for pair in plan.pairs() for bucket in plan.buckets(*pair)]


def assert_same_elements(plan: ServerPlan, source: SourceLayout, sink: SinkLayout, wanted_of: SinkLayout) -> None:
    written, wanted = carry_out(plan, source, sink), wanted_elements(source, wanted_of)
    for key, elements in wanted.items():
        np.testing.assert_array_equal(written[key], elements, err_msg=str(key))


@given(random_push(), BUCKET_BYTES)
@settings(max_examples=100, deadline=None)
def test_plan_writes_every_element_once_for_random_layouts(push: tuple[SourceLayout, SinkLayout], bucket_bytes: int) -> None:
    source, sink = push
    assert_same_elements(plan_one(source, sink, bucket_bytes), source, sink, sink)


@given(random_push(), BUCKET_BYTES)
@settings(max_examples=100, deadline=None)
def test_buckets_hold_one_dtype_trained_or_frozen_and_are_filled_in_order(push: tuple[SourceLayout, SinkLayout], bucket_bytes: int) -> None:
    """At most one bucket of extra memory: none is larger, and none ends while the next piece would still fit."""
    source, sink = push
    plan = plan_one(source, sink, bucket_bytes)
    parameters = {(worker.worker_rank, parameter.name): parameter for worker in sink.workers for parameter in worker.parameters}
    is_frozen = {tensor.name: tensor.frozen for tensor in source.tensors}
    for rank, worker_rank in plan.pairs():
        buckets = plan.buckets(rank, worker_rank)
        assert [bucket.index for bucket in buckets] == list(range(plan.num_buckets_of(rank, worker_rank)))
        assert sum(bucket.num_bytes for bucket in buckets) == plan.bytes_of(rank, worker_rank) > 0
        for bucket in buckets:
            assert (bucket.rank, bucket.worker_rank) == (rank, worker_rank)
            assert {parameters[worker_rank, piece.parameter].dtype for piece in bucket.pieces} == {bucket.dtype}
            assert len({is_frozen[piece.source_name] for piece in bucket.pieces}) == 1
            item = ITEM_BYTES[bucket.dtype]
            assert bucket.num_bytes == sum(piece.source_box.num_elements * item for piece in bucket.pieces) <= bucket_bytes
        for bucket, following in pairwise(buckets):
            first_bytes = following.pieces[0].source_box.num_elements * ITEM_BYTES[following.dtype]
            kinds = [(one.dtype, is_frozen[one.pieces[0].source_name]) for one in (bucket, following)]
            assert kinds[0] < kinds[1] or bucket.num_bytes + first_bytes > bucket_bytes
        places = [
            (
                bucket.dtype,
                is_frozen[piece.source_name],
                parameters[worker_rank, piece.parameter].staging_offset_bytes,
                piece.parameter_box.offsets,
            )
            for bucket in buckets
            for piece in bucket.pieces
        ]
        assert places == sorted(places)
    buckets = tuple(all_buckets(plan))
    assert (len(buckets), sum(bucket.num_bytes for bucket in buckets)) == (plan.num_buckets, plan.num_bytes)
    assert sum(len(bucket.pieces) for bucket in buckets) == plan.num_pieces


@given(random_push(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_plan_does_not_depend_on_the_order_of_its_input(push: tuple[SourceLayout, SinkLayout], shuffler: random.Random) -> None:
    source, sink = push

    def shuffled(items: Sequence[Item]) -> tuple[Item, ...]:
        return tuple(shuffler.sample(items, len(items)))

    workers = [replace(worker, regions=shuffled(worker.regions), parameters=shuffled(worker.parameters)) for worker in sink.workers]
    tensors = [replace(tensor, shards=shuffled(tensor.shards)) for tensor in source.tensors]
    one = plan_one(source, sink, 24)
    other = plan_one(replace(source, tensors=shuffled(tensors)), replace(sink, workers=shuffled(workers)), 24)
    assert (other.plan_hash, all_buckets(other)) == (one.plan_hash, all_buckets(one))


@given(random_source().flatmap(lambda source: st.tuples(st.just(source), random_sink(source, "a"), random_sink(source, "b"))))
@settings(max_examples=50, deadline=None)
def test_plan_push_gives_each_server_the_plan_it_makes_itself(push: tuple[SourceLayout, SinkLayout, SinkLayout]) -> None:
    source, one, other = push
    sinks = [other, one, replace(one, server_id="c")]
    plan = plan_push(source, sinks, bucket_bytes=24, transport="auto")
    assert list(plan.servers) == ["a", "b", "c"]
    assert plan.errors == {}
    for sink in sinks:
        own, shared = plan_one(source, sink, 24), plan.servers[sink.server_id]
        assert (shared.plan_hash, shared.num_bytes, all_buckets(shared)) == (own.plan_hash, own.num_bytes, all_buckets(own))


@given(random_source(replicated=True).flatmap(lambda source: st.tuples(st.just(source), random_sink(source))), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_replicated_shards_are_balanced_within_a_server_and_over_servers(push: tuple[SourceLayout, SinkLayout], num_servers: int) -> None:
    source, sink = push
    sinks = [replace(sink, server_id=f"rollout-{index}") for index in range(num_servers)]
    total: Counter[int] = Counter()
    largest = 0
    for plan in plan_push(source, sinks, bucket_bytes=100, transport="auto").servers.values():
        load = rank_loads(plan, len(source.places))
        pieces = [piece.source_box.num_elements * ITEM_BYTES[bucket.dtype] for bucket in all_buckets(plan) for piece in bucket.pieces]
        largest = max(pieces, default=0)
        assert max(load) - min(load) <= largest
        total.update(dict(enumerate(load)))
    loads = [total[rank] for rank in range(len(source.places))]
    assert max(loads) - min(loads) <= largest * num_servers


def rank_loads(plan: ServerPlan, num_ranks: int) -> list[int]:
    return [sum(plan.bytes_of(*pair) for pair in plan.pairs() if pair[0] == rank) for rank in range(num_ranks)]


def replicated_source(shapes: Mapping[str, tuple[int, ...]], num_ranks: int) -> SourceLayout:
    tensors = [source_tensor(name, shape, [(rank, boxes.whole(shape)) for rank in range(num_ranks)]) for name, shape in shapes.items()]
    return source_layout(tensors, num_ranks)


def identity_sink(shapes: Mapping[str, tuple[int, ...]], server_id: str = "a") -> SinkLayout:
    parameters, staging_bytes = staged(shapes)
    regions = [
        SinkRegion(parameter=name, source_name=name, source_box=boxes.whole(shape), parameter_box=boxes.whole(shape))
        for name, shape in shapes.items()
    ]
    return SinkLayout(server_id=server_id, workers=(sink_worker(0, parameters, regions, staging_bytes),))


def test_replicated_tensors_are_balanced_by_bytes() -> None:
    shapes = {f"t{index}": (size,) for index, size in enumerate([8, 7, 5, 4, 3, 3, 1, 1])}
    assert rank_loads(plan_one(replicated_source(shapes, 2), identity_sink(shapes)), 2) == [64, 64]


def test_a_rank_that_alone_holds_much_gets_less_of_what_is_replicated() -> None:
    shapes = {"alone": (6,), "shared": (4,), "more": (2,)}
    everyone = replicated_source({"shared": (4,), "more": (2,)}, 2)
    alone = source_tensor("alone", (6,), [(0, box((0, 6)))])
    source = replace(everyone, tensors=(*everyone.tensors, alone))
    for server_id in ("a", "b", "c", "d"):
        assert rank_loads(plan_one(source, identity_sink(shapes, server_id)), 2) == [24, 24]


def test_servers_begin_with_different_holders_of_a_replicated_tensor() -> None:
    shapes = {"t": (4,)}
    sinks = [identity_sink(shapes, f"rollout-{index}") for index in range(32)]
    plans = plan_push(replicated_source(shapes, 4), sinks, bucket_bytes=64, transport="auto").servers
    assert {plan.pairs()[0][0] for plan in plans.values()} == {0, 1, 2, 3}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("separate_head", [False, True])
@pytest.mark.parametrize(("num_ranks", "tp"), [(1, 1), (2, 2), (3, 2), (4, 1)])
def test_plan_reshards_a_decoder(num_ranks: int, tp: int, separate_head: bool, tied: bool) -> None:
    source = fsdp_source(decoder_shapes(tied=tied), num_ranks)
    sink = decoder_sink("rollout-0", tp, separate_head=separate_head)
    wanted = with_tied_head(sink) if tied and separate_head else sink
    assert_same_elements(plan_one(source, sink, 64), source, sink, wanted)


def with_tied_head(layout: SinkLayout) -> SinkLayout:
    """What the plan must do when the trainer has no head of its own: take the embedding."""
    workers = []
    for worker in layout.workers:
        regions = (
            replace(region, source_name="model.embed_tokens.weight") if region.source_name == "lm_head.weight" else region
            for region in worker.regions
        )
        workers.append(replace(worker, regions=tuple(regions)))
    return replace(layout, workers=tuple(workers))


def test_plan_meets_shards_of_two_dims() -> None:
    shape = (4, 6)
    held = [(2 * i + j, box((2 * i, 2 * i + 2), (3 * j, 3 * j + 3))) for i in range(2) for j in range(2)]
    source = source_layout([source_tensor("w", shape, held)], 4)
    parameters, staging_bytes = staged({"p": (4, 2)})
    region = SinkRegion(parameter="p", source_name="w", source_box=columns_of(shape, 2, 4), parameter_box=columns_of((4, 2), 0, 2))
    sink = SinkLayout(server_id="rollout-0", workers=(sink_worker(0, parameters, [region], staging_bytes),))
    plan = plan_one(source, sink)
    assert_same_elements(plan, source, sink, sink)
    assert plan.num_pieces == 4


def test_a_piece_larger_than_a_bucket_is_cut_by_rows_and_then_within_a_row() -> None:
    shapes = {"w": (5, 6)}
    source, sink = fsdp_source(shapes, 1), identity_sink(shapes)
    by_rows = [piece.source_box for bucket in all_buckets(plan_one(source, sink, 50)) for piece in bucket.pieces]
    assert by_rows == [box((0, 2), (0, 6)), box((2, 4), (0, 6)), box((4, 5), (0, 6))]
    within = [piece.source_box for bucket in all_buckets(plan_one(source, sink, 16)) for piece in bucket.pieces]
    assert within == [part for row in range(5) for part in (box((row, row + 1), (0, 4)), box((row, row + 1), (4, 6)))]


def test_plan_counts_bytes_in_the_serving_dtype() -> None:
    source = fsdp_source(decoder_shapes(tied=False), 2)
    half, full = (plan_one(source, decoder_sink("a", 2, dtype=dtype)) for dtype in ("bfloat16", "float32"))
    assert half.num_bytes * 2 == full.num_bytes


def test_plan_hash_changes_with_everything_that_is_agreed_on() -> None:
    source, sink = fsdp_source(decoder_shapes(tied=True), 2), decoder_sink("a", 2)
    one = plan_one(source, sink).plan_hash
    assert one == plan_one(source, decoder_sink("a", 2)).plan_hash
    assert len(one) == 64
    elsewhere = replace(source, places=(HERE, Place(host_id="there", device="cpu")))
    offered = decoder_sink("a", 2, endpoints={"shm": "/nowhere", "grpc": "nowhere:1"})
    moved = tuple(
        replace(
            worker,
            staging_bytes=1 << 20,
            parameters=tuple(replace(p, staging_offset_bytes=p.staging_offset_bytes * 2) for p in worker.parameters),
        )
        for worker in sink.workers
    )
    frozen = replace(source, tensors=tuple(replace(tensor, frozen=True) for tensor in source.tensors))
    others = [
        plan_one(frozen, sink),
        plan_one(source, decoder_sink("b", 2)),
        plan_one(source, decoder_sink("a", 1)),
        plan_one(source, decoder_sink("a", 2, dtype="bfloat16")),
        plan_one(source, replace(sink, workers=moved)),
        plan_one(source, sink, 64),
        plan_one(elsewhere, offered),
        plan_one(fsdp_source(decoder_shapes(tied=True), 1), sink),
        plan_one(fsdp_source(decoder_shapes(tied=True), 2, dtype="bfloat16"), sink),
    ]
    assert len({one, *(plan.plan_hash for plan in others)}) == 1 + len(others)


def test_plan_chooses_a_transport_for_each_pair() -> None:
    shapes = {"w": (4, 2)}
    source = replace(fsdp_source(shapes, 2), places=(HERE, Place(host_id="there", device="cpu")))
    worker = replace(identity_sink(shapes).workers[0], endpoints={"shm": "/nowhere", "grpc": "nowhere:1"})
    plan = plan_one(source, SinkLayout(server_id="a", workers=(worker,)))
    assert [plan.transport_of(*pair) for pair in plan.pairs()] == ["shm", "grpc"]


def test_a_pair_with_nothing_to_send_has_no_buckets() -> None:
    plan = plan_one(fsdp_source({"w": (2, 2)}, 3), identity_sink({"w": (2, 2)}))
    assert plan.pairs() == ((0, 0), (1, 0))
    assert (plan.buckets(2, 0), plan.bytes_of(2, 0), plan.num_buckets_of(0, 1)) == ((), 0, 0)
    with pytest.raises(KeyError):
        plan.transport_of(2, 0)


def test_plan_push_leaves_out_a_server_that_cannot_be_planned() -> None:
    source = fsdp_source({"w": (2, 2)}, 1)
    misfit = identity_sink({"v": (2, 2)}, "bad")
    plan = plan_push(source, [misfit, identity_sink({"w": (2, 2)}, "good")], bucket_bytes=64, transport="auto")
    assert list(plan.servers) == ["good"]
    assert "v needs v, which no trainer rank holds" in plan.errors["bad"]


def digests_of(plan: ServerPlan) -> list[PairDigests]:
    return [
        PairDigests(rank=rank, worker_rank=worker, xxh3=(0,) * count, encodings=(BucketEncoding.DENSE,) * count)
        for rank, worker in plan.pairs()
        for count in (plan.num_buckets_of(rank, worker),)
    ]


def test_coverage_fault_wants_one_digest_and_encoding_for_every_bucket() -> None:
    plan = plan_one(fsdp_source(decoder_shapes(tied=False), 2), decoder_sink("a", 2), 64)
    digests = digests_of(plan)
    assert plan.coverage_fault(digests) is None
    assert plan.coverage_fault(digests[::-1]) is None
    assert plan.coverage_fault(digests[1:]) == "rank 0 to worker 0, beginning with model.embed_tokens.weight, was planned but not written"
    assert plan.coverage_fault([*digests, digests[0]]) == "rank 0 to worker 0 is reported twice"
    assert plan.coverage_fault([*digests, replace(digests[0], rank=7)]) == "rank 7 to worker 0 was written but not planned"
    count = len(digests[0].xxh3)
    for changes in ({"xxh3": digests[0].xxh3[1:]}, {"encodings": (*digests[0].encodings, BucketEncoding.DELTA)}):
        fault = plan.coverage_fault([replace(digests[0], **changes), *digests[1:]])
        assert f"rank 0 to worker 0 has {count} buckets" in str(fault)


def test_plan_takes_scalars() -> None:
    shapes: dict[str, tuple[int, ...]] = {"s": ()}
    plan = plan_one(replicated_source(shapes, 2), identity_sink(shapes))
    (bucket,) = all_buckets(plan)
    assert (bucket.num_bytes, bucket.pieces[0].source_box) == (4, box())


def test_regions_meet_only_the_shards_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning work grows with the pieces, not with shards times regions: 64 regions of one row compare 64 pairs."""
    rows, shape = 64, (64, 2)
    parameters, staging_bytes = staged({f"p{row}": (1, 2) for row in range(rows)})
    regions = [region for row in range(rows) for region in stack_rows(f"p{row}", [("w", shape, row, row + 1)])]
    sink = SinkLayout(server_id="a", workers=(sink_worker(0, parameters, regions, staging_bytes),))
    compared = Counter[str]()
    original = box_table.Sweep.candidates

    def counted(sweep: box_table.Sweep, other: box_table.BoxTable) -> Iterator[tuple[box_table.Ints, box_table.Ints]]:
        for pairs in original(sweep, other):
            compared["pairs"] += len(pairs[0])
            yield pairs

    monkeypatch.setattr(box_table.Sweep, "candidates", counted)
    plan = plan_one(fsdp_source({"w": shape}, rows), sink)
    assert [rank for rank, _ in plan.pairs()] == list(range(rows))
    assert compared["pairs"] == rows
