"""Real reward servers over gRPC that write down every sample they score, and every call that they fail."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import xxhash
from shoal_reward.scoring import ScoringPool
from shoal_reward.service import RewardService
from shoal_reward.servicer import RewardServicer

from shoal.errors import InternalError
from shoal.reward import Row, Score, ScorerRegistry, reward
from shoal.rpc.v1 import reward_pb2, reward_pb2_grpc
from shoal.rpc.v1.common_pb2 import SCORE_STATUS_ERROR, SCORE_STATUS_SCORED
from tests.helpers.rpc_services import REWARD_SERVICE, serving

ScorerKey: TypeAlias = tuple[str, str]
"""Name and version."""
LIVE_PREFIXES = ("g", "eval-")
"""Of the ids of samples that a run generates; checks and warm-ups have others."""


def value_of(scorer: str, version: str, text: str) -> float:
    """What every scorer gives a text, or a token of it: 0, 1 or 2, other ones for another scorer or version."""
    return float(xxhash.xxh3_64_intdigest(f"{scorer}@{version}/{text}".encode()) % 3)


def score_of(scorer: str, version: str, response: str) -> Score:
    """`steps` rewards each token, `shy` has nothing to say about a third of the texts, all others give a number."""
    if scorer == "steps":
        return [value_of(scorer, version, token) for token in response.split()]
    value = value_of(scorer, version, response)
    return None if scorer == "shy" and value == 0 else value


def registry_of(scorers: Sequence[ScorerKey], *, is_other_code: bool = False) -> ScorerRegistry:
    """Scorers of these names and versions; or others under the same versions."""
    registry = ScorerRegistry()
    for name, version in scorers:
        (_add_other if is_other_code else _add)(registry, name, version)
    return registry


def _add(registry: ScorerRegistry, name: str, version: str) -> None:
    @reward(name=name, version=version, registry=registry)
    async def scripted(prompt: str, response: str, row: Row) -> Score:
        """What `score_of` says."""
        return score_of(name, version, response)


def _add_other(registry: ScorerRegistry, name: str, version: str) -> None:
    @reward(name=name, version=version, registry=registry)
    async def changed(prompt: str, response: str, row: Row) -> Score:
        """Something else."""
        return 100.0


@dataclass
class Journal:
    """What servers have done: answered (scorer, version, sample id) -> how often, and samples by server; failed calls."""

    answered: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    by_server: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)
    num_scored: Counter[str] = field(default_factory=Counter)
    """Sample id -> how often it got a score, by whichever scorer."""


@dataclass
class Faults:
    """How servers behave: they take up to max_delay_s, fail a share of the live calls, leave calls of `hanging` scorers
    unanswered, and have an error for every live sample of `broken` ones."""

    rng: random.Random
    max_delay_s: float = 0.003
    failing_share: float = 0.0
    hanging: frozenset[ScorerKey] = frozenset()
    broken: frozenset[ScorerKey] = frozenset()


class JournalServicer(RewardServicer):
    """The real servicer, with a journal."""

    def __init__(self, service: RewardService, journal: Journal, faults: Faults) -> None:
        super().__init__(service)
        self._name = service.service_id
        self._journal = journal
        self._faults = faults

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:  # noqa: ANN401 - gRPC's name
        """Score a batch, or fail as faults say."""
        ids = tuple(sample.sample_id for sample in request.samples)
        is_live = bool(ids) and ids[0].startswith(LIVE_PREFIXES)
        if is_live:
            await self._misbehave(request.scorer, request.version, ids)
        response = await super().Score(request, context)
        if is_live and (request.scorer, request.version) in self._faults.broken:
            for result in response.results:
                result.status, result.message = SCORE_STATUS_ERROR, "scripted"
        self._journal.num_scored.update(result.sample_id for result in response.results if result.status == SCORE_STATUS_SCORED)
        self._journal.answered.update((request.scorer, response.version, result.sample_id) for result in response.results)
        self._journal.by_server[self._name] += len(ids)
        return response

    async def _misbehave(self, scorer: str, version: str, ids: tuple[str, ...]) -> None:
        faults = self._faults
        if (scorer, version) in faults.hanging:
            await asyncio.Event().wait()
        await asyncio.sleep(faults.rng.random() * faults.max_delay_s)
        if faults.rng.random() < faults.failing_share:
            self._journal.failed.append((scorer, version, ids))
            raise InternalError("scripted")


@asynccontextmanager
async def journalling_servers(
    offers: Mapping[str, Sequence[ScorerKey]], journal: Journal, faults: Faults
) -> AsyncIterator[Mapping[str, str]]:
    """Serve scorers under service ids; gives the address of each."""
    threads = ScoringPool(1)
    try:
        async with _serving_all(offers, journal, faults, threads) as addresses:
            yield addresses
    finally:
        threads.shutdown()


@asynccontextmanager
async def _serving_all(
    offers: Mapping[str, Sequence[ScorerKey]], journal: Journal, faults: Faults, threads: ScoringPool
) -> AsyncIterator[dict[str, str]]:
    if not offers:
        yield {}
        return
    (name, scorers), *others = offers.items()
    servicer = JournalServicer(RewardService(service_id=name, registry=registry_of(scorers), pool=threads), journal, faults)
    async with (
        serving(lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server), REWARD_SERVICE) as address,
        _serving_all(dict(others), journal, faults, threads) as addresses,
    ):
        yield {name: address} | addresses
