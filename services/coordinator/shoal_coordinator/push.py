"""One weight push as a transaction over the actor gang (source) and the rollout servers (sinks).

    PREPARE    sinks answer layouts, the source its shards; coordinator and ranks plan on their own and must agree on the plan's hash
    TRANSFER   every rank writes its slices into the sinks' staging; exactly one digest must come back for each planned copy
    VERIFY     every sink digests its staging
    COMMIT     all sinks swap side by side; no way back
    ABORT      everyone drops the push and stays on the old version

A sink that fails before COMMIT is left out and the others go on. A source that fails, or no sink left, aborts. A sink whose COMMIT was not
answered is asked again, since committing is idempotent; one that stays silent is reported. Whoever calls fences the failed servers:
they take no traffic until a push reaches them. Weight bytes never pass through here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from shoal.config.models import PushSection
from shoal.errors import DeadlineError, InternalError, InvalidRequestError, ShoalError, StateError, TransportError, UnavailableError
from shoal.telemetry.logs import get_logger
from shoal.types.weights import CopyDigest, SinkCommitted, SinkLayout, SinkVerified, SourcePrepared, SourceShard, SourceTransferred
from shoal.weights.planner import PushPlan, plan_copies
from shoal.weights.stages import PushStage, advance

log = get_logger(__name__)
Answer = TypeVar("Answer")

ABORT_TIMEOUT_S = 5.0
"""Deadline of ABORT: what a failed push may add to the deadlines of its stages."""
COMMIT_ASKS = 2
"""An unavailable server is tried again by its client; this is for an answer that was lost."""
_UNKNOWN_OUTCOME = (TimeoutError, UnavailableError, DeadlineError, InternalError, TransportError)
"""After these a sink may or may not have committed; any other ShoalError is a refusal."""


class WeightSink(Protocol):
    """A rollout server's end; `shoal.clients.weights.WeightSinkClient`."""

    async def prepare(self, push_id: str, policy_version: int, *, timeout_s: float) -> tuple[SinkLayout, int]:
        """Answer the layout of every worker and the version being served."""
        ...

    async def verify(
        self, push_id: str, policy_version: int, plan_hash: str, digests: Sequence[CopyDigest], *, timeout_s: float
    ) -> SinkVerified:
        """Check the staged bytes and ready the swap."""
        ...

    async def commit(self, push_id: str, policy_version: int, *, timeout_s: float) -> SinkCommitted:
        """Serve the staged version; repeating succeeds."""
        ...

    async def abort(self, push_id: str, *, timeout_s: float) -> int:
        """Drop the push; answers the version being served."""
        ...


