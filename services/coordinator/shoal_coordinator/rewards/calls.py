"""Calls of reward servers: which replica, how often, for how long.

- A scorer's work goes to the server with the fewest outstanding tokens among those that offer exactly its name, version and fingerprint.
- What a server may be over soon (unavailable, internal faults, garbage, exhausted) is tried again, on another replica if there is one,
  else with full jitter, until the deadline: the component's timeout for each group of the call. A server is waited for within it, and
  for the timeout of one group at most. A
  request that is refused, or larger than a server takes, is not tried again.
- A server that fails a scorer again and again rests (`breaker`).
- At most max_open_requests requests are open at once. Waiting for one's turn there is no server's fault and not part of the deadline.
- No failure is raised: the samples become errors whose message names scorer, server and error, and never 0.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shoal.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InternalError,
    MessageSizeError,
    NotFoundError,
    ShoalError,
    StateError,
    TransportError,
    UnavailableError,
)
from shoal.rpc.retry import jittered_delay_s
from shoal.telemetry.metrics import counter, histogram
from shoal.types import ScorerDescription, ScoreResult, ScoreSample, ScoreStatus
from shoal_coordinator.rewards.breaker import Breakers
from shoal_coordinator.rewards.call_sizes import MAX_SAMPLE_BYTES, SampleSizes, plan_calls
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.rewards.results import checked_results
from shoal_coordinator.rewards.route import RouteComponent
from shoal_coordinator.rewards.slow_samples import SlowSamples
from shoal_coordinator.server_pool import ServerLease, ServerPool

_AnswerT = TypeVar("_AnswerT")

_RETRIED = (UnavailableError, InternalError, TransportError, CapacityError)
_SERVERS_FAULT = (*_RETRIED, DeadlineError, NotFoundError, StateError, ConfigError)
"""Counted by the breaker: a server that answers these at once would otherwise always be the least loaded."""

_SAMPLES = counter("coordinator", "scored", "samples", "Samples by what their scorer said.", labels=("scorer", "version", "status"))
_CALL_S = histogram("coordinator", "score_call", "seconds", "Time of a call of a reward server.", labels=("scorer", "version"))

ServiceResult = tuple[str, ScoreResult]
"""A result and the id of the server that gave it; "" if none was there."""
_Suits = Callable[[ServerLease[RewardEndpoint]], bool]


class _CallFailedError(Exception):
    """A call failed for good, last on service."""

    def __init__(self, service: str, error: ShoalError) -> None:
        super().__init__(service, error)
        self.service = service
        self.error = error


@dataclass(slots=True, kw_only=True)
class _Attempts:
    """What has been tried for one call: servers that failed, the last one and its error, and how long to leave a lone one alone."""

    deadline_s: float
    failed_on: list[str] = field(default_factory=list)
    pause_s: float = 0.0
    service: str = ""
    error: ShoalError | None = None

    def note(self, service: str, error: ShoalError, pause_s: float) -> None:
        """A server has failed."""
        self.failed_on.append(service)
        self.service, self.error, self.pause_s = service, error, pause_s


class ScorerCalls:
    """Asks the servers of a pool for scores; used from the event loop alone.

    Args:
        pool: reward servers; changes at any time.
        max_open_requests: requests that are open at once, over all scorers.
        slow: takes the latencies.
        is_live: the samples are the run's, and counted as such; else they are tried or shadowed.
    """

    def __init__(
        self,
        pool: ServerPool[RewardEndpoint],
        *,
        max_open_requests: int,
        slow: SlowSamples | None = None,
        is_live: bool = True,
        now_s: Callable[[], float] = time.monotonic,
        random_unit: Callable[[], float] = random.random,
    ) -> None:
        self._pool = pool
        self._slots = asyncio.Semaphore(max_open_requests)
        self._slow = slow
        self._is_live = is_live
        self._now_s = now_s
        self._random_unit = random_unit
        self._breakers = Breakers(now_s)

    async def score(self, component: RouteComponent, samples: Sequence[ScoreSample], num_groups: int) -> tuple[str, list[ScoreResult]]:
        """Score samples, in one call unless they are too large for one.

        Args:
            component: who scores, and within which time a group.
            num_groups: groups that the samples are of.
        Returns: the id of the server that scored the first sample, "" if none did; one checked result per sample, in order.
        """
        sizes = SampleSizes(with_ids=self._needs_ids(component))
        calls = plan_calls([samples], sizes)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._call(component, [samples[place] for _, place in call.places], call.num_bytes, num_groups))
                for call in calls
            ]
        answers = [answer for task in tasks for answer in task.result()]
        return (answers[0][0] if answers else ""), [result for _, result in answers]

    async def score_groups(self, component: RouteComponent, groups: Sequence[Sequence[ScoreSample]]) -> list[list[ServiceResult]]:
        """Score groups, several in a call as far as they fit; one checked result per sample, in order."""
        answers: list[list[ServiceResult]] = [[] for _ in groups]
        calls = plan_calls(groups, SampleSizes(with_ids=self._needs_ids(component)))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._call(component, [groups[each][place] for each, place in call.places], call.num_bytes, call.num_groups)
                )
                for call in calls
            ]
        for call, task in zip(calls, tasks, strict=True):
            for (each, _), answer in zip(call.places, task.result(), strict=True):
                answers[each].append(answer)
        return answers

    def _needs_ids(self, component: RouteComponent) -> bool:
        return any(_needs_ids(server.client, component) for server in self._pool.servers())

    async def _call(
        self, component: RouteComponent, samples: Sequence[ScoreSample], num_bytes: int, num_groups: int
    ) -> list[ServiceResult]:
        if len(samples) == 1 and num_bytes > MAX_SAMPLE_BYTES:
            message = f"the sample has {num_bytes} bytes, more than fits into a message ({MAX_SAMPLE_BYTES})"
            return self._noted(component, "", _failed(samples, f"{_name(component)}: {message}"))
        try:
            service, results = await self._ask(component, samples, component.timeout_s * num_groups)
        except _CallFailedError as failure:
            where = f" on {failure.service!r}" if failure.service else ""
            message = f"{_name(component)} failed{where}: {type(failure.error).__name__}: {failure.error}"
            return self._noted(component, failure.service, _failed(samples, message))
        return self._noted(component, service, results)

    async def _ask(self, component: RouteComponent, samples: Sequence[ScoreSample], timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """Ask servers until one has answered; the deadline stands still while all requests are taken by others."""
        attempts = _Attempts(deadline_s=self._now_s() + timeout_s)
        suits = self._suits(component)
        while True:
            await self._wait_for_server(component, attempts, suits)
            waits_since_s = self._now_s()
            async with self._slots:
                attempts.deadline_s += self._now_s() - waits_since_s
                # Chosen now, not before the wait: others have chosen meanwhile.
                server = self._pool.choose(attempts.failed_on, suits) or self._pool.choose((), suits)
                if server is None:
                    continue
                try:
                    left_s = max(0.001, attempts.deadline_s - self._now_s())
                    return server.server_id, await self._attempt(server, component, samples, left_s)
                except ShoalError as error:
                    attempts.note(server.server_id, error, jittered_delay_s(len(attempts.failed_on) + 1, self._random_unit))
                    if not _is_retried(error) or self._now_s() + attempts.pause_s >= attempts.deadline_s:
                        raise _CallFailedError(server.server_id, error) from error

    async def _wait_for_server(self, component: RouteComponent, attempts: _Attempts, suits: _Suits) -> None:
        """Wait until a server may be asked; one that has just failed only after the pause, if there is no other.

        Many groups in a call take longer to score, but not longer to be told that nobody scores them.
        """
        wait_s = min(component.timeout_s, max(0.0, attempts.deadline_s - self._now_s()))
        try:
            await self._pool.pick(wait_s, attempts.failed_on, attempts.pause_s, suits)
        except UnavailableError as error:
            # What a server said before tells more than that none is left.
            raise _CallFailedError(attempts.service, attempts.error or self._none_offers(component, wait_s)) from error

    def _none_offers(self, component: RouteComponent, timeout_s: float) -> UnavailableError:
        wanted = f"{_name(component)}, fingerprint {component.fingerprint or 'none'}"
        offered = [
            f"{server.server_id} ({', '.join(f'{each.name}@{each.version} {each.fingerprint}'.strip() for each in server.client.scorers)})"
            for server in self._pool.servers()
        ]
        there_is = ", ".join(offered) or "none at all"
        return UnavailableError(f"no reward server offered {wanted} for {timeout_s:.3g} s; there is: {there_is}: start one that does")

    def _suits(self, component: RouteComponent) -> _Suits:
        return lambda server: offers(server.client, component) and self._breakers.allows((server.server_id, _name(component)))

    async def _attempt(
        self, server: ServerLease[RewardEndpoint], component: RouteComponent, samples: Sequence[ScoreSample], timeout_s: float
    ) -> list[ScoreResult]:
        """Call one server once. Raises: ShoalError: it failed, or its answer is of no use."""
        key = (server.server_id, _name(component))
        is_probe = self._breakers.begin(key)
        timer = _CALL_S.labels(scorer=component.scorer, version=component.version)
        sent = samples if _needs_ids(server.client, component) else list(map(_without_ids, samples))
        try:
            with self._pool.working(server, sum(1 + sample.num_response_tokens for sample in samples)), timer.time():
                call = server.client.score(component.scorer, component.version, sent, timeout_s=timeout_s)
                version, results = await _unless_gone(server, call)
            checked = _checked_answer(component, version, samples, results)
        except _SERVERS_FAULT as error:
            has_gone = isinstance(error, UnavailableError) and server.gone.is_set()
            if has_gone or isinstance(error, MessageSizeError):
                self._breakers.abandon(key, is_probe=is_probe)
            else:
                self._breakers.fail(key, is_probe=is_probe)
            raise
        except BaseException:  # cancelled, or no fault of the server: a probe must not stay open for ever
            self._breakers.abandon(key, is_probe=is_probe)
            raise
        self._breakers.succeed(key)
        return checked

    def _noted(self, component: RouteComponent, service: str, results: Sequence[ScoreResult]) -> list[ServiceResult]:
        for status, number in Counter(result.status for result in results if self._is_live).items():
            _SAMPLES.labels(scorer=component.scorer, version=component.version, status=str(status)).inc(number)
        if self._slow is not None:
            for result in results:
                # 0: the server does not say.
                if result.latency_ms > 0:
                    self._slow.note(component.scorer, component.version, service, result.sample_id, result.latency_ms)
        return [(service, result) for result in results]


def _is_retried(error: ShoalError) -> bool:
    return isinstance(error, _RETRIED) and not isinstance(error, MessageSizeError)


def offers(endpoint: RewardEndpoint, component: RouteComponent) -> bool:
    """Whether a server may do a component's work: the same name, version and fingerprint; any version where none is pinned yet."""
    return _description(endpoint, component) is not None


