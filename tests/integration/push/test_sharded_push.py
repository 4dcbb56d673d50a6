"""A whole push: FSDP2 shards of real gloo ranks, gRPC, shared memory, and a tensor-parallel sink with fused parameters.

Only the engine is missing: the sink stages, digests and swaps, but serves nobody.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from shoal_coordinator.push import push
from shoal_coordinator.push_report import PushReport
from shoal_trainer.weight_servicer import SERVICE_NAME, WeightSourceServicer

from shoal.clients.weights import WeightSourceClient
from shoal.config.models import PushSection, SecuritySection
from shoal.rpc.server import RpcServer
from shoal.rpc.v1 import weights_pb2_grpc
from shoal.types.weights import SourceTransferred
from shoal.weights.stages import PushStage
from tests.helpers.push_gang import COUNT_COLLECTIVES, UPDATE, PipeGang, full_parameters
from tests.helpers.shm_sink import ShmSink
from tests.helpers.transport_gang import expected_parameters

SETTINGS = PushSection(delta="on", prepare_timeout_s=30, transfer_timeout_s=30, verify_timeout_s=30, commit_timeout_s=30)


@asynccontextmanager
async def served(gang: PipeGang) -> AsyncIterator[WeightSourceClient]:
    """The gang behind a real gRPC server, and a client of it."""
    server = RpcServer("127.0.0.1", 0, SecuritySection())
    server.add(
        lambda grpc_server: weights_pb2_grpc.add_WeightSourceServiceServicer_to_server(WeightSourceServicer(gang), grpc_server),
        SERVICE_NAME,
    )
    port = await server.start()
    try:
        async with WeightSourceClient(f"127.0.0.1:{port}", SecuritySection()) as client:
            yield client
    finally:
        await server.stop(1.0)


def flip_a_bit(sink: ShmSink) -> None:
    """Damage one staged byte of the second worker."""
    sink.staging.parameters(1)["model.norm.weight"].view(torch.uint8)[5] ^= 1


class Rig:
    """A gang and the version that it holds."""

    def __init__(self, gang: PipeGang, tied: bool) -> None:
        self.gang = gang
        self.tied = tied
        self.version = 0

    async def push_next(self, client: WeightSourceClient, *sinks: ShmSink) -> PushReport:
        await self.gang.run(UPDATE, b"", 30)
        self.version += 1
        return await self.push_again(client, *sinks)

    async def push_again(self, client: WeightSourceClient, *sinks: ShmSink) -> PushReport:
        return await push(client, {sink.server_id: sink for sink in sinks}, self.version, SETTINGS)

    def check_serves(self, sink: ShmSink, version: int) -> None:
        """The sink holds exactly the parameters of one version, each bit."""
        full = full_parameters(tied=self.tied, num_updates=version)
        if self.tied:
            full["lm_head.weight"] = full["model.embed_tokens.weight"]
        assert sink.served_version == version
        for worker, held in zip(sink.staging.layout.workers, sink.served, strict=True):
            for name, expected in expected_parameters(worker, full).items():
                assert torch.equal(held[name], expected), name


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    gang = PipeGang(2, tmp_path_factory.mktemp("gang"), SETTINGS, tied=request.param)
    yield Rig(gang, request.param)
    gang.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_push_reshards_into_every_server_bit_for_bit(rig: Rig, folder: str, dtype: str) -> None:
    sinks = [
        ShmSink.decoder("rollout-0", 2, folder, SETTINGS, dtype),
        ShmSink.decoder("rollout-1", 1, folder, SETTINGS, dtype, separate_head=not rig.tied),
    ]
    async with served(rig.gang) as client:
        for _ in range(3):
            report = await rig.push_next(client, *sinks)
            assert report.state is PushStage.COMMITTED
            assert report.committed_servers == ("rollout-0", "rollout-1")
            for sink in sinks:
                rig.check_serves(sink, rig.version)
    # Nothing was gathered: the ranks entered no collective since they were built.
    assert await rig.gang.run(COUNT_COLLECTIVES, b"", 30) == [b"0", b"0"]
    for sink in sinks:
        sink.close()


async def test_spoilt_staging_leaves_one_server_on_its_old_version_until_caught_up(rig: Rig, folder: str) -> None:
    good, spoilt = ShmSink.decoder("rollout-0", 2, folder, SETTINGS), ShmSink.decoder("rollout-1", 2, folder, SETTINGS)
    async with served(rig.gang) as client:
        await rig.push_next(client, good, spoilt)
        old_version = rig.version
        spoilt.after_staging = flip_a_bit
        report = await rig.push_next(client, good, spoilt)
        assert report.committed_servers == ("rollout-0",)
        assert re.search(r"staged bytes of .*model.norm.weight on worker 1 .* differ", report.failed_servers["rollout-1"])
        rig.check_serves(good, rig.version)
        rig.check_serves(spoilt, old_version)
        spoilt.after_staging = lambda _: None
        assert (await rig.push_again(client, spoilt)).committed_servers == ("rollout-1",)
        rig.check_serves(spoilt, rig.version)
    good.close()
    spoilt.close()


async def test_a_server_whose_staging_vanished_does_not_stop_the_others(rig: Rig, folder: str) -> None:
    good, dead = ShmSink.decoder("rollout-0", 2, folder, SETTINGS), ShmSink.decoder("rollout-1", 2, folder, SETTINGS)
    async with served(rig.gang) as client:
        dead.close()
        report = await rig.push_next(client, good, dead)
        assert report.committed_servers == ("rollout-0",)
        assert "is the engine worker alive" in report.failed_servers["rollout-1"]
        rig.check_serves(good, rig.version)
    good.close()


async def test_a_version_that_the_gang_does_not_hold_is_not_pushed(rig: Rig, folder: str) -> None:
    sink = ShmSink.decoder("rollout-0", 2, folder, SETTINGS)
    async with served(rig.gang) as client:
        await rig.push_next(client, sink)
        report = await push(client, {"rollout-0": sink}, rig.version + 1, SETTINGS)
        assert report.state is PushStage.ABORTED
        rig.check_serves(sink, rig.version)
    sink.close()


class SignallingSource:
    """A source whose rank 1 gets a signal just before TRANSFER."""

    def __init__(self, client: WeightSourceClient, gang: PipeGang, signal_number: signal.Signals) -> None:
        self.describe, self.prepare, self.abort, self.digest = client.describe, client.prepare, client.abort, client.digest
        self._client, self._gang, self._signal = client, gang, signal_number

    async def transfer(self, push_id: str, collective_groups: Mapping[str, str], *, timeout_s: float) -> SourceTransferred:
        process_id = self._gang.processes[1].pid
        assert process_id is not None
        os.kill(process_id, self._signal)
        return await self._client.transfer(push_id, collective_groups, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("signal_number", "words"), [(signal.SIGKILL, "a rank of the gang died"), (signal.SIGSTOP, "no answer|did not answer")]
)
async def test_a_rank_lost_in_transfer_leaves_the_old_version(tmp_path: Path, signal_number: signal.Signals, words: str) -> None:
    """Rank 0 has written its half of the new version by then."""
    gang = PipeGang(2, tmp_path, SETTINGS, tied=True)
    rig = Rig(gang, tied=True)
    sink = ShmSink.decoder("rollout-0", 2, str(tmp_path), SETTINGS)
    try:
        async with served(gang) as client:
            assert (await rig.push_next(client, sink)).state is PushStage.COMMITTED
            await gang.run(UPDATE, b"", 30)
            deadlines = SETTINGS.model_copy(update={"transfer_timeout_s": 2.0})
            report = await push(SignallingSource(client, gang, signal_number), {"rollout-0": sink}, rig.version + 1, deadlines)
            assert report.state is PushStage.ABORTED
            assert re.search(words, str(report.error))
            rig.check_serves(sink, rig.version)
    finally:
        gang.processes[1].kill()
        gang.close()
        sink.close()