class WeightSource(Protocol):
    """The actor gang's end; `shoal.clients.weights.WeightSourceClient`."""

    async def describe(self, *, timeout_s: float) -> tuple[list[SourceShard], int]:
        """Answer the shards of every rank and the policy version that they hold."""
        ...

    async def prepare(self, push_id: str, policy_version: int, sinks: Sequence[SinkLayout], *, timeout_s: float) -> SourcePrepared:
        """Plan on every rank."""
        ...

    async def transfer(self, push_id: str, *, timeout_s: float) -> SourceTransferred:
        """Write on every rank; a server that could not be written to is missing from the digests."""
        ...

    async def abort(self, push_id: str, *, timeout_s: float) -> None:
        """Drop the push."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """How a push ended."""

    push_id: str
    policy_version: int
    state: PushStage
    """COMMITTED: at least one server serves the version. ABORTED: all serve what they served. FAILED: no server confirmed its COMMIT."""
    stages_s: dict[str, float]
    """Seconds in each stage that was entered."""
    num_bytes: int
    """Bytes that the ranks wrote."""
    pause_ms: dict[str, float]
    """How long each committed server did not serve."""
    committed_servers: tuple[str, ...]
    failed_servers: dict[str, str]
    """Server to what went wrong; to be fenced."""
    error: str | None
    """Why the push was aborted or failed."""
    started_unix_s: float


async def push(
    source: WeightSource, sinks: Mapping[str, WeightSink], policy_version: int, deadlines: PushSection, *, push_id: str | None = None
) -> PushReport:
    """Bring servers to a policy version: all of them after a step, or a single one that joined late.

    Args:
        source: the actor gang; it must hold `policy_version`.
        sinks: rollout servers by server id, at least one.
        deadlines: seconds of each stage. PREPARE's holds for the sinks, and again for the source's planning.
    Returns: the report, also of a push that was aborted or failed.
    Raises: InvalidRequestError: no sinks. CancelledError: cancelled; the push was aborted, or finished if it had reached COMMIT.
    """
    return await WeightPush(source, sinks, policy_version, deadlines, push_id=push_id).run()


class WeightPush:
    """One transaction; `run` it once. `report` can be read at any time, also after `run` was cancelled.

    Used from the event loop alone. At most one push runs against a source: a second one makes the first abort.
    """

    def __init__(
        self,
        source: WeightSource,
        sinks: Mapping[str, WeightSink],
        policy_version: int,
        deadlines: PushSection,
        *,
        push_id: str | None = None,
    ) -> None:
        if not sinks:
            msg = f"a push of policy version {policy_version} needs at least one rollout server"
            raise InvalidRequestError(msg)
        self._source = source
        self._sinks = dict(sinks)
        self._policy_version = policy_version
        self._deadlines = deadlines
        self.push_id = f"v{policy_version}-{secrets.token_hex(6)}" if push_id is None else push_id
        self._stage = PushStage.PREPARE
        self._started_unix_s = time.time()
        self._stages_s: dict[str, float] = {}
        self._failed: dict[str, str] = {}
        self._pause_ms: dict[str, float] = {}
        self._num_bytes = 0
        self._error: str | None = None
        self._log = log.bind(push_id=self.push_id, policy_version=policy_version)

    async def run(self) -> PushReport:
        """Carry the push to a terminal state; see `push`."""
        try:
            await self._stage_and_verify()
        except ShoalError as error:
            self._error = str(error)
            await _undisturbed(self._abort())
            return self.report()
        except BaseException as error:  # cancelled, or a fault of this program: the servers must not keep staging
            self._error = "cancelled" if isinstance(error, asyncio.CancelledError) else f"internal error: {error!r}"
            await _undisturbed(self._abort())
            raise
        await _undisturbed(self._commit())
        return self.report()

    def report(self) -> PushReport:
        """What is known so far."""
        return PushReport(
            push_id=self.push_id,
            policy_version=self._policy_version,
            state=self._stage,
            stages_s=dict(self._stages_s),
            num_bytes=self._num_bytes,
            pause_ms=dict(self._pause_ms),
            committed_servers=tuple(sorted(self._pause_ms)),
            failed_servers=dict(self._failed),
            error=self._error,
            started_unix_s=self._started_unix_s,
        )

    async def _stage_and_verify(self) -> None:
        with self._timed():
            plan = await self._prepare()
        self._enter(PushStage.TRANSFER)
        with self._timed():
            digests = await self._transfer(plan)
        self._enter(PushStage.VERIFY)
        with self._timed():
            await self._verify(plan, digests)

    async def _prepare(self) -> PushPlan:
        timeout_s = self._deadlines.prepare_timeout_s
        async with asyncio.TaskGroup() as group:
            describing = group.create_task(_outcome(self._source.describe(timeout_s=timeout_s), timeout_s))
            layouts = await self._ask_sinks(
                lambda _, sink: sink.prepare(self.push_id, self._policy_version, timeout_s=timeout_s), timeout_s
            )
        shards, held_version = _unwrap(describing.result(), "the trainer did not describe its shards")
        if held_version != self._policy_version:
            msg = f"the trainer holds policy version {held_version}; version {self._policy_version} cannot be pushed"
            raise StateError(msg)
        plan, sinks = await self._plan(shards, {server_id: layout for server_id, (layout, _) in layouts.items()})
        prepared = _unwrap(
            await _outcome(self._source.prepare(self.push_id, self._policy_version, sinks, timeout_s=timeout_s), timeout_s),
            "the trainer did not plan the push",
        )
        if prepared.plan_hash != plan.plan_hash:
            msg = f"the trainer planned {prepared.plan_hash[:12]}, the coordinator {plan.plan_hash[:12]}; do both run the same Shoal?"
            raise TransportError(msg)
        return plan

    async def _plan(self, shards: Sequence[SourceShard], layouts: Mapping[str, SinkLayout]) -> tuple[PushPlan, list[SinkLayout]]:
        """Plan for all sinks; those whose layout cannot be planned are left out."""
        for server_id, layout in layouts.items():
            if layout.server_id != server_id:
                self._fail(server_id, f"answers as server {layout.server_id!r}")
        self._require_sinks()
        sinks = [layouts[server_id] for server_id in self._live()]
        try:
            return await asyncio.to_thread(plan_copies, shards, sinks), sinks
        except TransportError:
            await self._drop_unplannable(shards, sinks)
        self._require_sinks()
        sinks = [layouts[server_id] for server_id in self._live()]
        return await asyncio.to_thread(plan_copies, shards, sinks), sinks

    async def _drop_unplannable(self, shards: Sequence[SourceShard], sinks: Sequence[SinkLayout]) -> None:
        for sink in sinks:
            try:
                await asyncio.to_thread(plan_copies, shards, [sink])
            except TransportError as error:
                self._fail(sink.server_id, str(error))

    async def _transfer(self, plan: PushPlan) -> dict[str, list[CopyDigest]]:
        timeout_s = self._deadlines.transfer_timeout_s
        outcome = await _outcome(self._source.transfer(self.push_id, timeout_s=timeout_s), timeout_s)
        transferred = _unwrap(outcome, "the trainer did not write its slices")
        self._num_bytes = transferred.num_bytes
        for server_id in self._live():
            if server_id not in transferred.digests:
                self._fail(server_id, "the trainer could not write to its staging; the trainer's log says why")
            elif (fault := plan.coverage_fault(server_id, transferred.digests[server_id])) is not None:
                self._fail(server_id, fault)
        self._require_sinks()
        return transferred.digests

    async def _verify(self, plan: PushPlan, digests: Mapping[str, Sequence[CopyDigest]]) -> None:
        timeout_s = self._deadlines.verify_timeout_s
        await self._ask_sinks(
            lambda server_id, sink: sink.verify(
                self.push_id, self._policy_version, plan.plan_hash, digests[server_id], timeout_s=timeout_s
            ),
            timeout_s,
        )
        self._require_sinks()

    async def _commit(self) -> None:
        self._enter(PushStage.COMMIT)
        with self._timed():
            async with asyncio.TaskGroup() as group:
                for server_id in self._live():
                    group.create_task(self._commit_sink(server_id))
                # What was left out frees its staging meanwhile.
                for server_id in self._failed:
                    group.create_task(_outcome(self._sinks[server_id].abort(self.push_id, timeout_s=ABORT_TIMEOUT_S), ABORT_TIMEOUT_S))
        if not self._pause_ms:
            self._error = f"no server confirmed its COMMIT: {self._reasons()}"
        self._enter(PushStage.COMMITTED if self._pause_ms else PushStage.FAILED)
        self._log.info("push_ended", state=self._stage, committed=sorted(self._pause_ms), failed=sorted(self._failed))

    async def _commit_sink(self, server_id: str) -> None:
        deadline_s = asyncio.get_running_loop().time() + self._deadlines.commit_timeout_s
        outcome: SinkCommitted | Exception = DeadlineError("not asked")
        for asks_left in reversed(range(COMMIT_ASKS)):
            remaining_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
            # Half of what is left, so that a lost answer leaves time to ask again.
            timeout_s = remaining_s / 2 if asks_left else remaining_s
            commit = self._sinks[server_id].commit(self.push_id, self._policy_version, timeout_s=timeout_s)
            outcome = await _outcome(commit, timeout_s)
            if not isinstance(outcome, _UNKNOWN_OUTCOME) or not asks_left:
                break
        if isinstance(outcome, Exception):
            self._fail(server_id, _reason(outcome))
        elif outcome.policy_version != self._policy_version:
            self._fail(server_id, f"serves version {outcome.policy_version} after its COMMIT of {self._policy_version}")
        else:
            self._pause_ms[server_id] = outcome.pause_ms

    async def _abort(self) -> None:
        self._enter(PushStage.ABORT)
        with self._timed():
            async with asyncio.TaskGroup() as group:
                group.create_task(_outcome(self._source.abort(self.push_id, timeout_s=ABORT_TIMEOUT_S), ABORT_TIMEOUT_S))
                for server_id, sink in self._sinks.items():
                    group.create_task(self._abort_sink(server_id, sink))
        self._enter(PushStage.ABORTED)
        self._log.warning("push_aborted", reason=self._error, failed=sorted(self._failed))

    async def _abort_sink(self, server_id: str, sink: WeightSink) -> None:
        outcome = await _outcome(sink.abort(self.push_id, timeout_s=ABORT_TIMEOUT_S), ABORT_TIMEOUT_S)
        if isinstance(outcome, Exception) and server_id not in self._failed:
            self._fail(server_id, _reason(outcome))

    async def _ask_sinks(self, call: Callable[[str, WeightSink], Awaitable[Answer]], timeout_s: float) -> dict[str, Answer]:
        """Ask all live sinks side by side; those that fail are left out of the push."""
        live = self._live()
        outcomes = await asyncio.gather(*(_outcome(call(server_id, self._sinks[server_id]), timeout_s) for server_id in live))
        answers: dict[str, Answer] = {}
        for server_id, outcome in zip(live, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._fail(server_id, _reason(outcome))
            else:
                answers[server_id] = outcome
        return answers

    def _live(self) -> list[str]:
        return [server_id for server_id in self._sinks if server_id not in self._failed]

    def _require_sinks(self) -> None:
        if not self._live():
            msg = f"no server is left in the push: {self._reasons()}"
            raise TransportError(msg)

    def _reasons(self) -> str:
        return "; ".join(f"{server_id}: {reason}" for server_id, reason in sorted(self._failed.items()))

    def _fail(self, server_id: str, reason: str) -> None:
        self._failed[server_id] = f"{self._stage}: {reason}"
        self._log.warning("push_server_failed", server_id=server_id, stage=self._stage, reason=reason)

    def _enter(self, stage: PushStage) -> None:
        self._stage = advance(self._stage, stage)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        stage, started_s = self._stage, time.monotonic()
        try:
            yield
        finally:
            self._stages_s[stage] = time.monotonic() - started_s


async def _outcome(call: Awaitable[Answer], timeout_s: float) -> Answer | Exception:
    """The answer of a call, or the reason for which there is none; faults of this program are raised."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        return DeadlineError(f"no answer within {timeout_s:.3g} s")
    except ShoalError as error:
        return error


def _unwrap(outcome: Answer | Exception, what: str) -> Answer:
    if isinstance(outcome, Exception):
        msg = f"{what}: {_reason(outcome)}"
        raise TransportError(msg) from outcome
    return outcome


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


async def _undisturbed(work: Coroutine[object, object, None]) -> None:
    """Run to the end, then pass on a cancellation that came meanwhile; the work has deadlines of its own."""
    task = asyncio.create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
