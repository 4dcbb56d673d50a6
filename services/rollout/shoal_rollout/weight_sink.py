"""The server's side of a weight push: one push at a time, idempotent under (push_id, policy_version).

Concurrency: one lock serialises the stages. A commit runs in a task of its own that no caller's deadline can cancel, since a pause without
its resume would stop serving; a repeated commit waits for the same task. A push whose time is over is dropped by a timer, which takes the
same lock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence

from shoal.config.models import PushSection
from shoal.errors import InternalError, ShoalError, StateError
from shoal.telemetry.logs import get_logger
from shoal.telemetry.metrics import gauge, histogram
from shoal.types import (
    InflightMode,
    PairDigests,
    PieceDigests,
    SinkCommitted,
    SinkLayout,
    SinkPlanned,
    SinkPrepared,
    SinkVerified,
    SinkWorkerLayout,
    SourceLayout,
    StagedVersion,
)
from shoal.weights.plan import ServerPlan
from shoal.weights.planner import plan_server
from shoal_rollout.engine import StillRunningError, SwappableEngine
from shoal_rollout.sink_push import ExpiryTimer, Push, PushEnd, count_end, named_push, new_push
from shoal_rollout.sink_receivers import CollectiveGroups, SinkReceivers
from shoal_rollout.sink_states import DROPPABLE, SinkState, advance
from shoal_rollout.sink_workers import SinkWorkers

log = get_logger(__name__)

PAUSE_BUCKETS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)
WAIT_MARGIN_S = 1.0
"""A commit that waits for running requests gives up this long before its caller does."""
DROP_TIMEOUT_S = 10.0

_pause_ms = histogram("rollout", "push_pause", "ms", "How long a commit paused serving.", buckets=PAUSE_BUCKETS_MS)
_version = gauge("server", "policy", "version", "Policy version that a rollout server serves.", labels=("server",))


class WeightSink:
    """All pushes into one server."""

    def __init__(
        self,
        engine: SwappableEngine,
        *,
        server_id: str,
        staging_name: str,
        push: PushSection,
        on_committed: Callable[[int], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """Create an idle sink.

        Args:
            staging_name: Start of the staging buffers' names; unique on the host.
            on_committed: Called with the new version while generation is still paused.
            on_failed: Called when it is unknown which weights the engine holds; the server must stop serving.
        """
        self._engine = engine
        self._workers = SinkWorkers(engine, push, staging_name)
        self._receivers = SinkReceivers()
        self._groups = CollectiveGroups(server_id)
        self._server_id = server_id
        self._section = push
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._address, self._host = "", ""
        self._lock = asyncio.Lock()
        self._expiry = ExpiryTimer(self._expire)
        self._state = SinkState.IDLE
        self._push: Push | None = None
        self._served_version = 0
        self._staged: StagedVersion | None = None
        self._layout = SinkLayout(server_id=server_id, workers=())
        self._source_id = ""
        self._plan: ServerPlan | None = None
        self._verified: SinkVerified | None = None
        self._committing: asyncio.Task[SinkCommitted] | None = None
        self._committed: SinkCommitted | None = None
        _version.labels(server=server_id).set(0)

    @property
    def state(self) -> SinkState:
        """Where the current push is."""
        return self._state

    @property
    def served_version(self) -> int:
        """The complete version being served."""
        return self._served_version

    @property
    def staged(self) -> StagedVersion | None:
        """The complete version that staging holds."""
        return self._staged

    def listen_at(self, address: str) -> None:
        """Offer the transports that are dialled, under the host:port that others reach this server at."""
        self._address, self._host = address, address.rpartition(":")[0].strip("[]")

    async def discover(self, folder: str) -> None:
        """Record what every engine worker needs of a checkpoint. Raises: ConfigError: the model's weights cannot be exchanged."""
        await self._workers.discover(folder)

    async def reserve(self) -> None:
        """Allocate every worker's staging now, so that a server without room for a push refuses to start.

        Raises: CapacityError: no space for staging; names the folder, what is needed and what is free.
        """
        layouts, _ = await self._workers.prepare(self._host)
        self._layout = self._with_endpoints(layouts)

    async def prepare(self, push_id: str, policy_version: int, expires_s: float) -> SinkPrepared:
        """Allocate or reuse staging; another push that is not committed is dropped. A repeat does not set the clock anew.

        Args:
            expires_s: The push is dropped after so long without a commit.
        Raises: StateError: committing or failed. CapacityError: no space for staging.
        """
        async with self._lock:
            push = new_push(push_id, policy_version, expires_s)
            if self._is_repeated(push):
                return self._prepared()
            advance(self._state, SinkState.PREPARED)
            if self._state in DROPPABLE:
                # The workers forget it while they prepare.
                self._end_push(PushEnd.REPLACED)
            layouts, is_complete = await self._workers.prepare(self._host)
            self._layout = self._with_endpoints(layouts)
            self._staged = self._staged if is_complete else None
            self._state, self._push = advance(self._state, SinkState.PREPARED), push
            self._plan, self._verified, self._committed = None, None, None
            self._expiry.start(push)
            return self._prepared()

    async def plan(self, push_id: str, policy_version: int, plan_hash: str, source: SourceLayout) -> SinkPlanned:
        """Plan this server's part and listen where a transport needs it. From now on staging holds no complete version.

        Raises: StateError: another push or stage, or another hash; names both. TransportError: the layouts do not fit.
        """
        async with self._lock:
            push = self._require(push_id, policy_version, SinkState.PREPARED, SinkState.PLANNED, SinkState.VERIFIED, SinkState.COMMITTED)
            if self._plan is None:
                following = advance(self._state, SinkState.PLANNED)
                plan = await asyncio.to_thread(
                    plan_server, source, self._layout, bucket_bytes=self._section.bucket_bytes, transport=self._section.transport
                )
                _require_hash(push, plan.plan_hash, plan_hash)
                self._staged = None
                group = self._groups.begin(plan, source.source_id)
                await self._workers.plan(push, plan, self._layout, group)
                self._receivers.arm(push_id, policy_version, plan, self._layout.workers)
                self._plan, self._source_id, self._state = plan, source.source_id, following
            _require_hash(push, self._plan.plan_hash, plan_hash)
            return SinkPlanned(num_buckets=self._plan.num_buckets, collective_group=self._groups.current)

    async def write_buckets(self, messages: AsyncIterator[bytes]) -> tuple[int, int]:
        """Write a stream of the grpc transport to staging; see `BulkReceiver.write`."""
        return await self._receivers.write(messages)

    async def verify(self, push_id: str, policy_version: int, plan_hash: str, pairs: Sequence[PairDigests]) -> SinkVerified:
        """Check coverage and digests of the staged bytes and ready the swap; generation goes on in between.

        Raises: StateError: another push or stage, wrong coverage, or a digest that differs; names the parameter.
        """
        async with self._lock:
            push = self._require(push_id, policy_version, SinkState.PLANNED, SinkState.VERIFIED)
            assert self._plan is not None  # noqa: S101 - the state says so
            _require_hash(push, self._plan.plan_hash, plan_hash)
            if self._verified is None:
                following = advance(self._state, SinkState.VERIFIED)
                fault = self._plan.coverage_fault(pairs)
                if fault is not None:
                    raise StateError(f"push {push_id} into {self._server_id}: {fault}; push again")
                # What is checked must not change any more.
                self._receivers.disarm()
                start_s = time.perf_counter()
                num_bytes = await self._workers.verify(pairs, push.check_time)
                self._verified = SinkVerified(num_bytes=num_bytes, verify_ms=(time.perf_counter() - start_s) * 1e3)
                self._state = following
                self._groups.end()
                self._staged = StagedVersion(source_id=self._source_id, policy_version=policy_version)
            return self._verified

    async def commit(self, push_id: str, policy_version: int, inflight: InflightMode, timeout_s: float) -> SinkCommitted:
        """Pause, swap, clear caches, tag, resume. A push that is committed already succeeds again.

        Args:
            timeout_s: What is left of the caller's deadline; only waiting for running requests is bounded by it.
        Raises: StateError: another push or stage, or running requests did not end in time; nothing was changed.
            InternalError: the swap failed after the pause; this server serves nothing any more.
        """
        async with self._lock:
            # One that failed answers its reason again: what a caller hears last must not be that this push is failed, and no more.
            if self._committing is None or (self._committing.done() and self._state is not SinkState.FAILED):
                push = self._require(push_id, policy_version, SinkState.VERIFIED, SinkState.COMMITTED)
                if self._committed is not None:
                    return self._committed
                push.check_time()
                self._state = advance(self._state, SinkState.COMMITTING)
                self._committing = asyncio.create_task(self._commit(push, inflight, timeout_s - WAIT_MARGIN_S), name=f"commit-{push_id}")
                # A failure is told to whoever still waits, and is in the log.
                self._committing.add_done_callback(lambda task: task.cancelled() or task.exception())
            else:
                self._require(push_id, policy_version, SinkState.COMMITTING, SinkState.COMMITTED, SinkState.FAILED)
            task = self._committing
        return await asyncio.shield(task)

    async def abort(self, push_id: str) -> int:
        """Drop a push; staging stays for the next one. An unknown push succeeds.

        Returns: the served version.
        Raises: StateError: the push is committing or committed.
        """
        async with self._lock:
            if self._push is not None and self._push.push_id == push_id:
                advance(self._state, SinkState.IDLE)
                self._end_push(PushEnd.ABORTED)
                await self._workers.drop()
            return self._served_version

    async def digest(self, policy_version: int, plan_hash: str) -> tuple[PieceDigests, ...]:
        """Digest the live weights, piece by piece of the last plan; generation goes on in between, a commit waits.

        Raises: StateError: another version is served, another plan, or a parameter that cannot be read.
        """
        async with self._lock:
            if self._state in {SinkState.COMMITTING, SinkState.FAILED} or policy_version != self._served_version:
                serves = f"serves version {self._served_version}, a push is {self._state}"
                raise StateError(f"{self._server_id} {serves}; version {policy_version} cannot be digested, audit right after its push")
            return await self._workers.digest(plan_hash)

    async def close(self) -> None:
        """Wait for a running commit and remove staging."""
        self._expiry.stop()
        self._receivers.close()
        if self._committing is not None:
            await asyncio.wait({self._committing})
        async with self._lock:
            await self._workers.close()

    async def _commit(self, push: Push, inflight: InflightMode, wait_s: float) -> SinkCommitted:
        try:
            committed = await self._swap(push.policy_version, inflight, wait_s)
        except StillRunningError as error:
            self._state = advance(self._state, SinkState.VERIFIED)
            log.warning("commit_refused", push_id=push.push_id, policy_version=push.policy_version, error=str(error))
            raise
        except BaseException as error:
            # Some workers may have swapped and others not: no version is complete, so none is served.
            self._state = advance(self._state, SinkState.FAILED)
            count_end(PushEnd.FAILED)
            log.exception("commit_failed", policy_version=push.policy_version)
            self._on_failed(f"a weight swap to version {push.policy_version} failed half way; this server is ending, use another one")
            msg = f"{self._server_id} failed to swap to version {push.policy_version} and stopped serving: {error}"
            raise InternalError(msg) from error
        self._committed, self._state = committed, advance(self._state, SinkState.COMMITTED)
        self._expiry.stop()
        count_end(PushEnd.COMMITTED)
        _pause_ms.observe(committed.pause_ms)
        _version.labels(server=self._server_id).set(push.policy_version)
        log.info(
            "weights_committed",
            push_id=push.push_id,
            policy_version=push.policy_version,
            pause_ms=round(committed.pause_ms, 2),
            num_aborted=committed.num_aborted,
        )
        await self._free_replaced()
        return committed

    async def _swap(self, policy_version: int, inflight: InflightMode, wait_s: float) -> SinkCommitted:
        num_aborted = await self._engine.pause(inflight, wait_s)
        # Until here the engine was generating: a pause begins after the step that is running.
        start_s = time.perf_counter()
        await self._workers.commit()
        await self._engine.finish_swap(str(policy_version))
        self._served_version = policy_version
        self._on_committed(policy_version)
        await self._engine.resume()
        pause_ms = (time.perf_counter() - start_s) * 1e3
        return SinkCommitted(policy_version=policy_version, pause_ms=pause_ms, num_aborted=num_aborted)

    async def _free_replaced(self) -> None:
        """Free the old weights, which takes longer than the swap; the new ones are served already."""
        try:
            await self._workers.free()
        except ShoalError as error:
            log.warning("old_weights_not_freed", error=str(error))

    async def _expire(self, push: Push) -> None:
        """Drop a push whose time is over; one that is committing is waited for."""
        while True:
            async with self._lock:
                if self._push is not push or self._state not in DROPPABLE | {SinkState.COMMITTING}:
                    return
                if self._state in DROPPABLE:
                    return await self._drop_expired(push)
                assert self._committing is not None  # noqa: S101 - the state says so
                committing = self._committing
            await asyncio.wait({committing})

    async def _drop_expired(self, push: Push) -> None:
        log.warning("push_expired", push_id=push.push_id, policy_version=push.policy_version, state=self._state)
        self._end_push(PushEnd.EXPIRED)
        try:
            async with asyncio.timeout(DROP_TIMEOUT_S):
                await self._workers.drop()
        except (ShoalError, TimeoutError) as error:
            # The workers forget it with the next PREPARE at the latest.
            log.warning("push_not_dropped", push_id=push.push_id, error=repr(error))

    def _end_push(self, end: PushEnd) -> None:
        """Forget the current push, before the workers do: nothing of it can be committed from now on."""
        was_written = self._state is SinkState.PLANNED
        self._state = advance(self._state, SinkState.IDLE)
        self._push, self._plan, self._verified = None, None, None
        self._receivers.disarm()
        if was_written:
            # The workers leave these files, and this must not keep their memory.
            self._receivers.close()
        self._expiry.stop()
        count_end(end)

    def _with_endpoints(self, workers: Sequence[SinkWorkerLayout]) -> SinkLayout:
        """Add what this process offers to what the workers do."""
        grpc = {"grpc": self._address} if self._address else {}
        # Worker 0 hosts the store in which all of them meet the ranks.
        store = {name: address for worker in workers[:1] for name, address in worker.endpoints.items() if name == "collective"}
        return SinkLayout(
            server_id=self._server_id,
            workers=tuple(
                dataclasses.replace(worker, endpoints={**worker.endpoints, **store, **(grpc if "shm" in worker.endpoints else {})})
                for worker in workers
            ),
        )

    def _prepared(self) -> SinkPrepared:
        return SinkPrepared(layout=self._layout, served_version=self._served_version, staged=self._staged)

    def _is_repeated(self, push: Push) -> bool:
        """Whether PREPARE of the current push came again. Raises: StateError: for another version."""
        if self._push is None or self._push.push_id != push.push_id or self._state not in DROPPABLE | {SinkState.COMMITTED}:
            return False
        if push != self._push:
            msg = f"push {push.push_id} is for version {self._push.policy_version}, not {push.policy_version}; use a new push_id"
            raise StateError(msg)
        return True

    def _require(self, push_id: str, policy_version: int, *states: SinkState) -> Push:
        push = named_push(push_id, policy_version)
        if self._push is None or push != self._push:
            current = "no push" if self._push is None else f"push {self._push.push_id} for version {self._push.policy_version}"
            raise StateError(f"{self._server_id} is at {current}, not at push {push_id} for version {policy_version}; prepare first")
        if self._state not in states:
            raise StateError(f"push {push_id} is {self._state}; this call needs it to be {' or '.join(states)}")
        return self._push


def _require_hash(push: Push, own: str, given: str) -> None:
    if own != given:
        raise StateError(f"push {push.push_id}: this server's plan is {own}, the caller's {given}; do both sides have the same settings?")
