"""Scoring in the three ways that the reward benchmark compares: the function itself, a client's calls, and the coordinator's path."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from shoal_coordinator.dispatcher import GeneratedGroup
from shoal_coordinator.prompts import PromptTask
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.rewards.route import RouteComponent, RouteRevision
from shoal_coordinator.rewards.scoring import GroupScorer
from shoal_coordinator.rewards.slow_samples import SlowSamples
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import StageClock
from shoal_coordinator.tokenizing import Prompt
from shoal_coordinator.waiting import WaitBoard

from shoal.clients.reward import RewardClient
from shoal.config.models import RewardSection
from shoal.errors import NotFoundError, ShoalError
from shoal.types import Completion, FinishReason, Int32Array, SamplingParams, ScorerDescription, ScoreResult, ScoreSample, ScoreStatus
from shoal_benchmarks.reward_scorers import NAME, VERSION, holds_answer
from shoal_benchmarks.reward_summary import Measured

CALL_TIMEOUT_S = 60.0
Score = Callable[[Sequence[ScoreSample]], Awaitable[object]]


def score_in_process(samples: Sequence[ScoreSample]) -> list[float]:
    """Call the function for each sample."""
    return [holds_answer(sample.prompt, sample.response, sample.row) for sample in samples]


def measure_function(samples: Sequence[ScoreSample], seconds: float) -> Measured:
    """Call the function in a loop for so long."""
    started_s, num_samples = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - started_s) < seconds:
        score_in_process(samples)
        num_samples += len(samples)
    return Measured(num_samples=num_samples, seconds=passed_s)


def caller(client: RewardClient, scorer: str, version: str) -> Callable[[Sequence[ScoreSample]], Awaitable[list[ScoreResult]]]:
    """Score through a client; a sample without a score is an error."""

    async def score(samples: Sequence[ScoreSample]) -> list[ScoreResult]:
        _, results = await client.score(scorer, version, samples, timeout_s=CALL_TIMEOUT_S)
        require_scored(results)
        return results

    return score


def require_scored(results: Sequence[ScoreResult]) -> None:
    """Refuse to time what fails. Raises: ShoalError: a sample has no score."""
    for result in results:
        if result.status is not ScoreStatus.SCORED:
            raise ShoalError(f"sample {result.sample_id!r} was not scored but is {result.status}: {result.message}")


async def measure_calls(score: Score, batches: Sequence[Sequence[ScoreSample]], in_flight: int, seconds: float) -> Measured:
    """Score batches, over and over, with so many calls open, for so long; what is open at the end is waited for and counts."""
    started_s = time.perf_counter()
    num_samples, number = 0, 0

    async def work() -> None:
        nonlocal num_samples, number
        while time.perf_counter() - started_s < seconds:
            batch = batches[number % len(batches)]
            number += 1
            await score(batch)
            num_samples += len(batch)

    await _in_parallel(work, in_flight)
    return Measured(num_samples=num_samples, seconds=time.perf_counter() - started_s)


async def measure_pass(score: Score, batches: Sequence[Sequence[ScoreSample]], in_flight: int) -> Measured:
    """Score every batch once, with so many calls open."""
    started_s = time.perf_counter()
    left = iter(batches)

    async def work() -> None:
        for batch in left:
            await score(batch)

    await _in_parallel(work, in_flight)
    return Measured(num_samples=sum(map(len, batches)), seconds=time.perf_counter() - started_s)


async def _in_parallel(work: Callable[[], Awaitable[None]], number: int) -> None:
    await asyncio.gather(*(work() for _ in range(number)))


async def find_scorer(client: RewardClient, name: str) -> ScorerDescription:
    """What a server says of its scorer. Raises: NotFoundError: it has none of that name."""
    scorers = await client.describe(timeout_s=CALL_TIMEOUT_S)
    for scorer in scorers:
        if scorer.name == name:
            return scorer
    raise NotFoundError(f"the server has no scorer {name!r}; it has: {', '.join(each.name for each in scorers)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A client with what its server offers, as the coordinator keeps it."""

    client: RewardClient
    scorers: Sequence[ScorerDescription]

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """Score through the client."""
        return await self.client.score(scorer, version, samples, timeout_s=timeout_s)


