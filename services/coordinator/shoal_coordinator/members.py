"""Rollout and reward servers as the fleet keeps them.

A member whose call found it unavailable is *suspect*: it takes no traffic until it answers again. Without that, a server
that died would be given work until its lease expires, and use up every retry of every group. A reward server begins as a
suspect: it takes no traffic before it has said which scorers it offers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from shoal.errors import StalePolicyError, UnavailableError
from shoal.types import Completion, SamplingParams, ScorerDescription, ScoreResult, ScoreSample, ServiceInfo
from shoal.weights.plan import ServerPlan
from shoal_coordinator.connections import RewardCalls, RolloutCalls, SinkConnection

PROBE_TIMEOUT_S = 2.0
FIRST_REST_S = 1.0
MAX_REST_DOUBLINGS = 5
"""A server that pushes miss again and again is left out of them for 1, 2, 4 ... 32 s."""


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutMember:
    """A rollout server; served_version is what it is known to serve.

    wrong: what an audit found different in the weights it serves. plan: of the last push that it committed. failures and what follows
    describe pushes that missed it since the last one that reached it.
    """

    info: ServiceInfo
    client: RolloutCalls
    sink: SinkConnection
    served_version: int
    suspect: bool = False
    wrong: str = ""
    plan: ServerPlan | None = None
    needs_dense: bool = True
    pushes_since_dense: int = 0
    num_failures: int = 0
    failing_since_s: float | None = None
    last_error: str = ""
    rests_until_s: float = 0.0

    def serves(self, policy_version: int) -> bool:
        """Whether it answers, with exactly this version."""
        return not self.suspect and not self.wrong and self.served_version == policy_version

    def wants_dense(self, dense_every: int) -> bool:
        """Whether the next push must send everything: after whatever went wrong, and every so many pushes."""
        return self.needs_dense or self.pushes_since_dense + 1 >= dense_every

    def note_commit(self, policy_version: int, plan: ServerPlan | None, *, dense: bool) -> None:
        """A push has reached it."""
        self.served_version, self.plan = policy_version, plan
        self.wrong, self.needs_dense = "", False
        self.pushes_since_dense = 0 if dense else self.pushes_since_dense + 1
        self.num_failures, self.failing_since_s, self.last_error, self.rests_until_s = 0, None, "", 0.0

    def note_failure(self, error: str, now_s: float) -> None:
        """A push has missed it."""
        self.needs_dense = True
        self.num_failures += 1
        self.last_error = error
        if self.failing_since_s is None:
            self.failing_since_s = now_s
        # The first failure may have been chance; one that goes on, such as an engine that hangs, must not cost every push its deadline.
        repeated = min(self.num_failures - 2, MAX_REST_DOUBLINGS)
        self.rests_until_s = now_s + (FIRST_REST_S * 2**repeated if repeated >= 0 else 0.0)

    def note_wrong(self, what: str) -> None:
        """An audit has found other weights in it; only a push of everything repairs that."""
        self.wrong, self.needs_dense = what, True

    def note_version(self, policy_version: int) -> bool:
        """It says which version it serves; whether that is another one than was thought."""
        if policy_version == self.served_version:
            return False
        self.served_version, self.plan, self.needs_dense = policy_version, None, True
        return True

    async def describe_version(self, timeout_s: float) -> int:
        """Ask whether it serves, and which version.

        Raises: ShoalError: it does not answer. UnavailableError: it drains.
        """
        description = await self.client.describe(timeout_s=timeout_s)
        if description.draining:
            raise UnavailableError(f"rollout server {self.info.service_id!r} drains")
        return description.policy_version

    async def probe(self) -> None:
        """Ask a suspect whether it serves. Raises: as describe_version."""
        self.note_version(await self.describe_version(PROBE_TIMEOUT_S))


@dataclass(slots=True, kw_only=True, eq=False)
class RewardMember:
    """A reward server. It is suspect until it has said what it offers; problem: why it has not."""

    info: ServiceInfo
    client: RewardCalls
    suspect: bool = True
    scorers: tuple[ScorerDescription, ...] = ()
    problem: str = ""

    async def probe(self) -> None:
        """Ask a suspect what it offers: it may have been started again with other code.

        Raises: ShoalError: it does not answer.
        """
        self.scorers = tuple(await self.client.describe(timeout_s=PROBE_TIMEOUT_S))


class WatchedRollout:
    """Generation that reports when the server is unavailable, or older than it was thought to be."""

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
        except (UnavailableError, StalePolicyError):
            self._on_unavailable()
            raise


class WatchedReward:
    """Scoring that reports when the server is unavailable."""

    def __init__(self, member: RewardMember, on_unavailable: Callable[[], None]) -> None:
        self._member = member
        self._on_unavailable = on_unavailable

    @property
    def scorers(self) -> Sequence[ScorerDescription]:
        """What it last said it offers."""
        return self._member.scorers

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """As the client; see `RewardEndpoint`."""
        try:
            return await self._member.client.score(scorer, version, samples, timeout_s=timeout_s)
        except UnavailableError:
            self._on_unavailable()
            raise
