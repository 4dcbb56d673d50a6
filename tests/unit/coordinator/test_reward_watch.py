"""Reward servers are asked what they offer before they take traffic, each on its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from shoal_coordinator import reward_watch
from shoal_coordinator.members import RewardMember
from shoal_coordinator.reward_watch import RewardWatch
from shoal_coordinator.states import RunState

from shoal.errors import UnavailableError
from shoal.types import ScorerDescription, ScoreResult, ScoreSample, ServiceInfo, ServiceKind
from tests.helpers.run_fakes import RunHarness, ScriptedConnector, SilentReward

MATH = ScorerDescription(name="math", version="1", description="")


class GatedClient:
    """Answers once `gate` is set, after failing as often as `failures` says."""

    def __init__(self, failures: int = 0, *, is_open: bool = True) -> None:
        self.failures = failures
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()
        self.num_asked = 0
        if is_open:
            self.gate.set()

    async def describe(self, *, timeout_s: float) -> list[ScorerDescription]:
        self.num_asked += 1
        self.asked.set()
        await self.gate.wait()
        if self.num_asked <= self.failures:
            raise UnavailableError("connection refused")
        return [MATH]

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing to close."""


def member(client: GatedClient) -> RewardMember:
    info = ServiceInfo(run_id="r", service_id="s", kind=ServiceKind.REWARD, address="a:1", incarnation="i")
    return RewardMember(info=info, client=client)


@asynccontextmanager
async def watching(*members: RewardMember) -> AsyncIterator[asyncio.Queue[None]]:
    """Watch them; gives a queue with one item per answer."""
    answers: asyncio.Queue[None] = asyncio.Queue()
    watch = RewardWatch(lambda: members, lambda: answers.put_nowait(None))
    running = asyncio.create_task(watch.run())
    yield answers
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_watch_asks_each_server_on_its_own() -> None:
    hanging, prompt = GatedClient(is_open=False), GatedClient()
    members = member(hanging), member(prompt)
    async with watching(*members) as answers:
        await asyncio.wait_for(answers.get(), 5.0)
        assert [(each.suspect, each.scorers) for each in members] == [(True, ()), (False, (MATH,))]
        hanging.gate.set()
        await asyncio.wait_for(answers.get(), 5.0)
        assert not members[0].suspect
    assert (hanging.num_asked, prompt.num_asked) == (1, 1)


async def test_watch_asks_again_until_there_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_watch, "ASK_AGAIN_S", 0.01)
    client = GatedClient(failures=2, is_open=False)
    failing = member(client)
    async with watching(failing) as answers:
        client.gate.set()
        await asyncio.wait_for(answers.get(), 5.0)
    assert (client.num_asked, failing.suspect, failing.problem) == (3, False, "")


class LateReward(SilentReward):
    """Says what it offers once `gate` is set."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()

    async def describe(self, *, timeout_s: float) -> list[ScorerDescription]:
        self.asked.set()
        await self.gate.wait()
        return await super().describe(timeout_s=timeout_s)


class LateConnector(ScriptedConnector):
    """Its reward server is late."""

    def __init__(self) -> None:
        super().__init__()
        self.late = LateReward()

    def reward(self, address: str) -> SilentReward:
        return self.late


async def test_fleet_gives_a_reward_server_no_traffic_before_it_has_said_what_it_offers(tmp_path: Path) -> None:
    connector = LateConnector()
    async with RunHarness(tmp_path, run={"steps": 1}, connector=connector) as run:
        run.join_all()
        await connector.late.asked.wait()
        fleet = run.coordinator.fleet
        assert "reward-0" not in fleet.traffic_ids()
        states = {service.service_id: service.state for service in run.coordinator.backend.services()}
        assert states["reward-0"] == "silent"
        connector.late.gate.set()
        await run.until(RunState.FINISHED)
        assert "reward-0" in fleet.traffic_ids()


async def test_fleet_asks_again_what_a_restarted_reward_server_offers(tmp_path: Path) -> None:
    connector = LateConnector()
    connector.late.gate.set()
    async with RunHarness(tmp_path, run={"steps": 1}, connector=connector) as run:
        run.workload.hold_at = 1
        run.join_all()
        await run.workload.holding.wait()
        connector.late.gate.clear()
        connector.late.asked.clear()
        run.join("reward-0", incarnation="b")
        assert "reward-0" not in run.coordinator.fleet.traffic_ids()
        await connector.late.asked.wait()
        connector.late.gate.set()
        await run.until_true(lambda: "reward-0" in run.coordinator.fleet.traffic_ids())
        run.workload.release.set()
        await run.until(RunState.FINISHED)
