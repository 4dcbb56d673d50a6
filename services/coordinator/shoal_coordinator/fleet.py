"""The registered services as connections, and which rollout servers may take traffic.

A rollout server is *ready* when it serves exactly the current policy version; otherwise it is *fenced* until a weight
push brings it there. Fenced servers are caught up in the background, one push at a time. A server that a call found
unavailable is *suspect*, and asked until it answers again.

Invariant: `weights_lock` is held by whoever reads the actor's weights (a push) or changes them (an update), so a push
never mixes two versions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from shoal.config.models import RunConfig
from shoal.errors import NotFoundError, ShoalError, TransportError, UnavailableError
from shoal.telemetry.logs import get_logger
from shoal.types import ServiceInfo, ServiceKind
from shoal_coordinator.connections import Connector
from shoal_coordinator.dispatcher import RolloutEndpoint
from shoal_coordinator.gangs import Closable, Gang
from shoal_coordinator.members import RewardMember, RolloutMember, WatchedReward, WatchedRollout
from shoal_coordinator.push import WeightPush
from shoal_coordinator.push_history import PushHistory, PushReason
from shoal_coordinator.registry import Missing, Registry, RegistryChange, RegistryEvent
from shoal_coordinator.scoring import RewardEndpoint
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import Stage, StageClock
from shoal_coordinator.waiting import WaitBoard

log = get_logger(__name__)

GANG_KINDS = frozenset({ServiceKind.ACTOR, ServiceKind.CRITIC})
CATCH_UP_PAUSE_S = 1.0
HOPELESS_FAILURES = 3
HOPELESS_LEASES = 2.0
"""A server that lives but has failed every push for so many leases will not come round by itself."""
CLOSE_TIMEOUT_S = 5.0

ClientT = TypeVar("ClientT")


class Fleet:
    """Follows a registry; used from the event loop alone. `run` must be running for fenced servers to be caught up."""

    def __init__(
        self,
        *,
        registry: Registry,
        connector: Connector,
        config: RunConfig,
        clock: StageClock,
        waits: WaitBoard,
        history: PushHistory,
        rollout_pool: ServerPool[RolloutEndpoint],
        reward_pool: ServerPool[RewardEndpoint],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._connector = connector
        self._config = config
        self._clock = clock
        self._waits = waits
        self._history = history
        self._rollout_pool = rollout_pool
        self._reward_pool = reward_pool
        self._now_s = now_s
        self._rollouts: dict[str, RolloutMember] = {}
        self._rewards: dict[str, RewardMember] = {}
        self._gangs: dict[str, Gang] = {}
        self._to_close: list[Closable] = []
        self._lost_gang: str | None = None
        self._changed = asyncio.Event()
        self.weights_lock = asyncio.Lock()
        self.guards_gangs = False
        """True once training depends on the gangs' state: from then on their loss cannot be made good."""
        self._current_version: int | None = None
        registry.subscribe(self._on_event)

    @property
    def policy_version(self) -> int:
        """The version that servers must serve to take traffic; 0 before it is known."""
        return 0 if self._current_version is None else self._current_version

    def rollouts(self) -> tuple[RolloutMember, ...]:
        """All registered rollout servers."""
        return tuple(self._rollouts.values())

    def ready_rollouts(self) -> tuple[RolloutMember, ...]:
        """The rollout servers that may take traffic."""
        return tuple(member for member in self._rollouts.values() if self.is_ready(member.info))

    def traffic_ids(self) -> tuple[str, ...]:
        """Ids of the rollout and reward servers that take traffic."""
        return self._rollout_pool.server_ids() + self._reward_pool.server_ids()

    def rewards(self) -> tuple[RewardMember, ...]:
        """All registered reward servers."""
        return tuple(self._rewards.values())

    def gang(self, kind: ServiceKind) -> Gang:
        """The actor or the critic.

        Raises: NotFoundError: it is not registered.
        """
        for gang in self._gangs.values():
            if gang.info.kind is kind:
                return gang
        raise NotFoundError(f"no {kind} gang is registered; start it, or look at its log")

    def is_ready(self, info: ServiceInfo) -> bool:
        """Whether a service may be used; a rollout server only with the current version, once that is known."""
        if info.kind is ServiceKind.REWARD:
            reward = self._rewards.get(info.service_id)
            return reward is not None and not reward.suspect
        if info.kind is not ServiceKind.ROLLOUT:
            return True
        member = self._rollouts.get(info.service_id)
        return member is not None and not member.suspect and self._current_version in (None, member.served_version)

    def served_version(self, info: ServiceInfo) -> int:
        """The version that a service is known to serve or hold; what it registered with if it is no rollout server."""
        member = self._rollouts.get(info.service_id)
        return info.policy_version if member is None else member.served_version

    def state_of(self, info: ServiceInfo) -> str:
        """ready, silent or fenced."""
        if self.is_ready(info):
            return "ready"
        member = self._rollouts.get(info.service_id) or self._rewards.get(info.service_id)
        return "silent" if member is None or member.suspect else "fenced"

    def set_policy_version(self, policy_version: int) -> None:
        """Make a version current: servers with another one are fenced, and caught up by `run`."""
        self._current_version = policy_version
        self._wake()

    def missing(self, counts: Mapping[ServiceKind, int]) -> Missing:
        """Kinds with fewer ready services than wanted, as (ready, wanted)."""
        return self._registry.missing(counts, self.is_ready)

    async def wait_for(self, counts: Mapping[ServiceKind, int]) -> None:
        """Wait up to coordinator.ready_timeout_s for ready services.

        Raises:
            UnavailableError: some are still missing; names them.
            TransportError: the servers are there but no push reaches them.
        """
        if not (missing := self.missing(counts)):
            return
        text = ", ".join(f"{wanted - ready} of {wanted} {kind}" for kind, (ready, wanted) in missing.items())
        absent = [info.service_id for info in self._registry.services() if not self.is_ready(info)]
        with self._waits.waiting("coordinator", absent or [str(kind) for kind in missing], f"services to be ready: {text}"):
            await self._registry.wait_for(counts, self._config.coordinator.ready_timeout_s, self._is_ready_or_hopeless)

    async def wait_for_lost_gang(self) -> None:
        """Return only by raising.

        Raises: UnavailableError: a gang that training depends on is gone.
        """
        while self._lost_gang is None:
            await self._changed.wait()
        raise UnavailableError(self._lost_gang)

    async def push(self, policy_version: int) -> None:
        """Bring every registered server to a new version; the caller holds weights_lock.

        Servers go on with the old version meanwhile. Those that missed the push, all if it failed, are fenced after it.
        """
        # A suspect would only hold the others up until PREPARE's deadline; it is caught up once it answers.
        if members := {name: member for name, member in self._rollouts.items() if not member.suspect}:
            await self._push_to(members, policy_version, PushReason.STEP)
        self.set_policy_version(policy_version)

    async def run(self) -> None:
        """Catch up fenced servers and close left connections until cancelled."""
        try:
            while True:
                changed = self._changed
                await self._close_left()
                all_answer = await self._probe_suspects()
                all_current = await self._catch_up()
                if all_answer and all_current:
                    await self._pause(changed, None)
                else:
                    # A failed push wakes everybody, this loop too: only what changes from here on may end the pause early.
                    await self._pause(self._changed, CATCH_UP_PAUSE_S)
        finally:
            await self._close_all()

    async def _pause(self, changed: asyncio.Event, timeout_s: float | None) -> None:
        try:
            await asyncio.wait_for(changed.wait(), timeout_s)
        except TimeoutError:
            return

    async def _probe_suspects(self) -> bool:
        """Ask suspects whether they answer again; False if some do not."""
        members: list[RolloutMember | RewardMember] = [*self._rollouts.values(), *self._rewards.values()]
        suspects = [member for member in members if member.suspect]
        for member in suspects:
            try:
                await member.probe()
            except ShoalError as error:
                log.debug("suspect_silent", service_id=member.info.service_id, error=str(error))
                continue
            member.suspect = False
            self._wake()
        return not any(member.suspect for member in suspects)

    def _suspect(self, member: RolloutMember | RewardMember) -> None:
        if not member.suspect:
            log.warning("service_unavailable", service_id=member.info.service_id, address=member.info.address)
            member.suspect = True
            self._wake()

    async def _catch_up(self) -> bool:
        """Push to all fenced servers; False if some are still fenced."""
        fenced = self._fenced()
        if not fenced:
            return True
        with self._waits.waiting("coordinator", list(fenced), f"catching up to policy version {self.policy_version}"):
            async with self.weights_lock:
                # A step's push may have reached them while the lock was held elsewhere.
                if fenced := self._fenced():
                    await self._push_to(fenced, self.policy_version, PushReason.CATCH_UP)
        return not self._fenced()

    def _fenced(self) -> dict[str, RolloutMember]:
        if self._current_version is None or not self._has_actor():
            return {}
        return {
            name: member for name, member in self._rollouts.items() if member.served_version != self._current_version and not member.suspect
        }

    def _has_actor(self) -> bool:
        return any(gang.info.kind is ServiceKind.ACTOR for gang in self._gangs.values())

    async def _push_to(self, members: Mapping[str, RolloutMember], version: int, reason: PushReason) -> None:
        source = self.gang(ServiceKind.ACTOR).require_source()
        sinks = {name: member.sink for name, member in members.items()}
        transaction = WeightPush(source, sinks, version, self._config.push)
        with self._waits.waiting("coordinator", list(members), f"weight push of policy version {version}"), self._clock.measure(Stage.PUSH):
            try:
                report = await transaction.run()
            finally:
                self._history.add(transaction.report(), reason)
        for name, member in members.items():
            if name in report.committed_servers:
                member.served_version, member.num_failures, member.failing_since_s = version, 0, None
            else:
                self._note_failure(member, report.failed_servers.get(name) or report.error or "unknown")
        self._wake()

    def _note_failure(self, member: RolloutMember, error: str) -> None:
        member.num_failures += 1
        member.last_error = error
        if member.failing_since_s is None:
            member.failing_since_s = self._now_s()
        log.warning("server_fenced", server=member.info.service_id, error=error, failures=member.num_failures)

    def _is_ready_or_hopeless(self, info: ServiceInfo) -> bool:
        """As is_ready, but give up on a wait that cannot end well.

        Raises: TransportError: every registered server is alive and has refused every push for HOPELESS_LEASES leases.
        """
        members = list(self._rollouts.values())
        if info.kind is ServiceKind.ROLLOUT and members and all(self._is_hopeless(member) for member in members):
            reasons = "; ".join(f"{member.info.service_id}: {member.last_error}" for member in members)
            raise TransportError(f"policy version {self.policy_version} cannot be pushed to any rollout server: {reasons}")
        return self.is_ready(info)

    def _is_hopeless(self, member: RolloutMember) -> bool:
        if member.failing_since_s is None or member.num_failures < HOPELESS_FAILURES:
            return False
        return self._now_s() - member.failing_since_s > HOPELESS_LEASES * self._config.coordinator.lease_s

    def _on_event(self, event: RegistryEvent) -> None:
        log.info("service_changed", change=event.change, service_id=event.info.service_id, kind=event.info.kind, address=event.info.address)
        if event.change is not RegistryChange.JOINED:
            self._drop(event.info.service_id)
            self._note_gang_loss(event)
        if event.change in (RegistryChange.JOINED, RegistryChange.REPLACED):
            self._open(event.info)
        self._wake()

    def _note_gang_loss(self, event: RegistryEvent) -> None:
        if event.info.kind in GANG_KINDS and self.guards_gangs and self._lost_gang is None:
            how = {RegistryChange.EXPIRED: "its lease expired", RegistryChange.LEFT: "it left"}.get(event.change, "it was started again")
            self._lost_gang = (
                f"the {event.info.kind} gang {event.info.service_id!r} at {event.info.address} is gone ({how}) and its optimizer state "
                "with it; look at its log for the cause, remove it, and start the run again"
            )

    def _open(self, info: ServiceInfo) -> None:
        if info.kind is ServiceKind.ROLLOUT:
            client, sink = self._connector.rollout(info.address), self._connector.sink(info.address)
            self._rollouts[info.service_id] = RolloutMember(info=info, client=client, sink=sink, served_version=info.policy_version)
        elif info.kind is ServiceKind.REWARD:
            self._rewards[info.service_id] = RewardMember(info=info, client=self._connector.reward(info.address))
        else:
            self._gangs[info.service_id] = self._open_gang(info)

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

    def _drop(self, service_id: str) -> None:
        if (rollout := self._rollouts.pop(service_id, None)) is not None:
            self._rollout_pool.remove(service_id)
            self._to_close += [rollout.client, rollout.sink]
        if (reward := self._rewards.pop(service_id, None)) is not None:
            self._reward_pool.remove(service_id)
            self._to_close.append(reward.client)
        if (gang := self._gangs.pop(service_id, None)) is not None:
            self._to_close += gang.connections()

    async def _close_all(self) -> None:
        for service_id in [*self._rollouts, *self._rewards, *self._gangs]:
            self._drop(service_id)
        await self._close_left()

    async def _close_left(self) -> None:
        left, self._to_close = self._to_close, []
        for connection in left:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await connection.close()
            except (TimeoutError, ShoalError) as error:
                log.warning("close_failed", error=repr(error))

    def _wake(self) -> None:
        """Give ready servers traffic and fenced ones none; let everybody who waits look again."""
        self._update_pools()
        self._changed.set()
        self._changed = asyncio.Event()
        self._registry.wake_waiters()

    def _update_pools(self) -> None:
        rollouts = self.ready_rollouts() if self._current_version is not None else ()
        _keep_only(self._rollout_pool, {member.info.service_id: self._watched_rollout(member) for member in rollouts})
        rewards = [member for member in self._rewards.values() if not member.suspect]
        _keep_only(self._reward_pool, {member.info.service_id: self._watched_reward(member) for member in rewards})

    def _watched_rollout(self, member: RolloutMember) -> RolloutEndpoint:
        return WatchedRollout(member.client, lambda: self._suspect(member))

    def _watched_reward(self, member: RewardMember) -> RewardEndpoint:
        return WatchedReward(member.client, lambda: self._suspect(member))


def _keep_only(pool: ServerPool[ClientT], wanted: Mapping[str, ClientT]) -> None:
    """Make the pool hold exactly the wanted servers; those that stay are left alone, with their work."""
    present = set(pool.server_ids())
    for service_id in present - set(wanted):
        pool.remove(service_id)
    for service_id in sorted(set(wanted) - present):
        pool.add(service_id, wanted[service_id])
