"""Serves one engine: gRPC services, registration, watch over the engine's processes, orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import glob
import os
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.clients.registry import LeaseKeeper, this_process
from shoal.config.models import RunConfig
from shoal.errors import ShoalError
from shoal.rpc.channel import join_address
from shoal.rpc.server import RpcServer, serve_until_signal
from shoal.rpc.v1 import rollout_pb2_grpc
from shoal.telemetry.logs import get_logger
from shoal.telemetry.metrics import start_metrics_server
from shoal.types import ServiceKind
from shoal.weights.staging_names import server_staging
from shoal_rollout import rollout_servicer, weight_sink_servicer
from shoal_rollout.generation import Generation
from shoal_rollout.model_facts import ModelFacts
from shoal_rollout.weight_sink import WeightSink

if TYPE_CHECKING:
    from shoal_rollout.vllm_engine import VllmEngine

log = get_logger(__name__)

EXIT_OK = 0
EXIT_ENGINE_DIED = 70
EXIT_COMMIT_FAILED = 71
_WATCH_S = 0.5
_DRAIN_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 10.0
"""A worker that does not answer any more is ended with the engine; its files are removed here."""


class RolloutServer:
    """Wires one engine to its services.

    Args:
        address_host: Host part of the address that is registered; None uses `host`.
        coordinator: host:port of the coordinator; None registers nowhere.
    """

    def __init__(
        self,
        engine: VllmEngine,
        facts: ModelFacts,
        config: RunConfig,
        *,
        service_id: str,
        host: str,
        port: int,
        address_host: str | None = None,
        coordinator: str | None = None,
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._config = config
        self._service_id = service_id
        self._host, self._coordinator = host, coordinator
        self._address_host = host if address_host is None else address_host
        self._stop = asyncio.Event()
        self._exit_code = EXIT_OK
        self._lease: LeaseKeeper | None = None
        self._rpc = RpcServer(host, port, config.security)
        self._generation = Generation(
            engine,
            engine_id=service_id,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            eos_ids=facts.eos_ids,
            # A server that joins a run must not answer with the base weights before it knows how far the run is.
            required_policy_version=None if coordinator is not None else 0,
        )
        self._staging_name = server_staging(config.run.id, service_id, os.getpid())
        self._sink = WeightSink(
            engine,
            server_id=service_id,
            staging_name=self._staging_name,
            push=config.push.model_copy(update={"plaintext_collective": config.may_push_in_plaintext}),
            on_committed=self._on_committed,
            on_failed=self._on_commit_failed,
        )

    async def run(self) -> int:
        """Serve until a signal or the engine's death.

        Returns: the exit code of the process.
        Raises: ShoalError: the server cannot start.
        """
        remove_stale_staging(self._config.push.shm_dir, self._config.run.id, self._service_id)
        await self._restrict()
        await self._sink.discover(self._facts.folder)
        await self._sink.reserve()
        await self._engine.update_version("0")
        start_metrics_server(self._config.telemetry.metrics_port, host=self._host)
        self._add_services()
        # What the imports left lives as long as the process: a collection would walk it for a third of a second in mid-rollout.
        gc.collect()
        gc.freeze()
        port = await self._rpc.start()
        self._sink.listen_at(join_address(self._address_host, port))
        watching = asyncio.create_task(self._watch_engine(), name="engine-watch")
        try:
            async with AsyncExitStack() as stack:
                self._rpc.set_serving(True)
                if self._coordinator is not None:
                    self._lease = await stack.enter_async_context(self._lease_keeper(self._coordinator, port))
                    self._generation.require(0)
                await serve_until_signal(self._rpc, drain=self._drain, drain_timeout_s=_DRAIN_TIMEOUT_S, stop_event=self._stop)
        finally:
            watching.cancel()
            await self._close()
        return self._exit_code

    async def _restrict(self) -> None:
        facts = self._facts
        if facts.sampled_vocab_size < facts.vocab_size:
            await self._engine.call_workers("shoal_restrict", facts.sampled_vocab_size)
            log.info("padding_never_sampled", sampled_vocab_size=facts.sampled_vocab_size, vocab_size=facts.vocab_size)

    def _add_services(self) -> None:
        rollout = rollout_servicer.RolloutServicer(self._generation, self._config, self._service_id, self._facts)
        self._rpc.add(lambda server: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollout, server), rollout_servicer.SERVICE_NAME)
        sink = weight_sink_servicer.WeightSinkServicer(self._sink)
        self._rpc.add(sink.add_to, weight_sink_servicer.SERVICE_NAME)

    def _lease_keeper(self, coordinator: str, port: int) -> LeaseKeeper:
        info = this_process(
            run_id=self._config.run.id,
            service_id=self._service_id,
            kind=ServiceKind.ROLLOUT,
            address=join_address(self._address_host, port),
        )
        return LeaseKeeper(coordinator, info, self._config.security, on_required_version=self._generation.require)

    def _on_committed(self, policy_version: int) -> None:
        self._generation.policy_version = policy_version
        if self._lease is not None:
            self._lease.policy_version = policy_version

    def _on_commit_failed(self, reason: str) -> None:
        self._end(EXIT_COMMIT_FAILED, reason)

    async def _watch_engine(self) -> None:
        while not self._engine.is_dead:  # noqa: ASYNC110 - vLLM sets a flag, it has no event
            await asyncio.sleep(_WATCH_S)
        log.error("engine_died", service_id=self._service_id)
        self._end(EXIT_ENGINE_DIED, "the engine process has died; this server is ending, use another one")

    def _end(self, exit_code: int, reason: str) -> None:
        self._exit_code = exit_code
        self._generation.refuse(reason)
        self._rpc.set_serving(False)
        self._stop.set()

    async def _drain(self) -> None:
        if self._exit_code != EXIT_OK:
            # Nothing that runs can end well: let callers go on elsewhere at once.
            with contextlib.suppress(ShoalError):
                await self._generation.abort_all()
            return
        await self._generation.drain()

    async def _close(self) -> None:
        if not self._engine.is_dead:
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._sink.close()
            except (ShoalError, TimeoutError) as error:
                log.warning("staging_not_closed", error=repr(error))
        # A dead engine cannot remove its own files.
        remove_files(glob.glob(f"{glob.escape(self._config.push.shm_dir)}/shoal-{self._staging_name}-w*"))


def remove_stale_staging(folder: str, run_id: str, service_id: str) -> None:
    """Remove what a killed predecessor of this very service left behind."""
    remove_files(glob.glob(f"{glob.escape(folder)}/shoal-{run_id}-{service_id}-p[0-9]*-w[0-9]*"))


def remove_files(paths: Iterable[str]) -> None:
    """Remove files that may be gone already."""
    for path in paths:
        Path(path).unlink(missing_ok=True)
