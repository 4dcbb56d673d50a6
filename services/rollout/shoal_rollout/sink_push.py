"""One weight push at a rollout server: its identity, its clock, and how pushes ended."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.config.models import MAX_PUSH_S
from shoal.errors import InvalidRequestError, StateError
from shoal.telemetry.metrics import counter

_pushes = counter("rollout", "pushes", "count", "Weight pushes, by how they ended here.", ("end",))


class PushEnd(StrEnum):
    """How a push ended at this server."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    REPLACED = "replaced"
    FAILED = "failed"


def count_end(end: PushEnd) -> None:
    """Count a push that ended."""
    _pushes.labels(end.value).inc()


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A push that was prepared. Equal to another of the same id and version."""

    push_id: str
    policy_version: int
    expires_at_s: float = field(default=math.inf, compare=False)

    @property
    def is_expired(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self.expires_at_s

    def check_time(self) -> None:
        """Raises: StateError: its time is over."""
        if self.is_expired:
            raise StateError(f"push {self.push_id} for version {self.policy_version} has expired; start another one")


def new_push(push_id: str, policy_version: int, expires_s: float) -> Push:
    """Begin a push whose clock runs from now on.

    Raises: InvalidRequestError: an empty id, a negative version, or a time that is not within 0..86400 s.
    """
    identity = named_push(push_id, policy_version)
    if not 0 < expires_s <= MAX_PUSH_S:
        raise InvalidRequestError(f"expires_s of push {push_id} is {expires_s}; it must be above 0 and at most {MAX_PUSH_S:g} s")
    return Push(push_id=identity.push_id, policy_version=policy_version, expires_at_s=time.monotonic() + expires_s)


def named_push(push_id: str, policy_version: int) -> Push:
    """The push that a call names.

    Raises: InvalidRequestError: an empty id or a negative version.
    """
    if not push_id or policy_version < 0:
        raise InvalidRequestError(f"push_id {push_id!r} must not be empty and policy_version {policy_version} not negative")
    return Push(push_id=push_id, policy_version=policy_version)


class ExpiryTimer:
    """Calls once when a push's time is over. One push at a time; started again for the next one."""

    def __init__(self, expire: Callable[[Push], Awaitable[None]]) -> None:
        self._expire = expire
        self._task: asyncio.Task[None] | None = None

    def start(self, push: Push) -> None:
        """Forget the last push and watch this one."""
        self.stop()
        self._task = asyncio.create_task(self._run(push), name=f"expiry-{push.push_id}")

    def stop(self) -> None:
        """Watch nothing. From within the call itself this does nothing, since the watch ends with it."""
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _run(self, push: Push) -> None:
        await asyncio.sleep(max(push.expires_at_s - time.monotonic(), 0.0))
        await self._expire(push)
