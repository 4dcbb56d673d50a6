"""Rank 0 puts the ranks' answers together, and refuses those that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from shoal_trainer.weight_servicer import DESCRIBE, PREPARE, TRANSFER, WeightCommands, WeightSourceServicer
from shoal_trainer.weight_source import WeightSource
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shoal.codec.layouts import sink_target_to_proto, source_layout_from_proto
from shoal.codec.weights import planned_servers_from_proto, source_digests_from_proto, source_transferred_from_proto
from shoal.config.models import PushSection
from shoal.errors import InternalError, StateError
from shoal.rpc.v1 import weights_pb2
from shoal.types.weights import PlannedServer, SourceTransferred
from tests.helpers.weight_source import MemoryTransport, StagingServer, fake_ranks, identity

SHAPES: dict[str, tuple[int, ...]] = {"a": (5, 2), "b": (3,)}
FULL = {name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) for name, shape in SHAPES.items()}
NUM_BYTES = (10 + 3) * 4


class Context:
    """What a servicer asks of a call."""

    def time_remaining(self) -> float:
        return 5.0


class LocalGang:
    """Ranks in this process, each with its shard; `tamper` may change one command's answers."""

    def __init__(self, shards: list[Mapping[str, Tensor]], *servers: StagingServer) -> None:
        self.version = 1
        self.transports = [MemoryTransport(*servers) for _ in shards]
        self.handlers = []
        for rank, parameters in enumerate(shards):
            source = WeightSource(parameters, identity(rank, len(shards)), self.transports[rank], PushSection(), lambda: self.version)
            self.handlers.append(WeightCommands(source, lambda: self.version).handlers())
        self.tamper: dict[str, Callable[[list[bytes]], list[bytes]]] = {}

    async def run(self, command: str, payload: bytes, timeout_s: float) -> list[bytes]:
        assert timeout_s > 0
        answers = [handlers[command](payload) for handlers in self.handlers]
        return self.tamper[command](answers) if command in self.tamper else answers


@pytest.fixture
def servers() -> list[StagingServer]:
    return [StagingServer.copying(name, SHAPES) for name in ("s", "t")]


@pytest.fixture
def gang(servers: list[StagingServer]) -> Iterator[LocalGang]:
    shards: list[Mapping[str, Tensor]] = []
    for rank in fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        cut = {name: distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None) for name, full in FULL.items()}
        for parameter in cut.values():
            parameter.requires_grad_()
        shards.append(cut)
        if rank == 1:
            yield LocalGang(shards, *servers)


async def prepare(gang: LocalGang, servers: list[StagingServer]) -> dict[str, PlannedServer]:
    sinks = [sink_target_to_proto(server.target()) for server in servers]
    request = weights_pb2.PrepareSourceRequest(push_id="p", policy_version=1, sinks=sinks)
    return planned_servers_from_proto(await WeightSourceServicer(gang).PrepareSource(request, Context()))


async def transfer(gang: LocalGang) -> SourceTransferred:
    answer = await WeightSourceServicer(gang).TransferSource(weights_pb2.TransferSourceRequest(push_id="p"), Context())
    return source_transferred_from_proto(answer)


async def test_describe_joins_what_all_ranks_hold(gang: LocalGang) -> None:
    answer = await WeightSourceServicer(gang).DescribeSource(weights_pb2.DescribeSourceRequest(), Context())
    layout = source_layout_from_proto(answer.layout)
    assert answer.policy_version == 1
    assert (layout.source_id, len(layout.places)) == ("gang", 2)
    held = {tensor.name: [(shard.rank, shard.box.offsets[0], shard.box.sizes[0]) for shard in tensor.shards] for tensor in layout.tensors}
    assert held == {"a": [(0, 0, 3), (1, 3, 2)], "b": [(0, 0, 2), (1, 2, 1)]}


