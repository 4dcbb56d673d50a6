"""A client that is closed under its callers: they learn that the service is gone and are not taken for cancelled."""

from __future__ import annotations

import asyncio

import pytest

from shoal.clients.reward import RewardClient
from shoal.clients.rollout import RolloutClient
from shoal.errors import UnavailableError
from shoal.rpc.v1 import reward_pb2
from shoal.types import SamplingParams
from tests.helpers.rpc_services import (
    PLAINTEXT,
    REWARD_SERVICE,
    ROLLOUT_SERVICE,
    FakeReward,
    FakeRollout,
    register_reward,
    register_rollout,
    serving,
)


async def test_client_closed_during_a_call_ends_it_as_unavailable() -> None:
    called = asyncio.Event()

    async def wait_for_ever(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        called.set()
        await asyncio.Event().wait()
        return reward_pb2.ScoreResponse()

    async with serving(register_reward(FakeReward(wait_for_ever)), REWARD_SERVICE) as address:
        client = RewardClient(address, PLAINTEXT)
        call = asyncio.create_task(client.score("exact", "", [], timeout_s=30))
        await called.wait()
        await client.close()
        with pytest.raises(UnavailableError, match=r"reward at .* was closed"):
            await call


async def test_client_closed_during_a_stream_ends_it_as_unavailable() -> None:
    servicer = FakeRollout([])
    servicer.release.clear()
    async with serving(register_rollout(servicer), ROLLOUT_SERVICE) as address:
        client = RolloutClient(address, PLAINTEXT)
        stream = client.generate("r-1", [3], SamplingParams(max_new_tokens=4), 1, timeout_s=30)
        reading = asyncio.ensure_future(anext(stream))
        async with asyncio.timeout(10):
            while not servicer.requests:  # noqa: ASYNC110 - the servicer offers no event
                await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(UnavailableError, match=r"rollout at .* was closed"):
            await reading


async def test_client_called_after_close_is_unavailable() -> None:
    client = RewardClient("127.0.0.1:9", PLAINTEXT)
    await client.close()
    with pytest.raises(UnavailableError, match="was closed: the service has left or was replaced"):
        await client.describe(timeout_s=0.5)
