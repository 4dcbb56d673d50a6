"""Every RPC of a rollout server's end of a push, over each transport; the engine is scripted, all else is real.

Invariants: a push is the same whatever its bytes travel over; a stream of a push that has ended harms nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from shoal_rollout.sink_states import SinkState
from shoal_rollout.weight_sink_servicer import SERVICE_NAME, WeightSinkServicer

from shoal.clients.weights import WeightSinkClient
from shoal.errors import InvalidRequestError, ShoalError, StateError
from shoal.rpc.server import RpcServer
from shoal.types import InflightMode, SinkLayout, SinkPlanned
from shoal.types.weights import PairDigests, StagedVersion
from tests.helpers.rpc_services import PLAINTEXT
from tests.helpers.sink_rig import SinkRig

Transport = Literal["shm", "grpc", "collective"]
TRANSPORTS: tuple[Transport, ...] = ("shm", "grpc", "collective")
TIMEOUT_S = 20.0


class _Served:
    """A rig behind a real server, and a client of it."""

    def __init__(self, rig: SinkRig, client: WeightSinkClient) -> None:
        self.rig = rig
        self.client = client

    async def plan(self, push_id: str, version: int) -> tuple[SinkLayout, str, SinkPlanned]:
        prepared = await self.client.prepare(push_id, version, 60.0, timeout_s=TIMEOUT_S)
        plan_hash = self.rig.trainer.plan(prepared.layout).plan_hash
        planned = await self.client.plan(push_id, version, plan_hash, self.rig.trainer.layout, timeout_s=TIMEOUT_S)
        return prepared.layout, plan_hash, planned

    async def write(
        self, layout: SinkLayout, planned: SinkPlanned, push_id: str, version: int, unchanged: Collection[str] = ()
    ) -> tuple[PairDigests, ...]:
        return await asyncio.to_thread(
            self.rig.trainer.write, layout, push_id=push_id, version=version, unchanged=unchanged, group=planned.collective_group
        )

    async def push(self, push_id: str, version: int, unchanged: Collection[str] = ()) -> str:
        layout, plan_hash, planned = await self.plan(push_id, version)
        pairs = await self.write(layout, planned, push_id, version, unchanged)
        await self.client.verify(push_id, version, plan_hash, pairs, timeout_s=TIMEOUT_S)
        committed = await self.client.commit(push_id, version, InflightMode.KEEP, timeout_s=TIMEOUT_S)
        assert committed.policy_version == version
        return plan_hash


@asynccontextmanager
async def _serve(folder: Path, transport: Transport) -> AsyncIterator[_Served]:
    rig = SinkRig(folder, num_workers=2, transport=transport)
    server = RpcServer("127.0.0.1", 0, PLAINTEXT)
    server.add(WeightSinkServicer(rig.sink).add_to, SERVICE_NAME)
    address = f"127.0.0.1:{await server.start()}"
    rig.sink.listen_at(address)
    try:
        async with WeightSinkClient(address, PLAINTEXT) as client:
            yield _Served(rig, client)
    finally:
        await asyncio.to_thread(rig.trainer.close)
        await rig.sink.close()
        await server.stop(0)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_pushes_reach_every_worker_and_can_be_audited(tmp_path: Path, transport: Transport) -> None:
    async with _serve(tmp_path, transport) as served:
        rig = served.rig
        rig.set(a=1, b=2, c=-0.0)
        await served.push("one", 1)
        rig.set(b=4)
        plan_hash = await served.push("two", 2, unchanged=("a", "c"))
        assert rig.live(0) == rig.live(1) == {"a": 1, "b": 4, "c": 0}
        prepared = await served.client.prepare("three", 3, 60.0, timeout_s=TIMEOUT_S)
        assert (prepared.served_version, prepared.staged) == (2, StagedVersion(source_id="gang", policy_version=2))
        live = await served.client.digest(2, plan_hash, timeout_s=TIMEOUT_S)
        assert live == rig.trainer.digests(prepared.layout)
        assert await served.client.abort("three", timeout_s=TIMEOUT_S) == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_push_after_one_that_broke_off_goes_through(tmp_path: Path, transport: Transport) -> None:
    async with _serve(tmp_path, transport) as served:
        rig = served.rig
        rig.set(a=1)
        await served.push("one", 1)
        rig.set(a=2, b=2)
        layout, _, planned = await served.plan("two", 2)
        await served.client.abort("two", timeout_s=TIMEOUT_S)
        # A rank that was told late: over a wire it is refused, and into the old file nobody looks.
        with pytest.raises(ShoalError):
            await asyncio.to_thread(rig.trainer.write, layout, push_id="two", version=2, group=planned.collective_group, timeout_s=1.0)
        rig.set(a=3, b=3)
        await served.push("three", 3)
        assert rig.live(0) == rig.live(1) == {"a": 3, "b": 3, "c": 0}


async def test_streams_are_taken_between_plan_and_verify_only(tmp_path: Path) -> None:
    async with _serve(tmp_path, "grpc") as served:
        rig = served.rig
        layout, plan_hash, planned = await served.plan("one", 1)
        pairs = await served.write(layout, planned, "one", 1)
        with pytest.raises(ShoalError, match="came already"):
            await served.write(layout, planned, "one", 1)
        await served.client.verify("one", 1, plan_hash, pairs, timeout_s=TIMEOUT_S)
        rig.set(a=9)
        with pytest.raises(ShoalError, match="verified, aborted, or never planned"):
            await served.write(layout, planned, "one", 1)
        await served.client.commit("one", 1, InflightMode.KEEP, timeout_s=TIMEOUT_S)
        assert rig.live()["a"] == 0


async def test_errors_keep_their_class_over_the_wire(tmp_path: Path) -> None:
    async with _serve(tmp_path, "shm") as served:
        client = served.client
        with pytest.raises(InvalidRequestError, match="expires_s"):
            await client.prepare("one", 1, 0.0, timeout_s=TIMEOUT_S)
        for call in (
            client.verify("one", 1, "hash", (), timeout_s=TIMEOUT_S),
            client.commit("one", 1, InflightMode.WAIT, timeout_s=TIMEOUT_S),
            client.digest(7, "hash", timeout_s=TIMEOUT_S),
        ):
            with pytest.raises(StateError):
                await call
        assert await client.abort("unknown", timeout_s=TIMEOUT_S) == 0


async def test_a_wait_is_bounded_by_the_callers_deadline(tmp_path: Path) -> None:
    async with _serve(tmp_path, "shm") as served:
        rig = served.rig
        sampling = asyncio.create_task(rig.engine.sample("r", [1], rig.sampling(4)))
        layout, plan_hash, planned = await served.plan("one", 1)
        pairs = await served.write(layout, planned, "one", 1)
        await served.client.verify("one", 1, plan_hash, pairs, timeout_s=TIMEOUT_S)
        with pytest.raises(StateError, match="did not end"):
            await served.client.commit("one", 1, InflightMode.WAIT, timeout_s=1.5)
        assert rig.sink.state is SinkState.VERIFIED
        rig.engine.step(4)
        await sampling
        await served.client.commit("one", 1, InflightMode.WAIT, timeout_s=TIMEOUT_S)