async def test_prepare_and_transfer_bring_every_rank_s_part(gang: LocalGang, servers: list[StagingServer]) -> None:
    planned = await prepare(gang, servers)
    assert {server_id: one.num_bytes for server_id, one in planned.items()} == {"s": NUM_BYTES, "t": NUM_BYTES}
    layout = (await WeightSourceServicer(gang).DescribeSource(weights_pb2.DescribeSourceRequest(), Context())).layout
    transferred = await transfer(gang)
    assert transferred.transfer_ms > 0
    for server in servers:
        sent = transferred.servers[server.layout.server_id]
        assert (sent.error, sent.sent_bytes, sent.dense_bytes) == ("", NUM_BYTES, NUM_BYTES)
        assert sorted(pair.rank for pair in sent.pairs) == [0, 1]
        server.plan(source_layout_from_proto(layout), planned[server.layout.server_id].plan_hash, PushSection())
        server.verify(1, sent.pairs)
        assert all(torch.equal(staged, FULL[name]) for name, staged in server.parameters().items())


async def test_a_server_that_one_rank_could_not_reach_failed(gang: LocalGang, servers: list[StagingServer]) -> None:
    def fail() -> None:
        raise ConnectionError("gone")

    gang.transports[1].faults["s"] = fail
    await prepare(gang, servers)
    outcomes = (await transfer(gang)).servers
    assert outcomes["s"].error == "rank 1: ConnectionError: gone"
    assert outcomes["s"].pairs == ()
    assert outcomes["t"].error == ""


async def test_digests_of_all_ranks_are_joined(gang: LocalGang, servers: list[StagingServer]) -> None:
    planned = await prepare(gang, servers)
    request = weights_pb2.DigestSourceRequest(policy_version=1, plan_hashes={name: one.plan_hash for name, one in planned.items()})
    digests = source_digests_from_proto(await WeightSourceServicer(gang).DigestSource(request, Context()))
    assert [(pair.rank, len(pair.xxh3)) for pair in digests["s"]] == [(0, 2), (1, 2)]
    assert [pair.xxh3 for pair in digests["s"]] == [pair.xxh3 for pair in digests["t"]]
    with pytest.raises(StateError, match="holds policy version 1, not 2"):
        await WeightSourceServicer(gang).DigestSource(weights_pb2.DigestSourceRequest(policy_version=2), Context())


async def test_ranks_of_other_versions_tensors_or_plans_are_refused(gang: LocalGang, servers: list[StagingServer]) -> None:
    other = weights_pb2.DescribeSourceResponse(policy_version=9).SerializeToString()
    gang.tamper[DESCRIBE] = lambda answers: [other, *answers[1:]]
    with pytest.raises(InternalError, match=r"ranks hold policy versions \[9, 1\]"):
        await WeightSourceServicer(gang).DescribeSource(weights_pb2.DescribeSourceRequest(), Context())

    def renamed(answers: list[bytes]) -> list[bytes]:
        last = weights_pb2.DescribeSourceResponse.FromString(answers[-1])
        last.layout.tensors[0].name = "c"
        return [*answers[:-1], last.SerializeToString()]

    gang.tamper = {DESCRIBE: renamed}
    with pytest.raises(InternalError, match=r"rank 1 holds other tensors than rank 0, first \['c'\]"):
        await WeightSourceServicer(gang).DescribeSource(weights_pb2.DescribeSourceRequest(), Context())
    strange = weights_pb2.PrepareSourceResponse(servers=[weights_pb2.PlannedServer(server_id="s", plan_hash="f" * 64, num_bytes=1)])
    gang.tamper = {PREPARE: lambda answers: [*answers[:-1], strange.SerializeToString()]}
    with pytest.raises(InternalError, match=r"ranks planned differently: rank 0 .*, rank 1 {'s': 'ffffffffffff'}"):
        await prepare(gang, servers)


async def test_abort_reaches_every_rank(gang: LocalGang, servers: list[StagingServer]) -> None:
    await prepare(gang, servers)
    await WeightSourceServicer(gang).AbortSource(weights_pb2.AbortSourceRequest(push_id="p"), Context())
    for handlers in gang.handlers:
        with pytest.raises(StateError, match="push p is not prepared"):
            handlers[TRANSFER](weights_pb2.TransferSourceRequest(push_id="p").SerializeToString())
