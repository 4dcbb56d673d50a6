"""One weight push as a transaction over the actor gang (source) and the rollout servers (sinks).

    PREPARE    both ends answer their layouts; coordinator, servers and ranks each compute a server's plan and must agree on its hash
    TRANSFER   every rank writes its slices into the servers' staging; exactly one digest must come back for each bucket of the plan
    VERIFY     every server digests its staging
    COMMIT     the servers swap, side by side (barrier) or one after another (rolling); no way back
    ABORT      everyone drops the push and stays on the old version

A server that fails before COMMIT is left out and the others go on. A source that fails, or no server left, aborts. A server whose COMMIT
was not answered is asked again, since committing is idempotent; one that stays silent is reported. Whoever calls fences the failed servers:
they take no traffic until a push reaches them. Weight bytes never pass through here.

Each stage has one deadline for all of its calls (rolling: COMMIT has one for each server); ABORT adds at most ABORT_TIMEOUT_S. Where a
stage has calls after the servers' own, these get half of what is left, so that one silent server does not cost the others the push.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from shoal.config.models import PushSection
from shoal.errors import DeadlineError, InternalError, InvalidRequestError, ShoalError, StateError, TransportError, UnavailableError
from shoal.telemetry.logs import get_logger
from shoal.types.weights import InflightMode, PairDigests, SinkCommitted, SinkPrepared, SinkTarget, SourceLayout
from shoal.weights.plan import PushPlan, ServerPlan
from shoal.weights.planner import plan_push
from shoal.weights.stages import PushStage, advance
from shoal_coordinator.push_calls import Deadline, PushSink, WeightSource, outcome_of, outcomes_of, reason_of, undisturbed, unwrap
from shoal_coordinator.push_report import PushReport, ServerReport

log = get_logger(__name__)
Answer = TypeVar("Answer")

ABORT_TIMEOUT_S = 4.0
"""Deadline of ABORT: what a failed push may add to the deadlines of its stages."""
COURTESY_S = 0.5
"""How long a push that commits waits at its end for the answers of servers that it left out; they drop it by themselves."""
SERVER_SHARE = 0.5
"""Of the time left, for calls that a silent server may use up while others need the rest."""
COMMIT_ASKS = 2
"""An unavailable server is tried again by its client; this is for an answer that was lost."""
ASK_AGAIN_S = 5.0
"""Of COMMIT's deadline, kept for asking again; half of it if that is less."""
_UNKNOWN_OUTCOME = (TimeoutError, UnavailableError, DeadlineError, InternalError, TransportError)
"""After these a sink may or may not have committed; any other ShoalError is a refusal."""


async def push(
    source: WeightSource,
    sinks: Mapping[str, PushSink],
    policy_version: int,
    settings: PushSection,
    *,
    dense: Collection[str] = (),
    push_id: str | None = None,
) -> PushReport:
    """Bring servers to a policy version: all of them after a step, or a single one that joined late.

    Args:
        source: the actor gang; it must hold `policy_version`.
        sinks: rollout servers by server id, at least one.
        settings: deadlines of the stages, bucket size, transport, order and manner of COMMIT.
        dense: servers that are to get everything, whatever their staging holds.
    Returns: the report, also of a push that was aborted or failed.
    Raises: InvalidRequestError: no sinks. CancelledError: cancelled; the push was aborted, or finished if it had reached COMMIT.
    """
    return await WeightPush(source, sinks, policy_version, settings, dense=dense, push_id=push_id).run()


def expires_s(settings: PushSection, num_servers: int) -> float:
    """Sum of the stages' deadlines, in seconds: after that a server drops a push by itself."""
    num_commits = num_servers if settings.commit == "rolling" else 1
    before_commit_s = settings.prepare_timeout_s + settings.transfer_timeout_s + settings.verify_timeout_s
    return before_commit_s + num_commits * settings.commit_timeout_s


