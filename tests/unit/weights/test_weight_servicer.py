"""Rank 0 puts the ranks' answers together, and refuses those that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from shoal_trainer.weight_servicer import DESCRIBE, PREPARE, TRANSFER, WeightCommands, WeightSourceServicer
from shoal_trainer.weight_source import WeightSource

from shoal.codec.weights import sink_layout_to_proto, source_transferred_from_proto
from shoal.errors import InternalError, StateError
from shoal.rpc.v1 import weights_pb2
from shoal.weights.transports.shm import ShmSourceTransport
from tests.helpers.shm_sink import ShmSink

SHAPES: dict[str, tuple[int, ...]] = {"a": (4, 2), "b": (3,)}


class Context:
    """What a servicer asks of a call."""

    def time_remaining(self) -> float:
        return 5.0


class LocalGang:
    """Ranks in this process; `tamper` may change one command's answers."""

    def __init__(self, world_size: int) -> None:
        self.version = 1
        parameters = {name: torch.ones(shape) for name, shape in SHAPES.items()}
        sources = [WeightSource(parameters, rank, world_size, ShmSourceTransport()) for rank in range(world_size)]
        self.handlers = [WeightCommands(source, lambda: self.version).handlers() for source in sources]
        self.tamper: dict[str, Callable[[list[bytes]], list[bytes]]] = {}

    async def run(self, command: str, payload: bytes, timeout_s: float) -> list[bytes]:
        assert timeout_s > 0
        answers = [handlers[command](payload) for handlers in self.handlers]
        return self.tamper[command](answers) if command in self.tamper else answers


@pytest.fixture
def gang() -> LocalGang:
    return LocalGang(2)


async def prepare(gang: LocalGang, *sinks: ShmSink) -> weights_pb2.PrepareSourceResponse:
    request = weights_pb2.PrepareSourceRequest(push_id="p", policy_version=1, sinks=[sink_layout_to_proto(sink.stage()) for sink in sinks])
    return await WeightSourceServicer(gang).PrepareSource(request, Context())


async def test_describe_joins_the_shards_of_all_ranks(gang: LocalGang) -> None:
    answer = await WeightSourceServicer(gang).DescribeSource(weights_pb2.DescribeSourceRequest(), Context())
    assert answer.policy_version == 1
    assert [(shard.name, shard.rank) for shard in answer.shards] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


async def test_prepare_and_transfer_add_the_ranks_up(gang: LocalGang, tmp_path: Path) -> None:
    sink = ShmSink.copying("s", SHAPES, str(tmp_path))
    prepared = await prepare(gang, sink)
    assert (prepared.num_copies, prepared.num_bytes) == (2, 44)
    answer = await WeightSourceServicer(gang).TransferSource(weights_pb2.TransferSourceRequest(push_id="p"), Context())
    transferred = source_transferred_from_proto(answer)
    assert transferred.num_bytes == 44
    assert sorted(digest.parameter for digest in transferred.digests["s"]) == ["a", "b"]
    assert all(tensor.eq(1).all() for tensor in sink.staged(0).values())
    sink.close()


async def test_transfer_leaves_out_a_server_that_one_rank_could_not_write(gang: LocalGang, tmp_path: Path) -> None:
    sinks = [ShmSink.copying(name, SHAPES, str(tmp_path)) for name in ("s", "t")]
    await prepare(gang, *sinks)

    def forget(answers: list[bytes]) -> list[bytes]:
        last = weights_pb2.TransferSourceResponse.FromString(answers[-1])
        kept = [sink for sink in last.sinks if sink.server_id != "s"]
        del last.sinks[:]
        last.sinks.extend(kept)
        return [*answers[:-1], last.SerializeToString()]

    gang.tamper[TRANSFER] = forget
    answer = await WeightSourceServicer(gang).TransferSource(weights_pb2.TransferSourceRequest(push_id="p"), Context())
    assert [sink.server_id for sink in answer.sinks] == ["t"]
    for sink in sinks:
        sink.close()


async def test_ranks_with_other_versions_or_plans_are_refused(gang: LocalGang, tmp_path: Path) -> None:
    gang.tamper[DESCRIBE] = lambda answers: [weights_pb2.DescribeSourceResponse(policy_version=9).SerializeToString(), *answers[1:]]
    with pytest.raises(InternalError, match=r"ranks hold policy versions \[9, 1\]"):
        await WeightSourceServicer(gang).DescribeSource(weights_pb2.DescribeSourceRequest(), Context())
    gang.tamper = {PREPARE: lambda answers: [weights_pb2.PrepareSourceResponse(plan_hash="f" * 64).SerializeToString(), *answers[1:]]}
    sink = ShmSink.copying("s", SHAPES, str(tmp_path))
    with pytest.raises(InternalError, match=r"ranks planned differently: \['ffffffffffff'"):
        await prepare(gang, sink)
    sink.close()


async def test_abort_reaches_every_rank(gang: LocalGang, tmp_path: Path) -> None:
    sink = ShmSink.copying("s", SHAPES, str(tmp_path))
    await prepare(gang, sink)
    await WeightSourceServicer(gang).AbortSource(weights_pb2.AbortSourceRequest(push_id="p"), Context())
    for handlers in gang.handlers:
        with pytest.raises(StateError, match="push p is not prepared"):
            handlers[TRANSFER](weights_pb2.TransferSourceRequest(push_id="p").SerializeToString())
    sink.close()
