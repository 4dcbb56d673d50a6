"""RewardService on gRPC: validate, call, convert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal.codec.reward import score_result_to_proto, score_sample_from_proto, scorer_description_to_proto
from shoal.errors import CodecError
from shoal.rpc.v1 import reward_pb2, reward_pb2_grpc
from shoal.types import ScoreResult, ScoreSample
from shoal_reward.outcome import failure
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
        samples, unreadable = _decode(request.samples)
        scored = iter(await self._service.score(scorer, samples, context.time_remaining()))
        results = [unreadable[index] if index in unreadable else next(scored) for index in range(len(request.samples))]
        return reward_pb2.ScoreResponse(scorer=scorer.name, version=scorer.version, results=map(score_result_to_proto, results))


def _decode(messages: Iterable[reward_pb2.ScoreSample]) -> tuple[list[ScoreSample], dict[int, ScoreResult]]:
    samples: list[ScoreSample] = []
    unreadable: dict[int, ScoreResult] = {}
    for index, message in enumerate(messages):
        try:
            samples.append(score_sample_from_proto(message))
        except CodecError as error:
            unreadable[index] = failure(message.sample_id, str(error), 0.0)
    return samples, unreadable
