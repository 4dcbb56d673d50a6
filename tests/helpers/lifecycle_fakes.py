"""A route lifecycle over scripted servers, checks, calls and comparisons: no sockets. Tests gate it with events.

async with LifecycleHarness(tmp_path) as routes:
    routes.servers.join("reward-0", scorer("math", "1", "f1"))
    await routes.open()
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from shoal_coordinator.members import RewardMember
from shoal_coordinator.registry import Registry
from shoal_coordinator.rewards.assembly import RewardPath
from shoal_coordinator.rewards.book import RouteBook
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.comparison import Comparison, Sides
from shoal_coordinator.rewards.lifecycle import RouteLifecycle, RouteParts
from shoal_coordinator.rewards.route import RouteComponent
from shoal_coordinator.rewards.route_record import RouteRecord
from shoal_coordinator.rewards.route_stages import RouteStage
from shoal_coordinator.rewards.row_check import RowCheck
from shoal_coordinator.rewards.shadow import ShadowRunner
from shoal_coordinator.rewards.slow_samples import SlowSamples
from shoal_coordinator.rewards.static_servers import StaticServers
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.waiting import WaitBoard

from shoal.config.load import build_config
from shoal.conformance import Check, CheckLevel, ConformanceReport, Endpoint
from shoal.errors import ShoalError, UnavailableError
from shoal.types import FinishReason, ScorerDescription, ScoreResult, ScoreSample, ScoreStatus, ServiceInfo, ServiceKind
from tests.helpers.run_fakes import ScriptedConnector


def scorer(name: str = "math", version: str = "1", fingerprint: str = "f1") -> ScorerDescription:
    """What a server says of a scorer."""
    return ScorerDescription(name=name, version=version, description=f"{name} of a test", fingerprint=fingerprint)


def sample(number: int = 0, source: str = "") -> ScoreSample:
    """A made-up sample."""
    return ScoreSample(
        sample_id=f"s{number}",
        prompt="1+1=",
        response="2",
        row={"data_source": source},
        finish_reason=FinishReason.STOP,
        num_response_tokens=1,
    )


class QuietClient:
    """Says what it offers, and is never asked to score."""

    def __init__(self, scorers: Sequence[ScorerDescription]) -> None:
        self.scorers = list(scorers)

    async def describe(self, *, timeout_s: float) -> list[ScorerDescription]:
        return self.scorers

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        raise UnavailableError("nobody scores here")

    async def close(self) -> None:
        """Nothing to close."""


class FakeServers:
    """Reward servers that come and go when the test says so."""

    def __init__(self) -> None:
        self.members: dict[str, RewardMember] = {}
        self._changed = asyncio.Event()

    def join(self, service_id: str, *scorers: ScorerDescription, suspect: bool = False) -> RewardMember:
        info = ServiceInfo(run_id="run", service_id=service_id, kind=ServiceKind.REWARD, address=f"{service_id}:1", incarnation="a")
        member = RewardMember(info=info, client=QuietClient(scorers), suspect=suspect, scorers=scorers)
        self.members[service_id] = member
        self._wake()
        return member

    def leave(self, service_id: str) -> None:
        del self.members[service_id]
        self._wake()

    def rewards(self) -> tuple[RewardMember, ...]:
        return tuple(self.members.values())

    async def wait_for_change(self, timeout_s: float) -> None:
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ScriptedCheck:
    """Passes every server unless `failures` names it; waits for `gate` if there is one."""

    def __init__(self) -> None:
        self.failures: dict[tuple[str, str], Check] = {}
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.asked: list[tuple[tuple[str, str], ...]] = []
        self.num_samples: list[int] = []

    async def __call__(
        self, endpoint: Endpoint, *, wanted: Sequence[tuple[str, str]], samples: Sequence[ScoreSample], timeout_s: float, large_batch: int
    ) -> ConformanceReport:
        self.entered.set()
        self.asked.append(tuple(wanted))
        self.num_samples.append(len(samples))
        if self.gate is not None:
            await self.gate.wait()
        ok = Check(name="describe", level=CheckLevel.OK, detail="fine")
        return ConformanceReport(checks=(ok, *(self.failures[key] for key in wanted if key in self.failures)), scorers=())


class ScriptedCalls:
    """Scores 1.0, but for scorers in `errors`; waits for `gate` if there is one."""

    def __init__(self) -> None:
        self.errors: dict[str, tuple[int, str]] = {}
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.asked: list[tuple[str, str, int]] = []
        self.raises: ShoalError | None = None

    async def score(self, component: RouteComponent, samples: Sequence[ScoreSample], num_groups: int) -> tuple[str, list[ScoreResult]]:
        assert len({each.sample_id for each in samples}) == len(samples)
        self.entered.set()
        self.asked.append((component.scorer, component.version, len(samples)))
        if self.gate is not None:
            await self.gate.wait()
        if self.raises is not None:
            raise self.raises
        num_errors, message = self.errors.get(component.scorer, (0, ""))
        results = [ScoreResult(sample_id=each.sample_id, status=ScoreStatus.SCORED, value=1.0) for each in samples]
        failed = [replace(result, status=ScoreStatus.ERROR, message=message) for result in results[:num_errors]]
        return "reward-0", [*failed, *results[num_errors:]]


class ScriptedShadow:
    """Comparisons as the test sets them."""

    def __init__(self) -> None:
        self.comparisons: dict[int, Comparison] = {}
        self.forgotten: list[int] = []

    def comparison(self, number: int) -> Comparison:
        return self.comparisons.get(number, Comparison(number=number, active=1))

    def forget(self, number: int) -> None:
        self.forgotten.append(number)


def passing(number: int, num_samples: int = 100) -> Comparison:
    """A comparison with many samples and no errors."""
    return Comparison(number=number, active=1, num_samples=num_samples, error_share=Sides(active=0.0, shadow=0.0))


class FixedProbes:
    """Four samples of each source."""

    def __init__(self, num_samples: int = 4) -> None:
        self.num_samples = num_samples
        self.asked: list[Collection[str]] = []

    def samples(self, limit: int, *, sources: Collection[str] = ()) -> list[ScoreSample]:
        self.asked.append(tuple(sources))
        # Two of them under one id, as a live sample and one that was made of the same row.
        return [sample(max(0, number - 1)) for number in range(min(limit, self.num_samples))]


class LifecycleHarness:
    """A lifecycle that runs; `start_again` is the end of one coordinator and the beginning of the next."""

    def __init__(
        self,
        folder: Path,
        *,
        patience_s: float = 0.05,
        probes: FixedProbes | None = None,
        algorithm: dict[str, object] | None = None,
        **reward: Any,  # noqa: ANN401
    ) -> None:
        tree: dict[str, Any] = {
            "run": {"id": "run", "folder": str(folder), "steps": 1},
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "algorithm": algorithm or {},
            "coordinator": {"ready_timeout_s": reward.pop("ready_timeout_s", 5.0), "lease_s": 1.5},
            "reward": ({} if reward.get("sources") else {"scorer": "math"}) | {"timeout_s": 7.0} | reward,
        }
        self.config = build_config(tree)
        self.folder = folder
        self._patience_s = patience_s
        self.probes = FixedProbes() if probes is None else probes
        self.servers, self.check, self.calls, self.shadow = FakeServers(), ScriptedCheck(), ScriptedCalls(), ScriptedShadow()
        self.waits = WaitBoard()
        self._build()

    def _build(self) -> None:
        self.book = RouteBook.open(self.folder, "run")
        self.statics = StaticServers(Registry(run_id="run", lease_s=1.5), ScriptedConnector())
        parts = RouteParts(
            config=self.config,
            book=self.book,
            servers=self.servers,
            statics=self.statics,
            shadow=self.shadow,
            calls=self.calls,
            check=self.check,
            waits=self.waits,
        )
        self.lifecycle = RouteLifecycle(parts, patience_s=self._patience_s)
        self.slow = SlowSamples()
        calls = ScorerCalls(ServerPool("reward server", self.waits), max_open_requests=1)
        self.rows = RowCheck(self.config, self.book, self.calls)
        self.path = RewardPath(
            parts=parts,
            lifecycle=self.lifecycle,
            calls=calls,
            shadow=ShadowRunner(self.book, calls),
            slow=self.slow,
            rows=self.rows,
        )

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self.lifecycle.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        result = (await asyncio.gather(self._running, return_exceptions=True))[0]
        self.book.close()
        assert isinstance(result, asyncio.CancelledError), result

    async def start_again(self) -> None:
        """Kill this coordinator and start another over the same folder; the servers live on."""
        await self.__aexit__()
        self._build()
        await self.__aenter__()

    async def open(self) -> None:
        await self.lifecycle.open(self.probes)

    async def begin(self) -> None:
        """Make revision 1 active: math@1 of reward-0."""
        self.servers.join("reward-0", scorer())
        await self.open()

    async def add(self, *components: RouteComponent, addresses: Sequence[str] = ()) -> int:
        """Ask for a revision; its number."""
        asked = components or (RouteComponent(scorer="math"),)
        return (await self.lifecycle.add("new", asked, addresses, who="ada", why="better")).number

    async def until(self, number: int, stage: RouteStage, timeout_s: float = 10.0) -> RouteRecord:
        """Wait until a revision is in a stage."""
        await self.until_true(lambda: self.book.stage(number) is stage, timeout_s)
        return self.book.record(number)

    async def until_true(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, self.book.records()
            await self.book.wait_for_change(0.02)
