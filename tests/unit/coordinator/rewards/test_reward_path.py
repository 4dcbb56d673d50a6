"""The whole reward path of a coordinator over real gRPC servers: registered and static ones, real checks, real calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from shoal_coordinator.app import Coordinator
from shoal_coordinator.metrics_sink import JsonLinesSink, MetricsSink
from shoal_coordinator.rest import create_app
from shoal_coordinator.rest_models import Command
from shoal_coordinator.rewards.probes import ProbeSet
from shoal_coordinator.rewards.route_stages import RouteStage
from shoal_coordinator.states import RunState

from shoal.config.load import build_config
from shoal.errors import InvalidRequestError
from shoal.rpc.v1 import common_pb2, reward_pb2
from shoal.types import FinishReason, ScoreSample, ServiceInfo, ServiceKind
from tests.helpers.run_fakes import RunHarness
from tests.helpers.third_party_reward import ThirdPartyReward, served

SIGNED = {"who": "ada", "why": "because"}


class Contains(ThirdPartyReward):
    """Version 1 of a scorer that is always there."""

    name = "contains"
    versions = ("1",)


class Longer(ThirdPartyReward):
    """A scorer that a user brings in."""

    name = "longer"
    versions = ("1",)
    fingerprint = "l1"

    def result(self, sample: reward_pb2.ScoreSample, index: int, request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResult:
        value = float(len(sample.response))
        return reward_pb2.ScoreResult(sample_id=sample.sample_id, status=common_pb2.SCORE_STATUS_SCORED, value=value)


class Careless(Longer):
    """Gives another reward at every call."""

    num_calls = 0

    def result(self, sample: reward_pb2.ScoreSample, index: int, request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResult:
        self.num_calls += 1
        value = float("nan") if self.num_calls % 2 else 1.0
        return reward_pb2.ScoreResult(sample_id=sample.sample_id, status=common_pb2.SCORE_STATUS_SCORED, value=value)


class Desk:
    """A coordinator without a run, and its REST API."""

    def __init__(self, coordinator: Coordinator, api: httpx.AsyncClient) -> None:
        self.coordinator = coordinator
        self.book = coordinator.rewards.book
        self._api = api

    def register(self, service_id: str, address: str, incarnation: str = "a", run_id: str = "") -> str:
        """As a service that serves several runs does; its lease."""
        info = ServiceInfo(run_id=run_id, service_id=service_id, kind=ServiceKind.REWARD, address=address, incarnation=incarnation)
        return self.coordinator.registry.register(info).lease_id

    async def post(self, path: str, **body: object) -> dict[str, Any]:
        answer = await self._api.post(f"/v1/rewards{path}", json=SIGNED | body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def servers(self) -> dict[str, str]:
        answer = (await self._api.get("/v1/rewards")).json()
        return {server["service_id"]: server["state"] for server in answer["servers"]}

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 30.0
        while not condition():
            assert time.monotonic() < deadline_s, self.book.records()
            await asyncio.sleep(0.01)

    async def until_stage(self, number: int, stage: RouteStage) -> None:
        await self.until(lambda: self.book.stage(number) in (stage, RouteStage.REJECTED))
        assert self.book.stage(number) is stage, self.book.record(number).problem


def probes() -> ProbeSet:
    """Rows with an answer."""
    samples = [
        ScoreSample(
            sample_id=f"made-{number}/0/1",
            prompt=f"say {number}",
            response=f"{number}",
            row={"answer": str(number)},
            finish_reason=FinishReason.STOP,
            num_response_tokens=1,
        )
        for number in range(8)
    ]
    return ProbeSet(samples)


@asynccontextmanager
async def desk(folder: Path, **reward: object) -> AsyncIterator[Desk]:
    """Serve a run's folder until the block is left."""
    tree = {
        "run": {"id": "run", "folder": str(folder), "steps": 1},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "coordinator": {"ready_timeout_s": 10.0, "lease_s": 60.0},
        "reward": {"scorer": "contains", "timeout_s": 5.0} | reward,
    }
    with MetricsSink([JsonLinesSink(folder)]) as sink:
        coordinator = Coordinator(build_config(tree), sink)
        background = [asyncio.create_task(work) for work in coordinator.background()]
        transport = httpx.ASGITransport(app=create_app(coordinator.backend, coordinator.reward_backend))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://coordinator", timeout=30.0) as api:
                yield Desk(coordinator, api)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            coordinator.close()


