"""Real reward servers over gRPC, as the coordinator reaches them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from shoal_reward.scoring import ScoringPool
from shoal_reward.service import RewardService
from shoal_reward.servicer import RewardServicer

from shoal.clients.reward import RewardClient
from shoal.reward import ScorerRegistry
from shoal.rpc.v1 import reward_pb2_grpc
from shoal.types import ScorerDescription, ScoreResult, ScoreSample
from tests.helpers.rpc_services import PLAINTEXT, REWARD_SERVICE, serving

TIMEOUT_S = 20.0


class ConnectedReward:
    """A connection that knows what the server offers; as `shoal_coordinator.members.WatchedReward`."""

    def __init__(self, address: str, scorers: Sequence[ScorerDescription] = ()) -> None:
        self.client = RewardClient(address, PLAINTEXT, tolerant=True)
        self.scorers: Sequence[ScorerDescription] = scorers

    async def describe(self) -> None:
        """Ask what the server offers."""
        self.scorers = await self.client.describe(timeout_s=TIMEOUT_S)

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """As the client."""
        return await self.client.score(scorer, version, samples, timeout_s=timeout_s)


@asynccontextmanager
async def connected(address: str, scorers: Sequence[ScorerDescription] | None = None) -> AsyncIterator[ConnectedReward]:
    """Connect; None asks the server for its scorers."""
    reward = ConnectedReward(address, scorers or ())
    try:
        if scorers is None:
            await reward.describe()
        yield reward
    finally:
        await reward.client.close()


@asynccontextmanager
async def serving_scorers(registry: ScorerRegistry, service_id: str = "reward") -> AsyncIterator[ConnectedReward]:
    """Serve scorers that run in threads or the event loop."""
    threads = ScoringPool(1)
    servicer = RewardServicer(RewardService(service_id=service_id, registry=registry, pool=threads))
    try:
        async with (
            serving(lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server), REWARD_SERVICE) as address,
            connected(address) as reward,
        ):
            yield reward
    finally:
        threads.shutdown()
