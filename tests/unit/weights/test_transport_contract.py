"""What every transport promises: one suite, run over each, with the sink in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.errors import DeadlineError, StateError, TransportError, UnavailableError
from shoal.types.weights import Box, SinkLayout, SinkRegion, SourceLayout
from shoal.weights import boxes
from shoal.weights.buckets import Bucket
from shoal.weights.transports.base import SourceLink
from shoal.weights.transports.pieces import digest_of, find_delta
from tests.helpers.forked import fork_context
from tests.helpers.layouts import (
    columns_of,
    decoder_shapes,
    decoder_sink,
    fsdp_source,
    rows_of,
    sink_worker,
    source_layout,
    source_tensor,
    staged,
)
from tests.helpers.transport_gang import Gang, expected_parameters, push_until_killed
from tests.helpers.transport_receivers import RECEIVERS
from tests.helpers.transport_sink import Footprint, SinkProcess

BUCKET_BYTES = 8192
TIMEOUT_S = 20.0
GONE = (TransportError, DeadlineError, UnavailableError, StateError)
SCALAR = Box(offsets=(), sizes=())

MakeGang = Callable[[SourceLayout, Mapping[str, Tensor]], Gang]


@pytest.fixture(scope="module", params=sorted(RECEIVERS.keys() - {"cuda_ipc"}))
def sink(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SinkProcess]:
    process = SinkProcess(request.param, str(tmp_path_factory.mktemp("staging")), BUCKET_BYTES)
    yield process
    process.close()


@pytest.fixture
def make_gang(sink: SinkProcess) -> Iterator[MakeGang]:
    made: list[Gang] = []

    def make(source: SourceLayout, full: Mapping[str, Tensor]) -> Gang:
        made.append(Gang(sink.transport, source, full, BUCKET_BYTES, TIMEOUT_S))
        return made[-1]

    yield make
    for gang in made:
        gang.close()


def random_tensors(source: SourceLayout, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in source.tensors}


def small_source() -> SourceLayout:
    """A matrix of several buckets, a vector and a scalar on one rank."""
    shapes: dict[str, tuple[int, ...]] = {"matrix": (100, 96), "vector": (33,), "scalar": ()}
    return source_layout((source_tensor(name, shape, [(0, boxes.whole(shape))]) for name, shape in shapes.items()), 1)


def small_sink(dtype: str = "float32") -> SinkLayout:
    """The matrix lands in some columns of a larger one, whose other columns must stay zero."""
    shapes: dict[str, tuple[int, ...]] = {"wide": (100, 128), "vector": (33,), "scalar": ()}
    parameters, num_bytes = staged(shapes, dtype)
    regions = [
        SinkRegion(
            parameter="wide", source_name="matrix", source_box=boxes.whole((100, 96)), parameter_box=columns_of((100, 128), 16, 112)
        ),
        SinkRegion(parameter="vector", source_name="vector", source_box=rows_of((33,), 0, 33), parameter_box=rows_of((33,), 0, 33)),
        SinkRegion(parameter="scalar", source_name="scalar", source_box=SCALAR, parameter_box=SCALAR),
    ]
    return SinkLayout(server_id="server", workers=(sink_worker(0, parameters, regions, num_bytes),))


def assert_staged(sink: SinkProcess, layout: SinkLayout, full: Mapping[str, Tensor]) -> None:
    for worker in layout.workers:
        found = sink.parameters(worker.worker_rank)
        for name, expected in expected_parameters(worker, full).items():
            assert torch.equal(found[name], expected), f"{name} of worker {worker.worker_rank}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dense_push_fills_the_boxes_and_nothing_else(sink: SinkProcess, make_gang: MakeGang, dtype: str) -> None:
    source = small_source()
    layout = sink.stage(small_sink(dtype))
    gang = make_gang(source, random_tensors(source))
    digests = gang.push(sink, layout)
    assert_staged(sink, layout, gang.full)
    assert digests == sink.digests()
    assert len(digests[0, 0]) > 2


def test_strided_pieces_arrive(sink: SinkProcess, make_gang: MakeGang) -> None:
    source = small_source()
    layout = sink.stage(small_sink())
    full = random_tensors(source) | {"matrix": torch.randn(96, 100).T, "vector": torch.randn(66)[::2]}
    gang = make_gang(source, full)
    assert gang.push(sink, layout) == sink.digests()
    assert_staged(sink, layout, full)


def test_many_ranks_fill_many_workers_at_once(sink: SinkProcess, make_gang: MakeGang) -> None:
    source = fsdp_source(decoder_shapes(tied=False), 3)
    layout = sink.stage(decoder_sink("server", 2, dtype="bfloat16"))
    gang = make_gang(source, random_tensors(source))
    digests = gang.push(sink, layout)
    assert {rank for rank, _ in digests} == {0, 1, 2}
    assert {worker_rank for _, worker_rank in digests} == {0, 1}
    assert digests == sink.digests()
    assert_staged(sink, layout, gang.full)


def test_delta_changes_some_elements_bit_for_bit(sink: SinkProcess, make_gang: MakeGang) -> None:
    source = small_source()
    layout = sink.stage(small_sink("bfloat16"))
    full = {name: tensor.to(torch.bfloat16).float() for name, tensor in random_tensors(source).items()}
    gang = make_gang(source, full)
    gang.push(sink, layout)
    old = {name: tensor.clone() for name, tensor in full.items()}
    gang.full["matrix"][::7, ::5] += 1
    gang.full["matrix"][3, 3] = -0.0
    gang.full["matrix"][4, 4] = float("nan")
    gang.full["scalar"].fill_(5)
    before = Gang(sink.transport, source, old, BUCKET_BYTES)

    def write_changed(link: SourceLink, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        new = [piece.to(torch.bfloat16) for piece in pieces]
        delta = find_delta(bucket, [piece.to(torch.bfloat16) for piece in before.pieces(bucket)], new)
        assert delta is not None
        link.write_delta(bucket, delta)
        return digest_of(new, bucket.dtype)

    assert gang.push(sink, layout, write_changed) == sink.digests()
    staged_now = sink.parameters(0)
    wanted = expected_parameters(layout.workers[0], gang.full)
    for name, tensor in wanted.items():
        assert torch.equal(staged_now[name].view(torch.int16), tensor.view(torch.int16)), name


def test_buckets_that_are_left_out_stay(sink: SinkProcess, make_gang: MakeGang) -> None:
    source = small_source()
    layout = sink.stage(small_sink())
    gang = make_gang(source, random_tensors(source))
    first = gang.push(sink, layout)[0, 0]
    gang.full = random_tensors(source, seed=1)
    second = gang.push(sink, layout, lambda link, bucket, pieces: link.write_dense(bucket, pieces) if bucket.index % 2 else None)[0, 0]
    assert sink.digests()[0, 0] == [old if new is None else new for old, new in zip(first, second, strict=True)]


def test_push_of_nothing_leaves_everything(sink: SinkProcess, make_gang: MakeGang) -> None:
    source = small_source()
    layout = sink.stage(small_sink())
    gang = make_gang(source, random_tensors(source))
    first = gang.push(sink, layout)
    assert gang.push(sink, layout, lambda *_: None) == {(0, 0): [None] * len(first[0, 0])}
    assert sink.digests() == first


def test_sent_bytes_tell_what_crossed(sink: SinkProcess, make_gang: MakeGang) -> None:
    source = small_source()
    layout = sink.stage(small_sink())
    sent: list[int] = []

    def write(link: SourceLink, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        digest = link.write_dense(bucket, pieces)
        link.finish()
        sent.append(link.sent_bytes)
        return digest

    gang = make_gang(source, random_tensors(source))
    started = gang.start(sink, layout)
    gang.transfer(started, write)
    sink.disarm()
    dense = sum(bucket.num_bytes for bucket in started.plan.buckets(0, 0))
    assert dense <= sent[-1] <= dense * 1.05 + 4096
    assert sent == sorted(sent)


def test_other_shapes_are_refused_and_nothing_is_written(sink: SinkProcess, make_gang: MakeGang) -> None:
    source = small_source()
    layout = sink.stage(small_sink())
    gang = make_gang(source, random_tensors(source))

    def write_less(link: SourceLink, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        return link.write_dense(bucket, [piece[:-1] if piece.dim() else piece for piece in pieces])

    with pytest.raises(TransportError, match="the source has"):
        gang.push(sink, layout, write_less)
    assert not any(tensor.any() for tensor in sink.parameters(0).values())
    assert gang.push(sink, layout) == sink.digests()


def test_push_after_a_failed_one_is_whole(sink: SinkProcess, make_gang: MakeGang) -> None:
    source = small_source()
    layout = sink.stage(small_sink())
    gang = make_gang(source, random_tensors(source))

    def fail_in_the_middle(link: SourceLink, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        if bucket.index == 2:
            raise ArithmeticError("the rank stumbles")
        return link.write_dense(bucket, pieces)

    with pytest.raises(ArithmeticError):
        gang.push(sink, layout, fail_in_the_middle)
    gang.full = random_tensors(source, seed=1)
    assert gang.push(sink, layout) == sink.digests()
    assert_staged(sink, layout, gang.full)


def test_restaged_sink_is_found_again(sink: SinkProcess, make_gang: MakeGang) -> None:
    source = small_source()
    gang = make_gang(source, random_tensors(source))
    gang.push(sink, sink.stage(small_sink()))
    layout = sink.stage(small_sink())
    assert not any(tensor.any() for tensor in sink.parameters(0).values())
    assert gang.push(sink, layout) == sink.digests()


def test_200_pushes_leave_no_growth(sink: SinkProcess, make_gang: MakeGang) -> None:
    source = small_source()
    layout = sink.stage(small_sink())
    gang = make_gang(source, random_tensors(source))
    for _ in range(20):
        gang.push(sink, layout)
    early = [sink.footprint(), Footprint.of_this_process()]
    for _ in range(180):
        gang.push(sink, layout)
    # Threads and connections of the last push may still be ending.
    deadline_s = time.monotonic() + 10.0
    while (grown := growth(early, [sink.footprint(), Footprint.of_this_process()])) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert grown == []


def growth(early: list[Footprint], late: list[Footprint]) -> list[str]:
    """What a process holds more of than it did; 4 MiB of memory are no growth."""
    allowed = {"num_files": 0, "num_maps": 0, "num_threads": 0, "rss_bytes": 4 << 20}
    return [
        f"{name} {getattr(before, name)} -> {getattr(after, name)}"
        for before, after in zip(early, late, strict=True)
        for name, num_more in allowed.items()
        if getattr(after, name) > getattr(before, name) + num_more
    ]


def test_source_killed_in_the_middle_leaves_the_sink_alive(sink: SinkProcess, make_gang: MakeGang) -> None:
    shape = (400, 2048)
    source = source_layout([source_tensor("big", shape, [(0, boxes.whole(shape))])], 1)
    parameters, num_bytes = staged({"big": shape})
    regions = [SinkRegion(parameter="big", source_name="big", source_box=boxes.whole(shape), parameter_box=boxes.whole(shape))]
    layout = sink.stage(SinkLayout(server_id="server", workers=(sink_worker(0, parameters, regions, num_bytes),)))
    gang = make_gang(source, random_tensors(source))
    started = gang.start(sink, layout)
    victim = fork_context().Process(target=push_until_killed, args=(sink.transport, source, started, BUCKET_BYTES), daemon=True)
    victim.start()
    deadline = time.monotonic() + 60
    while not sink.parameters(0)["big"].any() and time.monotonic() < deadline:
        time.sleep(0.01)
    victim.kill()
    victim.join()
    sink.disarm()
    assert (sink.parameters(0)["big"] == 7).any()
    assert gang.push(sink, layout) == sink.digests()
    assert_staged(sink, layout, gang.full)


@pytest.mark.parametrize("when", ["before open", "in the middle"])
def test_killed_sink_is_an_error_within_the_deadline(request: pytest.FixtureRequest, tmp_path: Path, sink: SinkProcess, when: str) -> None:
    victim = SinkProcess(sink.transport, str(tmp_path), BUCKET_BYTES)
    source = small_source()
    layout = victim.stage(small_sink())
    gang = Gang(sink.transport, source, random_tensors(source), BUCKET_BYTES, timeout_s=5.0)
    started = gang.start(victim, layout)
    if when == "before open":
        victim.kill()

    def kill_then_write(link: SourceLink, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        if bucket.index == 1:
            victim.kill()
        return link.write_dense(bucket, pieces)

    began = time.monotonic()
    with pytest.raises(GONE):
        gang.transfer(started, kill_then_write)
    assert time.monotonic() - began < 5.0 + 2.0
    gang.close()
    victim.close()


def test_link_to_a_worker_that_is_not_there_is_refused(sink: SinkProcess, make_gang: MakeGang) -> None:
    source = small_source()
    layout = sink.stage(small_sink())
    gang = make_gang(source, random_tensors(source))
    started = gang.start(sink, layout)
    with pytest.raises(TransportError, match=sink.transport):
        gang.open(started, 0, replace(layout.workers[0], endpoints={}))
    sink.disarm()
