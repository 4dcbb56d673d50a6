"""Small real servicers on a real gRPC server, for tests of the wires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from shoal.config.models import SecuritySection
from shoal.errors import NotFoundError
from shoal.rpc.channel import join_address
from shoal.rpc.server import RpcServer
from shoal.rpc.v1 import common_pb2, registry_pb2, registry_pb2_grpc, reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc

PLAINTEXT = SecuritySection(insecure=True)
REWARD_SERVICE = "shoal.rpc.v1.RewardService"
ROLLOUT_SERVICE = "shoal.rpc.v1.RolloutService"
REGISTRY_SERVICE = "shoal.rpc.v1.RegistryService"

ScoreBehaviour = Callable[[reward_pb2.ScoreRequest], Awaitable[reward_pb2.ScoreResponse]]


class FakeReward(reward_pb2_grpc.RewardServiceServicer):
    """Answers Score with a given behaviour and counts the calls."""

    def __init__(self, behaviour: ScoreBehaviour | None = None) -> None:
        self.behaviour = behaviour
        self.num_calls = 0

    async def DescribeReward(self, request: reward_pb2.DescribeRewardRequest, context: Any) -> reward_pb2.DescribeRewardResponse:  # noqa: ANN401
        scorers = [reward_pb2.ScorerDescription(name="exact", version="1", description="Equality.")]
        return reward_pb2.DescribeRewardResponse(service_id="reward-0", scorers=scorers)

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:  # noqa: ANN401
        self.num_calls += 1
        assert self.behaviour is not None
        return await self.behaviour(request)


class FakeRollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Streams given answers, then waits for `release`; tells what became of the handler."""

    def __init__(self, answers: list[rollout_pb2.GenerateResponse]) -> None:
        self.answers = answers
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self.release = asyncio.Event()
        self.release.set()
        self.ended = asyncio.Event()
        self.cancelled = False
        self.failure: Exception | None = None

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: Any) -> AsyncIterator[rollout_pb2.GenerateResponse]:  # noqa: ANN401
        self.requests.append(request)
        try:
            for answer in self.answers:
                yield answer
            await self.release.wait()
            if self.failure is not None:
                raise self.failure
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled = True
            raise
        finally:
            self.ended.set()

    async def DescribeRollout(self, request: rollout_pb2.DescribeRolloutRequest, context: Any) -> rollout_pb2.DescribeRolloutResponse:  # noqa: ANN401
        return rollout_pb2.DescribeRolloutResponse(
            service_id="rollout-0", vocab_size=30, weight_dtype=common_pb2.DATA_TYPE_FLOAT32, policy_version=4, draining=True
        )

    async def Abort(self, request: rollout_pb2.AbortRequest, context: Any) -> rollout_pb2.AbortResponse:  # noqa: ANN401
        return rollout_pb2.AbortResponse(num_aborted=len(request.request_ids))

    async def Drain(self, request: rollout_pb2.DrainRequest, context: Any) -> rollout_pb2.DrainResponse:  # noqa: ANN401
        return rollout_pb2.DrainResponse(num_running=5)


class FakeRegistry(registry_pb2_grpc.RegistryServiceServicer):
    """Grants leases; `forget` makes the next renewal fail as after a coordinator's restart."""

    def __init__(self, lease_s: float = 0.3) -> None:
        self.lease_s = lease_s
        self.registered: asyncio.Queue[registry_pb2.RegisterRequest] = asyncio.Queue()
        self.renewed: asyncio.Queue[str] = asyncio.Queue()
        self.deregistered: asyncio.Queue[str] = asyncio.Queue()
        self.failure: Exception | None = None
        self.required_policy_version = 0
        self._lease_id = ""
        self._num_leases = 0

    def forget(self) -> None:
        self._lease_id = ""

    async def Register(self, request: registry_pb2.RegisterRequest, context: Any) -> registry_pb2.RegisterResponse:  # noqa: ANN401
        if self.failure is not None:
            raise self.failure
        self._num_leases += 1
        self._lease_id = f"lease-{self._num_leases}"
        self.registered.put_nowait(request)
        return registry_pb2.RegisterResponse(
            lease_id=self._lease_id, lease_s=self.lease_s, required_policy_version=self.required_policy_version
        )

    async def Renew(self, request: registry_pb2.RenewRequest, context: Any) -> registry_pb2.RenewResponse:  # noqa: ANN401
        if request.lease_id != self._lease_id:
            raise NotFoundError(f"no lease {request.lease_id}; register again")
        self.renewed.put_nowait(request.service_id)
        return registry_pb2.RenewResponse(lease_s=self.lease_s, required_policy_version=self.required_policy_version)

    async def Deregister(self, request: registry_pb2.DeregisterRequest, context: Any) -> registry_pb2.DeregisterResponse:  # noqa: ANN401
        self.deregistered.put_nowait(request.lease_id)
        return registry_pb2.DeregisterResponse()


def register_reward(servicer: FakeReward) -> Callable[[grpc.aio.Server], None]:
    return lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server)


def register_rollout(servicer: FakeRollout) -> Callable[[grpc.aio.Server], None]:
    return lambda server: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)


def register_registry(servicer: FakeRegistry) -> Callable[[grpc.aio.Server], None]:
    return lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, server)


@asynccontextmanager
async def serving(
    register: Callable[[grpc.aio.Server], None],
    service_name: str,
    *,
    security: SecuritySection = PLAINTEXT,
    port: int = 0,
    host: str = "127.0.0.1",
) -> AsyncIterator[str]:
    """Serve one servicer on an ephemeral loopback port; yields host:port."""
    server = RpcServer(host, port, security)
    server.add(register, service_name)
    bound = await server.start()
    server.set_serving(True)
    try:
        yield join_address(host, bound)
    finally:
        await server.stop(0.0)


async def ready(answer: reward_pb2.ScoreResponse) -> reward_pb2.ScoreResponse:
    return answer
