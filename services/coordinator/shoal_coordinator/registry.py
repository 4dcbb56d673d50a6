"""Which services exist and are alive.

A registration is a lease. A service that is started again replaces its old entry under the same service_id; an entry
that is not renewed within `lease_s` expires. Listeners run synchronously in the event loop, in order of registration,
and must not block.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from shoal.errors import ConfigError, InvalidRequestError, NotFoundError, UnavailableError
from shoal.rpc.channel import split_address
from shoal.types import ServiceInfo, ServiceKind

EXPIRY_CHECKS_PER_LEASE = 4
MAX_ID_CHARS = 256

ReadyTest: TypeAlias = Callable[[ServiceInfo], bool]
Missing: TypeAlias = Mapping[ServiceKind, tuple[int, int]]


def always_ready(info: ServiceInfo) -> bool:
    """A registered service is ready unless somebody knows better."""
    return bool(info.service_id)


class RegistryChange(StrEnum):
    """What happened to an entry."""

    JOINED = "joined"
    REPLACED = "replaced"
    LEFT = "left"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryEvent:
    """One change; info is the new entry, or the one that is gone."""

    change: RegistryChange
    info: ServiceInfo


@dataclass(slots=True, kw_only=True)
class Lease:
    """An entry; expires_s is on the registry's monotonic clock."""

    info: ServiceInfo
    lease_id: str
    registered_unix_s: float
    renewed_unix_s: float
    expires_s: float


