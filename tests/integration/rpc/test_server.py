"""RpcServer over real connections: errors, deadlines, limits, health, ports, metrics, the end of a service."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import Iterator

import grpc
import pytest

from shoal import errors
from shoal.clients.reward import RewardClient
from shoal.config.models import TelemetrySection
from shoal.errors import CapacityError, ConfigError, InternalError, InvalidRequestError, ShoalError, StateError
from shoal.rpc.channel import join_address, open_channel
from shoal.rpc.health import is_serving
from shoal.rpc.server import RpcServer, serve_until_signal
from shoal.rpc.settings import MAX_MESSAGE_BYTES
from shoal.rpc.v1 import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from shoal.telemetry.logs import setup_logging
from shoal.telemetry.metrics import sample_value
from tests.helpers.rpc_services import (
    PLAINTEXT,
    REWARD_SERVICE,
    ROLLOUT_SERVICE,
    FakeReward,
    FakeRollout,
    ready,
    register_reward,
    register_rollout,
    serving,
)

SCORE = "/shoal.rpc.v1.RewardService/Score"
GENERATE = "/shoal.rpc.v1.RolloutService/Generate"


def _subclasses(cls: type[ShoalError]) -> Iterator[type[ShoalError]]:
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from _subclasses(child)


@pytest.mark.parametrize("cls", sorted(set(_subclasses(ShoalError)), key=str))
async def test_error_class_and_text_arrive_as_raised(cls: type[ShoalError]) -> None:
    async def fail(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        raise cls(f"what ☃: value 7 of {request.scorer}; do this")

    async with serving(register_reward(FakeReward(fail)), REWARD_SERVICE) as address, RewardClient(address, PLAINTEXT) as client:
        with pytest.raises(ShoalError) as caught:
            await client.score("exact", "", [], timeout_s=1.0)
    assert type(caught.value) is cls
    assert str(caught.value) == "what ☃: value 7 of exact; do this"


async def test_unexpected_exception_becomes_internal_with_an_id_found_in_the_log() -> None:
    async def fail(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        raise ValueError("detail that stays here")

    stream = io.StringIO()
    setup_logging("reward-0", TelemetrySection(), stream=stream)
    async with serving(register_reward(FakeReward(fail)), REWARD_SERVICE) as address, RewardClient(address, PLAINTEXT) as client:
        with pytest.raises(InternalError) as caught:
            await client.score("exact", "", [], timeout_s=5)
    assert "detail" not in str(caught.value)
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    (failed,) = [event for event in events if event["event"] == "call_failed"]
    assert failed["error_id"] in str(caught.value)
    assert "ValueError: detail that stays here" in failed["exception"]


async def test_call_without_deadline_is_refused_before_the_handler_runs() -> None:
    servicer = FakeReward(lambda _: ready(reward_pb2.ScoreResponse()))
    async with serving(register_reward(servicer), REWARD_SERVICE) as address, open_channel(address, PLAINTEXT) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reward_pb2_grpc.RewardServiceStub(channel).Score(reward_pb2.ScoreRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "deadline" in str(caught.value.details())
    assert servicer.num_calls == 0


async def test_stream_without_deadline_is_refused_before_the_handler_runs() -> None:
    servicer = FakeRollout([])
    async with serving(register_rollout(servicer), ROLLOUT_SERVICE) as address, open_channel(address, PLAINTEXT) as channel:
        call = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(rollout_pb2.GenerateRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert servicer.requests == []


async def test_calls_are_counted_by_method_and_status() -> None:
    async def behave(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        if request.scorer == "missing":
            raise StateError("not now")
        return reward_pb2.ScoreResponse(version="1")

    def count(status: str) -> float:
        return sample_value("shoal_rpc_server_calls_total", {"method": SCORE, "status": status}) or 0.0

    def timed(status: str) -> float:
        return sample_value("shoal_rpc_server_call_seconds_count", {"method": SCORE, "status": status}) or 0.0

    before = (count("OK"), count("FAILED_PRECONDITION"), timed("OK"))
    async with serving(register_reward(FakeReward(behave)), REWARD_SERVICE) as address, RewardClient(address, PLAINTEXT) as client:
        await client.score("exact", "", [], timeout_s=5)
        with pytest.raises(StateError):
            await client.score("missing", "", [], timeout_s=5)
    assert (count("OK"), count("FAILED_PRECONDITION"), timed("OK")) == (before[0] + 1, before[1] + 1, before[2] + 1)


@pytest.mark.parametrize("num_bytes", [4_194_304, 4_194_305, 5 << 20, 32 << 20])
async def test_message_above_grpc_default_limit_passes_both_ways(num_bytes: int) -> None:
    async def echo(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        return reward_pb2.ScoreResponse(version=request.version)

    # Field tag and length take the rest of the message.
    text = "x" * (num_bytes - 5)
    assert reward_pb2.ScoreRequest(version=text).ByteSize() == num_bytes
    async with serving(register_reward(FakeReward(echo)), REWARD_SERVICE) as address, RewardClient(address, PLAINTEXT) as client:
        version, _ = await client.score("", text, [], timeout_s=30)
    assert version == text


async def test_answer_above_the_limit_names_size_and_limit() -> None:
    big = reward_pb2.ScoreResponse(version="x" * MAX_MESSAGE_BYTES)
    async with (
        serving(register_reward(FakeReward(lambda _: ready(big))), REWARD_SERVICE) as address,
        RewardClient(address, PLAINTEXT) as client,
    ):
        with pytest.raises(CapacityError) as caught:
            await client.score("exact", "", [], timeout_s=30)
    assert str(big.ByteSize()) in str(caught.value)
    assert str(MAX_MESSAGE_BYTES) in str(caught.value)


async def test_request_above_the_limit_names_size_and_limit() -> None:
    servicer = FakeReward(lambda _: ready(reward_pb2.ScoreResponse()))
    text = "x" * MAX_MESSAGE_BYTES
    async with serving(register_reward(servicer), REWARD_SERVICE) as address, RewardClient(address, PLAINTEXT) as client:
        with pytest.raises(CapacityError) as caught:
            await client.score("", text, [], timeout_s=30)
    assert str(reward_pb2.ScoreRequest(version=text).ByteSize()) in str(caught.value)
    assert str(MAX_MESSAGE_BYTES) in str(caught.value)
    assert servicer.num_calls == 0


async def test_message_of_a_client_without_limits_is_refused_by_the_server() -> None:
    servicer = FakeReward(lambda _: ready(reward_pb2.ScoreResponse()))
    unlimited = [("grpc.max_send_message_length", -1)]
    async with (
        serving(register_reward(servicer), REWARD_SERVICE) as address,
        grpc.aio.insecure_channel(address, options=unlimited) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reward_pb2_grpc.RewardServiceStub(channel).Score(reward_pb2.ScoreRequest(version="x" * MAX_MESSAGE_BYTES), timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert servicer.num_calls == 0


async def test_health_is_not_serving_until_told_and_again_after() -> None:
    server = RpcServer("127.0.0.1", 0, PLAINTEXT)
    server.add(register_reward(FakeReward()), REWARD_SERVICE)
    address = join_address("127.0.0.1", await server.start())
    seen = []
    for state in (None, True, False):
        if state is not None:
            server.set_serving(state)
        seen.append([await is_serving(address, PLAINTEXT, timeout_s=5, service_name=name) for name in ("", REWARD_SERVICE)])
    with pytest.raises(errors.NotFoundError, match="Other"):
        await is_serving(address, PLAINTEXT, timeout_s=5, service_name="Other")
    await server.stop(0)
    assert seen == [[False, False], [True, True], [False, False]]
    assert not await is_serving(address, PLAINTEXT, timeout_s=5)


async def test_health_watch_reports_changes_without_a_deadline() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    server = RpcServer("127.0.0.1", 0, PLAINTEXT)
    server.add(register_reward(FakeReward()), REWARD_SERVICE)
    address = join_address("127.0.0.1", await server.start())
    async with open_channel(address, PLAINTEXT) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=REWARD_SERVICE))  # type: ignore[attr-defined]
        first = await watch.read()
        server.set_serving(True)
        second = await watch.read()
        watch.cancel()
    await server.stop(0)
    response = health_pb2.HealthCheckResponse
    assert [first.status, second.status] == [response.NOT_SERVING, response.SERVING]


async def test_start_on_a_used_port_names_it() -> None:
    async with serving(register_reward(FakeReward()), REWARD_SERVICE) as address:
        host, _, port = address.rpartition(":")
        with pytest.raises(ConfigError, match=f"{host}:{port}.*in use.*choose another port"):
            await RpcServer(host, int(port), PLAINTEXT).start()


async def test_add_after_start_is_refused() -> None:
    server = RpcServer("127.0.0.1", 0, PLAINTEXT)
    await server.start()
    with pytest.raises(StateError, match=REWARD_SERVICE):
        server.add(register_reward(FakeReward()), REWARD_SERVICE)
    await server.stop(0)


async def test_unknown_method_says_that_the_service_is_another() -> None:
    async with serving(register_rollout(FakeRollout([])), ROLLOUT_SERVICE) as address, RewardClient(address, PLAINTEXT) as client:
        with pytest.raises(ConfigError, match=f"reward at {address}.*does not offer"):
            await client.describe(timeout_s=5)


async def test_serve_until_signal_drains_before_the_running_call_ends() -> None:
    release, events = asyncio.Event(), list[str]()

    async def slow(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        events.append("started")
        os.kill(os.getpid(), signal.SIGTERM)
        await release.wait()
        events.append("answered")
        return reward_pb2.ScoreResponse(version="1")

    server = RpcServer("127.0.0.1", 0, PLAINTEXT)
    server.add(register_reward(FakeReward(slow)), REWARD_SERVICE)
    address = join_address("127.0.0.1", await server.start())
    server.set_serving(True)

    async def drain() -> None:
        events.append(f"serving={await is_serving(address, PLAINTEXT, timeout_s=5)}")
        release.set()

    serve = asyncio.create_task(serve_until_signal(server, drain=drain))
    # The signal may come only once the handler is installed.
    await asyncio.sleep(0)
    async with RewardClient(address, PLAINTEXT) as client:
        version, results = await client.score("exact", "", [], timeout_s=10)
    await serve
    assert (version, results) == ("1", [])
    assert events == ["started", "serving=False", "answered"]


async def test_serve_until_signal_failed_or_endless_drain_still_stops() -> None:
    async def fail() -> None:
        raise RuntimeError("cannot drain")

    async def never() -> None:
        await asyncio.Event().wait()

    for drain in (fail, never):
        server = RpcServer("127.0.0.1", 0, PLAINTEXT)
        address = join_address("127.0.0.1", await server.start())
        stop = asyncio.Event()
        stop.set()
        await serve_until_signal(server, drain=drain, drain_timeout_s=0.1, grace_s=0, stop_event=stop)
        assert not await is_serving(address, PLAINTEXT, timeout_s=5)


async def test_stream_error_after_answers_keeps_class_and_answers() -> None:
    servicer = FakeRollout([rollout_pb2.GenerateResponse(sample_index=3)])
    servicer.failure = InvalidRequestError("id 99 is outside the vocabulary")
    async with serving(register_rollout(servicer), ROLLOUT_SERVICE) as address, open_channel(address, PLAINTEXT) as channel:
        call = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(rollout_pb2.GenerateRequest(), timeout=5)
        first = await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert isinstance(first, rollout_pb2.GenerateResponse)
    assert first.sample_index == 3
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("shoal-error", "InvalidRequestError") in [tuple(entry) for entry in caught.value.trailing_metadata() or ()]


async def test_stream_cancelled_by_the_client_is_counted_and_cleaned_up() -> None:
    def count() -> float:
        return sample_value("shoal_rpc_server_calls_total", {"method": GENERATE, "status": "CANCELLED"}) or 0.0

    before = count()
    servicer = FakeRollout([rollout_pb2.GenerateResponse(sample_index=0)])
    servicer.release.clear()
    async with serving(register_rollout(servicer), ROLLOUT_SERVICE) as address, open_channel(address, PLAINTEXT) as channel:
        call = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(rollout_pb2.GenerateRequest(), timeout=30)
        await call.read()
        call.cancel()
        async with asyncio.timeout(10):
            await servicer.ended.wait()
    assert servicer.cancelled
    assert count() == before + 1
