"""Pushes of merged weights: the same bytes at every stage and for every server, and only of layers with an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_trainer.merging import MergedWeight
from torch import Tensor, nn

from shoal.config.models import PushSection, SecuritySection
from shoal.types.weights import BucketEncoding, SinkLayout
from shoal.weights.transports.factory import open_source_transport
from shoal.weights.transports.pieces import canonical_digest
from tests.helpers.layouts import sink_worker, stack_rows, staged
from tests.helpers.weight_source import PushRig, StagingServer, encodings

SHAPES: dict[str, tuple[int, ...]] = {"embed": (64, 32), "up": (300, 32), "norm": (32,), "down": (32, 50)}
ADAPTED = ("up", "down")
RANK = 4
DENSE, DELTA, UNCHANGED = BucketEncoding.DENSE, BucketEncoding.DELTA, BucketEncoding.UNCHANGED


def num_bytes(*names: str, item_bytes: int) -> int:
    return sum(torch.Size(SHAPES[name]).numel() for name in names or SHAPES) * item_bytes


class Rig(PushRig):
    """A rank whose adapters can be stepped; small buckets, so that every tensor has some of its own."""

    def __init__(self, *servers: StagingServer, **settings: Any) -> None:  # noqa: ANN401
        generator = torch.Generator().manual_seed(3)
        self.base = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        self.down = {name: nn.Parameter(torch.randn(RANK, SHAPES[name][1], generator=generator)) for name in ADAPTED}
        self.up = {name: nn.Parameter(torch.zeros(SHAPES[name][0], RANK)) for name in ADAPTED}
        self.merged = {
            name: MergedWeight(
                name, nn.Parameter(self.base[name], requires_grad=False), self.down[name], self.up[name], 2.0, lambda: self.version
            )
            for name in ADAPTED
        }
        parameters = {name: self.merged.get(name, tensor) for name, tensor in self.base.items()}
        super().__init__(parameters, *servers, frozen=SHAPES.keys() - set(ADAPTED), **{"bucket_bytes": 4096, **settings})
        self.gather()

    def gather(self) -> None:
        for weight in self.merged.values():
            weight.gather(torch.device("cpu"))

    def step(self, scale: float = 0.05) -> None:
        """Move the adapters and count the version up."""
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for adapter in (*self.down.values(), *self.up.values()):
                adapter.add_(scale * torch.randn(adapter.shape, generator=generator))
        self.version += 1
        self.gather()

    def expected(self, name: str) -> Tensor:
        if name not in ADAPTED:
            return self.base[name]
        up, down = self.up[name].detach().double(), self.down[name].detach().double()
        return torch.addmm(self.base[name].double(), up, down, alpha=2.0)

    def check(self, server: StagingServer) -> None:
        for name, found in server.parameters().items():
            wide = found.dtype is torch.float32
            assert torch.allclose(found.double(), self.expected(name).double(), atol=1e-5 if wide else 1e-2, rtol=1e-5 if wide else 1e-2)


def copying(server_id: str = "a", dtype: str = "float32", folder: str | None = None) -> StagingServer:
    return StagingServer.copying(server_id, SHAPES, folder, dtype)


def two_columns(server_id: str) -> StagingServer:
    """Two workers: halves of the rows of `up`, of the columns of `down`, everything else whole."""
    workers = []
    for worker_rank in range(2):
        shapes = {**SHAPES, "up": (150, 32)}
        parameters, staging_bytes = staged(shapes)
        start = 150 * worker_rank
        cut = {name: (start, start + 150) if name == "up" else (0, shape[0]) for name, shape in SHAPES.items()}
        regions = [region for name, (low, high) in cut.items() for region in stack_rows(name, [(name, SHAPES[name], low, high)])]
        workers.append(sink_worker(worker_rank, parameters, regions, staging_bytes, {}))
    return StagingServer(SinkLayout(server_id=server_id, workers=tuple(workers)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("delta", ["on", "off"])
def test_only_layers_with_an_adapter_are_sent_after_the_first_push(dtype: str, delta: str) -> None:
    a = copying(dtype=dtype)
    rig = Rig(a, delta=delta)
    item_bytes = {"float32": 4, "bfloat16": 2}[dtype]
    first = rig.push()["a"]
    assert (encodings(first), first.sent_bytes) == ({DENSE}, num_bytes(item_bytes=item_bytes))
    rig.check(a)
    for _ in range(3):
        rig.step()
        sent = rig.push()["a"]
        assert sent.error == ""
        assert UNCHANGED in encodings(sent)
        assert sent.dense_bytes == num_bytes(item_bytes=item_bytes)
        assert sent.sent_bytes == num_bytes(*ADAPTED, item_bytes=item_bytes)
        rig.check(a)


def test_small_steps_go_as_differences_in_a_narrower_dtype() -> None:
    a = copying(dtype="bfloat16")
    rig = Rig(a, delta="on")
    rig.push()
    rig.step()
    rig.push()
    rig.step(scale=1e-5)
    sent = rig.push()["a"]
    assert encodings(sent) == {DELTA, UNCHANGED}
    assert 0 < sent.sent_bytes < 0.25 * num_bytes(*ADAPTED, item_bytes=2)
    fresh = copying("fresh", dtype="bfloat16")
    again = Rig(fresh)
    for name in ADAPTED:
        again.down[name].data, again.up[name].data = rig.down[name].data, rig.up[name].data
    again.gather()
    again.push()
    assert a.staged_bytes() == fresh.staged_bytes()


def test_servers_that_cut_differently_get_the_same_bits_and_digests() -> None:
    whole, halves = copying("whole"), two_columns("halves")
    rig = Rig(whole, halves, delta="off")
    rig.step()
    outcomes = rig.push()
    assert [outcome.error for outcome in outcomes.values()] == ["", ""]
    joined = torch.cat([halves.parameters(worker)["up"] for worker in (0, 1)])
    assert torch.equal(joined, whole.parameters()["up"])
    assert torch.equal(halves.parameters(1)["down"], whole.parameters()["down"])


def test_digests_are_those_of_what_was_sent() -> None:
    a = copying(dtype="bfloat16")
    rig = Rig(a)
    rig.step()
    rig.push()
    plan = a._plan
    assert plan is not None
    (digests,) = rig.source.digest(rig.version, {"a": plan.plan_hash})["a"]
    pieces = [piece for bucket in plan.buckets(0, 0) for piece in bucket.pieces]
    for piece, xxh3 in zip(pieces, digests.xxh3, strict=True):
        rows = tuple(slice(o, o + s) for o, s in zip(piece.parameter_box.offsets, piece.parameter_box.sizes, strict=True))
        assert xxh3 == canonical_digest(a.parameters()[piece.parameter][rows], "bfloat16"), piece


def test_push_over_mapped_files_serves_merged_weights(tmp_path: Path) -> None:
    a = copying(folder=str(tmp_path))
    rig = Rig(a, transport=open_source_transport(PushSection(), SecuritySection()), shm_dir=str(tmp_path))
    for _ in range(3):
        rig.step()
        assert rig.push()["a"].error == ""
        rig.check(a)
    rig.source.close()
    a.close()


def test_push_of_an_adapter_that_was_not_gathered_fails_and_names_it() -> None:
    a = copying()
    rig = Rig(a)
    rig.version += 1
    (sent,) = rig.push().values()
    assert "the adapter of" in sent.error
    assert "gather it after every update" in sent.error