class Registry:
    """Leases by service_id; used from the event loop alone."""

    def __init__(
        self,
        *,
        run_id: str,
        lease_s: float,
        now_s: Callable[[], float] = time.monotonic,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.run_id = run_id
        self.lease_s = lease_s
        self.required_policy_version = 0
        """What rollout servers are told to serve before they answer; 0 while no version is known."""
        self._now_s = now_s
        self._now_unix_s = now_unix_s
        self._leases: dict[str, Lease] = {}
        self._absent_since_unix_s = dict.fromkeys(ServiceKind, now_unix_s())
        self._listeners: list[Callable[[RegistryEvent], None]] = []
        self._changed = asyncio.Event()

    def subscribe(self, listener: Callable[[RegistryEvent], None]) -> None:
        """Call listener on every change from now on."""
        self._listeners.append(listener)

    def register(self, info: ServiceInfo) -> Lease:
        """Add or replace an entry; the same incarnation again keeps its lease id.

        Raises: InvalidRequestError: run_id differs, or an id or address is empty.
        """
        self._check(info)
        old = self._leases.get(info.service_id)
        now_unix_s = self._now_unix_s()
        if old is not None and (old.info.incarnation, old.info.address) == (info.incarnation, info.address):
            old.info = info
            return self.renew(info.service_id, old.lease_id)
        lease = Lease(
            info=info,
            lease_id=secrets.token_hex(8),
            registered_unix_s=now_unix_s,
            renewed_unix_s=now_unix_s,
            expires_s=self._now_s() + self.lease_s,
        )
        self._leases[info.service_id] = lease
        self._notify(RegistryChange.JOINED if old is None else RegistryChange.REPLACED, info)
        return lease

    def renew(self, service_id: str, lease_id: str) -> Lease:
        """Extend a lease.

        Raises: NotFoundError: no such lease, it expired, or a restarted service replaced it.
        """
        lease = self._leases.get(service_id)
        if lease is None or lease.lease_id != lease_id:
            raise NotFoundError(f"service {service_id!r} has no lease {lease_id!r} (expired or replaced); register again")
        lease.expires_s = self._now_s() + self.lease_s
        lease.renewed_unix_s = self._now_unix_s()
        return lease

    def deregister(self, service_id: str, lease_id: str) -> None:
        """Remove an entry; unknown and replaced leases are ignored."""
        lease = self._leases.get(service_id)
        if lease is not None and lease.lease_id == lease_id:
            self._remove(lease, RegistryChange.LEFT)

    def expire_due(self) -> list[ServiceInfo]:
        """Remove and return the entries whose lease has run out."""
        now_s = self._now_s()
        due = [lease for lease in self._leases.values() if lease.expires_s <= now_s]
        for lease in due:
            self._remove(lease, RegistryChange.EXPIRED)
        return [lease.info for lease in due]

    async def run_expiry(self) -> None:
        """Expire leases until cancelled."""
        while True:
            await asyncio.sleep(self.lease_s / EXPIRY_CHECKS_PER_LEASE)
            self.expire_due()

    def leases(self, kind: ServiceKind | None = None) -> tuple[Lease, ...]:
        """Live entries, of one kind or all, by service_id."""
        found = [lease for lease in self._leases.values() if kind is None or lease.info.kind == kind]
        return tuple(sorted(found, key=lambda lease: lease.info.service_id))

    def services(self, kind: ServiceKind | None = None) -> tuple[ServiceInfo, ...]:
        """Live services, of one kind or all, by service_id."""
        return tuple(lease.info for lease in self.leases(kind))

    def missing(self, counts: Mapping[ServiceKind, int], is_ready: ReadyTest = always_ready) -> Missing:
        """Kinds with fewer ready services than wanted, as (ready, wanted)."""
        ready = {kind: sum(is_ready(info) for info in self.services(kind)) for kind in counts}
        return {kind: (ready[kind], wanted) for kind, wanted in counts.items() if ready[kind] < wanted}

    async def wait_for(self, counts: Mapping[ServiceKind, int], timeout_s: float, is_ready: ReadyTest = always_ready) -> None:
        """Wait until at least `counts[kind]` services of each kind are ready.

        Args:
            counts: services wanted per kind.
            timeout_s: how long to wait, in seconds.
            is_ready: further condition; whoever changes its answer calls `wake_waiters`.

        Raises: UnavailableError: names what is missing, since when, and where to look.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.missing(counts, is_ready):
                    await self._changed.wait()
        except TimeoutError:
            raise UnavailableError(missing_message(self, self.missing(counts, is_ready), timeout_s)) from None

    def wake_waiters(self) -> None:
        """Let every `wait_for` look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def absent_since_unix_s(self, kind: ServiceKind) -> float:
        """When the last service of this kind went away, or when the registry started if there never was one."""
        return self._absent_since_unix_s[kind]

    def _check(self, info: ServiceInfo) -> None:
        # A reward server may serve several runs, and then belongs to none.
        if info.run_id != self.run_id and not (info.kind is ServiceKind.REWARD and not info.run_id):
            raise InvalidRequestError(
                f"service {info.service_id!r} belongs to run {info.run_id!r} but this coordinator drives {self.run_id!r}; "
                "start it with this run's config or point it at its own coordinator"
            )
        if not info.service_id or not info.address or not info.incarnation:
            raise InvalidRequestError(f"service_id, address and incarnation must not be empty, got {info}; fill them in")
        if len(info.service_id) > MAX_ID_CHARS or not info.service_id.isprintable():
            raise InvalidRequestError(
                f"service_id {info.service_id[:80]!r} is too long or has control characters; give at most {MAX_ID_CHARS} printable ones"
            )
        try:
            split_address(info.address)
        except ConfigError as error:
            raise InvalidRequestError(f"service {info.service_id!r}: {error}") from error

    def _remove(self, lease: Lease, change: RegistryChange) -> None:
        del self._leases[lease.info.service_id]
        self._absent_since_unix_s[lease.info.kind] = self._now_unix_s()
        self._notify(change, lease.info)

    def _notify(self, change: RegistryChange, info: ServiceInfo) -> None:
        event = RegistryEvent(change=change, info=info)
        for listener in self._listeners:
            listener(event)
        self.wake_waiters()


def missing_message(registry: Registry, missing: Missing, waited_s: float) -> str:
    """Say which services are missing, since when, and where to look.

    Args:
        missing: per kind, (ready, wanted).
        waited_s: how long was waited, in seconds.
    """
    parts = []
    for kind, (ready, wanted) in missing.items():
        since = time.strftime("%H:%M:%S", time.localtime(registry.absent_since_unix_s(kind)))
        present = [info.service_id for info in registry.services(kind)]
        seen = f"registered but not ready: {', '.join(present)}" if present else f"none registered since {since}"
        parts.append(f"{wanted - ready} of {wanted} {kind} services ({seen})")
    kinds = ", ".join(missing)
    return f"after {waited_s:.0f} s still missing: {'; '.join(parts)}; look at the log of each {kinds} service, then start it again"
