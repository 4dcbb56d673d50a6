"""Rollout and reward servers as the fleet keeps them.

A member whose call found it unavailable is *suspect*: it takes no traffic until it answers again. Without that, a server
that died would be given work until its lease expires, and use up every retry of every group.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from shoal.errors import UnavailableError
from shoal.types import Completion, SamplingParams, ScoreResult, ScoreSample, ServiceInfo
from shoal_coordinator.connections import RewardCalls, RolloutCalls, SinkConnection

PROBE_TIMEOUT_S = 2.0


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutMember:
    """A rollout server; served_version is what it is known to serve. The rest describes pushes that missed it."""

    info: ServiceInfo
    client: RolloutCalls
    sink: SinkConnection
    served_version: int
    suspect: bool = False
    num_failures: int = 0
    failing_since_s: float | None = None
    last_error: str = ""

    async def probe(self) -> None:
        """Ask a suspect whether it serves, and which version.

        Raises: ShoalError: it does not answer. UnavailableError: it drains.
        """
        description = await self.client.describe(timeout_s=PROBE_TIMEOUT_S)
        if description.draining:
            raise UnavailableError(f"rollout server {self.info.service_id!r} drains")
        self.served_version = description.policy_version


@dataclass(slots=True, kw_only=True, eq=False)
class RewardMember:
    """A reward server."""

    info: ServiceInfo
    client: RewardCalls
    suspect: bool = False

    async def probe(self) -> None:
        """Ask a suspect whether it serves.

        Raises: ShoalError: it does not answer.
        """
        await self.client.describe(timeout_s=PROBE_TIMEOUT_S)


class WatchedRollout:
    """Generation that reports when the server is unavailable."""

    def __init__(self, client: RolloutCalls, on_unavailable: Callable[[], None]) -> None:
        self._client = client
        self._on_unavailable = on_unavailable

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        num_samples: int,
        seeds: Sequence[int] = (),
        min_policy_version: int = 0,
        *,
        timeout_s: float,
    ) -> AsyncGenerator[Completion, None]:
        """As the client; see `RolloutEndpoint`."""
        stream = self._client.generate(request_id, prompt_ids, sampling, num_samples, seeds, min_policy_version, timeout_s=timeout_s)
        try:
            async with aclosing(stream):
                async for completion in stream:
                    yield completion
        except UnavailableError:
            self._on_unavailable()
            raise


class WatchedReward:
    """Scoring that reports when the server is unavailable."""

    def __init__(self, client: RewardCalls, on_unavailable: Callable[[], None]) -> None:
        self._client = client
        self._on_unavailable = on_unavailable

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """As the client; see `RewardEndpoint`."""
        try:
            return await self._client.score(scorer, version, samples, timeout_s=timeout_s)
        except UnavailableError:
            self._on_unavailable()
            raise
