"""Builds the coordinator from a configuration and serves it: registry, REST API, the run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from shoal.config.models import RunConfig
from shoal.errors import ConfigError
from shoal.rpc.channel import join_address
from shoal.rpc.server import RpcServer
from shoal.rpc.v1 import registry_pb2_grpc
from shoal.telemetry.logs import get_logger
from shoal_coordinator.backend import RunBackend
from shoal_coordinator.backend_rewards import RouteBackend
from shoal_coordinator.connections import Connector, GrpcConnector
from shoal_coordinator.control import RunControl
from shoal_coordinator.dispatcher import RolloutEndpoint
from shoal_coordinator.error_groups import first_error
from shoal_coordinator.fleet import Fleet
from shoal_coordinator.metrics_sink import JsonLinesSink, MetricsSink, PrometheusSink, Sink
from shoal_coordinator.push_history import PushHistory
from shoal_coordinator.registry import Registry
from shoal_coordinator.registry_servicer import SERVICE_NAME, RegistryServicer
from shoal_coordinator.report import public_config, write_json_atomically
from shoal_coordinator.rest import RestServer, create_app
from shoal_coordinator.rewards.assembly import build_reward_path
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.run import Run, RunParts
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import StageClock
from shoal_coordinator.states import RunState, StateMachine
from shoal_coordinator.waiting import WaitBoard
from shoal_coordinator.workload import RewardAccess, Workload, open_workload

log = get_logger(__name__)

REST_START_S = 10.0
STOP_GRACE_S = 2.0
RUN_STOP_S = 15.0
"""A push in its COMMIT is finished before a cancelled run lets go."""


class Coordinator:
    """One run's coordinator. Create it inside a running event loop; it is closed by leaving `serve`.

    Args:
        connector: opens connections to services; None is gRPC.
        make_workload: loads data and connects to the queue; None is the real one.
    """

    def __init__(
        self,
        config: RunConfig,
        sink: MetricsSink,
        *,
        connector: Connector | None = None,
        make_workload: Callable[[], AbstractAsyncContextManager[Workload]] | None = None,
    ) -> None:
        self.config = config
        self.machine = StateMachine()
        self.registry = Registry(run_id=config.run.id, lease_s=config.coordinator.lease_s)
        clock, waits, history = StageClock(), WaitBoard(), PushHistory()
        rollout_pool = ServerPool[RolloutEndpoint]("rollout server", waits)
        reward_pool = ServerPool[RewardEndpoint]("reward server", waits)
        connections = GrpcConnector(config.security) if connector is None else connector
        self.fleet = Fleet(
            registry=self.registry,
            connector=connections,
            config=config,
            clock=clock,
            waits=waits,
            history=history,
            rollout_pool=rollout_pool,
            reward_pool=reward_pool,
        )
        self.rewards = build_reward_path(
            config, registry=self.registry, connector=connections, servers=self.fleet, pool=reward_pool, waits=waits
        )
        control = RunControl(self.machine)
        access = RewardAccess(
            calls=self.rewards.calls, routes=self.rewards.book, attention=control, shadow=self.rewards.shadow, rows=self.rewards.rows
        )
        parts = RunParts(
            config=config,
            machine=self.machine,
            control=control,
            fleet=self.fleet,
            sink=sink,
            history=history,
            clock=clock,
            waits=waits,
            open_workload=make_workload or (lambda: open_workload(config, rollout_pool, access, clock)),
            open_route=self.rewards.open,
        )
        self.run = Run(parts)
        self.backend = RunBackend(self.run, parts, self.registry, self.rewards.book)
        self.reward_backend = RouteBackend(self.rewards)

    async def serve(self, stop: asyncio.Event, *, ready_file: Path | None = None, exit_when_done: bool = False) -> RunState:
        """Serve until stop is set, or until the run is over if exit_when_done.

        Args:
            stop: a run that is not over yet is STOPPED at once when this is set.
            ready_file: gets {"grpc_address", "rest_address", "pid"} once both are served.
        Returns: the run's last state.
        Raises: ConfigError: a port is in use.
        """
        try:
            return await self._serve(stop, ready_file, exit_when_done)
        finally:
            self.close()

    async def _serve(self, stop: asyncio.Event, ready_file: Path | None, exit_when_done: bool) -> RunState:
        section = self.config.coordinator
        rest = RestServer(create_app(self.backend, self.reward_backend), section.host, section.rest_port)
        rpc = RpcServer(section.host, section.grpc_port, self.config.security)
        rpc.add(
            lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(RegistryServicer(self.registry), server), SERVICE_NAME
        )
        grpc_port = await rpc.start()
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(work) for work in self.background()]
                serving = group.create_task(rest.serve())
                await rest.wait_started(REST_START_S)
                rpc.set_serving(True)
                self._announce(ready_file, grpc_port, rest.port)
                await self._run_until(stop, exit_when_done)
                rpc.set_serving(False)
                rest.stop()
                await serving
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            await rpc.stop(STOP_GRACE_S)
        return self.machine.state

    def background(self) -> tuple[Coroutine[None, None, None], ...]:
        """What must run beside the run itself until it is cancelled."""
        return self.registry.run_expiry(), self.fleet.run(), self.rewards.run()

    def close(self) -> None:
        """Let go of the files of the run's folder."""
        self.rewards.close()

    async def _run_until(self, stop: asyncio.Event, exit_when_done: bool) -> None:
        running = asyncio.create_task(self.run.execute())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([running, stopping] if exit_when_done else [stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()
            stopping.cancel()
            await asyncio.wait([running, stopping], timeout=RUN_STOP_S)
        if not running.done():
            log.error("run_did_not_stop", waited_s=RUN_STOP_S)
        elif not running.cancelled():
            running.result()

    def _announce(self, ready_file: Path | None, grpc_port: int, rest_port: int) -> None:
        host = self.config.coordinator.host
        addresses = {"grpc_address": join_address(host, grpc_port), "rest_address": join_address(host, rest_port)}
        self.backend.grpc_address = addresses["grpc_address"]
        log.info("coordinator_ready", **addresses)
        if ready_file is not None:
            try:
                write_json_atomically(ready_file, {**addresses, "pid": os.getpid()})
            except OSError as error:
                raise ConfigError(f"cannot write the ready file {ready_file} ({error.strerror}); choose another --ready-file") from error


def open_sinks(config: RunConfig) -> list[Sink]:
    """Everything that takes metrics.

    Raises: ConfigError: the run's folder cannot be written.
    """
    folder = Path(config.run.folder)
    sinks: list[Sink] = [JsonLinesSink(folder), PrometheusSink()]
    if config.telemetry.tensorboard:
        # Here: tensorboardX takes a while to import.
        from shoal_coordinator.tensorboard_sink import FOLDER_NAME, TensorBoardSink

        sinks.append(TensorBoardSink(folder / FOLDER_NAME, public_config(config)))
    return sinks


async def serve(config: RunConfig, stop: asyncio.Event, *, ready_file: Path | None = None, exit_when_done: bool = False) -> RunState:
    """Serve a run; see `Coordinator.serve`.

    Raises: ConfigError: the run's folder cannot be written, or a port is in use.
    """
    with MetricsSink(open_sinks(config)) as sink:
        return await Coordinator(config, sink).serve(stop, ready_file=ready_file, exit_when_done=exit_when_done)
