"""Serve scorers.

python -m shoal_reward --config RUN.yaml --service-id reward-0 --coordinator HOST:PORT
python -m shoal_reward --serve FILE.yaml
python -m shoal_reward --module my_scorers.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from shoal.clients.registry import LeaseKeeper, this_process
from shoal.config.models import TelemetrySection
from shoal.errors import ConfigError, NotFoundError, ShoalError
from shoal.process import die_with_parent
from shoal.reward import REGISTRY
from shoal.rpc.channel import join_address
from shoal.rpc.server import RpcServer, serve_until_signal
from shoal.rpc.v1.reward_pb2_grpc import add_RewardServiceServicer_to_server
from shoal.telemetry.logs import get_logger, setup_logging
from shoal.telemetry.metrics import start_metrics_server
from shoal.types import ServiceKind
from shoal_reward.grading.pool import GraderPool
from shoal_reward.loading import load_scorers
from shoal_reward.scoring import ScoringPool
from shoal_reward.service import RewardService
from shoal_reward.servicer import SERVICE_NAME, RewardServicer
from shoal_reward.startup import Startup, parser, startup_of

log = get_logger(__name__)

SCORER_THREADS = 8


def main(argv: list[str] | None = None) -> int:
    """Run the service until SIGTERM or SIGINT. Returns the exit status."""
    die_with_parent()
    arguments = parser().parse_args(argv)
    pool = ScoringPool(SCORER_THREADS)
    setup_logging("reward", TelemetrySection())
    try:
        startup = startup_of(arguments)
        setup_logging("reward", startup.telemetry)
        asyncio.run(_serve(startup, arguments, pool))
    except ShoalError as error:
        log.error("service_failed", service_id=arguments.service_id, error=str(error))
        # 2: this configuration would be refused again, so a restart is of no use.
        return 2 if isinstance(error, ConfigError | NotFoundError) else 1
    finally:
        pool.shutdown()
    _leave_stuck_threads(pool)
    return 0


async def _serve(startup: Startup, arguments: argparse.Namespace, pool: ScoringPool) -> None:
    load_scorers(startup.settings)
    for name, version in startup.wanted.items():
        REGISTRY.get(name, version)
    async with _graders(startup) as graders:
        service = RewardService(service_id=startup.service_id, registry=REGISTRY, pool=pool, graders=graders)
        await _listen(service, startup, arguments)


async def _listen(service: RewardService, startup: Startup, arguments: argparse.Namespace) -> None:
    server = RpcServer(arguments.host, arguments.port, startup.security)
    server.add(lambda target: add_RewardServiceServicer_to_server(RewardServicer(service), target), SERVICE_NAME)
    port = await server.start()
    try:
        metrics_port = start_metrics_server(startup.telemetry.metrics_port, host=arguments.host)
        server.set_serving(True)
        address = join_address(arguments.advertise or arguments.host, port)
        names = ", ".join(f"{scorer.name} {scorer.version}" for scorer in REGISTRY.all())
        log.info("reward_ready", scorers=names, port=port, metrics_port=metrics_port)
        async with AsyncExitStack() as stack:
            if arguments.coordinator is not None:
                await stack.enter_async_context(_lease(startup, arguments.coordinator, address))
            file = arguments.ready_file
            await serve_until_signal(server, on_ready=None if file is None else partial(_announce, file, address))
    finally:
        # After an orderly end there is nothing left to stop.
        await server.stop(0.0)


@asynccontextmanager
async def _graders(startup: Startup) -> AsyncIterator[GraderPool]:
    graders = GraderPool(startup.settings, REGISTRY.all())
    await graders.start()
    try:
        yield graders
    finally:
        await graders.stop()


def _lease(startup: Startup, coordinator: str, address: str) -> LeaseKeeper:
    service = this_process(run_id=startup.run_id, service_id=startup.service_id, kind=ServiceKind.REWARD, address=address)
    return LeaseKeeper(coordinator, service, startup.security)


def _announce(file: Path, address: str) -> None:
    """Write the ready file so that nobody reads half of it."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps({"address": address, "pid": os.getpid()}) + "\n", encoding="utf-8")
        unfinished.replace(file)
    except OSError as error:
        raise ConfigError(f"cannot write the ready file {file} ({error.strerror}); choose another --ready-file") from error


def _leave_stuck_threads(pool: ScoringPool) -> None:
    # The interpreter would wait at exit for a scorer in an endless loop.
    if pool.num_running:
        log.warning("scorers_left_running", num_threads=pool.num_running)
        logging.shutdown()
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
