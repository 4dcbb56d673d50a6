"""Every fault of a layout that the planner refuses, with the name of the tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shoal.errors import TransportError
from shoal.types.weights import Box, SinkLayout, SourceLayout, SourceTensor, TensorShard
from shoal.weights.planner import plan_push, plan_server
from tests.helpers.layouts import LAYER, box, decoder_shapes, decoder_sink, fsdp_source, rows_of

QKV = f"{LAYER}.self_attn.qkv_proj.weight"
Q = f"{LAYER}.self_attn.q_proj.weight"


def refusal(source: SourceLayout, layout: SinkLayout, *, transport: str = "auto") -> str:
    with pytest.raises(TransportError) as caught:
        plan_server(source, layout, bucket_bytes=1 << 20, transport=transport)
    return str(caught.value)


def decoder_source() -> SourceLayout:
    return fsdp_source(decoder_shapes(tied=False), 2)


def change_worker(layout: SinkLayout, **changes: object) -> SinkLayout:
    return replace(layout, workers=(replace(layout.workers[0], **changes), *layout.workers[1:]))  # type: ignore[arg-type]


def change_tensor(source: SourceLayout, name: str, change: Callable[[SourceTensor], SourceTensor]) -> SourceLayout:
    return replace(source, tensors=tuple(change(tensor) if tensor.name == name else tensor for tensor in source.tensors))


def with_boxes(source: SourceLayout, name: str, *held: tuple[int, Box]) -> SourceLayout:
    shards = tuple(TensorShard(rank=rank, box=box) for rank, box in held)
    return change_tensor(source, name, lambda tensor: replace(tensor, shards=shards))


def test_plan_refuses_a_missing_source_tensor() -> None:
    shapes = decoder_shapes(tied=False)
    del shapes[Q]
    assert refusal(fsdp_source(shapes, 2), decoder_sink("a", 2)) == f"{QKV} needs {Q}, which no trainer rank holds"


def test_plan_refuses_a_missing_head_if_there_is_no_single_embedding() -> None:
    shapes = decoder_shapes(tied=True) | {"other.embed_tokens.weight": (7, 8)}
    assert "lm_head.weight needs lm_head.weight" in refusal(fsdp_source(shapes, 1), decoder_sink("a", 1))


def test_plan_refuses_a_source_of_another_shape() -> None:
    shapes = decoder_shapes(tied=False)
    message = refusal(fsdp_source(shapes | {Q: (6, 8)}, 2), decoder_sink("a", 2))
    assert message == f"{QKV} needs [4:8, 0:8] of {Q}, which has shape [6, 8] on the trainer"
    assert Q in refusal(fsdp_source(shapes | {Q: (8, 8, 1)}, 2), decoder_sink("a", 2))


def test_plan_refuses_shards_with_a_hole_an_overlap_or_a_part_outside() -> None:
    source, sink = decoder_source(), decoder_sink("a", 2)
    message = refusal(with_boxes(source, Q, (0, rows_of((8, 8), 0, 4))), sink)
    assert message == f"the trainer's shards of {Q} do not make up the tensor [8, 8]: 32 of 64 elements are missing"
    overlapping = with_boxes(source, Q, (0, rows_of((8, 8), 0, 4)), (1, rows_of((8, 8), 3, 8)))
    assert f"{Q} do not make up the tensor [8, 8]: [0:4, 0:8] and [3:8, 0:8] overlap" in refusal(overlapping, sink)
    outside = with_boxes(source, Q, (0, rows_of((8, 8), 0, 4)), (1, rows_of((8, 8), 4, 9)))
    assert f"{Q} do not make up the tensor [8, 8]: [4:9, 0:8] of rank 1 lies outside" in refusal(outside, sink)
    assert "rank 0 lies outside" in refusal(with_boxes(source, Q, (0, box((0, 8)))), sink)


def test_plan_refuses_an_overlap_beside_a_hole_of_the_same_size() -> None:
    """The number of elements alone would not tell."""
    cells = [(0, box((0, 4), (0, 4))), (0, box((0, 4), (4, 8))), (1, box((4, 8), (0, 4))), (1, box((3, 7), (4, 8)))]
    assert "overlap" in refusal(with_boxes(decoder_source(), Q, *cells), decoder_sink("a", 2))


def test_plan_refuses_a_tensor_without_shards_and_a_rank_without_a_place() -> None:
    source, sink = decoder_source(), decoder_sink("a", 2)
    assert f"{Q} do not make up the tensor [8, 8]: 64 of 64" in refusal(with_boxes(source, Q), sink)
    unplaced = with_boxes(source, Q, (0, rows_of((8, 8), 0, 4)), (2, rows_of((8, 8), 4, 8)))
    assert f"rank 2 holds a part of {Q}, but the layout places only 2 ranks" in refusal(unplaced, sink)


def test_plan_refuses_a_tensor_twice() -> None:
    source = decoder_source()
    assert f"{source.tensors[0].name!r} appears twice" in refusal(
        replace(source, tensors=(*source.tensors, source.tensors[0])), decoder_sink("a", 1)
    )


def test_plan_refuses_a_trained_tensor_that_the_server_does_not_take() -> None:
    shapes = decoder_shapes(tied=False) | {"model.extra.weight": (3,)}
    assert "model.extra.weight" in refusal(fsdp_source(shapes, 1), decoder_sink("a", 1))


def test_plan_lets_a_tied_head_go_unused() -> None:
    source = decoder_source()
    assert plan_server(source, decoder_sink("a", 2, separate_head=False), bucket_bytes=64, transport="auto").num_bytes > 0


def test_plan_refuses_regions_that_overlap_leave_the_parameter_or_are_missing() -> None:
    source, layout = decoder_source(), decoder_sink("a", 2)
    regions = layout.workers[0].regions
    assert "overlapping" in refusal(source, change_worker(layout, regions=(*regions, regions[0])))
    moved = replace(regions[0], parameter_box=rows_of((9, 8), 5, 9))
    assert "lies outside" in refusal(source, change_worker(layout, regions=(moved, *regions[1:])))
    assert "has no region" in refusal(source, change_worker(layout, regions=regions[1:]))
    assert regions[0].parameter in refusal(source, change_worker(layout, regions=regions[1:]))
    unlisted = replace(regions[0], parameter="nobody")
    assert "nobody" in refusal(source, change_worker(layout, regions=(*regions, unlisted)))
    narrowed = replace(regions[0], parameter_box=rows_of((4, 8), 0, 2))
    assert "sizes differ" in refusal(source, change_worker(layout, regions=(narrowed, *regions[1:])))


def test_plan_refuses_a_region_of_other_dims_or_negative_size() -> None:
    source, layout = decoder_source(), decoder_sink("a", 2)
    regions = layout.workers[0].regions
    flat = replace(regions[0], parameter_box=box((0, 4)))
    assert "lies outside" in refusal(source, change_worker(layout, regions=(flat, *regions[1:])))
    negative = replace(regions[0], parameter_box=Box(offsets=(2, 0), sizes=(-1, 8)))
    assert "lies outside" in refusal(source, change_worker(layout, regions=(negative, *regions[1:])))
    ragged = replace(regions[0], source_box=Box(offsets=(0, 0), sizes=(4,)))
    assert regions[0].parameter in refusal(source, change_worker(layout, regions=(ragged, *regions[1:])))


def test_plan_refuses_parameters_that_overlap_or_overflow_in_staging() -> None:
    source, layout = decoder_source(), decoder_sink("a", 2)
    parameters = layout.workers[0].parameters
    shared = replace(parameters[1], staging_offset_bytes=parameters[0].staging_offset_bytes + 4)
    assert "inside" in refusal(source, change_worker(layout, parameters=(parameters[0], shared, *parameters[2:])))
    assert "ends at byte" in refusal(source, change_worker(layout, staging_bytes=layout.workers[0].staging_bytes - 64))


def test_plan_refuses_unknown_and_uncastable_dtypes() -> None:
    source, layout = decoder_source(), decoder_sink("a", 2)
    for dtype, words in (("float8", "carries"), ("int32", "not cast")):
        parameters = tuple(replace(parameter, dtype=dtype) for parameter in layout.workers[0].parameters)
        assert words in refusal(source, change_worker(layout, parameters=parameters))


def test_plan_refuses_a_worker_rank_a_parameter_or_a_server_twice() -> None:
    source, layout = decoder_source(), decoder_sink("a", 2)
    assert "worker rank of server a 0 appears twice" in refusal(source, replace(layout, workers=(layout.workers[0], layout.workers[0])))
    parameters = layout.workers[0].parameters
    assert f"{parameters[0].name!r} appears twice" in refusal(source, change_worker(layout, parameters=(*parameters, parameters[0])))
    with pytest.raises(TransportError, match="server 'a' appears twice"):
        plan_push(source, [layout, layout], bucket_bytes=64, transport="auto")


def test_plan_refuses_a_transport_that_is_not_offered() -> None:
    assert "transport grpc does not reach worker 0" in refusal(decoder_source(), decoder_sink("a", 2), transport="grpc")


def test_plan_refuses_buckets_smaller_than_an_element() -> None:
    with pytest.raises(TransportError, match="bucket_bytes is 4"):
        plan_server(decoder_source(), decoder_sink("a", 1), bucket_bytes=4, transport="auto")
