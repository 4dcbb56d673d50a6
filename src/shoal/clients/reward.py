"""Client of one reward server."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.clients.base import ServiceClient
from shoal.codec.reward import score_result_from_proto, score_sample_to_proto, scorer_description_from_proto
from shoal.config.models import SecuritySection
from shoal.errors import CodecError
from shoal.rpc.v1 import reward_pb2, reward_pb2_grpc
from shoal.types import ScorerDescription, ScoreResult, ScoreSample, ScoreStatus

__all__ = ["RULES_BROKEN", "RewardClient", "ScorerDescription"]

RULES_BROKEN = "the server broke the rules: "
"""How the message of a result begins that a tolerant client made an error."""


class RewardClient(ServiceClient):
    """Scores on one reward server.

    Args:
        address: host:port.
        security: of the channel.
        tolerant: let a result that breaks the rules be an error of its sample, and leave it to the caller to match results to samples;
            else any such result fails the call.
    """

    def __init__(self, address: str, security: SecuritySection, *, tolerant: bool = False) -> None:
        super().__init__(address, security)
        self._tolerant = tolerant
        self._stub = reward_pb2_grpc.RewardServiceStub(self._channel)

    async def describe(self, *, timeout_s: float) -> list[ScorerDescription]:
        """Return the scorers that the server offers."""
        answer = await self._call_idempotent(self._stub.DescribeReward, reward_pb2.DescribeRewardRequest(), timeout_s)
        return [scorer_description_from_proto(scorer) for scorer in answer.scorers]

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """Score samples, once; an empty version asks for the newest. Retrying is the caller's, who knows other servers.

        Returns: The version that scored, and one result per sample in order.
        Raises:
            NotFoundError: unknown scorer or version.
            UnavailableError: the server cannot be reached, is starting or drains.
            CodecError: a sample cannot be sent, or the answer does not match the samples one to one.
        """
        request = reward_pb2.ScoreRequest(scorer=scorer, version=version, samples=[score_sample_to_proto(sample) for sample in samples])
        answer = await self._call(self._stub.Score, request, timeout_s)
        if self._tolerant:
            return answer.version, list(map(_tolerated, answer.results))
        results = [score_result_from_proto(result) for result in answer.results]
        if [result.sample_id for result in results] != [sample.sample_id for sample in samples]:
            raise CodecError(
                f"scorer {scorer} answered {len(results)} results for {len(samples)} samples, or in another order; "
                "it must answer one result per sample, in order"
            )
        return answer.version, results


def _tolerated(message: reward_pb2.ScoreResult) -> ScoreResult:
    try:
        return score_result_from_proto(message)
    except CodecError as error:
        return ScoreResult(
            sample_id=message.sample_id,
            status=ScoreStatus.ERROR,
            message=f"{RULES_BROKEN}{error}",
            latency_ms=message.latency_ms,
        )
