"""A reward server that scores nothing: what gRPC and the conversion of messages cost alone.

    python -m shoal_benchmarks.reward_echo

Writes its address as a line of JSON, and serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from shoal.config.models import SecuritySection
from shoal.process import die_with_parent
from shoal.rpc.channel import join_address
from shoal.rpc.server import RpcServer, serve_until_signal
from shoal.rpc.v1 import common_pb2, reward_pb2, reward_pb2_grpc

_HOST = "127.0.0.1"


class EchoServicer(reward_pb2_grpc.RewardServiceServicer):
    """Answers every sample with 1."""

    async def DescribeReward(
        self,
        request: reward_pb2.DescribeRewardRequest,
        context: Any,  # noqa: ANN401
    ) -> reward_pb2.DescribeRewardResponse:
        """Any scorer is there; none is listed."""
        return reward_pb2.DescribeRewardResponse(service_id="echo")

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:  # noqa: ANN401 - gRPC's name
        """One result per sample, in order."""
        results = [
            reward_pb2.ScoreResult(sample_id=sample.sample_id, status=common_pb2.SCORE_STATUS_SCORED, value=1.0)
            for sample in request.samples
        ]
        return reward_pb2.ScoreResponse(scorer=request.scorer, version=request.version, results=results)


async def serve() -> None:
    """Serve until a signal."""
    server = RpcServer(_HOST, 0, SecuritySection(insecure=True))
    server.add(lambda target: reward_pb2_grpc.add_RewardServiceServicer_to_server(EchoServicer(), target), "shoal.rpc.v1.RewardService")
    port = await server.start()
    server.set_serving(True)
    sys.stdout.write(json.dumps({"address": join_address(_HOST, port)}) + "\n")
    sys.stdout.flush()
    await serve_until_signal(server)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(serve())
