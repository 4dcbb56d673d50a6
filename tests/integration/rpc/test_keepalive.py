"""Quiet connections stay open, and a peer that stops answering is noticed."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from shoal.rpc.channel import open_channel
from shoal.rpc.settings import channel_options
from shoal.rpc.v1 import reward_pb2, reward_pb2_grpc
from tests.helpers.rpc_services import PLAINTEXT, REWARD_SERVICE, FakeReward, register_reward, serving

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_channel_quiet_call_and_idle_time_keep_the_connection() -> None:
    async def answer_late(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        if request.scorer == "late":
            await asyncio.sleep(60)
        return reward_pb2.ScoreResponse(scorer=request.scorer)

    async with serving(register_reward(FakeReward(answer_late)), REWARD_SERVICE) as address, open_channel(address, PLAINTEXT) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        states: list[grpc.ChannelConnectivity] = []
        watcher = asyncio.create_task(_record_states(channel, states))
        assert (await stub.Score(reward_pb2.ScoreRequest(scorer="late"), timeout=90)).scorer == "late"
        await asyncio.sleep(120)
        assert (await stub.Score(reward_pb2.ScoreRequest(scorer="soon"), timeout=1)).scorer == "soon"
        watcher.cancel()
    assert states.count(grpc.ChannelConnectivity.READY) == 1, states
    assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states, states


async def _record_states(channel: grpc.aio.Channel, states: list[grpc.ChannelConnectivity]) -> None:
    state = channel.get_state()
    while True:
        states.append(state)
        await channel.wait_for_state_change(state)
        state = channel.get_state()


@asynccontextmanager
async def _server_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.helpers.rpc_child", stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def test_channel_stopped_peer_fails_the_call_long_before_its_deadline() -> None:
    # The product's settings with a shorter interval: what is tested is that the ping's own timeout is in force.
    short = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 1000, "grpc.http2.ping_timeout_ms": 1000}
    options = [(name, short.get(name, value)) for name, value in channel_options()]
    async with _server_process() as (process, address), grpc.aio.insecure_channel(address, options=options) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        await stub.DescribeReward(reward_pb2.DescribeRewardRequest(), timeout=10)
        process.send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.DescribeReward(reward_pb2.DescribeRewardRequest(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - start_s < 20