def _description(endpoint: RewardEndpoint, component: RouteComponent) -> ScorerDescription | None:
    for offered in endpoint.scorers:
        is_same = not component.version or (offered.version, offered.fingerprint) == (component.version, component.fingerprint)
        if offered.name == component.scorer and is_same:
            return offered
    return None


def _needs_ids(endpoint: RewardEndpoint, component: RouteComponent) -> bool:
    description = _description(endpoint, component)
    return description is not None and description.needs_token_ids


def _without_ids(sample: ScoreSample) -> ScoreSample:
    # Spelt out: for each sample of a run, and `replace` takes many times as long.
    return ScoreSample(
        sample_id=sample.sample_id,
        prompt=sample.prompt,
        response=sample.response,
        row=sample.row,
        finish_reason=sample.finish_reason,
        num_response_tokens=sample.num_response_tokens,
    )


def _checked_answer(
    component: RouteComponent, version: str, samples: Sequence[ScoreSample], results: Sequence[ScoreResult]
) -> list[ScoreResult]:
    if component.version and version != component.version:
        raise InternalError(f"it answered as version {version!r}, not {component.version!r}")
    return checked_results(samples, results)


def _failed(samples: Sequence[ScoreSample], message: str) -> list[ScoreResult]:
    return [ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message=message) for sample in samples]


def _name(component: RouteComponent) -> str:
    return f"{component.scorer}@{component.version}" if component.version else component.scorer


async def _unless_gone(server: ServerLease[RewardEndpoint], call: Coroutine[Any, Any, _AnswerT]) -> _AnswerT:
    """Await a call, but give up as soon as the server has left the pool."""
    calling, leaving = asyncio.create_task(call), asyncio.create_task(server.gone.wait())
    try:
        await asyncio.wait({calling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            raise UnavailableError(f"reward server {server.server_id!r} left while it was scoring")
        return calling.result()
    finally:
        calling.cancel()
        leaving.cancel()
        await asyncio.gather(calling, leaving, return_exceptions=True)
