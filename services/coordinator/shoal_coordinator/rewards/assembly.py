"""Puts the parts of a run's reward path together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from shoal.config.models import RunConfig
from shoal.conformance import check_service
from shoal_coordinator.connections import Connector
from shoal_coordinator.registry import Registry
from shoal_coordinator.rewards.admission import RewardServers
from shoal_coordinator.rewards.book import RouteBook
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.rewards.lifecycle import RouteLifecycle, RouteParts
from shoal_coordinator.rewards.probes import ProbeSet
from shoal_coordinator.rewards.row_check import RowCheck
from shoal_coordinator.rewards.shadow import ShadowRunner
from shoal_coordinator.rewards.slow_samples import SlowSamples
from shoal_coordinator.rewards.static_servers import StaticServers
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.waiting import WaitBoard

MAX_SIDE_REQUESTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPath:
    """Everything between a finished group and its reward, but for the servers. `run` must be running; `close` it at the end."""

    parts: RouteParts
    lifecycle: RouteLifecycle
    calls: ScorerCalls
    shadow: ShadowRunner
    slow: SlowSamples
    rows: RowCheck

    @property
    def book(self) -> RouteBook:
        """The revisions of the route."""
        return self.parts.book

    async def open(self, probes: ProbeSet) -> None:
        """Make sure that a revision is active, and let the rows be checked. Raises: see `RouteLifecycle.open`."""
        await self.lifecycle.open(probes)
        self.rows.begin()

    async def run(self) -> None:
        """Ask static servers, shadow, drive revisions and check rows until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.parts.statics.run())
            group.create_task(self.shadow.run())
            group.create_task(self.lifecycle.run())
            group.create_task(self.rows.run())

    def close(self) -> None:
        """Let go of the audit log."""
        self.book.close()


def build_reward_path(
    config: RunConfig,
    *,
    registry: Registry,
    connector: Connector,
    servers: RewardServers,
    pool: ServerPool[RewardEndpoint],
    waits: WaitBoard,
) -> RewardPath:
    """Open the audit log and build everything over it.

    Raises: ConfigError: the log cannot be used.
    """
    slow = SlowSamples()
    calls = ScorerCalls(pool, max_open_requests=config.reward.max_open_requests, slow=slow)
    # What is tried or shadowed waits for slots of its own: it must not hold up the rewards of the run.
    side_calls = ScorerCalls(pool, max_open_requests=MAX_SIDE_REQUESTS, is_live=False)
    book = RouteBook.open(Path(config.run.folder), config.run.id)
    shadow = ShadowRunner(book, side_calls, source_key=config.data.source_key)
    parts = RouteParts(
        config=config,
        book=book,
        servers=servers,
        statics=StaticServers(registry, connector),
        shadow=shadow,
        calls=side_calls,
        check=check_service,
        waits=waits,
    )
    rows = RowCheck(config, book, side_calls)
    return RewardPath(parts=parts, lifecycle=RouteLifecycle(parts), calls=calls, shadow=shadow, slow=slow, rows=rows)
