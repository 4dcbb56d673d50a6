"""Connections to the registered services: opened when one joins, closed when it is gone."""

from __future__ import annotations

import asyncio

from shoal.config.models import RunConfig
from shoal.errors import NotFoundError, ShoalError
from shoal.telemetry.logs import get_logger
from shoal.telemetry.metrics import gauge
from shoal.types import ServiceInfo, ServiceKind
from shoal_coordinator.connections import Connector
from shoal_coordinator.gangs import Closable, Gang
from shoal_coordinator.members import RewardMember, RolloutMember
from shoal_coordinator.stage_clock import StageClock
from shoal_coordinator.waiting import WaitBoard

log = get_logger(__name__)

CLOSE_TIMEOUT_S = 5.0
_SERVED_VERSION = gauge("server", "policy", "version", "Version that a rollout server is known to serve.", labels=("server",))


class Roster:
    """Services by id; used from the event loop alone. `run` closes what was dropped, `close` the rest."""

    def __init__(self, connector: Connector, config: RunConfig, clock: StageClock, waits: WaitBoard) -> None:
        self._connector = connector
        self._config = config
        self._clock = clock
        self._waits = waits
        self.rollouts: dict[str, RolloutMember] = {}
        self.rewards: dict[str, RewardMember] = {}
        self.gangs: dict[str, Gang] = {}
        self._left: asyncio.Queue[Closable] = asyncio.Queue()

    def gang(self, kind: ServiceKind) -> Gang:
        """The actor or the critic.

        Raises: NotFoundError: it is not registered.
        """
        for gang in self.gangs.values():
            if gang.info.kind is kind:
                return gang
        raise NotFoundError(f"no {kind} gang is registered; start it, or look at its log")

    def has_gang(self, kind: ServiceKind) -> bool:
        """Whether the actor or the critic is registered."""
        return any(gang.info.kind is kind for gang in self.gangs.values())

    def open(self, info: ServiceInfo) -> None:
        """Connect to a service; nothing is sent yet."""
        if info.kind is ServiceKind.ROLLOUT:
            client, sink = self._connector.rollout(info.address), self._connector.sink(info.address)
            self.rollouts[info.service_id] = RolloutMember(info=info, client=client, sink=sink, served_version=info.policy_version)
        elif info.kind is ServiceKind.REWARD:
            self.rewards[info.service_id] = RewardMember(info=info, client=self._connector.reward(info.address))
        else:
            self.gangs[info.service_id] = self._open_gang(info)

    def drop(self, service_id: str) -> None:
        """Forget a service; its connections are closed, which ends the calls that wait for it."""
        closables: list[Closable] = []
        if (rollout := self.rollouts.pop(service_id, None)) is not None:
            closables += [rollout.client, rollout.sink]
            _SERVED_VERSION.remove(service_id)
        if (reward := self.rewards.pop(service_id, None)) is not None:
            closables.append(reward.client)
        if (gang := self.gangs.pop(service_id, None)) is not None:
            closables += gang.connections()
        for closable in closables:
            self._left.put_nowait(closable)

    def publish_versions(self) -> None:
        """Set the metric of every rollout server."""
        for service_id, member in self.rollouts.items():
            _SERVED_VERSION.labels(server=service_id).set(member.served_version)

    async def run(self) -> None:
        """Close what was dropped, until cancelled."""
        while True:
            await _close(await self._left.get())

    async def close(self) -> None:
        """Close everything."""
        for service_id in [*self.rollouts, *self.rewards, *self.gangs]:
            self.drop(service_id)
        while not self._left.empty():
            await _close(self._left.get_nowait())

    def _open_gang(self, info: ServiceInfo) -> Gang:
        is_actor = info.kind is ServiceKind.ACTOR
        section = self._config.actor if is_actor else self._config.critic
        return Gang(
            info=info,
            trainer=self._connector.trainer(info.address),
            source=self._connector.source(info.address) if is_actor else None,
            clock=self._clock,
            waits=self._waits,
            timeout_s=section.command_timeout_s,
        )


async def _close(connection: Closable) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await connection.close()
    except (TimeoutError, ShoalError) as error:
        log.warning("close_failed", error=repr(error))