class Utf8Tokenizer:
    """Token ids are the bytes of the text: decoding costs next to nothing, and is the same for every way."""

    tokenizer_hash = "utf8"
    bos_token_id = None

    def text(self, prompt: Prompt) -> str:
        """Plain strings alone."""
        return str(prompt)

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        """[P] bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, responses: Sequence[Int32Array]) -> list[str]:
        """The texts of bytes."""
        return [ids.astype(np.uint8).tobytes().decode() for ids in responses]


def route_scorer(endpoint: RewardEndpoint) -> GroupScorer:
    """The coordinator's way to one server."""
    pool: ServerPool[RewardEndpoint] = ServerPool("reward server", WaitBoard())
    pool.add("bench", endpoint)
    calls = ScorerCalls(pool, max_open_requests=RewardSection().max_open_requests, slow=SlowSamples())
    return GroupScorer(calls, Utf8Tokenizer(), StageClock())


def route_of(scorer: ScorerDescription) -> RouteRevision:
    """A revision of one component."""
    component = RouteComponent(scorer=scorer.name, version=scorer.version, fingerprint=scorer.fingerprint, timeout_s=CALL_TIMEOUT_S)
    return RouteRevision(number=1, label="bench", components=(component,))


def group_of(samples: Sequence[ScoreSample], uid: str) -> GeneratedGroup:
    """Samples as the completions of one prompt, as rollout servers give them."""
    tokenizer = Utf8Tokenizer()
    (prompt_ids,) = tokenizer.encode([samples[0].prompt])
    task = PromptTask(uid=uid, group_id=uid, prompt_ids=prompt_ids, text=samples[0].prompt, row=samples[0].row)
    completions = tuple(_completion(index, ids) for index, ids in enumerate(tokenizer.encode([sample.response for sample in samples])))
    return GeneratedGroup(task=task, attempt=1, server_id="bench", sampling=SamplingParams(max_new_tokens=1024), completions=completions)


def _completion(index: int, ids: Int32Array) -> Completion:
    return Completion(
        sample_index=index,
        response_ids=ids,
        rollout_logprobs=np.zeros(ids.size, np.float32),
        finish_reason=FinishReason.STOP,
        policy_version_spans=(),
        latency_ms=0.0,
        engine_id="bench",
    )


async def measure_ways(
    client: RewardClient, scorer: ScorerDescription, groups: Sequence[Sequence[ScoreSample]], num_rounds: int, num_warmup: int
) -> Mapping[str, list[float]]:
    """Score one group a round, in each way, one after another; another way is first each round.

    Returns: seconds of every round after the first num_warmup, by way: "function", "client", "route".
    """
    direct = caller(client, NAME, VERSION)
    route, revision = route_scorer(Endpoint(client=client, scorers=[scorer])), route_of(scorer)
    generated = [group_of(samples, f"bench-{index}") for index, samples in enumerate(groups)]

    async def by_function(place: int) -> None:
        score_in_process(groups[place])

    async def by_client(place: int) -> None:
        await direct(groups[place])

    async def by_route(place: int) -> None:
        (scored,) = await route.score([(generated[place], revision)])
        require_scored(scored.results)

    ways = [("function", by_function), ("client", by_client), ("route", by_route)]
    rounds: dict[str, list[float]] = {name: [] for name, _ in ways}
    for number in range(num_warmup + num_rounds):
        for name, score in ways[number % len(ways) :] + ways[: number % len(ways)]:
            started_s = time.perf_counter()
            await score(number % len(groups))
            if number >= num_warmup:
                rounds[name].append(time.perf_counter() - started_s)
    return rounds
