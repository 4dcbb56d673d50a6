"""What a push needs of its two ends, and calls that end by themselves: an answer or a reason, never later than a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Protocol, TypeVar

from shoal.errors import DeadlineError, ShoalError, TransportError
from shoal.types.weights import (
    InflightMode,
    PairDigests,
    PieceDigests,
    PlannedServer,
    SinkCommitted,
    SinkPlanned,
    SinkPrepared,
    SinkTarget,
    SinkVerified,
    SourceLayout,
    SourceTransferred,
)

Answer = TypeVar("Answer")

_LEAST_S = 0.001


class PushSink(Protocol):
    """A rollout server's end of a push; `shoal.clients.weights.WeightSinkClient`."""

    async def prepare(self, push_id: str, policy_version: int, expires_s: float, *, timeout_s: float) -> SinkPrepared:
        """Answer the layout of every worker, the version being served and the one that staging holds."""
        ...

    async def plan(self, push_id: str, policy_version: int, plan_hash: str, source: SourceLayout, *, timeout_s: float) -> SinkPlanned:
        """Plan this server's part and compare the hash."""
        ...

    async def verify(
        self, push_id: str, policy_version: int, plan_hash: str, pairs: Sequence[PairDigests], *, timeout_s: float
    ) -> SinkVerified:
        """Check the staged bytes and ready the swap."""
        ...

    async def commit(self, push_id: str, policy_version: int, inflight: InflightMode, *, timeout_s: float) -> SinkCommitted:
        """Serve the staged version; repeating succeeds."""
        ...

    async def abort(self, push_id: str, *, timeout_s: float) -> int:
        """Drop the push; answers the version being served."""
        ...


class SinkDigests(Protocol):
    """A rollout server's end of an audit."""

    async def digest(self, policy_version: int, plan_hash: str, *, timeout_s: float) -> tuple[PieceDigests, ...]:
        """Digests of the live weights, piece by piece of a plan."""
        ...


class WeightSink(PushSink, SinkDigests, Protocol):
    """Both."""


class WeightSource(Protocol):
    """The actor gang's end; `shoal.clients.weights.WeightSourceClient`."""

    async def describe(self, *, timeout_s: float) -> tuple[SourceLayout, int]:
        """Answer what every rank holds, and of which policy version."""
        ...

    async def prepare(
        self, push_id: str, policy_version: int, sinks: Sequence[SinkTarget], *, timeout_s: float
    ) -> Mapping[str, PlannedServer]:
        """Plan on every rank; a server that cannot be planned is missing."""
        ...

    async def transfer(self, push_id: str, collective_groups: Mapping[str, str], *, timeout_s: float) -> SourceTransferred:
        """Write on every rank; says of each server whether it got everything."""
        ...

    async def abort(self, push_id: str, *, timeout_s: float) -> None:
        """Forget the push."""
        ...

    async def digest(
        self, policy_version: int, plan_hashes: Mapping[str, str], *, timeout_s: float
    ) -> Mapping[str, tuple[PieceDigests, ...]]:
        """Digests of what the ranks hold, piece by piece of each server's plan."""
        ...


class Deadline:
    """One stage's time, shared by all of its calls."""

    def __init__(self, timeout_s: float) -> None:
        self._ends_s = time.monotonic() + timeout_s

    def left_s(self, share: float = 1.0) -> float:
        """A share of the seconds that are left; never 0, since a call without time would be refused for a wrong reason."""
        return max(_LEAST_S, share * (self._ends_s - time.monotonic()))


async def outcome_of(call: Awaitable[Answer], timeout_s: float) -> Answer | Exception:
    """The answer of a call, or the reason for which there is none; faults of this program are raised."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        return DeadlineError(f"no answer within {timeout_s:.3g} s")
    except ShoalError as error:
        return error


async def outcomes_of(calls: Mapping[str, Awaitable[Answer]], timeout_s: float) -> dict[str, Answer | Exception]:
    """The outcomes of several calls side by side."""
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(outcome_of(call, timeout_s)) for name, call in calls.items()}
    return {name: task.result() for name, task in tasks.items()}


def unwrap(outcome: Answer | Exception, what: str) -> Answer:
    """The answer. Raises: TransportError: there is none; starts with `what`."""
    if isinstance(outcome, Exception):
        msg = f"{what}: {reason_of(outcome)}"
        raise TransportError(msg) from outcome
    return outcome


def reason_of(error: Exception) -> str:
    """Class and message."""
    return f"{type(error).__name__}: {error}"


async def undisturbed(work: Coroutine[object, object, None]) -> None:
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
