"""The server's side of a weight push: one push at a time, idempotent under (push_id, policy_version).

Concurrency: one lock serialises the stages. A commit runs in a task of its own that no caller's deadline can cancel, since a pause without
its resume would stop serving; a repeated commit waits for the same task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.config.models import PushSection
from shoal.errors import InternalError, InvalidRequestError, ShoalError, StateError
from shoal.telemetry.logs import get_logger
from shoal.telemetry.metrics import counter, gauge, histogram
from shoal.types import CopyDigest, SinkCommitted, SinkLayout, SinkVerified
from shoal_rollout.engine import SwappableEngine
from shoal_rollout.sink_states import SinkState, advance
from shoal_rollout.worker_layout import digests_to_plain, layout_from_plain

log = get_logger(__name__)

VERIFY_STEP_S = 0.02
"""How long the engine's workers check and pack between two steps of generation."""
_REPEATABLE = frozenset({SinkState.PREPARED, SinkState.VERIFIED, SinkState.COMMITTED})
"""In these states PREPARE of the current push answers again."""
PAUSE_BUCKETS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)

_pushes = counter("rollout", "pushes", "count", "Weight pushes, by how they ended here.", ("end",))
_pause_ms = histogram("rollout", "push_pause", "ms", "How long a commit paused serving.", buckets=PAUSE_BUCKETS_MS)
_version = gauge("rollout", "policy_version", "number", "Policy version being served.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Push:
    push_id: str
    policy_version: int


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
        self._server_id = server_id
        self._staging_name = staging_name
        self._section = push
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._lock = asyncio.Lock()
        self._state = SinkState.IDLE
        self._push: _Push | None = None
        self._served_version = 0
        self._layout: SinkLayout | None = None
        self._plan_hash = ""
        self._verified: SinkVerified | None = None
        self._committing: asyncio.Task[SinkCommitted] | None = None
        self._committed: SinkCommitted | None = None

    @property
    def state(self) -> SinkState:
        """Where the current push is."""
        return self._state

    @property
    def served_version(self) -> int:
        """The complete version being served."""
        return self._served_version

    @property
    def staging_paths(self) -> tuple[str, ...]:
        """Staging buffers of this server's workers."""
        return () if self._layout is None else tuple(worker.staging_path for worker in self._layout.workers)

    async def discover(self, folder: str) -> None:
        """Record what every engine worker needs of a checkpoint.

        Raises: ConfigError: the model cannot be updated in place.
        """
        await self._engine.call_workers("shoal_discover", folder)

    async def reserve(self) -> None:
        """Allocate every worker's staging now, so that a server without room for a push refuses to start.

        Raises: CapacityError: no space for staging; names the folder, what is needed and what is free.
        """
        await self._engine.call_workers("shoal_prepare", self._section.model_dump(), self._staging_name)

    async def prepare(self, push_id: str, policy_version: int) -> tuple[SinkLayout, int]:
        """Allocate or reuse staging; another push that is not committed is dropped.

        Returns: the layout of every worker, and the served version.
        Raises: StateError: committing or failed. CapacityError: no space for staging.
        """
        push = _checked(push_id, policy_version)
        async with self._lock:
            is_known = self._push is not None and self._push.push_id == push_id and self._state in _REPEATABLE
            if is_known and push == self._push and self._layout is not None:
                return self._layout, self._served_version
            if is_known and self._push is not None:
                raise StateError(f"push {push_id} is for version {self._push.policy_version}, not {policy_version}; use a new push_id")
            following = advance(self._state, SinkState.PREPARED)
            plain = await self._engine.call_workers("shoal_prepare", self._section.model_dump(), self._staging_name)
            self._layout = SinkLayout(server_id=self._server_id, workers=tuple(layout_from_plain(layout) for layout in plain))
            self._state, self._push = following, push
            self._verified, self._committed, self._plan_hash = None, None, ""
            return self._layout, self._served_version

    async def verify(self, push_id: str, policy_version: int, plan_hash: str, digests: Sequence[CopyDigest]) -> SinkVerified:
        """Check coverage and digests of the staged bytes and ready the swap; generation goes on in between.

        Raises: StateError: another push or stage, wrong coverage, or a digest that differs; names the parameter.
        """
        async with self._lock:
            self._require(push_id, policy_version, SinkState.PREPARED, SinkState.VERIFIED)
            if self._verified is not None:
                if plan_hash != self._plan_hash:
                    raise StateError(f"push {push_id} was verified for plan {self._plan_hash}, not {plan_hash}; use a new push_id")
                return self._verified
            following = advance(self._state, SinkState.VERIFIED)
            start_s = time.perf_counter()
            num_bytes = await self._verify_on_workers(digests)
            self._verified = SinkVerified(num_bytes=num_bytes, verify_ms=(time.perf_counter() - start_s) * 1e3)
            self._state, self._plan_hash = following, plan_hash
            return self._verified

    async def commit(self, push_id: str, policy_version: int) -> SinkCommitted:
        """Pause, swap, clear caches, tag, resume. A push that is committed already succeeds again.

        Raises: StateError: another push or stage; nothing was changed.
            InternalError: the swap failed after the pause; this server serves nothing any more.
        """
        async with self._lock:
            if self._committing is None or self._committing.done():
                self._require(push_id, policy_version, SinkState.VERIFIED, SinkState.COMMITTED)
                if self._committed is not None:
                    return self._committed
                self._state = advance(self._state, SinkState.COMMITTING)
                self._committing = asyncio.create_task(self._swap(policy_version), name=f"commit-{push_id}")
            else:
                self._require(push_id, policy_version, SinkState.COMMITTING)
            task = self._committing
        return await asyncio.shield(task)

    async def abort(self, push_id: str) -> int:
        """Drop a push; staging stays for the next one. An unknown push succeeds.

        Returns: the served version.
        Raises: StateError: the push is committing or committed.
        """
        async with self._lock:
            if self._push is None or self._push.push_id != push_id or self._state is SinkState.IDLE:
                return self._served_version
            following = advance(self._state, SinkState.IDLE)
            await self._engine.call_workers("shoal_drop")
            self._state, self._push, self._verified = following, None, None
            _pushes.labels("aborted").inc()
            return self._served_version

    async def close(self) -> None:
        """Wait for a running commit and remove staging."""
        if self._committing is not None:
            await asyncio.wait({self._committing})
        async with self._lock:
            await self._engine.call_workers("shoal_close")

    async def _verify_on_workers(self, digests: Sequence[CopyDigest]) -> int:
        ranks = set() if self._layout is None else {worker.worker_rank for worker in self._layout.workers}
        unknown = sorted({digest.worker_rank for digest in digests} - ranks)
        if unknown:
            raise StateError(f"digests name worker {unknown[0]}; {self._server_id} has workers {sorted(ranks)}")
        await self._engine.call_workers("shoal_start_verify", digests_to_plain(digests))
        while True:
            answers = await self._engine.call_workers("shoal_step_verify", VERIFY_STEP_S)
            if all(is_done for is_done, _ in answers):
                return sum(num_bytes for _, num_bytes in answers)

    async def _swap(self, policy_version: int) -> SinkCommitted:
        start_s = time.perf_counter()
        try:
            await self._engine.pause()
            await self._engine.call_workers("shoal_commit")
            await self._engine.finish_swap(str(policy_version))
            self._served_version = policy_version
            self._on_committed(policy_version)
            await self._engine.resume()
        except BaseException as error:
            # Some workers may have swapped and others not: no version is complete, so none is served.
            self._state = advance(self._state, SinkState.FAILED)
            _pushes.labels("failed").inc()
            log.exception("commit_failed", policy_version=policy_version)
            self._on_failed(f"a weight swap to version {policy_version} failed half way; this server is ending, use another one")
            raise InternalError(f"{self._server_id} failed to swap to version {policy_version} and stopped serving: {error}") from error
        pause_ms = (time.perf_counter() - start_s) * 1e3
        self._committed = SinkCommitted(policy_version=policy_version, pause_ms=pause_ms)
        self._state = advance(self._state, SinkState.COMMITTED)
        _pushes.labels("committed").inc()
        _pause_ms.observe(pause_ms)
        _version.set(policy_version)
        log.info("weights_committed", policy_version=policy_version, pause_ms=round(pause_ms, 2))
        await self._free_replaced()
        return self._committed

    async def _free_replaced(self) -> None:
        """Free the old weights, which takes longer than the swap; the new ones are served already."""
        try:
            await self._engine.call_workers("shoal_drop")
        except ShoalError as error:
            log.warning("old_weights_not_freed", error=str(error))

    def _require(self, push_id: str, policy_version: int, *states: SinkState) -> None:
        push = _checked(push_id, policy_version)
        if push != self._push:
            current = "no push" if self._push is None else f"push {self._push.push_id} for version {self._push.policy_version}"
            raise StateError(f"{self._server_id} is at {current}, not at push {push_id} for version {policy_version}; prepare first")
        if self._state not in states:
            raise StateError(f"push {push_id} is {self._state}; this call needs it to be {' or '.join(states)}")


def _checked(push_id: str, policy_version: int) -> _Push:
    if not push_id or policy_version < 0:
        raise InvalidRequestError(f"push_id {push_id!r} must not be empty and policy_version {policy_version} not negative")
    return _Push(push_id=push_id, policy_version=policy_version)
