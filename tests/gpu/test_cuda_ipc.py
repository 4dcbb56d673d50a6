"""cuda_ipc between processes that share a GPU: bytes, digests, and that neither end's death harms the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.errors import TransportError
from shoal.types.weights import Place, SinkLayout, SinkRegion, SourceLayout
from shoal.weights import boxes
from shoal.weights.buckets import Bucket
from shoal.weights.transports.base import SourceLink
from shoal.weights.transports.cuda_ipc import CudaStaging
from shoal.weights.transports.pieces import digest_of, find_delta
from tests.helpers.layouts import columns_of, decoder_shapes, decoder_sink, fsdp_source, sink_worker, source_layout, source_tensor, staged
from tests.helpers.transport_gang import Gang, expected_parameters
from tests.helpers.transport_sink import SinkProcess

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BUCKET_BYTES = 1 << 16
GPU = Place(host_id="here", device="cuda")

MakeGang = Callable[[SourceLayout, Mapping[str, Tensor]], Gang]


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[SinkProcess]:
    process = SinkProcess("cuda_ipc", str(tmp_path), BUCKET_BYTES, "cuda")
    yield process
    process.close()


@pytest.fixture
def make_gang() -> Iterator[MakeGang]:
    made: list[Gang] = []

    def make(source: SourceLayout, full: Mapping[str, Tensor]) -> Gang:
        made.append(Gang("cuda_ipc", source, {name: tensor.cuda() for name, tensor in full.items()}, BUCKET_BYTES))
        return made[-1]

    yield make
    for gang in made:
        gang.close()


def on_gpu(layout: SinkLayout) -> SinkLayout:
    return replace(layout, workers=tuple(replace(worker, place=GPU, endpoints={"cuda_ipc": "none yet"}) for worker in layout.workers))


def matrix() -> tuple[SourceLayout, SinkLayout]:
    """A matrix that lands in some columns of a larger one."""
    parameters, num_bytes = staged({"wide": (300, 512)}, "bfloat16")
    region = SinkRegion(
        parameter="wide", source_name="matrix", source_box=boxes.whole((300, 400)), parameter_box=columns_of((300, 512), 64, 464)
    )
    source = source_layout([source_tensor("matrix", (300, 400), [(0, boxes.whole((300, 400)))])], 1, GPU)
    return source, on_gpu(SinkLayout(server_id="server", workers=(sink_worker(0, parameters, [region], num_bytes),)))


def assert_staged(sink: SinkProcess, layout: SinkLayout, full: Mapping[str, Tensor]) -> None:
    host = {name: tensor.cpu() for name, tensor in full.items()}
    for worker in layout.workers:
        found = sink.parameters(worker.worker_rank)
        for name, expected in expected_parameters(worker, host).items():
            assert torch.equal(found[name], expected), f"{name} of worker {worker.worker_rank}"


def test_many_ranks_fill_many_workers(sink: SinkProcess, make_gang: MakeGang) -> None:
    source = replace(fsdp_source(decoder_shapes(tied=False), 3), places=(GPU,) * 3)
    layout = sink.stage(on_gpu(decoder_sink("server", 2, dtype="bfloat16")))
    gang = make_gang(source, {name: torch.randn(shape) for name, shape in decoder_shapes(tied=False).items()})
    assert gang.push(sink, layout) == sink.digests()
    assert_staged(sink, layout, gang.full)


def test_delta_changes_some_elements(sink: SinkProcess, make_gang: MakeGang) -> None:
    source, wanted = matrix()
    layout = sink.stage(wanted)
    gang = make_gang(source, {"matrix": torch.randn(300, 400).to(torch.bfloat16).float()})
    gang.push(sink, layout)
    old = gang.full["matrix"].clone()
    gang.full["matrix"][::7, ::9] += 1

    def write_changed(link: SourceLink, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        new = [piece.to(torch.bfloat16) for piece in pieces]
        rows = [
            old[piece.source_box.offsets[0] :][: piece.source_box.sizes[0], piece.source_box.offsets[1] :][:, : piece.source_box.sizes[1]]
            for piece in bucket.pieces
        ]
        delta = find_delta(bucket, [row.to(torch.bfloat16) for row in rows], new)
        assert delta is not None
        link.write_delta(bucket, delta)
        return digest_of(new, bucket.dtype)

    assert gang.push(sink, layout, write_changed) == sink.digests()
    assert_staged(sink, layout, gang.full)


def test_killed_sink_is_an_error_within_the_deadline(sink: SinkProcess, make_gang: MakeGang) -> None:
    source, wanted = matrix()
    layout = sink.stage(wanted)
    gang = make_gang(source, {"matrix": torch.randn(300, 400)})
    started = gang.start(sink, layout)
    link = gang.open(started, 0, layout.workers[0])
    bucket = started.plan.buckets(0, 0)[0]
    link.write_dense(bucket, gang.pieces(bucket))
    sink.kill()
    began = time.monotonic()
    with pytest.raises(TransportError):
        link.finish()
    assert time.monotonic() - began < 5
    link.close()


def test_200_pushes_leave_no_growth(sink: SinkProcess, make_gang: MakeGang) -> None:
    source, wanted = matrix()
    layout = sink.stage(wanted)
    gang = make_gang(source, {"matrix": torch.randn(300, 400)})
    gang.push(sink, layout)
    files, memory = sink.footprint().num_files, torch.cuda.memory_allocated()
    for _ in range(200):
        gang.push(sink, layout)
    assert sink.footprint().num_files <= files
    assert torch.cuda.memory_allocated() <= memory


def test_restaged_sink_is_found_again(sink: SinkProcess, make_gang: MakeGang) -> None:
    source, wanted = matrix()
    gang = make_gang(source, {"matrix": torch.randn(300, 400)})
    for _ in range(3):
        layout = sink.stage(wanted)
        assert gang.push(sink, layout) == sink.digests()


def test_closed_staging_gives_its_memory_back(tmp_path: Path) -> None:
    before = torch.cuda.memory_allocated()
    for number in range(3):
        staging = CudaStaging(str(tmp_path), f"run-{number}", 64 << 20, "cuda")
        staging.close()
        staging.close()
    assert torch.cuda.memory_allocated() == before
    assert list(tmp_path.iterdir()) == []
