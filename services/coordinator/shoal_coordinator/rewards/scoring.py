"""Scores generated groups through the reward servers; several groups of one scorer share one call.

With reward.sources each group goes to the scorer of its row's source. "Not scored" is not 0: a sample whose scorer declined, raised,
answered NaN or could not be reached keeps that status and reaches no advantage. Only UnavailableError is retried, and only here: on
another server, or on the same one with full jitter. A scorer that does not exist fails the run at once: the first call asks for all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.config.models import RewardSection
from shoal.errors import InvalidRequestError, NotFoundError, ShoalError, UnavailableError
from shoal.rpc.retry import jittered_delay_s
from shoal.types import ScoreResult, ScoreSample, ScoreStatus
from shoal_coordinator.dispatcher import GeneratedGroup
from shoal_coordinator.rewards.results import checked_results, weighted
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
    """Scores groups with the configured scorers; used from the event loop alone.

    Args:
        pool: reward servers; changes at any time.
        config: scorers, version, weights, deadline.
        tokenizer: decodes responses.
        clock: counts open calls as reward time.
        wait_for_server_s: how long a call may stay unanswered for want of a server, beside its own deadline; a server that
            is being restarted comes back meanwhile.
        source_key: column that names a row's source; all rows were checked against reward.sources when they were loaded.
    """

    def __init__(
        self,
        pool: ServerPool[RewardEndpoint],
        config: RewardSection,
        tokenizer: PromptTokenizer,
        clock: StageClock,
        *,
        wait_for_server_s: float,
        source_key: str = "data_source",
    ) -> None:
        self._pool = pool
        self._config = config
        self._tokenizer = tokenizer
        self._clock = clock
        self._wait_for_server_s = wait_for_server_s
        self._source_key = source_key
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._versions = config.scorers
        self._unseen = set(self._versions)

    async def score(self, groups: Sequence[GeneratedGroup]) -> list[ScoredGroup]:
        """Score groups, in order.

        Raises:
            NotFoundError: no such scorer or version.
            InvalidRequestError: the scorer refuses the request as such.
        """
        chunks = self._chunks(groups)
        called = {name for name, places in chunks if any(groups[place].completions for place in places)}
        try:
            async with asyncio.TaskGroup() as calls:
                # A scorer of few rows would be missed only when the first of them comes.
                asked = [calls.create_task(self._ask_for(name)) for name in sorted(self._unseen - called) if called]
                scoring = [calls.create_task(self._score_chunk(name, [groups[place] for place in places])) for name, places in chunks]
        except* ShoalError as errors:
            raise first_error(errors) from None
        self._unseen -= called | {name for task in asked if (name := task.result()) is not None}
        places = [place for _, own in chunks for place in own]
        scored = [group for task in scoring for group in task.result()]
        return [group for _, group in sorted(zip(places, scored, strict=True), key=lambda pair: pair[0])]

    def _chunks(self, groups: Sequence[GeneratedGroup]) -> list[tuple[str, list[int]]]:
        """Places of the groups that share a call, with the scorer to call."""
        places: dict[str, list[int]] = {}
        for place, group in enumerate(groups):
            places.setdefault(self._scorer_of(group), []).append(place)
        return [
            (name, own[start : start + GROUPS_PER_CALL]) for name, own in places.items() for start in range(0, len(own), GROUPS_PER_CALL)
        ]

    def _scorer_of(self, group: GeneratedGroup) -> str:
        if not self._config.sources:
            return self._config.scorer
        return self._config.sources[str(group.task.row[self._source_key])]

    async def _ask_for(self, scorer: str) -> str | None:
        """Ask a server for a scorer without scoring; returns its name if one answered."""
        try:
            await self._call_servers(scorer, (), self._config.timeout_s)
        except NotFoundError as error:
            raise self._cannot_score(scorer, error) from error
        except ShoalError:
            # Whatever else is wrong shows, and is dealt with, when there is something to score.
            return None
        return scorer

    async def _score_chunk(self, scorer: str, groups: Sequence[GeneratedGroup]) -> list[ScoredGroup]:
        samples = self._samples(groups)
        async with self._slots:
            with self._clock.measure(Stage.REWARD):
                service, version, results = await self._call(scorer, samples, self._config.timeout_s * len(groups))
        scored: list[ScoredGroup] = []
        start = 0
        for group in groups:
            end = start + len(group.completions)
            own = tuple(results[start:end])
            scored.append(ScoredGroup(group=group, results=own, scorer=scorer, service=service, service_version=version))
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

    async def _call(self, scorer: str, samples: Sequence[ScoreSample], timeout_s: float) -> tuple[str, str, list[ScoreResult]]:
        """Returns the service's id, the scorer's version and one checked result per sample."""
        if not samples:
            return "", self._versions[scorer], []
        try:
            service, (version, results) = await self._call_servers(scorer, samples, timeout_s)
            checked = checked_results(samples, results)
            return service, version, [weighted(result, self._config.weights, scorer) for result in checked]
        except (NotFoundError, InvalidRequestError) as error:
            raise self._cannot_score(scorer, error) from error
        except ShoalError as error:
            message = f"{type(error).__name__}: {error}"
            failed = [ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message=message) for sample in samples]
            return "", self._versions[scorer], failed

    def _cannot_score(self, scorer: str, error: NotFoundError | InvalidRequestError) -> ShoalError:
        sources = sorted(source for source, name in self._config.sources.items() if name == scorer)
        setting = f"reward.sources of {', '.join(sources)}:" if sources else "reward.scorer"
        return type(error)(f"{setting} {scorer!r} cannot score: {error}")

    async def _call_servers(
        self, scorer: str, samples: Sequence[ScoreSample], timeout_s: float
    ) -> tuple[str, tuple[str, list[ScoreResult]]]:
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
                    answer = await server.client.score(scorer, self._versions[scorer], samples, timeout_s=left_s)
                    return server.server_id, answer
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
