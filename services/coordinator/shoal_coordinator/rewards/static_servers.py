"""Reward servers that cannot register: the coordinator asks them at their addresses, and registers them for as long as they answer.

So they are services like all others: they take traffic, are suspected, and are shown as those that hold a lease themselves. Only what
they offer tells one start of such a server from the next; it is their incarnation.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Mapping, Sequence

from shoal.errors import ShoalError
from shoal.telemetry.logs import get_logger
from shoal.types import ScorerDescription, ServiceInfo, ServiceKind
from shoal_coordinator.connections import Connector, RewardCalls
from shoal_coordinator.registry import Lease, Registry

log = get_logger(__name__)

CHECKS_PER_LEASE = 4
MAX_ASK_TIMEOUT_S = 2.0
STATIC_PREFIX = "static-"


def is_static(info: ServiceInfo) -> bool:
    """Whether the coordinator registered it on its behalf."""
    return info.kind is ServiceKind.REWARD and info.incarnation.startswith(STATIC_PREFIX)


class StaticServers:
    """Asks servers by address; used from the event loop alone. `run` must be running for them to be asked."""

    def __init__(self, registry: Registry, connector: Connector) -> None:
        self._registry = registry
        self._connector = connector
        self._interval_s = registry.lease_s / CHECKS_PER_LEASE
        self._wanted: frozenset[str] = frozenset()
        self._problems: dict[str, str] = {}
        self._changed = asyncio.Event()

    @property
    def addresses(self) -> frozenset[str]:
        """The servers that are asked."""
        return self._wanted

    def set_addresses(self, addresses: Collection[str]) -> None:
        """Ask these servers from now on, and no others."""
        if self._wanted != frozenset(addresses):
            self._wanted = frozenset(addresses)
            self._changed.set()

    def problems(self) -> Mapping[str, str]:
        """Address -> why it did not answer when it was last asked."""
        return dict(self._problems)

    async def run(self) -> None:
        """Ask until cancelled; what is registered then is left to its lease."""
        watches: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for address in watches.keys() - self._wanted:
                    watches.pop(address).cancel()
                for address in self._wanted - watches.keys():
                    watches[address] = group.create_task(self._watch(address))
                await self._changed.wait()

    async def _watch(self, address: str) -> None:
        client: RewardCalls | None = None
        lease: Lease | None = None
        try:
            client = await self._connected(address)
            while True:
                lease = await self._ask(address, client) or lease
                await asyncio.sleep(self._interval_s)
        finally:
            self._problems.pop(address, None)
            if lease is not None:
                self._registry.deregister(lease.info.service_id, lease.lease_id)
            if client is not None:
                await client.close()

    async def _connected(self, address: str) -> RewardCalls:
        """A client, which nobody has asked anything; a certificate that cannot be read now costs this server, not the run."""
        while True:
            try:
                return self._connector.reward(address)
            except ShoalError as error:
                self._note_silent(address, error)
                await asyncio.sleep(self._interval_s)

    async def _ask(self, address: str, client: RewardCalls) -> Lease | None:
        """One question; its lease if it answers. One that does not is left to the end of its lease."""
        try:
            scorers = await client.describe(timeout_s=min(self._interval_s, MAX_ASK_TIMEOUT_S))
        except ShoalError as error:
            self._note_silent(address, error)
            return None
        self._problems.pop(address, None)
        if self._registers_itself(address):
            return None
        return self._registry.register(
            ServiceInfo(
                run_id=self._registry.run_id,
                service_id=address,
                kind=ServiceKind.REWARD,
                address=address,
                incarnation=STATIC_PREFIX + _digest(scorers),
            )
        )

    def _note_silent(self, address: str, error: ShoalError) -> None:
        if address not in self._problems:
            log.warning("static_server_silent", address=address, error=str(error))
        self._problems[address] = str(error)

    def _registers_itself(self, address: str) -> bool:
        """One server under two names would count as two replicas."""
        return any(info.address == address and not is_static(info) for info in self._registry.services(ServiceKind.REWARD))


def _digest(scorers: Sequence[ScorerDescription]) -> str:
    facts = sorted(f"{scorer.name}\0{scorer.version}\0{scorer.fingerprint}" for scorer in scorers)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
