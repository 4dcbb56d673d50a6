"""Scores generated groups through the reward servers; several groups share one call.

"Not scored" is not 0: a sample whose scorer declined, raised, answered NaN or could not be reached keeps that status and
reaches no advantage. Only UnavailableError is retried, and only here: on another server, or on the same one with full jitter.
A scorer that does not exist fails the run at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from shoal.config.models import RewardSection
from shoal.errors import InternalError, InvalidRequestError, NotFoundError, ShoalError, UnavailableError
from shoal.rpc.retry import jittered_delay_s
from shoal.types import ScoreResult, ScoreSample, ScoreStatus
from shoal_coordinator.dispatcher import GeneratedGroup
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import Stage, StageClock
from shoal_coordinator.tokenizing import PromptTokenizer

GROUPS_PER_CALL = 8
"""Few enough that a call's deadline (reward.timeout_s for each of its groups) stays bounded."""

MAX_CONCURRENT_CALLS = 4


class RewardEndpoint(Protocol):
    """What scoring needs of a reward client."""

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """Score samples; returns the scorer's version and one result per sample, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with one result per completion, and who gave it."""

    group: GeneratedGroup
    results: tuple[ScoreResult, ...]
    scorer: str
    service: str
    service_version: str


class GroupScorer:
    """Scores groups with the configured scorer; used from the event loop alone.

    Args:
        pool: reward servers; changes at any time.
        config: scorer, version, deadline.
        tokenizer: decodes responses.
        clock: counts open calls as reward time.
        wait_for_server_s: how long a call may stay unanswered for want of a server, beside its own deadline; a server that
            is being restarted comes back meanwhile.
    """

    def __init__(
        self,
        pool: ServerPool[RewardEndpoint],
        config: RewardSection,
        tokenizer: PromptTokenizer,
        clock: StageClock,
        *,
        wait_for_server_s: float,
    ) -> None:
        self._pool = pool
        self._config = config
        self._tokenizer = tokenizer
        self._clock = clock
        self._wait_for_server_s = wait_for_server_s
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def score(self, groups: Sequence[GeneratedGroup]) -> list[ScoredGroup]:
        """Score groups, in order.

        Raises:
            NotFoundError: no such scorer or version.
            InvalidRequestError: the scorer refuses the request as such.
        """
        chunks = [groups[start : start + GROUPS_PER_CALL] for start in range(0, len(groups), GROUPS_PER_CALL)]
        try:
            async with asyncio.TaskGroup() as calls:
                scoring = [calls.create_task(self._score_chunk(chunk)) for chunk in chunks]
        except* ShoalError as errors:
            raise first_error(errors) from None
        return [scored for task in scoring for scored in task.result()]

    async def _score_chunk(self, groups: Sequence[GeneratedGroup]) -> list[ScoredGroup]:
        samples = self._samples(groups)
        async with self._slots:
            with self._clock.measure(Stage.REWARD):
                service, version, results = await self._call(samples, self._config.timeout_s * len(groups))
        scored: list[ScoredGroup] = []
        start = 0
        for group in groups:
            end = start + len(group.completions)
            own = tuple(results[start:end])
            scored.append(ScoredGroup(group=group, results=own, scorer=self._config.scorer, service=service, service_version=version))
            start = end
        return scored

    def _samples(self, groups: Sequence[GeneratedGroup]) -> list[ScoreSample]:
        pairs = [(group, completion) for group in groups for completion in group.completions]
        texts = self._tokenizer.decode([completion.response_ids for _, completion in pairs])
        return [
            ScoreSample(
                sample_id=f"{group.task.uid}/{completion.sample_index}/{group.attempt}",
                prompt=group.task.text,
                response=text,
                row=group.task.row,
                finish_reason=completion.finish_reason,
                num_response_tokens=completion.response_ids.size,
            )
            for (group, completion), text in zip(pairs, texts, strict=True)
        ]

    async def _call(self, samples: Sequence[ScoreSample], timeout_s: float) -> tuple[str, str, list[ScoreResult]]:
        """Returns the service's id, the scorer's version and one checked result per sample."""
        if not samples:
            return "", self._config.version, []
        try:
            service, (version, results) = await self._call_servers(samples, timeout_s)
            return service, version, checked_results(samples, results)
        except (NotFoundError, InvalidRequestError) as error:
            raise type(error)(f"reward.scorer {self._config.scorer!r} cannot score: {error}") from error
        except ShoalError as error:
            message = f"{type(error).__name__}: {error}"
            failed = [ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message=message) for sample in samples]
            return "", self._config.version, failed

    async def _call_servers(self, samples: Sequence[ScoreSample], timeout_s: float) -> tuple[str, tuple[str, list[ScoreResult]]]:
        """Ask the least loaded server; where it is unavailable, another one, its successor, or the same one again."""
        deadline = time.monotonic() + timeout_s + self._wait_for_server_s
        num_tokens = sum(sample.num_response_tokens for sample in samples)
        failed_on: list[str] = []
        pause_s = 0.0
        while True:
            server = await self._pool.pick(deadline - time.monotonic(), failed_on, pause_s)
            left_s = min(timeout_s, max(0.001, deadline - time.monotonic()))
            try:
                with self._pool.working(server, num_tokens):
                    return server.server_id, await server.client.score(self._config.scorer, self._config.version, samples, timeout_s=left_s)
            except UnavailableError:
                failed_on.append(server.server_id)
                pause_s = jittered_delay_s(len(failed_on))
                if time.monotonic() + pause_s >= deadline:
                    raise


def first_error(errors: BaseExceptionGroup[ShoalError]) -> ShoalError:
    """The first error of a group of concurrent ones, which all have the same cause as a rule."""
    error: ShoalError | BaseExceptionGroup[ShoalError] = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def checked_results(samples: Sequence[ScoreSample], results: Sequence[ScoreResult]) -> list[ScoreResult]:
    """Match results to samples; a score that is not finite, or per-token rewards of another length, become errors.

    Raises: InternalError: the answer is for other samples.
    """
    if [result.sample_id for result in results] != [sample.sample_id for sample in samples]:
        raise InternalError(f"the reward server answered {len(results)} results that do not match the {len(samples)} samples in order")
    return [_checked(sample, result) for sample, result in zip(samples, results, strict=True)]


def _checked(sample: ScoreSample, result: ScoreResult) -> ScoreResult:
    if result.status is not ScoreStatus.SCORED:
        return result
    if not math.isfinite(result.value):
        return replace(result, status=ScoreStatus.ERROR, value=0.0, message=f"the score is {result.value}: it should be finite")
    if result.token_values and len(result.token_values) != sample.num_response_tokens:
        message = f"{len(result.token_values)} per-token rewards for {sample.num_response_tokens} tokens"
        return replace(result, status=ScoreStatus.ERROR, value=0.0, message=message)
    return result
