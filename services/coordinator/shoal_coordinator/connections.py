"""Typed connections to registered services; the only place of the coordinator that opens channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.config.models import SecuritySection
from shoal.types import RolloutDescription, ScorerDescription, ScoreResult, ScoreSample
from shoal_coordinator.dispatcher import RolloutEndpoint
from shoal_coordinator.gangs import Closable, SourceConnection, TrainerConnection
from shoal_coordinator.push_calls import WeightSink


class RolloutCalls(RolloutEndpoint, Closable, Protocol):
    """Generation on one server; `shoal.clients.rollout.RolloutClient`."""

    async def describe(self, *, timeout_s: float) -> RolloutDescription:
        """Facts about the server."""
        ...


class RewardCalls(Closable, Protocol):
    """Scoring; `shoal.clients.reward.RewardClient`."""

    async def describe(self, *, timeout_s: float) -> list[ScorerDescription]:
        """The server's scorers."""
        ...

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """Score samples; returns the scorer's version and one result per sample, in order."""
        ...


class SinkConnection(WeightSink, Closable, Protocol):
    """A rollout server's end of pushes and audits."""


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

        return RewardClient(address, self._security, tolerant=True)
