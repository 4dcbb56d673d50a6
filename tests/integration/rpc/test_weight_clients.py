"""The clients of both ends of a weight push against real servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shoal.clients.weights import WeightSinkClient, WeightSourceClient
from shoal.codec.layouts import sink_targets_from_proto, source_layout_from_proto, source_layout_to_proto
from shoal.codec.weights import (
    pairs_from_proto,
    piece_pairs_to_proto,
    planned_servers_to_proto,
    sink_committed_to_proto,
    sink_planned_to_proto,
    sink_prepared_to_proto,
    source_digests_to_proto,
    source_transferred_to_proto,
)
from shoal.errors import DeadlineError, StalePolicyError, UnavailableError
from shoal.rpc.v1 import weights_pb2, weights_pb2_grpc
from shoal.types import (
    Box,
    InflightMode,
    PairDigests,
    Place,
    PlannedServer,
    SinkCommitted,
    SinkLayout,
    SinkParameter,
    SinkPlanned,
    SinkPrepared,
    SinkRegion,
    SinkTarget,
    SinkVerified,
    SinkWorkerLayout,
    SourceLayout,
    SourceTransferred,
)
from tests.helpers.codec_values import PAIR, PIECES, SOURCE, STAGED, TRANSFER
from tests.helpers.rpc_services import PLAINTEXT, serving


def layout(num_parameters: int) -> SinkLayout:
    box = Box(offsets=(0, 2), sizes=(4, 2))
    names = [f"model.layers.{index}.mlp.gate_up_proj.weight" for index in range(num_parameters)]
    parameters = tuple(SinkParameter(name=name, shape=(4, 4), dtype="bfloat16", staging_offset_bytes=32) for name in names)
    regions = tuple(SinkRegion(parameter=name, source_name=name, source_box=box, parameter_box=box) for name in names)
    place = Place(host_id="h", device="cpu")
    worker = SinkWorkerLayout(worker_rank=0, parameters=parameters, regions=regions, staging_bytes=64, place=place)
    return SinkLayout(server_id="rollout-0", workers=(worker,))


class FakeSink(weights_pb2_grpc.WeightSinkServiceServicer):
    """Answers every stage, keeps what came; refuses `num_refusals` calls of COMMIT first, as a draining server does."""

    def __init__(self, sink_layout: SinkLayout) -> None:
        self.layout = sink_layout
        self.expires_s = 0.0
        self.source: SourceLayout | None = None
        self.pairs: tuple[PairDigests, ...] = ()
        self.commits: list[weights_pb2.CommitSinkRequest] = []
        self.num_refusals = 0
        self.plan_hashes: list[str] = []

    async def PrepareSink(self, request: weights_pb2.PrepareSinkRequest, context: object) -> weights_pb2.PrepareSinkResponse:
        self.expires_s = request.expires_s
        return sink_prepared_to_proto(SinkPrepared(layout=self.layout, served_version=request.policy_version - 1, staged=STAGED))

    async def PlanSink(self, request: weights_pb2.PlanSinkRequest, context: object) -> weights_pb2.PlanSinkResponse:
        self.source = source_layout_from_proto(request.source)
        self.plan_hashes.append(request.plan_hash)
        return sink_planned_to_proto(SinkPlanned(num_buckets=3, collective_group="g"))

    async def VerifySink(self, request: weights_pb2.VerifySinkRequest, context: object) -> weights_pb2.VerifySinkResponse:
        self.pairs = pairs_from_proto(request.pairs)
        self.plan_hashes.append(request.plan_hash)
        return weights_pb2.VerifySinkResponse(num_bytes=5, verify_ms=0.5)

    async def CommitSink(self, request: weights_pb2.CommitSinkRequest, context: object) -> weights_pb2.CommitSinkResponse:
        self.commits.append(request)
        if len(self.commits) <= self.num_refusals:
            raise UnavailableError("not now")
        return sink_committed_to_proto(SinkCommitted(policy_version=request.policy_version, pause_ms=1.5, num_aborted=2))

    async def AbortSink(self, request: weights_pb2.AbortSinkRequest, context: object) -> weights_pb2.AbortSinkResponse:
        return weights_pb2.AbortSinkResponse(served_policy_version=6)

    async def DigestSink(self, request: weights_pb2.DigestSinkRequest, context: object) -> weights_pb2.DigestSinkResponse:
        self.plan_hashes.append(request.plan_hash)
        return weights_pb2.DigestSinkResponse(pairs=piece_pairs_to_proto([PIECES]))

    async def WriteBuckets(self, request_iterator: object, context: object) -> weights_pb2.WriteBucketsResponse:
        raise NotImplementedError("the bulk stream is the grpc transport's own")


@asynccontextmanager
async def sink_client(servicer: weights_pb2_grpc.WeightSinkServiceServicer) -> AsyncIterator[WeightSinkClient]:
    async with (
        serving(
            lambda s: weights_pb2_grpc.add_WeightSinkServiceServicer_to_server(servicer, s), "shoal.rpc.v1.WeightSinkService"
        ) as address,
        WeightSinkClient(address, PLAINTEXT) as client,
    ):
        yield client


async def test_sink_client_carries_every_stage() -> None:
    servicer = FakeSink(layout(2))
    async with sink_client(servicer) as client:
        assert await client.prepare("p", 7, 12.5, timeout_s=5) == SinkPrepared(layout=layout(2), served_version=6, staged=STAGED)
        assert servicer.expires_s == 12.5
        assert await client.plan("p", 7, "h1", SOURCE, timeout_s=5) == SinkPlanned(num_buckets=3, collective_group="g")
        assert servicer.source == SOURCE
        assert await client.verify("p", 7, "h2", [PAIR], timeout_s=5) == SinkVerified(num_bytes=5, verify_ms=0.5)
        assert servicer.pairs == (PAIR,)
        committed = await client.commit("p", 7, InflightMode.WAIT, timeout_s=5)
        assert committed == SinkCommitted(policy_version=7, pause_ms=1.5, num_aborted=2)
        assert [commit.inflight for commit in servicer.commits] == [weights_pb2.INFLIGHT_MODE_WAIT]
        assert await client.abort("p", timeout_s=5) == 6
        assert await client.digest(7, "h3", timeout_s=5) == (PIECES,)
        assert servicer.plan_hashes == ["h1", "h2", "h3"]


async def test_sink_client_layout_of_fifty_thousand_names_passes() -> None:
    big = layout(50_000)
    async with sink_client(FakeSink(big)) as client:
        assert (await client.prepare("p", 1, 60, timeout_s=60)).layout == big


async def test_a_stage_is_repeated_while_the_server_is_unavailable() -> None:
    servicer = FakeSink(layout(1))
    servicer.num_refusals = 2
    async with sink_client(servicer) as client:
        assert (await client.commit("p", 7, InflightMode.KEEP, timeout_s=30)).policy_version == 7
    assert [commit.push_id for commit in servicer.commits] == ["p"] * 3


async def test_a_server_that_is_gone_is_reported_long_before_the_deadline(unused_tcp_port: int) -> None:
    async with WeightSinkClient(f"127.0.0.1:{unused_tcp_port}", PLAINTEXT) as client:
        started_s = time.monotonic()
        with pytest.raises(UnavailableError):
            await client.prepare("p", 1, 60, timeout_s=60)
        assert time.monotonic() - started_s < 10


class FakeSource(weights_pb2_grpc.WeightSourceServiceServicer):
    """Answers every stage and keeps what came."""

    def __init__(self) -> None:
        self.targets: tuple[SinkTarget, ...] = ()
        self.groups: dict[str, str] = {}
        self.plan_hashes: dict[str, str] = {}
        self.aborted = ""

    async def DescribeSource(self, request: weights_pb2.DescribeSourceRequest, context: object) -> weights_pb2.DescribeSourceResponse:
        return weights_pb2.DescribeSourceResponse(layout=source_layout_to_proto(SOURCE), policy_version=3)

    async def PrepareSource(self, request: weights_pb2.PrepareSourceRequest, context: object) -> weights_pb2.PrepareSourceResponse:
        self.targets = sink_targets_from_proto(request.sinks)
        return planned_servers_to_proto({"rollout-0": PlannedServer(plan_hash="h", num_bytes=64)})

    async def TransferSource(self, request: weights_pb2.TransferSourceRequest, context: object) -> weights_pb2.TransferSourceResponse:
        if request.push_id == "over":
            raise StalePolicyError(f"push {request.push_id} is over")
        if request.push_id == "stuck":
            await asyncio.Event().wait()
        self.groups = dict(request.collective_groups)
        return source_transferred_to_proto(SourceTransferred(servers={"rollout-0": TRANSFER}, transfer_ms=2.5))

    async def AbortSource(self, request: weights_pb2.AbortSourceRequest, context: object) -> weights_pb2.AbortSourceResponse:
        self.aborted = request.push_id
        return weights_pb2.AbortSourceResponse()

    async def DigestSource(self, request: weights_pb2.DigestSourceRequest, context: object) -> weights_pb2.DigestSourceResponse:
        self.plan_hashes = dict(request.plan_hashes)
        return source_digests_to_proto({"rollout-0": (PIECES,)})


@asynccontextmanager
async def source_client(servicer: FakeSource) -> AsyncIterator[WeightSourceClient]:
    async with (
        serving(
            lambda s: weights_pb2_grpc.add_WeightSourceServiceServicer_to_server(servicer, s), "shoal.rpc.v1.WeightSourceService"
        ) as address,
        WeightSourceClient(address, PLAINTEXT) as client,
    ):
        yield client


async def test_source_client_carries_every_stage() -> None:
    servicer = FakeSource()
    targets = (SinkTarget(layout=layout(1), staged=STAGED, dense=False),)
    async with source_client(servicer) as client:
        assert await client.describe(timeout_s=5) == (SOURCE, 3)
        assert await client.prepare("p", 4, targets, timeout_s=5) == {"rollout-0": PlannedServer(plan_hash="h", num_bytes=64)}
        assert servicer.targets == targets
        transferred = await client.transfer("p", {"rollout-0": "g"}, timeout_s=5)
        assert transferred == SourceTransferred(servers={"rollout-0": TRANSFER}, transfer_ms=2.5)
        assert servicer.groups == {"rollout-0": "g"}
        assert await client.digest(4, {"rollout-0": "h"}, timeout_s=5) == {"rollout-0": (PIECES,)}
        assert servicer.plan_hashes == {"rollout-0": "h"}
        await client.abort("p", timeout_s=5)
    assert servicer.aborted == "p"


async def test_source_client_raises_what_the_gang_says() -> None:
    async with source_client(FakeSource()) as client:
        with pytest.raises(StalePolicyError, match="push over is over"):
            await client.transfer("over", {}, timeout_s=5)
        with pytest.raises(DeadlineError):
            await client.transfer("stuck", {}, timeout_s=0.2)
