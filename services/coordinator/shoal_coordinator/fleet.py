"""The registered services as connections, and which rollout servers may take traffic.

A rollout server is *ready* when it serves exactly the current policy version; otherwise it is *fenced* until a weight
push brings it there. Fenced servers are caught up in the background, one push at a time. A server that a call found
unavailable is *suspect*, and asked until it answers again; so is a reward server that has just joined. An audit that finds
other weights in a server fences it too.

Invariant: `weights_lock` is held by whoever reads the actor's weights (a push, an audit) or changes them (an update), so a
push never mixes two versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from shoal.config.models import RunConfig
from shoal.errors import DeadlineError, ShoalError, UnavailableError
from shoal.telemetry.logs import get_logger
from shoal.types import Int32Array, ServiceInfo, ServiceKind
from shoal_coordinator.audit import Auditor, require_comparable
from shoal_coordinator.audit_report import AuditReport
from shoal_coordinator.connections import Connector
from shoal_coordinator.dispatcher import RolloutEndpoint
from shoal_coordinator.gangs import Gang
from shoal_coordinator.members import RewardMember, RolloutMember, WatchedReward, WatchedRollout
from shoal_coordinator.push_history import PushHistory, PushReason
from shoal_coordinator.pushing import MemberPusher
from shoal_coordinator.registry import Missing, Registry, RegistryChange, RegistryEvent
from shoal_coordinator.reward_watch import RewardWatch
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.roster import Roster
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import StageClock
from shoal_coordinator.waiting import WaitBoard

log = get_logger(__name__)

GANG_KINDS = frozenset({ServiceKind.ACTOR, ServiceKind.CRITIC})
CATCH_UP_PAUSE_S = 1.0
CHECK_TIMEOUT_S = 10.0
"""Deadline of asking a server that takes traffic for its version; a busy one answers late."""

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
        self._config = config
        self._waits = waits
        self._history = history
        self._rollout_pool = rollout_pool
        self._reward_pool = reward_pool
        self._now_s = now_s
        self._roster = Roster(connector, config, clock, waits)
        self._reward_watch = RewardWatch(self._roster.rewards.values, self._wake)
        lease_s = config.coordinator.lease_s
        self._pusher = MemberPusher(config.push, lease_s=lease_s, history=history, clock=clock, waits=waits, now_s=now_s)
        self._auditor = Auditor(config)
        self._num_step_pushes = 0
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
        return tuple(self._roster.rollouts.values())

    def rewards(self) -> tuple[RewardMember, ...]:
        """All reward servers, those that are registered and those that the coordinator asks itself."""
        return tuple(self._roster.rewards.values())

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when a service has come, gone or changed, or after timeout_s."""
        await _wait_for(self._changed, timeout_s)

    def ready_rollouts(self) -> tuple[RolloutMember, ...]:
        """The rollout servers that may take traffic."""
        return tuple(member for member in self.rollouts() if self.is_ready(member.info))

    def traffic_ids(self) -> tuple[str, ...]:
        """Ids of the rollout and reward servers that take traffic."""
        return self._rollout_pool.server_ids() + self._reward_pool.server_ids()

    def gang(self, kind: ServiceKind) -> Gang:
        """The actor or the critic.

        Raises: NotFoundError: it is not registered.
        """
        return self._roster.gang(kind)

    def is_ready(self, info: ServiceInfo) -> bool:
        """Whether a service may be used; a rollout server only with the current version, once that is known."""
        if info.kind is ServiceKind.REWARD:
            reward = self._roster.rewards.get(info.service_id)
            return reward is not None and not reward.suspect
        if info.kind is not ServiceKind.ROLLOUT:
            return True
        member = self._roster.rollouts.get(info.service_id)
        return member is not None and member.serves(member.served_version if self._current_version is None else self._current_version)

    def served_version(self, info: ServiceInfo) -> int:
        """The version that a service is known to serve or hold; what it registered with if it is no rollout server."""
        member = self._roster.rollouts.get(info.service_id)
        return info.policy_version if member is None else member.served_version

    def state_of(self, info: ServiceInfo) -> str:
        """ready, silent or fenced."""
        if self.is_ready(info):
            return "ready"
        member = self._roster.rollouts.get(info.service_id) or self._roster.rewards.get(info.service_id)
        return "silent" if member is None or member.suspect else "fenced"

    def fenced_because(self, info: ServiceInfo) -> str:
        """What the last push or audit found wrong with a rollout server, or why a reward server is not used; empty if nothing."""
        if (reward := self._roster.rewards.get(info.service_id)) is not None:
            return reward.problem
        member = self._roster.rollouts.get(info.service_id)
        return "" if member is None else member.wrong or member.last_error

    def set_policy_version(self, policy_version: int) -> None:
        """Make a version current: servers with another one are fenced, and caught up by `run`.

        Nothing is routed to a server with another version from here on; servers learn it with their leases as the least that they
        may answer with.
        """
        self._current_version = self._registry.required_policy_version = policy_version
        self._wake()

    def set_probe_prompts(self, prompts: Sequence[Int32Array]) -> None:
        """Prompts for the probe sets of audits; [P] ids each."""
        self._auditor.probe_prompts = prompts

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
        text = ", ".join(f"{kind} ({ready} of {wanted})" for kind, (ready, wanted) in missing.items())
        absent = [info.service_id for info in self._registry.services() if not self.is_ready(info)]
        with self._waits.waiting("coordinator", absent or [str(kind) for kind in missing], f"services to be ready, so far: {text}"):
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

        Servers go on with the old version meanwhile, and with their requests. Those that missed the push, all if it failed, are
        fenced after it. Every `push.audit_every` pushes the servers are audited.
        """
        # A suspect would only hold the others up until PREPARE's deadline; it is caught up once it answers.
        now_s = self._now_s()
        if members := {
            name: member for name, member in self._roster.rollouts.items() if not member.suspect and member.rests_until_s <= now_s
        }:
            await self._push_to(members, policy_version, PushReason.STEP)
        # In one go with what the push has changed: a server that swapped in time must not lose its running requests.
        self.set_policy_version(policy_version)
        self._num_step_pushes += 1
        if (every := self._config.push.audit_every) and self._num_step_pushes % every == 0 and (audited := self._auditable()):
            await self._audit(audited)

    async def audit(self, timeout_s: float) -> AuditReport:
        """Compare all ready servers with the trainer as soon as its weights are free.

        Raises: StateError: there is nothing to compare yet. DeadlineError: not done within timeout_s. NotFoundError: no actor.
        """
        require_comparable(self._auditable(), self.policy_version)
        try:
            async with asyncio.timeout(timeout_s), self.weights_lock:
                members = self._auditable()
                require_comparable(members, self.policy_version)
                return await self._audit(members)
        except TimeoutError:
            raise DeadlineError(f"the audit did not end within {timeout_s:g} s; the run may be in an update or a push: try again") from None

    async def run(self) -> None:
        """Catch up fenced servers, watch the others, and close left connections until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._roster.run())
                group.create_task(self._reward_watch.run())
                group.create_task(self._watch_versions())
                await self._catch_up_forever()
        finally:
            await self._roster.close()

    async def _catch_up_forever(self) -> None:
        while True:
            changed = self._changed
            all_answer = await self._probe_suspects()
            all_current = await self._catch_up()
            if all_answer and all_current:
                await changed.wait()
            else:
                # A failed push wakes everybody, this loop too: only what changes from here on may end the pause early.
                await _wait_for(self._changed, CATCH_UP_PAUSE_S)

    async def _probe_suspects(self) -> bool:
        """Ask suspects whether they answer again; False if some do not."""
        suspects = [member for member in self.rollouts() if member.suspect]
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

    async def _watch_versions(self) -> None:
        """Ask the servers that take traffic, once a lease, which version they serve: what they say counts."""
        while True:
            await asyncio.sleep(self._config.coordinator.lease_s)
            async with asyncio.TaskGroup() as group:
                for member in self.ready_rollouts():
                    group.create_task(self._check_version(member))

    async def _check_version(self, member: RolloutMember) -> None:
        num_pushes = self._pusher.num_pushes
        try:
            version = await member.describe_version(CHECK_TIMEOUT_S)
        except UnavailableError:
            self._suspect(member)
            return
        except ShoalError as error:  # late or odd; its lease tells whether it lives
            log.debug("version_unknown", service_id=member.info.service_id, error=str(error))
            return
        # The answer is of no use if a push has changed the version meanwhile, or may have.
        if num_pushes == self._pusher.num_pushes and not self._pusher.is_pushing and member.note_version(version):
            log.error("server_serves_other_version", server=member.info.service_id, served=version, current=self.policy_version)
            self._wake()

    async def _catch_up(self) -> bool:
        """Push to all fenced servers; False if some are still fenced."""
        fenced = self._due()
        if not fenced:
            return not self._fenced()
        with self._waits.waiting("coordinator", list(fenced), f"catching up to policy version {self.policy_version}"):
            async with self.weights_lock:
                # A step's push may have reached them while the lock was held elsewhere.
                if fenced := self._due():
                    await self._push_to(fenced, self.policy_version, PushReason.CATCH_UP)
                    self._wake()
        return not self._fenced()

    def _fenced(self) -> dict[str, RolloutMember]:
        if self._current_version is None or not self._roster.has_gang(ServiceKind.ACTOR):
            return {}
        version = self._current_version
        return {name: member for name, member in self._roster.rollouts.items() if not member.suspect and not member.serves(version)}

    def _due(self) -> dict[str, RolloutMember]:
        now_s = self._now_s()
        return {name: member for name, member in self._fenced().items() if member.rests_until_s <= now_s}

    async def _push_to(self, members: Mapping[str, RolloutMember], version: int, reason: PushReason) -> None:
        await self._pusher.push(self.gang(ServiceKind.ACTOR).require_source(), members, version, reason)

    def _auditable(self) -> dict[str, RolloutMember]:
        if self._current_version is None:
            return {}
        return {member.info.service_id: member for member in self.ready_rollouts()}

    async def _audit(self, members: Mapping[str, RolloutMember]) -> AuditReport:
        """Compare, record, and fence what differs; the caller holds weights_lock."""
        with self._waits.waiting("coordinator", list(members), f"audit of policy version {self.policy_version}"):
            report = await self._auditor.audit(self.gang(ServiceKind.ACTOR), members, self.policy_version)
        self._history.add_audit(report)
        for name, server in report.servers.items():
            if server.differs:
                members[name].note_wrong(f"its weights differ from the trainer's in {server.first_difference}")
        self._wake()
        return report

    def _is_ready_or_hopeless(self, info: ServiceInfo) -> bool:
        """As is_ready, but give up on a wait that cannot end well.

        Raises: TransportError: every registered server is alive and has refused every push for long.
        """
        if info.kind is ServiceKind.ROLLOUT:
            self._pusher.refuse_hopeless(self._roster.rollouts, self.policy_version)
        return self.is_ready(info)

    def _on_event(self, event: RegistryEvent) -> None:
        log.info("service_changed", change=event.change, service_id=event.info.service_id, kind=event.info.kind, address=event.info.address)
        if event.change is not RegistryChange.JOINED:
            self._roster.drop(event.info.service_id)
            # One that was started again has the same name and another connection: a pool would keep the old one.
            self._rollout_pool.remove(event.info.service_id)
            self._reward_pool.remove(event.info.service_id)
            self._pusher.leave_out(event.info.service_id)
            self._note_gang_loss(event)
        if event.change in (RegistryChange.JOINED, RegistryChange.REPLACED):
            self._roster.open(event.info)
        self._wake()

    def _note_gang_loss(self, event: RegistryEvent) -> None:
        if event.info.kind in GANG_KINDS and self.guards_gangs and self._lost_gang is None:
            how = {RegistryChange.EXPIRED: "its lease expired", RegistryChange.LEFT: "it left"}.get(event.change, "it was started again")
            self._lost_gang = (
                f"the {event.info.kind} gang {event.info.service_id!r} at {event.info.address} is gone ({how}) and its optimizer state "
                "with it; look at its log for the cause, remove it, and start the run again"
            )

    def _wake(self) -> None:
        """Give ready servers traffic and fenced ones none; let everybody who waits look again."""
        self._roster.publish_versions()
        self._update_pools()
        self._changed.set()
        self._changed = asyncio.Event()
        self._reward_watch.wake()
        self._registry.wake_waiters()

    def _update_pools(self) -> None:
        rollouts = self.ready_rollouts() if self._current_version is not None else ()
        _keep_only(self._rollout_pool, {member.info.service_id: self._watched_rollout(member) for member in rollouts})
        rewards = [member for member in self._roster.rewards.values() if not member.suspect]
        _keep_only(self._reward_pool, {member.info.service_id: self._watched_reward(member) for member in rewards})

    def _watched_rollout(self, member: RolloutMember) -> RolloutEndpoint:
        return WatchedRollout(member.client, lambda: self._suspect(member))

    def _watched_reward(self, member: RewardMember) -> RewardEndpoint:
        return WatchedReward(member, lambda: self._suspect(member))


async def _wait_for(changed: asyncio.Event, timeout_s: float) -> None:
    # Not asyncio.wait_for: on 3.11 it swallows a cancellation that comes together with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await changed.wait()


def _keep_only(pool: ServerPool[ClientT], wanted: Mapping[str, ClientT]) -> None:
    """Make the pool hold exactly the wanted servers; those that stay are left alone, with their work."""
    present = set(pool.server_ids())
    for service_id in present - set(wanted):
        pool.remove(service_id)
    for service_id in sorted(set(wanted) - present):
        pool.add(service_id, wanted[service_id])
