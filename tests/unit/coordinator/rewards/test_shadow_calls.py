"""Shadowing through the real calls: services that hang, die or refuse, and live groups beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from shoal_coordinator.rewards.breaker import MAX_FAILURES
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.comparison import Comparison
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.rewards.gates import Gates, gate_problems
from shoal_coordinator.rewards.route import RouteComponent
from shoal_coordinator.rewards.shadow import ShadowRunner
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.waiting import WaitBoard

from shoal.errors import InvalidRequestError, UnavailableError
from shoal.types import ScorerDescription, ScoreResult, ScoreSample, ScoreStatus
from tests.unit.coordinator.rewards.test_shadow import SHADOW, FakeRoutes, compared, make_revision, make_scored, running, until

MAX_OPEN_REQUESTS = 16
LIVE = RouteComponent(scorer="old", version="1", timeout_s=5.0)


def answer(samples: Sequence[ScoreSample]) -> list[ScoreResult]:
    return [ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=1.0, latency_ms=3.0) for sample in samples]


@dataclass
class FakeServer:
    """Offers one scorer; hangs for ever, or fails with an error."""

    name: str
    version: str
    hangs: bool = False
    error: Callable[[], Exception] | None = None
    num_open: int = 0
    num_calls: int = 0
    scorers: Sequence[ScorerDescription] = field(init=False)

    def __post_init__(self) -> None:
        self.scorers = (ScorerDescription(name=self.name, version=self.version, description=""),)

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        self.num_open += 1
        self.num_calls += 1
        try:
            if self.hangs:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error()
            return version, answer(samples)
        finally:
            self.num_open -= 1


def make_pool(**servers: FakeServer) -> ServerPool[RewardEndpoint]:
    pool: ServerPool[RewardEndpoint] = ServerPool("reward server", WaitBoard())
    for server_id, server in servers.items():
        pool.add(server_id, server)
    return pool


def make_runner(pool: ServerPool[RewardEndpoint], timeout_s: float = 0.05) -> ShadowRunner:
    revision = make_revision(SHADOW, RouteComponent(scorer="new", version="2", timeout_s=timeout_s))
    calls = ScorerCalls(pool, max_open_requests=MAX_OPEN_REQUESTS)
    return ShadowRunner(FakeRoutes(in_shadow={SHADOW: (revision, 1.0)}), calls)


async def shadowed(pool: ServerPool[RewardEndpoint], num_groups: int = 3, timeout_s: float = 0.05) -> Comparison:
    runner = make_runner(pool, timeout_s)
    async with running(runner):
        for number in range(num_groups):
            runner.offer(make_scored(f"g{number}"))
        return await compared(runner, num_groups)


async def test_service_that_answers_is_compared() -> None:
    comparison = await shadowed(make_pool(a=FakeServer("new", "2")))
    assert (comparison.num_samples, comparison.error_share.shadow, comparison.latency_ms.shadow.p99) == (6, 0.0, 3.0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (lambda: UnavailableError("connection refused"), ["new@2", "'a'", "UnavailableError", "connection refused"]),
        (lambda: InvalidRequestError("no such column"), ["new@2", "'a'", "InvalidRequestError", "no such column"]),
    ],
)
async def test_service_that_fails_shows_as_errors_and_passes_no_gate(error: Callable[[], Exception], words: list[str]) -> None:
    comparison = await shadowed(make_pool(a=FakeServer("new", "2", error=error)))
    assert (comparison.num_samples, comparison.error_share.shadow, comparison.error_share.active) == (0, 1.0, 0.0)
    assert comparison.first_error is not None
    assert [word for word in words if word not in comparison.first_error] == []
    problems = gate_problems(Gates(min_samples=1, min_rank_correlation=0.0, max_p99_ms=1e9, max_error_share=0.99), comparison)
    assert [problem.split(":")[0] for problem in problems] == ["min_samples", "min_rank_correlation", "max_p99_ms", "max_error_share"]


async def test_service_that_is_not_there_shows_as_errors() -> None:
    comparison = await shadowed(make_pool(a=FakeServer("old", "1")))
    assert comparison.error_share.shadow == 1.0
    assert comparison.first_error is not None
    assert "no reward server offered new@2" in comparison.first_error


async def test_live_calls_have_their_turns_while_the_shadow_hangs() -> None:
    live, hanging = FakeServer("old", "1"), FakeServer("new", "2", hangs=True)
    pool = make_pool(a=live, b=hanging)
    runner = make_runner(pool, timeout_s=60.0)
    calls = ScorerCalls(pool, max_open_requests=1)
    async with running(runner), asyncio.timeout(10):
        for number in range(200):
            scored = make_scored(f"g{number}")
            service, results = await calls.score(LIVE, scored.samples, 1)
            assert (service, [result.status for result in results]) == ("a", [ScoreStatus.SCORED] * 2)
            runner.offer(scored)
        await until(lambda: hanging.num_open > 0)
        comparison = runner.comparison(SHADOW)
    assert (comparison.num_groups, live.num_calls) == (0, 200)
    assert comparison.num_dropped > 100
    assert hanging.num_open == 0


async def test_failing_version_leaves_the_live_version_of_the_same_server_alone() -> None:
    def fail() -> Exception:
        return UnavailableError("crashed")

    both = FakeServer("grade", "1")
    both.scorers = tuple(ScorerDescription(name="grade", version=version, description="") for version in ("1", "2"))
    pool = make_pool(a=both)
    revision = make_revision(SHADOW, RouteComponent(scorer="grade", version="2", timeout_s=0.5))
    calls = ScorerCalls(pool, max_open_requests=MAX_OPEN_REQUESTS)
    runner = ShadowRunner(FakeRoutes(in_shadow={SHADOW: (revision, 1.0)}), calls)
    both.error = fail
    async with running(runner):
        for number in range(8):
            runner.offer(make_scored(f"g{number}"))
        # All that a breaker stands of one version.
        await until(lambda: both.num_calls >= MAX_FAILURES)
        both.error = None
        component = RouteComponent(scorer="grade", version="1", timeout_s=5.0)
        _, results = await calls.score(component, make_scored().samples, 1)
        assert [result.status for result in results] == [ScoreStatus.SCORED] * 2
        assert runner.comparison(SHADOW).num_samples == 0
