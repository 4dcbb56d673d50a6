"""The reward service over real gRPC, with scorers in its own process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from shoal_reward.scoring import ScoringPool
from shoal_reward.service import RewardService
from shoal_reward.servicer import SERVICE_NAME, RewardServicer

from shoal.clients.reward import RewardClient
from shoal.config.models import SecuritySection
from shoal.errors import NotFoundError
from shoal.reward import Isolation, Row, ScorerRegistry, reward
from shoal.rpc.channel import open_channel
from shoal.rpc.server import RpcServer
from shoal.rpc.v1 import reward_pb2, reward_pb2_grpc
from shoal.rpc.v1.common_pb2 import FINISH_REASON_STOP, SCORE_STATUS_ERROR, SCORE_STATUS_SCORED
from shoal.telemetry.metrics import sample_value
from tests.helpers.scoring import make_sample, make_samples

SECURITY = SecuritySection()
TIMEOUT_S = 20.0
REGISTRY = ScorerRegistry()
release = threading.Event()


@reward(name="number", version="1", registry=REGISTRY, isolation=Isolation.THREAD)
def number(prompt: str, response: str, row: Row) -> float | None:
    """Reads a number."""
    return None if response == "skip" else float(response)


@reward(name="number", version="2", registry=REGISTRY, isolation=Isolation.THREAD)
def number_parts(prompt: str, response: str, row: Row) -> dict[str, float]:
    """Reads a number twice."""
    return {"first": float(response), "second": float(response)}


@reward(name="tokens", version="1", registry=REGISTRY, isolation=Isolation.THREAD)
def tokens(prompt: str, response: str, row: Row) -> list[float]:
    """A reward per letter."""
    return [0.5] * len(response)


@reward(name="hang", version="1", registry=REGISTRY, isolation=Isolation.THREAD)
def hang(prompt: str, response: str, row: Row) -> float:
    """Never ends for `hang`."""
    if response == "hang":
        release.wait(TIMEOUT_S)
    return 1.0


@pytest.fixture
async def address() -> AsyncIterator[str]:
    pool = ScoringPool(2)
    servicer = RewardServicer(RewardService(service_id="reward-7", registry=REGISTRY, pool=pool))
    server = RpcServer("127.0.0.1", 0, SECURITY)
    server.add(lambda target: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, target), SERVICE_NAME)
    port = await server.start()
    server.set_serving(True)
    yield f"127.0.0.1:{port}"
    release.set()
    await server.stop(1.0)
    pool.shutdown()


@pytest.fixture
async def client(address: str) -> AsyncIterator[RewardClient]:
    client = RewardClient(address, SECURITY)
    yield client
    await client.close()


async def test_server_describes_its_scorers(client: RewardClient) -> None:
    scorers = await client.describe(timeout_s=TIMEOUT_S)
    assert [(scorer.name, scorer.version) for scorer in scorers] == [("hang", "1"), ("number", "1"), ("number", "2"), ("tokens", "1")]
    assert scorers[1].description == "Reads a number."


async def test_server_keeps_statuses_apart(client: RewardClient) -> None:
    version, results = await client.score("number", "1", make_samples(["1.5", "skip", "nan", "word"]), timeout_s=TIMEOUT_S)
    assert version == "1"
    assert [str(result.status) for result in results] == ["scored", "not_scored", "error", "error"]
    assert results[0].value == 1.5
    assert "ValueError" in results[3].message
    assert all(result.latency_ms >= 0 for result in results)


async def test_server_takes_the_newest_version_by_default(client: RewardClient) -> None:
    version, (result,) = await client.score("number", "", make_samples(["2"]), timeout_s=TIMEOUT_S)
    assert (version, result.value, result.components) == ("2", 4.0, {"first": 2.0, "second": 2.0})


async def test_server_returns_token_rewards_and_refuses_a_short_list(client: RewardClient) -> None:
    samples = [make_sample(0, response="abc"), make_sample(1, response="ab")]
    _, (right, short) = await client.score("tokens", "", samples, timeout_s=TIMEOUT_S)
    assert (right.value, right.token_values) == (1.5, (0.5, 0.5, 0.5))
    assert str(short.status) == "error"


async def test_server_names_what_there_is_for_an_unknown_scorer(client: RewardClient) -> None:
    with pytest.raises(NotFoundError, match="number 1, number 2"):
        await client.score("numbr", "", make_samples(["1"]), timeout_s=TIMEOUT_S)
    with pytest.raises(NotFoundError, match="'number' version '3'"):
        await client.score("number", "3", make_samples(["1"]), timeout_s=TIMEOUT_S)


async def test_server_answers_before_the_callers_deadline(client: RewardClient) -> None:
    release.clear()
    _, results = await client.score("hang", "", make_samples(["a", "hang", "b"]), timeout_s=1.0)
    assert [str(result.status) for result in results] == ["scored", "error", "scored"]
    assert results[1].message.startswith("deadline")


async def test_server_makes_an_unreadable_row_an_error_of_its_sample(address: str) -> None:
    def message(index: int, row_json: str) -> reward_pb2.ScoreSample:
        return reward_pb2.ScoreSample(sample_id=f"s{index}", response="1", row_json=row_json, finish_reason=FINISH_REASON_STOP)

    samples = [message(0, "{}"), message(1, "[1]"), message(2, "{" * 100_000), message(3, "{}")]
    async with open_channel(address, SECURITY) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        answer = await stub.Score(reward_pb2.ScoreRequest(scorer="number", version="1", samples=samples), timeout=TIMEOUT_S)
    assert [result.sample_id for result in answer.results] == ["s0", "s1", "s2", "s3"]
    scored, error = SCORE_STATUS_SCORED, SCORE_STATUS_ERROR
    assert [result.status for result in answer.results] == [scored, error, error, scored]


async def test_server_counts_samples_by_status(client: RewardClient) -> None:
    def counted(status: str) -> float:
        labels = {"scorer": "number", "version": "1", "status": status}
        return sample_value("shoal_reward_scored_samples_total", labels) or 0.0

    before = {status: counted(status) for status in ("scored", "error", "not_scored")}
    await client.score("number", "1", make_samples(["1", "2", "nan", "skip"]), timeout_s=TIMEOUT_S)
    assert counted("scored") - before["scored"] == 2
    assert counted("error") - before["error"] == 1
    assert counted("not_scored") - before["not_scored"] == 1


async def test_server_scores_many_batches_at_once_in_order(client: RewardClient) -> None:
    async def score(start: int) -> list[float]:
        samples = make_samples([str(start + index) for index in range(256)])
        _, results = await client.score("number", "1", samples, timeout_s=TIMEOUT_S)
        return [result.value for result in results]

    starts = [1000 * index for index in range(8)]
    answers = await asyncio.gather(*(score(start) for start in starts))
    assert answers == [[float(start + index) for index in range(256)] for start in starts]
