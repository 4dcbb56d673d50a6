"""A reward server as a third party would write it: raw stubs of the protos, none of Shoal's code."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import grpc

from shoal.rpc.v1 import common_pb2, reward_pb2, reward_pb2_grpc

MAX_BYTES = 64 << 20
Context: TypeAlias = Any
"""grpcio's context is generic over messages in its stubs alone."""


class ThirdPartyReward(reward_pb2_grpc.RewardServiceServicer):
    """Scores equality with the row's answer; right in every respect. Tests override what is to be wrong."""

    name = "equals"
    versions: tuple[str, ...] = ("1", "2")
    fingerprint = "0123abcd"

    async def DescribeReward(self, request: reward_pb2.DescribeRewardRequest, context: Context) -> reward_pb2.DescribeRewardResponse:
        """Tell name and versions."""
        scorers = [reward_pb2.ScorerDescription(name=self.name, version=version, fingerprint=self.fingerprint) for version in self.versions]
        return reward_pb2.DescribeRewardResponse(service_id="theirs", scorers=scorers)

    async def Score(self, request: reward_pb2.ScoreRequest, context: Context) -> reward_pb2.ScoreResponse:
        """Score a batch."""
        version = request.version or self.versions[-1]
        if request.scorer != self.name or version not in self.versions:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no scorer {request.scorer} {version}; there is {self.name}")
        results = [self.result(sample, index, request) for index, sample in enumerate(request.samples)]
        return reward_pb2.ScoreResponse(scorer=self.name, version=version, results=results)

    def result(self, sample: reward_pb2.ScoreSample, index: int, request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResult:
        """Score one sample."""
        row = json.loads(sample.row_json or "{}")
        if not isinstance(row, dict) or not isinstance(row.get("answer"), str):
            return reward_pb2.ScoreResult(sample_id=sample.sample_id, status=common_pb2.SCORE_STATUS_ERROR, message="no answer in the row")
        value = float(row["answer"] in sample.response)
        return reward_pb2.ScoreResult(sample_id=sample.sample_id, status=common_pb2.SCORE_STATUS_SCORED, value=value)


@asynccontextmanager
async def served(servicer: reward_pb2_grpc.RewardServiceServicer | None, *, max_bytes: int = MAX_BYTES) -> AsyncIterator[str]:
    """Serve it, or nothing, on a free port; gives its address."""
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", max_bytes), ("grpc.max_send_message_length", max_bytes), ("grpc.so_reuseport", 0)]
    )
    if servicer is not None:
        reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextmanager
def served_in_thread(servicer: reward_pb2_grpc.RewardServiceServicer) -> Iterator[str]:
    """As `served`, for a test without an event loop."""
    address: Future[str] = Future()
    loop, done = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with served(servicer) as where:
            address.set_result(where)
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield address.result(timeout=10)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()
