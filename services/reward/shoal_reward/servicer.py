"""RewardService on gRPC: validate, call, convert."""

from __future__ import annotations

from typing import Any

from shoal.codec.reward import scorer_description_to_proto
from shoal.rpc.v1 import reward_pb2, reward_pb2_grpc
from shoal_reward.service import RewardService

SERVICE_NAME = "shoal.rpc.v1.RewardService"


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """The wire of one `RewardService`."""

    def __init__(self, service: RewardService) -> None:
        self._service = service

    async def DescribeReward(
        self,
        request: reward_pb2.DescribeRewardRequest,
        context: Any,  # noqa: ANN401
    ) -> reward_pb2.DescribeRewardResponse:
        """List the scorers."""
        return reward_pb2.DescribeRewardResponse(
            service_id=self._service.service_id,
            scorers=[scorer_description_to_proto(scorer) for scorer in self._service.describe()],
        )

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:  # noqa: ANN401 - gRPC's name
        """Score a batch."""
        scorer = self._service.find(request.scorer, request.version)
        results = await self._service.score(scorer, request.samples, context.time_remaining())
        return reward_pb2.ScoreResponse(scorer=scorer.name, version=scorer.version, results=results)
