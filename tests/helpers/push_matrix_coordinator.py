"""The failure matrix's coordinator: the real registry, fleet and push transaction; a test asks for each step over a unix socket.

Requests and answers are a JSON object per line:

    {"do": "adopt"}      take over the actor's version as the current one, as a coordinator does that was started again
    {"do": "step"}       update the gang, push its new version
    {"do": "audit"}      compare what the servers that take traffic compute with and what the gang holds
    {"do": "status"}     which servers take traffic, which version is current, what happened to the last pushes
    {"do": "generate"}   one completion from a server that takes traffic
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from shoal_coordinator.connections import GrpcConnector, SinkConnection
from shoal_coordinator.dispatcher import RolloutEndpoint
from shoal_coordinator.fleet import Fleet
from shoal_coordinator.gangs import SourceConnection
from shoal_coordinator.push_history import PushHistory
from shoal_coordinator.registry import Registry
from shoal_coordinator.registry_servicer import SERVICE_NAME, RegistryServicer
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import StageClock
from shoal_coordinator.waiting import WaitBoard

from shoal.clients.weights import WeightSinkClient, WeightSourceClient
from shoal.config.models import RunConfig, SecuritySection
from shoal.errors import ShoalError
from shoal.rpc.server import RpcServer
from shoal.rpc.v1 import registry_pb2_grpc
from shoal.types import (
    InflightMode,
    PairDigests,
    PlannedServer,
    SamplingParams,
    ServiceKind,
    SinkCommitted,
    SinkPlanned,
    SinkPrepared,
    SinkTarget,
    SinkVerified,
    SourceLayout,
    SourceTransferred,
)
from tests.helpers.push_matrix_config import load
from tests.helpers.push_matrix_faults import FaultBox

SAMPLING = SamplingParams(max_new_tokens=4)
GENERATE_TIMEOUT_S = 5.0
AUDIT_TIMEOUT_S = 10.0
VICTIM_SERVER = "rollout-0"


class FaultySource(WeightSourceClient):
    """Meets the coordinator's faults before it calls the gang."""

    def __init__(self, address: str, security: SecuritySection, faults: FaultBox) -> None:
        super().__init__(address, security)
        self._faults = faults

    async def prepare(
        self, push_id: str, policy_version: int, sinks: Sequence[SinkTarget], *, timeout_s: float
    ) -> dict[str, PlannedServer]:
        """PREPARE at the gang."""
        self._faults.enter("prepare-source")
        return await super().prepare(push_id, policy_version, sinks, timeout_s=timeout_s)

    async def transfer(self, push_id: str, collective_groups: Any, *, timeout_s: float) -> SourceTransferred:  # noqa: ANN401
        """TRANSFER."""
        if self._faults.enter("transfer") == "other push":
            push_id += "-other"
        return await super().transfer(push_id, collective_groups, timeout_s=timeout_s)


class FaultySink(WeightSinkClient):
    """Meets the coordinator's faults before it calls a server; they strike at calls to one server alone."""

    def __init__(self, address: str, security: SecuritySection, faults: FaultBox) -> None:
        super().__init__(address, security)
        self._faults = faults
        self.is_victim = False

    async def prepare(self, push_id: str, policy_version: int, expires_s: float, *, timeout_s: float) -> SinkPrepared:
        """PREPARE; tells whose connection this is."""
        answer = await super().prepare(push_id, policy_version, expires_s, timeout_s=timeout_s)
        self.is_victim = answer.layout.server_id == VICTIM_SERVER
        return answer

    async def plan(self, push_id: str, policy_version: int, plan_hash: str, source: SourceLayout, *, timeout_s: float) -> SinkPlanned:
        """PREPARE, once both sides have planned."""
        if self._meets("prepare") == "wrong plan hash":
            plan_hash = "0" * len(plan_hash)
        return await super().plan(push_id, policy_version, plan_hash, source, timeout_s=timeout_s)

    async def verify(
        self, push_id: str, policy_version: int, plan_hash: str, pairs: Sequence[PairDigests], *, timeout_s: float
    ) -> SinkVerified:
        """VERIFY."""
        if self._meets("verify") == "changed digest":
            pairs = [flip_first(pairs[0]), *pairs[1:]]
        return await super().verify(push_id, policy_version, plan_hash, pairs, timeout_s=timeout_s)

    async def commit(self, push_id: str, policy_version: int, inflight: InflightMode, *, timeout_s: float) -> SinkCommitted:
        """COMMIT. A fault at "committed" strikes once the victim has answered, and the other server has not been asked."""
        if not self.is_victim:
            while self._faults.is_armed("committed"):  # noqa: ASYNC110 - the event is in another process's file
                await asyncio.sleep(0.01)
            return await super().commit(push_id, policy_version, inflight, timeout_s=timeout_s)
        fault = self._faults.enter("commit")
        answer = await super().commit(push_id, policy_version + (fault == "other version"), inflight, timeout_s=timeout_s)
        self._faults.enter("committed")
        return answer

    def _meets(self, stage: str) -> str:
        return self._faults.enter(stage) if self.is_victim else ""


def flip_first(pair: PairDigests) -> PairDigests:
    """The same pair with its first digest changed."""
    return PairDigests(rank=pair.rank, worker_rank=pair.worker_rank, xxh3=(pair.xxh3[0] ^ 1, *pair.xxh3[1:]), encodings=pair.encodings)