async def test_reward_is_swapped_for_one_of_a_server_that_cannot_register(tmp_path: Path) -> None:
    async with served(Contains()) as first, served(Longer()) as second:
        async with desk(tmp_path) as run:
            run.register("reward-0", first)
            await run.coordinator.rewards.lifecycle.open(probes())
            assert run.coordinator.backend.status().route_revision == 1
            added = await run.post("/routes", label="longer", components=[{"scorer": "longer"}], addresses=[second])
            await run.until_stage(2, RouteStage.READY)
            assert (added["stage"], run.book.revision(2).components[0].fingerprint) == ("registered", "l1")
            assert await run.servers() == {"reward-0": "ready", second: "ready"}
            await run.post("/routes/2/activate")
            (sample,) = probes().samples(1)
            server, (result,) = await run.coordinator.rewards.calls.score(run.book.active.components[0], [sample], 1)
            assert (server, result.value) == (second, 1.0)
        # The coordinator starts again: the log knows what is active, and whom to ask.
        async with desk(tmp_path) as run:
            await run.coordinator.rewards.lifecycle.open(probes())
            assert run.book.active_number == 2
            await run.until(lambda: second in run.coordinator.fleet.traffic_ids())


async def test_reward_that_fails_its_checks_is_rejected_and_the_active_one_stays(tmp_path: Path) -> None:
    async with served(Contains()) as first, served(Careless()) as second, desk(tmp_path) as run:
        run.register("reward-0", first)
        run.register("reward-1", second)
        await run.coordinator.rewards.lifecycle.open(probes())
        await run.post("/routes", label="careless", components=[{"scorer": "longer"}])
        await run.until(lambda: run.book.stage(2) is RouteStage.REJECTED)
        problem = run.book.record(2).problem
        assert problem is not None
        assert problem.startswith("server reward-1: longer@1 failed the check")
        assert run.book.active_number == 1


async def test_server_with_other_code_gets_no_work(tmp_path: Path) -> None:
    changed = Contains()
    changed.fingerprint = "other"
    async with served(Contains()) as first, served(changed) as second, desk(tmp_path) as run:
        run.register("reward-0", first)
        await run.coordinator.rewards.lifecycle.open(probes())
        run.register("reward-1", second)
        await run.until(lambda: "reward-1" in run.coordinator.fleet.traffic_ids())
        assert await run.servers() == {"reward-0": "ready", "reward-1": "other code under the same version"}
        component = run.book.active.components[0]
        asked = [await run.coordinator.rewards.calls.score(component, probes().samples(1), 1) for _ in range(4)]
        assert [server for server, _ in asked] == ["reward-0"] * 4


async def test_server_that_is_started_again_is_asked_again_before_it_gets_work(tmp_path: Path) -> None:
    async with desk(tmp_path) as run:
        async with served(Contains()) as address:
            run.register("reward-0", address)
            await run.coordinator.rewards.lifecycle.open(probes())
        changed = Contains()
        changed.fingerprint = "other"
        async with served(changed) as address:
            run.register("reward-0", address, incarnation="b")
            assert run.coordinator.fleet.traffic_ids() == ()
            assert (await run.servers())["reward-0"] == "silent"
            await run.until(lambda: run.coordinator.fleet.traffic_ids() == ("reward-0",))
            assert (await run.servers())["reward-0"] == "other code under the same version"


@pytest.mark.parametrize(("run_id", "is_taken"), [("", True), ("run", True), ("other", False)])
async def test_reward_server_serves_this_run_or_whoever_asks(tmp_path: Path, run_id: str, is_taken: bool) -> None:
    async with served(Contains()) as address, desk(tmp_path) as run:
        if is_taken:
            run.register("reward-0", address, run_id=run_id)
            await run.until(lambda: run.coordinator.fleet.traffic_ids() == ("reward-0",))
        else:
            with pytest.raises(InvalidRequestError, match="belongs to run 'other'"):
                run.register("reward-0", address, run_id=run_id)


async def test_run_fails_when_no_server_offers_the_configured_scorer(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, reward={"scorer": "poet"}, coordinator={"ready_timeout_s": 1.0}) as run:
        run.join_all()
        await run.until(RunState.FAILED)
        error = run.coordinator.run.progress.error
    assert error == "reward.scorer cannot score: no reward server offers scorer 'poet'; there is: arithmetic 1 (reward-0)"


async def test_run_can_be_stopped_while_it_waits_for_a_scorer(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, reward={"scorer": "poet"}, coordinator={"ready_timeout_s": 60.0}) as run:
        run.join_all()
        await run.until_true(lambda: any("offers poet" in wait.what for wait in run.coordinator.backend.status().waiting_for))
        run.coordinator.backend.command(Command.STOP)
        await run.until(RunState.STOPPED)
    assert run.coordinator.rewards.book.records() == ()


async def test_run_goes_on_with_the_route_of_its_log(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 1}) as run:
        run.join_all()
        await run.until(RunState.FINISHED)
        assert run.coordinator.backend.status().route_revision == 1
    before = run.coordinator.rewards.book.records()
    async with RunHarness(tmp_path, run={"steps": 1}) as run:
        assert run.coordinator.rewards.book.records() == before
