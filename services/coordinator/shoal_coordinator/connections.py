"""Typed connections to registered services; the only place of the coordinator that opens channels."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from shoal.config.models import SecuritySection
from shoal.types import Completion, RolloutDescription, SamplingParams, ScorerDescription, ScoreResult, ScoreSample
from shoal_coordinator.gangs import Closable, SourceConnection, TrainerConnection
from shoal_coordinator.push import WeightSink


class RolloutCalls(Closable, Protocol):
    """Generation on one server; `shoal.clients.rollout.RolloutClient`."""

    async def describe(self, *, timeout_s: float) -> RolloutDescription:
        """Facts about the server."""
        ...

    def generate(
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
        """Completions of a group as they finish."""
        ...


class RewardCalls(Closable, Protocol):
    """Scoring; `shoal.clients.reward.RewardClient`."""

    async def describe(self, *, timeout_s: float) -> list[ScorerDescription]:
        """The server's scorers."""
        ...

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """The scorer's version and one result per sample."""
        ...


class SinkConnection(WeightSink, Closable, Protocol):
    """A rollout server's end of the push."""


class Connector(Protocol):
    """Opens connections; nothing is sent yet."""

    def rollout(self, address: str) -> RolloutCalls:
        """Connect to a rollout server."""
        ...

    def sink(self, address: str) -> SinkConnection:
        """Connect to a rollout server's end of the push."""
        ...

    def source(self, address: str) -> SourceConnection:
        """Connect to the actor's end of the push."""
        ...

    def trainer(self, address: str) -> TrainerConnection:
        """Connect to a gang."""
        ...

    def reward(self, address: str) -> RewardCalls:
        """Connect to a reward server."""
        ...


class GrpcConnector:
    """Connections over gRPC."""

    def __init__(self, security: SecuritySection) -> None:
        self._security = security

    def rollout(self, address: str) -> RolloutCalls:
        """Connect to a rollout server."""
        from shoal.clients.rollout import RolloutClient

        return RolloutClient(address, self._security)

    def sink(self, address: str) -> SinkConnection:
        """Connect to a rollout server's end of the push."""
        from shoal.clients.weights import WeightSinkClient

        return WeightSinkClient(address, self._security)

    def source(self, address: str) -> SourceConnection:
        """Connect to the actor's end of the push."""
        from shoal.clients.weights import WeightSourceClient

        return WeightSourceClient(address, self._security)

    def trainer(self, address: str) -> TrainerConnection:
        """Connect to a gang."""
        from shoal.clients.trainer import TrainerClient

        return TrainerClient(address, self._security)

    def reward(self, address: str) -> RewardCalls:
        """Connect to a reward server."""
        from shoal.clients.reward import RewardClient

        return RewardClient(address, self._security)
