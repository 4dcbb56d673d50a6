"""Which reward route scores what: the revisions of a run, the one that is active, and the groups that are pinned to them.

Every change goes one way: the table of stages allows it, its line is on disk (audit_log), memory changes, listeners are told. So what is
active in memory is what the log says, and a disk that fails refuses a command and changes nothing.

Invariant: changes are made one after another under a lock, and the memory of one change at a stroke; a pin taken while a line is being
written is a pin of what was active before. Used from the event loop alone.

A rollback makes the revision active that was active before the present one was made so. Two rollbacks lead back to where they began; to
go further back, activate that revision.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError

from shoal.errors import CapacityError, InvalidRequestError, NotFoundError, StateError
from shoal.telemetry.logs import get_logger
from shoal_coordinator.rewards.audit_log import COORDINATOR, LOG_NAME, AuditLog, LogEntry, RouteAction, damaged
from shoal_coordinator.rewards.component_checks import check_components, check_text
from shoal_coordinator.rewards.gates import Gates
from shoal_coordinator.rewards.route import RouteComponent, RouteRevision
from shoal_coordinator.rewards.route_record import RouteLedger, RouteRecord, stage_after, stored_components, stored_gates
from shoal_coordinator.rewards.route_stages import RouteStage

log = get_logger(__name__)

ResultT = TypeVar("ResultT")
Check: TypeAlias = Callable[[], None]

MAX_OPEN_REVISIONS = 64
"""Revisions that are neither rejected nor retired."""
MAX_ADDRESSES = 64
MAX_WHO_CHARS = 64
MAX_WHY_CHARS = 500
MAX_LABEL_CHARS = 64
MAX_PROBLEM_CHARS = 2000
OVER = frozenset({RouteStage.REJECTED, RouteStage.RETIRED})


class RoutePin:
    """Keeps a revision from being drained; made by `RouteBook.pin`."""

    __slots__ = ("_release", "_revision")

    def __init__(self, revision: RouteRevision, release: Callable[[], None]) -> None:
        self._revision = revision
        self._release: Callable[[], None] | None = release

    @property
    def revision(self) -> RouteRevision:
        """What is pinned."""
        return self._revision

    def release(self) -> None:
        """The group has ended, however; releasing twice is harmless."""
        release, self._release = self._release, None
        if release is not None:
            release()


class RouteBook:
    """The revisions of a run.

    Args:
        log: the open log; its lines are replayed.
    Raises: ConfigError: a line says what cannot be.
    """

    def __init__(self, log: AuditLog, *, now_unix_s: Callable[[], float] = time.time) -> None:
        self._log = log
        self._now_unix_s = now_unix_s
        self._ledger = RouteLedger()
        self._num_pins: Counter[int] = Counter()
        self._lock = asyncio.Lock()
        self._changing: set[asyncio.Task[Any]] = set()
        self._listeners: list[Callable[[LogEntry], None]] = []
        self._changed = asyncio.Event()
        for entry in log.entries:
            self._replay(entry)

    @classmethod
    def open(cls, folder: Path, run_id: str, *, now_unix_s: Callable[[], float] = time.time) -> RouteBook:
        """Open the book of a run's folder.

        Raises: ConfigError: its log cannot be used.
        """
        return cls(AuditLog(folder / LOG_NAME, run_id, now_unix_s()), now_unix_s=now_unix_s)

    @property
    def active(self) -> RouteRevision:
        """What new groups are scored by.

        Raises: StateError: no revision is active yet.
        """
        if not self._ledger.active:
            raise StateError("no revision of the reward route is active yet: wait until the first one has been checked")
        return self._ledger.record(self._ledger.active).revision

    @property
    def active_number(self) -> int:
        """Number of the active revision; 0 before there is one."""
        return self._ledger.active

    @property
    def previous_number(self) -> int:
        """What a rollback makes active; 0 if there is nothing to go back to."""
        return self._ledger.previous

    def pin(self) -> RoutePin:
        """Pin the active revision: it is not drained before the pin is released.

        Raises: StateError: no revision is active yet.
        """
        revision = self.active
        self._num_pins[revision.number] += 1
        return RoutePin(revision, lambda: self._unpin(revision.number))

    def revision(self, number: int) -> RouteRevision:
        """A revision. Raises: NotFoundError: there is none of that number."""
        return self._ledger.record(number).revision

    def stage(self, number: int) -> RouteStage:
        """Where a revision is. Raises: NotFoundError: there is none of that number."""
        return self._ledger.record(number).stage

    def record(self, number: int) -> RouteRecord:
        """Everything about a revision. Raises: NotFoundError: there is none of that number."""
        return self._ledger.record(number)

    def records(self) -> tuple[RouteRecord, ...]:
        """All revisions, oldest first."""
        return self._ledger.records()

    def in_stage(self, stage: RouteStage) -> tuple[RouteRecord, ...]:
        """The revisions in a stage, oldest first."""
        return tuple(record for record in self.records() if record.stage is stage)

    def shadows(self) -> tuple[tuple[RouteRevision, float], ...]:
        """The revisions that score a share of live groups beside the active one, and the share."""
        return tuple((record.revision, record.shadow_share or 0.0) for record in self.in_stage(RouteStage.SHADOW))

    def num_open_groups(self, number: int) -> int:
        """Groups that are pinned to a revision."""
        return self._num_pins[number]

    def addresses(self) -> tuple[str, ...]:
        """Servers that cannot register, of every revision that may still be used."""
        return tuple(sorted({address for record in self.records() if record.stage not in OVER for address in record.addresses}))

    def entries(self, limit: int) -> tuple[LogEntry, ...]:
        """The last lines of the log, oldest first."""
        return self._log.entries[-limit:]

    def subscribe(self, listener: Callable[[LogEntry], None]) -> None:
        """Tell a listener every line from now on, once it has taken effect; it must neither block nor raise."""
        self._listeners.append(listener)

    async def wait_for_change(self, timeout_s: float | None = None) -> None:
        """Return after the next line, when the last pin of a revision is released, or after timeout_s."""
        changed = self._changed
        # Not wait_for: on 3.11 it swallows a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def close(self) -> None:
        """Let go of the log; the book can be read on."""
        self._log.close()

    async def add(
        self, label: str, components: Sequence[RouteComponent], *, addresses: Sequence[str] = (), who: str, why: str
    ) -> RouteRevision:
        """Register a revision.

        Raises: InvalidRequestError: label, who, why or components cannot be used. CapacityError: too many revisions are open.
        """
        check_text("label", label, MAX_LABEL_CHARS)
        check_components(components)
        if len(addresses) > MAX_ADDRESSES:
            raise InvalidRequestError(f"addresses has {len(addresses)} entries; give at most {MAX_ADDRESSES}")
        detail = {"label": label, "components": stored_components(components), "addresses": list(addresses)}
        entry = await self._write(None, RouteAction.ADD, who, why, detail, self._refuse_too_many)
        return self.revision(entry.revision)

    async def note_checked(self, number: int, components: Sequence[RouteComponent], *, why: str = "all servers passed") -> None:
        """Its scorers were described and checked; components have versions and fingerprints now. Raises: StateError."""
        await self._write(number, RouteAction.CHECK, COORDINATOR, _cut(why, MAX_WHY_CHARS), {"components": stored_components(components)})

    async def note_ready(self, number: int, *, why: str = "the probe set was scored") -> None:
        """It scored the probe set. Raises: StateError."""
        await self._write(number, RouteAction.READY, COORDINATOR, why)

    async def reject(self, number: int, problem: str) -> None:
        """It did not pass. Raises: StateError."""
        await self._write(number, RouteAction.REJECT, COORDINATOR, "it did not pass", {"problem": _cut(problem, MAX_PROBLEM_CHARS)})

    async def shadow(self, number: int, share: float, *, who: str, why: str) -> None:
        """Let it score a share of live groups beside the active one, or another share than so far.

        Raises: StateError: not from its stage. InvalidRequestError: share is not in (0, 1].
        """
        if not 0.0 < share <= 1.0:
            raise InvalidRequestError(f"share is {share}; give a number above 0, at most 1")
        await self._write(number, RouteAction.SHADOW, who, why, {"share": share})

    async def stop_shadow(self, number: int, *, who: str, why: str) -> None:
        """End its shadowing, and gates that wait for it. Raises: StateError: it does not shadow."""
        await self._write(number, RouteAction.STOP_SHADOW, who, why)

    async def arm(self, number: int, gates: Gates, *, who: str, why: str) -> None:
        """Have it activated once its comparison passes gates. Raises: StateError: it does not shadow."""
        await self._write(number, RouteAction.ARM, who, why, {"gates": stored_gates(gates)})

    async def activate(self, number: int, *, who: str, why: str, gates: Gates | None = None, check: Check | None = None) -> None:
        """Score new groups by a revision from now on; the one that is active so far drains.

        Args:
            gates: what is found to be passed; written down.
            check: refuses by raising, when no other change can come in between.
        Raises: StateError: not from its stage.
        """
        detail = {} if gates is None else {"gates": stored_gates(gates)}
        await self._write(number, RouteAction.ACTIVATE, who, why, detail, check)

    async def rollback(self, *, who: str, why: str, check: Check | None = None) -> RouteRevision:
        """Make the revision active again that was active before the present one.

        Args:
            check: as for `activate`.
        Raises: StateError: there is none, or it is retired.
        """

        def refuse() -> None:
            self._refuse_no_rollback()
            if check is not None:
                check()

        entry = await self._write(None, RouteAction.ROLLBACK, who, why, check=refuse)
        return self.revision(entry.revision)

    async def retire(self, number: int, *, who: str, why: str) -> None:
        """It is used no more: its servers may be stopped. Raises: StateError: not from its stage."""
        await self._write(number, RouteAction.RETIRE, who, why)

    async def drain(self) -> None:
        """Note as drained what is draining and has no open groups. Raises: StateError: the disk fails."""
        if self._idle():
            await self._unhindered(self._drain_idle)

    def _idle(self) -> list[int]:
        draining = [record.revision.number for record in self.in_stage(RouteStage.DRAINING)]
        return [number for number in draining if not self._num_pins[number]]

    def _unpin(self, number: int) -> None:
        self._num_pins[number] -= 1
        if not self._num_pins[number]:
            del self._num_pins[number]
            self._wake()

    async def _write(
        self,
        number: int | None,
        action: RouteAction,
        who: str,
        why: str,
        detail: Mapping[str, object] | None = None,
        check: Check | None = None,
    ) -> LogEntry:
        """Check, write ahead, change memory, tell listeners; number None is the one that the action implies."""
        check_text("who", who, MAX_WHO_CHARS)
        check_text("why", why, MAX_WHY_CHARS)

        async def change() -> LogEntry:
            await self._drain_idle()
            if check is not None:
                check()
            return await self._commit(self._implied(action) if number is None else number, action, who, why, detail or {})

        return await self._unhindered(change)

    async def _unhindered(self, change: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Make a change under the lock; it goes on should its caller be cancelled, since disk and memory must not part."""

        async def locked() -> ResultT:
            async with self._lock:
                return await change()

        task = asyncio.create_task(locked())
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        return await asyncio.shield(task)

    async def _drain_idle(self) -> None:
        for number in self._idle():
            await self._commit(number, RouteAction.DRAIN, COORDINATOR, "its last group is done", {})

    async def _commit(self, number: int, action: RouteAction, who: str, why: str, detail: Mapping[str, object]) -> LogEntry:
        activates = action in (RouteAction.ACTIVATE, RouteAction.ROLLBACK)
        entry = LogEntry(
            seq=self._log.next_seq,
            unix_s=self._now_unix_s(),
            who=who,
            why=why,
            action=action,
            revision=number,
            stage=stage_after(action),
            active=number if activates else self._ledger.active,
            detail=dict(detail),
        )
        changed = self._ledger.plan(entry)
        await asyncio.to_thread(self._log.append, entry)
        self._ledger.commit(entry, changed)
        log.info("reward_route_changed", action=action, revision=number, stage=entry.stage, active=entry.active, who=who)
        for listener in self._listeners:
            listener(entry)
        self._wake()
        return entry

    def _implied(self, action: RouteAction) -> int:
        return self._ledger.previous if action is RouteAction.ROLLBACK else self._ledger.next_number

    def _replay(self, entry: LogEntry) -> None:
        try:
            self._ledger.commit(entry, self._ledger.plan(entry))
        except (StateError, NotFoundError, ValueError) as error:
            what = f"{error.errors()[0]['msg']} in its detail" if isinstance(error, ValidationError) else str(error)
            raise damaged(self._log.path, entry.seq, what) from error

    def _refuse_too_many(self) -> None:
        num_open = sum(record.stage not in OVER for record in self.records())
        if num_open >= MAX_OPEN_REVISIONS:
            raise CapacityError(f"{num_open} revisions of the reward route are open, at most {MAX_OPEN_REVISIONS} may be: retire some")

    def _refuse_no_rollback(self) -> None:
        if not self._ledger.previous:
            raise StateError(f"there is nothing to roll back to: no revision was active before revision {self._ledger.active}")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 4] + " ..."
