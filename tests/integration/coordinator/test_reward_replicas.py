"""Calls of real reward servers over gRPC: failing, refusing, growing and shrinking in number, and answering nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from shoal_coordinator.rewards.breaker import MAX_FAILURES
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.rewards.route import RouteComponent
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.waiting import WaitBoard

from shoal.errors import InternalError, InvalidRequestError, UnavailableError
from shoal.reward import Isolation, Row, ScorerRegistry, reward
from shoal.rpc.v1 import common_pb2, reward_pb2
from shoal.types import ScorerDescription, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.reward_servers import connected, serving_scorers
from tests.helpers.routes import component
from tests.helpers.rpc_services import REWARD_SERVICE, FakeReward, register_reward, serving
from tests.helpers.scoring import make_sample
from tests.helpers.valkey import free_port

EXACT = component("exact", version="1", timeout_s=10.0)
REGISTRY = ScorerRegistry()


@reward(name="length", version="1", registry=REGISTRY, isolation=Isolation.THREAD)
def length(prompt: str, response: str, row: Row) -> float:
    """Characters."""
    return float(len(response))


def new_pool(**servers: RewardEndpoint) -> ServerPool[RewardEndpoint]:
    pool: ServerPool[RewardEndpoint] = ServerPool("reward server", WaitBoard())
    for server_id, server in servers.items():
        pool.add(server_id, server)
    return pool


def samples(number: int, **settings: object) -> list[ScoreSample]:
    return [replace(make_sample(index, **settings), sample_id=f"g{number}/{index}/0") for index in range(2)]  # type: ignore[arg-type]


def answer(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
    results = [
        reward_pb2.ScoreResult(sample_id=sample.sample_id, status=common_pb2.SCORE_STATUS_SCORED, value=0.5) for sample in request.samples
    ]
    return reward_pb2.ScoreResponse(scorer=request.scorer, version="1", results=results)


def failing(*errors: Exception) -> Callable[[reward_pb2.ScoreRequest], Awaitable[reward_pb2.ScoreResponse]]:
    """Fails in turn, then answers."""
    left = list(errors)

    async def behave(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        if left:
            raise left.pop(0)
        return answer(request)

    return behave


@asynccontextmanager
async def small_server(servicer: FakeReward) -> AsyncIterator[str]:
    """As others write one: with gRPC's own limits."""
    server = grpc.aio.server()
    register_reward(servicer)(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def score_on(servicer: FakeReward, route: RouteComponent = EXACT) -> list[ScoreResult]:
    async with serving(register_reward(servicer), REWARD_SERVICE) as address, connected(address) as server:
        _, results = await ScorerCalls(new_pool(a=server), max_open_requests=8).score(route, samples(0), 1)
    return results


@pytest.mark.parametrize("error", [InternalError("500"), UnavailableError("503"), ValueError("a bug")])
async def test_score_is_right_after_two_failures(error: Exception) -> None:
    """R46: 500, 500, 200."""
    servicer = FakeReward(failing(error, error))
    results = await score_on(servicer)
    assert ([result.value for result in results], servicer.num_calls) == ([0.5, 0.5], 3)


async def test_server_that_always_fails_leaves_samples_without_a_score() -> None:
    """R46: always 500."""
    servicer = FakeReward(failing(*[InternalError("500")] * 1000))
    results = await score_on(servicer, replace(EXACT, timeout_s=0.5))
    assert {(result.status, result.value) for result in results} == {(ScoreStatus.ERROR, 0.0)}
    assert results[0].message == "exact@1 failed on 'a': InternalError: 500"


async def test_refused_request_is_not_sent_again() -> None:
    """R46: 422."""
    servicer = FakeReward(failing(InvalidRequestError("422")))
    results = await score_on(servicer)
    assert ({result.status for result in results}, servicer.num_calls) == ({ScoreStatus.ERROR}, 1)


async def test_sample_that_is_too_large_for_a_server_is_sent_once_and_does_not_rest_the_server() -> None:
    """A server that is not Shoal's may take no more than gRPC's 4 MiB."""
    servicer = FakeReward(failing())
    large = [replace(sample, response="x" * (5 << 20)) for sample in samples(0)]
    async with small_server(servicer) as address, connected(address, scorers=offered()) as server:
        calls = ScorerCalls(new_pool(a=server), max_open_requests=8)
        for _ in range(MAX_FAILURES):
            async with asyncio.timeout(5.0):
                _, results = await calls.score(EXACT, large, 1)
            assert {result.status for result in results} == {ScoreStatus.ERROR}
            assert "exact@1 failed on 'a': MessageSizeError" in results[0].message
        _, results = await calls.score(EXACT, samples(1), 1)
    assert ([result.value for result in results], servicer.num_calls) == ([0.5, 0.5], 1)


async def test_result_without_a_status_is_an_error_of_its_sample_alone() -> None:
    """R46: 200 without a score."""

    async def behave(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        response = answer(request)
        response.results[0].status = common_pb2.SCORE_STATUS_UNSPECIFIED
        return response

    first, second = await score_on(FakeReward(behave))
    assert (first.status, first.value, second.status, second.value) == (ScoreStatus.ERROR, 0.0, ScoreStatus.SCORED, 0.5)
    assert "the server broke the rules" in first.message


async def test_number_that_is_none_is_an_error_of_its_sample_alone() -> None:
    async def behave(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        response = answer(request)
        response.results[0].value = float("nan")
        return response

    first, second = await score_on(FakeReward(behave))
    assert (first.status, first.value, second.status) == (ScoreStatus.ERROR, 0.0, ScoreStatus.SCORED)


async def test_server_that_refuses_connections_at_first_is_reached_when_it_is_up() -> None:
    """R46: connection refused, then up; for less than the five seconds of the report."""
    port = free_port()
    async with connected(f"127.0.0.1:{port}", scorers=offered()) as server:
        scoring = asyncio.create_task(ScorerCalls(new_pool(a=server), max_open_requests=8).score(EXACT, samples(0), 1))
        await asyncio.sleep(0.7)
        assert not scoring.done()
        async with serving(register_reward(FakeReward(failing())), REWARD_SERVICE, port=port):
            _, results = await scoring
    assert [result.value for result in results] == [0.5, 0.5]


async def test_replicas_join_and_leave_under_load_and_no_sample_is_lost() -> None:
    """From one to three and back to one."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving_scorers(REGISTRY, f"reward-{number}")) for number in range(3)]
        pool = new_pool(a=servers[0])
        (description,) = servers[0].scorers
        route = component("length", version="1", fingerprint=description.fingerprint)
        calls = ScorerCalls(pool, max_open_requests=8)
        scoring = [asyncio.create_task(calls.score(route, samples(number, response="x" * (1 + number)), 1)) for number in range(300)]
        await scoring[20]
        pool.add("b", servers[1])
        pool.add("c", servers[2])
        await scoring[150]
        pool.remove("a")
        await scoring[200]
        pool.remove("b")
        answers = await asyncio.gather(*scoring)
    assert [[(result.sample_id, result.value) for result in results] for _, results in answers] == [
        [(f"g{number}/{index}/0", 1.0 + number) for index in range(2)] for number in range(300)
    ]
    assert {service for service, _ in answers} == {"a", "b", "c"}


async def test_poisoned_texts_reach_the_scorer_and_come_back() -> None:
    """Ten megabytes, null bytes, lone surrogates in the row, a hundred thousand braces."""
    texts = ["x" * (10 << 20), "a\0b", "{" * 100_000, "�" * 5]
    poisoned = [replace(make_sample(index, response=text, answer="\ud800"), sample_id=f"p/{index}/0") for index, text in enumerate(texts)]
    async with serving_scorers(REGISTRY) as server:
        (description,) = server.scorers
        route = component("length", version="1", fingerprint=description.fingerprint)
        answers = await ScorerCalls(new_pool(a=server), max_open_requests=8).score_groups(route, [poisoned])
    assert [(result.sample_id, result.value) for _, result in answers[0]] == [
        (f"p/{index}/0", float(len(text))) for index, text in enumerate(texts)
    ]


def offered() -> list[ScorerDescription]:
    return [ScorerDescription(name="exact", version="1", description="")]


async def test_server_that_dies_amid_its_calls_is_left_for_another_one() -> None:
    asked = asyncio.Event()

    async def hang(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        asked.set()
        await asyncio.Event().wait()
        return answer(request)

    async with AsyncExitStack() as stack:
        doomed = AsyncExitStack()
        address = await doomed.enter_async_context(serving(register_reward(FakeReward(hang)), REWARD_SERVICE))
        dying = await stack.enter_async_context(connected(address))
        healthy = await stack.enter_async_context(serving(register_reward(FakeReward(failing())), REWARD_SERVICE))
        pool = new_pool(a=dying)
        calls = ScorerCalls(pool, max_open_requests=8)
        scoring = [asyncio.create_task(calls.score(EXACT, samples(number), 1)) for number in range(3)]
        await asked.wait()
        pool.add("b", await stack.enter_async_context(connected(healthy)))
        await doomed.aclose()
        answers = await asyncio.gather(*scoring)
    assert [(service, [result.value for result in results]) for service, results in answers] == [("b", [0.5, 0.5])] * 3


async def test_answer_that_never_comes_is_an_error_at_the_deadline() -> None:
    async def hang(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        await asyncio.Event().wait()
        return answer(request)

    results = await score_on(FakeReward(hang), replace(EXACT, timeout_s=0.3))
    assert {result.status for result in results} == {ScoreStatus.ERROR}
    assert results[0].message.startswith("exact@1 failed on 'a': DeadlineError")