class FaultyConnector(GrpcConnector):
    """Connections that meet faults."""

    def __init__(self, security: SecuritySection, faults: FaultBox) -> None:
        super().__init__(security)
        self._own_security = security
        self._faults = faults

    def sink(self, address: str) -> SinkConnection:
        """Connect to a rollout server's end of the push."""
        return FaultySink(address, self._own_security, self._faults)

    def source(self, address: str) -> SourceConnection:
        """Connect to the actor's end of the push."""
        return FaultySource(address, self._own_security, self._faults)


class MatrixCoordinator:
    """Registry, fleet, and the requests of the test."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._config = config
        self.registry = Registry(run_id=config.run.id, lease_s=config.coordinator.lease_s)
        waits = WaitBoard()
        self._history = PushHistory()
        self._pool = ServerPool[RolloutEndpoint]("rollout server", waits)
        self.fleet = Fleet(
            registry=self.registry,
            connector=FaultyConnector(config.security, FaultBox(folder, "coordinator")),
            config=config,
            clock=StageClock(),
            waits=waits,
            history=self._history,
            rollout_pool=self._pool,
            reward_pool=ServerPool[RewardEndpoint]("reward server", waits),
        )

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        try:
            line = await reader.readline()
            if not line:
                return writer.close()
            request = json.loads(line)
            answer = json.dumps(await getattr(self, request["do"])())
        except ShoalError as error:
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        except Exception as error:  # noqa: BLE001 - a fault of the harness must reach the test
            answer = json.dumps({"error": repr(error)})
        writer.write(answer.encode() + b"\n")
        await writer.drain()
        writer.close()

    async def adopt(self) -> dict[str, Any]:
        """Take over the actor's version."""
        await self.registry.wait_for({ServiceKind.ACTOR: 1, ServiceKind.ROLLOUT: 1}, self._config.coordinator.ready_timeout_s)
        self.fleet.set_policy_version((await self.fleet.gang(ServiceKind.ACTOR).describe()).step)
        return await self.status()

    async def step(self) -> dict[str, Any]:
        """Update and push; answers how the push ended and how long it took, the update not included."""
        async with self.fleet.weights_lock:
            gang = self.fleet.gang(ServiceKind.ACTOR)
            policy_version = (await gang.update_batch(self.fleet.policy_version + 1)).policy_version
            num_before = self._history.totals.num_pushes
            started_s = time.monotonic()
            await self.fleet.push(policy_version)
            elapsed_s = time.monotonic() - started_s
            # Before anything else can run: what is fenced now is caught up soon.
            traffic = list(self._pool.server_ids())
        return {"policy_version": policy_version, "elapsed_s": elapsed_s, "traffic": traffic, **self._last_push(num_before)}

    async def audit(self) -> dict[str, Any]:
        """Digests of both ends; answers who differs, and who takes traffic right after it."""
        report = await self.fleet.audit(AUDIT_TIMEOUT_S)
        return {
            "result": report.result,
            "servers": {name: server.result for name, server in report.servers.items()},
            "first_difference": {name: server.first_difference for name, server in report.servers.items()},
            "traffic": list(self._pool.server_ids()),
        }

    async def status(self) -> dict[str, Any]:
        """What a test waits for."""
        return {
            "policy_version": self.fleet.policy_version,
            "traffic": list(self._pool.server_ids()),
            "addresses": {info.service_id: info.address for info in self.registry.services()},
            "services": {info.service_id: info.incarnation for info in self.registry.services()},
            "plans": {member.info.service_id: member.plan.plan_hash for member in self.fleet.rollouts() if member.plan is not None},
            "states": {info.service_id: self.fleet.state_of(info) for info in self.registry.services(ServiceKind.ROLLOUT)},
        }

    async def generate(self) -> dict[str, Any]:
        """One completion of whoever takes traffic."""
        server = await self._pool.pick(GENERATE_TIMEOUT_S)
        call = server.client.generate(
            uuid.uuid4().hex, [1], SAMPLING, 1, min_policy_version=self.fleet.policy_version, timeout_s=GENERATE_TIMEOUT_S
        )
        async with aclosing(call) as stream:
            completion = await anext(stream)
        return {
            "server": completion.engine_id,
            "tokens": [int(token) for token in completion.response_ids],
            "versions": [span.policy_version for span in completion.policy_version_spans],
        }

    def _last_push(self, num_before: int) -> dict[str, Any]:
        if self._history.totals.num_pushes == num_before:
            return {"state": "no server", "committed": [], "failed": {}, "stages_s": {}, "reason": None}
        report = self._history.last(1)[0].report
        return {
            "state": report.state,
            "committed": list(report.committed_servers),
            "failed": report.failed_servers,
            "stages_s": dict(report.stages_s),
            "reason": report.error,
        }


def main(folder: str, port: int) -> int:
    """Run until killed."""
    asyncio.run(serve(Path(folder), port))
    return 0


async def serve(folder: Path, port: int) -> None:
    """Serve the registry and the test."""
    config = load(folder, "coordinator")
    coordinator = MatrixCoordinator(config, folder)
    rpc = RpcServer("127.0.0.1", port, config.security)
    servicer = RegistryServicer(coordinator.registry)
    rpc.add(lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, server), SERVICE_NAME)
    await rpc.start()
    rpc.set_serving(True)
    path = folder / f"coordinator-{os.getpid()}.sock"
    control = await asyncio.start_unix_server(coordinator.answer, path)
    async with control, asyncio.TaskGroup() as group:
        group.create_task(coordinator.registry.run_expiry())
        group.create_task(coordinator.fleet.run())
