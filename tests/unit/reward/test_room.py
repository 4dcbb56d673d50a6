"""The bound on what open calls hold."""

from __future__ import annotations

import asyncio

import pytest
from shoal_reward.room import Room
from shoal_reward.scoring import ScoringPool
from shoal_reward.service import RewardService

from shoal.codec.reward import score_sample_to_proto
from shoal.errors import CapacityError
from shoal.reward import Row, ScorerRegistry, reward
from shoal.rpc.v1 import reward_pb2
from tests.helpers.scoring import make_sample

REGISTRY = ScorerRegistry()
asked, may_answer = asyncio.Event(), asyncio.Event()


@reward(name="waits", version="1", registry=REGISTRY)
async def waits(prompt: str, response: str, row: Row) -> float:
    """Answers when the test says so."""
    asked.set()
    await may_answer.wait()
    return 1.0


def test_room_is_taken_and_given_back() -> None:
    room = Room(max_samples=10, max_bytes=100)
    with room.taken(4, 60):
        with pytest.raises(CapacityError, match="4 samples of 60 bytes wait, and 7 of 1 bytes more would pass the limit of 10 samples"):
            room.taken(7, 1).__enter__()
        with pytest.raises(CapacityError, match="try again later, or add servers"), room.taken(1, 41):
            pass
        with room.taken(6, 40):
            pass
    with room.taken(10, 100):
        pass


async def test_service_refuses_calls_beyond_its_room_until_others_have_ended() -> None:
    pool = ScoringPool(1)
    service = RewardService(service_id="r", registry=REGISTRY, pool=pool, room=Room(max_samples=3))
    scorer = service.find("waits", "")

    def score(number: int) -> asyncio.Task[list[reward_pb2.ScoreResult]]:
        samples = [score_sample_to_proto(make_sample(index)) for index in range(number)]
        return asyncio.create_task(service.score(scorer, samples, 20.0))

    first = score(2)
    await asked.wait()
    with pytest.raises(CapacityError, match="limit of 3 samples"):
        await score(2)
    may_answer.set()
    assert [result.value for result in await first] == [1.0, 1.0]
    assert [result.value for result in await score(3)] == [1.0, 1.0, 1.0]
    pool.shutdown()