class WeightPush:
    """One transaction; `run` it once. `report` can be read at any time, also after `run` was cancelled.

    Used from the event loop alone. At most one push runs against a source: a second one makes the first abort.
    """

    def __init__(
        self,
        source: WeightSource,
        sinks: Mapping[str, PushSink],
        policy_version: int,
        settings: PushSection,
        *,
        dense: Collection[str] = (),
        push_id: str | None = None,
    ) -> None:
        if not sinks:
            msg = f"a push of policy version {policy_version} needs at least one rollout server"
            raise InvalidRequestError(msg)
        self._source = source
        self._sinks = dict(sinks)
        self._policy_version = policy_version
        self._settings = settings
        self.push_id = f"v{policy_version}-{secrets.token_hex(6)}" if push_id is None else push_id
        self.plans: Mapping[str, ServerPlan] = {}
        """By server id, once PREPARE is over."""
        self._servers = {name: ServerReport(server_id=name, dense=name in dense) for name in sorted(sinks)}
        self._stage = PushStage.PREPARE
        self._started_unix_s = time.time()
        self._stages_s: dict[str, float] = {}
        self._error: str | None = None
        self._farewells: list[asyncio.Task[object]] = []
        self._deserted = asyncio.Event()
        self._log = log.bind(push_id=self.push_id, policy_version=policy_version)

    async def run(self) -> PushReport:
        """Carry the push to a terminal state; see `push`."""
        try:
            await self._unless_deserted(self._stage_and_verify())
        except ShoalError as error:
            self._error = str(error)
            await undisturbed(self._abort())
            return self.report()
        except BaseException as error:  # cancelled, or a fault of this program: the servers must not keep staging
            self._error = "cancelled" if isinstance(error, asyncio.CancelledError) else f"internal error: {error!r}"
            await undisturbed(self._abort())
            raise
        await undisturbed(self._commit())
        return self.report()

    def report(self) -> PushReport:
        """What is known so far."""
        return PushReport(
            push_id=self.push_id,
            policy_version=self._policy_version,
            state=self._stage,
            stages_s=dict(self._stages_s),
            servers=self._servers,
            error=self._error,
            started_unix_s=self._started_unix_s,
        )

    def leave_out(self, name: str, reason: str) -> None:
        """Go on without a server that is known to be gone; ignored once it can no longer be left out."""
        if name in self._servers and self._stage in (PushStage.PREPARE, PushStage.TRANSFER, PushStage.VERIFY):
            self._fail(name, reason)
            if not self._live():
                self._deserted.set()

    async def _unless_deserted(self, work: Coroutine[object, object, None]) -> None:
        """Run work, but no longer than a server is left: the trainer may wait long for one that is gone."""
        working, deserted = asyncio.create_task(work), asyncio.create_task(self._deserted.wait())
        try:
            await asyncio.wait({working, deserted}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._require_servers()
            working.result()
        finally:
            working.cancel()
            deserted.cancel()
            await asyncio.gather(working, deserted, return_exceptions=True)

    async def _stage_and_verify(self) -> None:
        with self._timed():
            groups = await self._prepare(Deadline(self._settings.prepare_timeout_s))
        self._enter(PushStage.TRANSFER)
        with self._timed():
            digests = await self._transfer(groups)
        self._enter(PushStage.VERIFY)
        with self._timed():
            await self._verify(digests)

    async def _prepare(self, deadline: Deadline) -> dict[str, str]:
        """Agree on the plans; answers the collective groups of the servers that have one."""
        layout, prepared = await self._describe(deadline)
        await self._plan(layout, prepared, deadline)
        planned = await self._ask(
            lambda name, sink, timeout_s: sink.plan(
                self.push_id, self._policy_version, self.plans[name].plan_hash, layout, timeout_s=timeout_s
            ),
            deadline.left_s(SERVER_SHARE),
        )
        self._require_servers()
        # Only now: a rank must not try to reach a server that does not listen.
        await self._plan_source(prepared, deadline)
        return {name: planned[name].collective_group for name in self._live() if planned[name].collective_group}

    async def _describe(self, deadline: Deadline) -> tuple[SourceLayout, dict[str, SinkPrepared]]:
        timeout_s = deadline.left_s()
        expiry_s = expires_s(self._settings, len(self._sinks))
        async with asyncio.TaskGroup() as group:
            describing = group.create_task(outcome_of(self._source.describe(timeout_s=timeout_s), timeout_s))
            prepared = await self._ask(
                lambda _, sink, timeout_s: sink.prepare(self.push_id, self._policy_version, expiry_s, timeout_s=timeout_s),
                deadline.left_s(SERVER_SHARE),
            )
        for name, answer in prepared.items():
            self._servers[name].served_version = answer.served_version
            if answer.layout.server_id != name:
                self._fail(name, f"answers as server {answer.layout.server_id!r}")
        self._require_servers()
        layout, held_version = unwrap(describing.result(), "the trainer did not describe its shards")
        if held_version != self._policy_version:
            msg = f"the trainer holds policy version {held_version}; version {self._policy_version} cannot be pushed"
            raise StateError(msg)
        return layout, prepared

    async def _plan(self, layout: SourceLayout, prepared: Mapping[str, SinkPrepared], deadline: Deadline) -> None:
        """Plan for all servers; those whose layout cannot be planned are left out."""
        sinks = [prepared[name].layout for name in self._live()]
        settings, timeout_s = self._settings, deadline.left_s(SERVER_SHARE)
        planning = asyncio.to_thread(plan_push, layout, sinks, bucket_bytes=settings.bucket_bytes, transport=settings.transport)
        plan: PushPlan = unwrap(await outcome_of(planning, timeout_s), "the push could not be planned")
        self.plans = plan.servers
        for name in self._live():
            if name in plan.servers:
                self._servers[name].num_buckets = plan.servers[name].num_buckets
                self._servers[name].transports = transports_of(plan.servers[name])
            else:
                self._fail(name, plan.errors.get(name, "no plan was made"))
        self._require_servers()

    async def _plan_source(self, prepared: Mapping[str, SinkPrepared], deadline: Deadline) -> None:
        targets = [
            SinkTarget(layout=prepared[name].layout, staged=prepared[name].staged, dense=self._servers[name].dense) for name in self._live()
        ]
        timeout_s = deadline.left_s()
        planning = self._source.prepare(self.push_id, self._policy_version, targets, timeout_s=timeout_s)
        planned = unwrap(await outcome_of(planning, timeout_s), "the trainer did not plan the push")
        for name in self._live():
            if name not in planned:
                self._fail(name, "the trainer made no plan for it; the trainer's log says why")
            elif planned[name].plan_hash != self.plans[name].plan_hash:
                theirs, ours = planned[name].plan_hash[:12], self.plans[name].plan_hash[:12]
                self._fail(name, f"the trainer planned {theirs}, the coordinator {ours}; do both run the same Shoal?")
        self._require_servers()

    async def _transfer(self, groups: Mapping[str, str]) -> dict[str, tuple[PairDigests, ...]]:
        timeout_s = self._settings.transfer_timeout_s
        outcome = await outcome_of(self._source.transfer(self.push_id, groups, timeout_s=timeout_s), timeout_s)
        transferred = unwrap(outcome, "the trainer did not write its slices")
        for name in self._live():
            transfer = transferred.servers.get(name)
            if transfer is None:
                self._fail(name, "the trainer does not say what it wrote; the trainer's log says why")
                continue
            self._servers[name].sent_bytes, self._servers[name].dense_bytes = transfer.sent_bytes, transfer.dense_bytes
            fault = transfer.error or self.plans[name].coverage_fault(transfer.pairs)
            if fault:
                self._fail(name, fault)
        self._require_servers()
        return {name: transferred.servers[name].pairs for name in self._live()}

    async def _verify(self, digests: Mapping[str, tuple[PairDigests, ...]]) -> None:
        verified = await self._ask(
            lambda name, sink, timeout_s: sink.verify(
                self.push_id, self._policy_version, self.plans[name].plan_hash, digests[name], timeout_s=timeout_s
            ),
            self._settings.verify_timeout_s,
        )
        for name, answer in verified.items():
            self._servers[name].verify_ms = answer.verify_ms
        self._require_servers()

    async def _commit(self) -> None:
        self._enter(PushStage.COMMIT)
        with self._timed():
            if self._settings.commit == "rolling":
                for name in self._live():
                    await self._commit_server(name)
            else:
                async with asyncio.TaskGroup() as group:
                    for name in self._live():
                        group.create_task(self._commit_server(name))
        await self._end_farewells(COURTESY_S)
        committed = self.report().committed_servers
        if not committed:
            self._error = f"no server confirmed its COMMIT: {self._reasons()}"
        self._enter(PushStage.COMMITTED if committed else PushStage.FAILED)
        self._log.info("push_ended", state=self._stage, committed=committed, failed=sorted(self.report().failed_servers))

    async def _commit_server(self, name: str) -> None:
        deadline = Deadline(self._settings.commit_timeout_s)
        inflight = InflightMode(self._settings.inflight)
        outcome: SinkCommitted | Exception = DeadlineError("not asked")
        for asks_left in reversed(range(COMMIT_ASKS)):
            timeout_s = max(deadline.left_s(0.5), deadline.left_s() - ASK_AGAIN_S) if asks_left else deadline.left_s()
            commit = self._sinks[name].commit(self.push_id, self._policy_version, inflight, timeout_s=timeout_s)
            outcome = await outcome_of(commit, timeout_s)
            if not isinstance(outcome, _UNKNOWN_OUTCOME):
                break
        if isinstance(outcome, Exception):
            # No farewell: whether it serves the new version is not known, and aborting would not tell.
            self._fail(name, reason_of(outcome), farewell=False)
        elif outcome.policy_version != self._policy_version:
            self._fail(name, f"serves version {outcome.policy_version} after its COMMIT of {self._policy_version}", farewell=False)
        else:
            server = self._servers[name]
            server.stage, server.pause_ms, server.num_aborted = PushStage.COMMITTED, outcome.pause_ms, outcome.num_aborted

    async def _abort(self) -> None:
        self._enter(PushStage.ABORT)
        with self._timed():
            source = outcome_of(self._source.abort(self.push_id, timeout_s=ABORT_TIMEOUT_S), ABORT_TIMEOUT_S)
            live = {name: self._sinks[name].abort(self.push_id, timeout_s=ABORT_TIMEOUT_S) for name in self._live()}
            async with asyncio.TaskGroup() as group:
                group.create_task(source)
                aborting = group.create_task(outcomes_of(live, ABORT_TIMEOUT_S))
                group.create_task(self._end_farewells(ABORT_TIMEOUT_S))
            for name, outcome in aborting.result().items():
                if isinstance(outcome, Exception):
                    self._fail(name, reason_of(outcome), farewell=False)
        self._enter(PushStage.ABORTED)
        self._log.warning("push_aborted", reason=self._error, failed=sorted(self.report().failed_servers))

    async def _ask(self, call: Callable[[str, PushSink, float], Awaitable[Answer]], timeout_s: float) -> dict[str, Answer]:
        """Ask all servers that are left side by side; those that fail are left out of the push."""
        calls = {name: call(name, self._sinks[name], timeout_s) for name in self._live()}
        answers: dict[str, Answer] = {}
        for name, outcome in (await outcomes_of(calls, timeout_s)).items():
            if isinstance(outcome, Exception):
                self._fail(name, reason_of(outcome))
            else:
                answers[name] = outcome
        return answers

    def _live(self) -> list[str]:
        return [name for name, server in self._servers.items() if server.error is None]

    def _require_servers(self) -> None:
        if not self._live():
            msg = f"no server is left in the push: {self._reasons()}"
            raise TransportError(msg)

    def _reasons(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.report().failed_servers.items())

    def _fail(self, name: str, reason: str, *, farewell: bool = True) -> None:
        """Leave a server out, once; it is told at once, beside what the others still have to do."""
        if self._servers[name].error is not None:
            return
        self._servers[name].stage, self._servers[name].error = self._stage, reason
        self._log.warning("push_server_failed", server_id=name, stage=self._stage, reason=reason)
        if farewell:
            abort = self._sinks[name].abort(self.push_id, timeout_s=ABORT_TIMEOUT_S)
            self._farewells.append(asyncio.create_task(outcome_of(abort, ABORT_TIMEOUT_S)))

    async def _end_farewells(self, timeout_s: float) -> None:
        if self._farewells:
            _, late = await asyncio.wait(self._farewells, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._farewells, return_exceptions=True)

    def _enter(self, stage: PushStage) -> None:
        self._stage = advance(self._stage, stage)
        for name in self._live():
            if not self._servers[name].is_committed:
                self._servers[name].stage = stage

    @contextmanager
    def _timed(self) -> Iterator[None]:
        stage, started_s = self._stage, time.monotonic()
        try:
            yield
        finally:
            self._stages_s[stage] = time.monotonic() - started_s


def transports_of(plan: ServerPlan) -> tuple[str, ...]:
    """The transports of a server's pairs, sorted."""
    return tuple(sorted({plan.transport_of(rank, worker_rank) for rank, worker_rank in plan.pairs()}))
