"""Calls to the server under check: whatever goes wrong is an answer with a problem, never an exception."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.conformance.report import Problem
from shoal.conformance.results import result_problem
from shoal.errors import (
    CapacityError,
    CodecError,
    ConfigError,
    DeadlineError,
    NotFoundError,
    ShoalError,
    UnavailableError,
)
from shoal.types import ScorerDescription, ScoreResult, ScoreSample

LATE_GRACE_S = 1.5
"""How long after its deadline a call may come back."""
MAX_DETAIL_CHARS = 400

_FIXES: dict[type[ShoalError], str] = {
    DeadlineError: "answer inside the call's deadline, with an error result for each sample that is not done by then",
    NotFoundError: "accept the names and versions that DescribeReward tells",
    CapacityError: "accept and send messages of up to 64 MiB (grpc.max_receive_message_length, grpc.max_send_message_length)",
    CodecError: "answer one result per sample, in order, with its sample_id, a status, and a finite value if it is scored",
    ConfigError: "implement DescribeReward and Score of shoal.rpc.v1.RewardService, and give the address and security that it listens with",
    UnavailableError: "see that the server listens at this address and stays up; its log says why it refused or lost the call",
}
_FIX_OF_OTHERS = "never fail the call for one sample: answer it with status error and a message; the server's log has the fault"


class Endpoint(Protocol):
    """A reward server as its callers see it; `shoal.clients.reward.RewardClient` is one."""

    async def describe(self, *, timeout_s: float) -> Sequence[ScorerDescription]:
        """The scorers that it offers."""
        ...

    async def score(
        self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float
    ) -> tuple[str, Sequence[ScoreResult]]:
        """The version that scored, and one result per sample in order; an empty version is the newest."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one call of Score gave: results, or an error; and how long it took."""

    samples: tuple[ScoreSample, ...]
    version: str = ""
    results: tuple[ScoreResult, ...] = ()
    error: Exception | None = None
    duration_s: float

    @property
    def problem(self) -> Problem | None:
        """What is wrong with it, if anything: the call failed, or a result does not fit its sample."""
        if self.error is not None:
            return error_problem(self.error)
        return result_problem(self.samples, self.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Calls an endpoint with a deadline of timeout_s seconds a call."""

    endpoint: Endpoint
    timeout_s: float

    async def describe(self) -> tuple[tuple[ScorerDescription, ...], Problem | None, float]:
        """The scorers, what went wrong if anything, and the seconds that it took."""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s + LATE_GRACE_S):
                scorers = tuple(await self.endpoint.describe(timeout_s=self.timeout_s))
        except Exception as error:  # noqa: BLE001 - whatever the endpoint raises is what is reported
            return (), error_problem(_in_time(error, self.timeout_s)), time.perf_counter() - started
        return scorers, None, time.perf_counter() - started

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float | None = None) -> Answer:
        """Score once.

        Args:
            timeout_s: instead of the usual deadline.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        asked, started = tuple(samples), time.perf_counter()
        try:
            async with asyncio.timeout(limit_s + LATE_GRACE_S):
                answered, results = await self.endpoint.score(scorer, version, asked, timeout_s=limit_s)
        except Exception as error:  # noqa: BLE001 - whatever the endpoint raises is what is reported
            return Answer(samples=asked, error=_in_time(error, limit_s), duration_s=time.perf_counter() - started)
        return Answer(samples=asked, version=answered, results=tuple(results), duration_s=time.perf_counter() - started)


def error_problem(error: Exception) -> Problem:
    """A failed call as a problem."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) > MAX_DETAIL_CHARS:
        text = f"{text[:MAX_DETAIL_CHARS]}…"
    fix = next((fix for kind, fix in _FIXES.items() if isinstance(error, kind)), _FIX_OF_OTHERS)
    return Problem(what=f"the call failed ({type(error).__name__.removesuffix('Error')}): {text}", fix=fix)


def _in_time(error: Exception, timeout_s: float) -> Exception:
    return DeadlineError(f"no answer although the deadline of {timeout_s:g} s has passed") if isinstance(error, TimeoutError) else error
