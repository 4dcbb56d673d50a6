"""The engine's workers as the sink sees them: calls by name with plain data, in steps where one would hold up generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from shoal.config.models import PushSection
from shoal.telemetry.logs import get_logger
from shoal.types import SinkLayout, SinkWorkerLayout
from shoal.types.weights import PairDigests, PieceDigests
from shoal.weights.plan import ServerPlan
from shoal_rollout.engine import SwappableEngine
from shoal_rollout.sink_push import Push
from shoal_rollout.worker_layout import Plain, buckets_to_plain, layout_from_plain, pairs_to_plain, pieces_from_plain

log = get_logger(__name__)

STEP_S = 0.02
"""How long the engine's workers check, pack or digest between two steps of generation, at least."""
STEP_SHARE = 0.5
"""Of the time that a step of generation takes: slow steps would else make a check of seconds last for minutes."""
MAX_STEP_S = 0.25
PART_PIECES = 2000
"""Pieces of a plan that are handed to the workers at once."""


class SinkWorkers:
    """All workers of one engine."""

    def __init__(self, engine: SwappableEngine, push: PushSection, staging_name: str) -> None:
        self._engine = engine
        self._push = push.model_dump()
        self._staging_name = staging_name

    async def discover(self, folder: str) -> None:
        """Record what every worker needs of a checkpoint. Raises: ConfigError: the model's weights cannot be exchanged."""
        for mode, reason in (await self._call("shoal_discover", folder))[:1]:
            log.info("layout_discovered", mode=mode, reason=reason)

    async def prepare(self, host: str) -> tuple[tuple[SinkWorkerLayout, ...], bool]:
        """Allocate or reuse staging.

        Args:
            host: Where others reach this machine; empty if it is not known yet.
        Returns: the layouts by rank, and whether every worker's staging holds a complete version.
        Raises: CapacityError: no space for staging.
        """
        answers = await self._call("shoal_prepare", self._push, self._staging_name, host)
        layouts = tuple(layout_from_plain(layout) for layout, _ in answers)
        return layouts, all(is_complete for _, is_complete in answers)

    async def plan(self, push: Push, plan: ServerPlan, layout: SinkLayout, group: str) -> None:
        """Hand every worker its buckets, and let those that come over the collective transport be received.

        Args:
            group: Name that the workers and the ranks meet under; empty if the plan does not use that transport.
        """
        num_workers = len(layout.workers)
        for part, buckets in enumerate(await asyncio.to_thread(lambda: list(_plan_parts(plan, num_workers)))):
            await self._call("shoal_add_buckets", plan.plan_hash, part, buckets)
        ranks: list[list[int]] = [[] for _ in range(num_workers)]
        for rank, worker_rank in plan.pairs():
            if plan.transport_of(rank, worker_rank) == "collective":
                ranks[worker_rank].append(rank)
        address = layout.workers[0].endpoints.get("collective", "")
        reception = [group, address, max(push.expires_at_s - time.monotonic(), 0.0), ranks]
        await self._call("shoal_plan", push.push_id, push.policy_version, plan.plan_hash, reception)

    async def verify(self, pairs: Sequence[PairDigests], check_time: Callable[[], None]) -> int:
        """Check every bucket and ready the swap; generation goes on in between.

        Args:
            check_time: Called before each step; raises to stop.
        Returns: the bytes that were checked.
        Raises: StateError: a bucket without digest, or one that differs; names the parameter.
        """
        await self._call("shoal_start_verify", pairs_to_plain(pairs))
        pace = _Pace()
        while True:
            check_time()
            answers = await pace.run(lambda budget_s: self._call("shoal_step_verify", budget_s))
            if all(is_done for is_done, _ in answers):
                return sum(num_bytes for _, num_bytes in answers)

    async def commit(self) -> None:
        """Swap; the engine must be paused."""
        await self._call("shoal_commit")

    async def digest(self, plan_hash: str) -> tuple[PieceDigests, ...]:
        """Digest the live weights, piece by piece of a plan; generation goes on in between.

        Returns: the pairs in the plan's order.
        Raises: StateError: another plan, or a parameter that cannot be read.
        """
        await self._call("shoal_start_digest", plan_hash)
        found: dict[tuple[int, int], PieceDigests] = {}
        waiting, pace = True, _Pace()
        while waiting:
            answers = await pace.run(lambda budget_s: self._call("shoal_step_digest", budget_s))
            waiting = not all(is_done for is_done, _, _ in answers)
            for worker_rank, (_, pieces, staged) in enumerate(answers):
                found |= {(pair.rank, pair.worker_rank): pair for pair in pieces_from_plain(pieces)}
                if staged:
                    log.warning("digested_from_staging", worker_rank=worker_rank, parameters=staged[:10], num_parameters=len(staged))
        return tuple(found[key] for key in sorted(found))

    async def free(self) -> None:
        """Free what a commit replaced."""
        await self._call("shoal_free")

    async def drop(self) -> None:
        """Give up the current push."""
        await self._call("shoal_drop")

    async def close(self) -> None:
        """Remove staging."""
        await self._call("shoal_close")

    async def _call(self, method: str, *args: Plain) -> list[Plain]:
        return await self._engine.call_workers(method, *args)


class _Pace:
    """How long the next step of work may take, from how long generation made the last one wait."""

    def __init__(self) -> None:
        self._budget_s = STEP_S

    async def run(self, step: Callable[[float], Awaitable[list[Plain]]]) -> list[Plain]:
        """Run a step with a budget in seconds."""
        start_s = time.monotonic()
        answers = await step(self._budget_s)
        waited_s = time.monotonic() - start_s - self._budget_s
        self._budget_s = min(max(waited_s * STEP_SHARE, STEP_S), MAX_STEP_S)
        return answers


def _plan_parts(plan: ServerPlan, num_workers: int) -> Iterator[list[Plain]]:
    """The buckets by worker rank, in parts that hold up generation for milliseconds only; at least one."""
    part: list[Plain] = [[] for _ in range(num_workers)]
    num_pieces = 0
    for rank, worker_rank in plan.pairs():
        for bucket in plan.buckets(rank, worker_rank):
            part[worker_rank].extend(buckets_to_plain([bucket]))
            num_pieces += len(bucket.pieces)
            if num_pieces >= PART_PIECES:
                yield part
                part, num_pieces = [[] for _ in range(num_workers)], 0
    yield part
