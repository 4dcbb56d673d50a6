"""Weight pushes to members of the fleet: who gets everything, what becomes of those that a push missed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from shoal.config.models import PushSection
from shoal.errors import TransportError
from shoal.telemetry.logs import get_logger
from shoal_coordinator.members import RolloutMember
from shoal_coordinator.push import WeightPush
from shoal_coordinator.push_calls import WeightSource
from shoal_coordinator.push_history import PushHistory, PushReason
from shoal_coordinator.push_report import PushReport
from shoal_coordinator.stage_clock import Stage, StageClock
from shoal_coordinator.waiting import WaitBoard

log = get_logger(__name__)

HOPELESS_FAILURES = 3
HOPELESS_LEASES = 2.0
"""A server that lives but has failed every push for so many leases will not come round by itself."""


class MemberPusher:
    """Pushes to members and keeps their state; one push at a time.

    Dense are: pushes that catch a server up, the first to a server after anything went wrong with it, and every `push.dense_every`-th.
    """

    def __init__(
        self,
        settings: PushSection,
        *,
        lease_s: float,
        history: PushHistory,
        clock: StageClock,
        waits: WaitBoard,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._lease_s = lease_s
        self._history = history
        self._clock = clock
        self._waits = waits
        self._now_s = now_s
        self._running: WeightPush | None = None
        self.num_pushes = 0
        """Pushes that have ended."""

    @property
    def is_pushing(self) -> bool:
        """Whether a push runs."""
        return self._running is not None

    async def push(self, source: WeightSource, members: Mapping[str, RolloutMember], policy_version: int, reason: PushReason) -> None:
        """Push to members, at least one; those that were missed say so afterwards."""
        catches_up = reason is PushReason.CATCH_UP
        dense = {name for name, member in members.items() if catches_up or member.wants_dense(self._settings.dense_every)}
        sinks = {name: member.sink for name, member in members.items()}
        transaction = self._running = WeightPush(source, sinks, policy_version, self._settings, dense=dense)
        what = f"weight push of policy version {policy_version}"
        try:
            with self._waits.waiting("coordinator", list(members), what), self._clock.measure(Stage.PUSH):
                report = await transaction.run()
        finally:
            self._running = None
            self.num_pushes += 1
            self._history.add(transaction.report(), reason)
        self._note(members, transaction, report)

    def leave_out(self, service_id: str) -> None:
        """A server is gone; a push that runs goes on without it."""
        if self._running is not None:
            self._running.leave_out(service_id, "it left, was started again, or its lease expired")

    def is_hopeless(self, member: RolloutMember) -> bool:
        """Whether a live server has refused every push for HOPELESS_LEASES leases."""
        if member.failing_since_s is None or member.num_failures < HOPELESS_FAILURES:
            return False
        return self._now_s() - member.failing_since_s > HOPELESS_LEASES * self._lease_s

    def refuse_hopeless(self, members: Mapping[str, RolloutMember], policy_version: int) -> None:
        """Give up waiting for what cannot come.

        Raises: TransportError: there are servers and all are hopeless.
        """
        if members and all(self.is_hopeless(member) for member in members.values()):
            reasons = "; ".join(f"{name}: {member.last_error}" for name, member in members.items())
            raise TransportError(f"policy version {policy_version} cannot be pushed to any rollout server: {reasons}")

    def _note(self, members: Mapping[str, RolloutMember], transaction: WeightPush, report: PushReport) -> None:
        failed = report.failed_servers
        for name, member in members.items():
            server = report.servers[name]
            if server.is_committed:
                member.note_commit(report.policy_version, transaction.plans.get(name), dense=server.dense)
            else:
                error = failed.get(name) or report.error or "unknown"
                member.note_failure(error, self._now_s())
                log.warning("server_fenced", server=name, error=error, failures=member.num_failures)
