"""python -m shoal_reward --config F --service-id reward-0 --coordinator HOST:PORT."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from shoal.clients.registry import LeaseKeeper, this_process
from shoal.config.load import load_config
from shoal.config.models import RunConfig
from shoal.errors import ConfigError, NotFoundError, ShoalError
from shoal.process import die_with_parent
from shoal.reward import REGISTRY
from shoal.rpc.channel import join_address
from shoal.rpc.server import RpcServer, serve_until_signal
from shoal.rpc.v1.reward_pb2_grpc import add_RewardServiceServicer_to_server
from shoal.service_arguments import add_service_arguments
from shoal.telemetry.logs import get_logger, setup_logging
from shoal.telemetry.metrics import start_metrics_server
from shoal.types import ServiceInfo, ServiceKind
from shoal_reward.loading import load_modules
from shoal_reward.scoring import ScoringPool
from shoal_reward.service import RewardService
from shoal_reward.servicer import SERVICE_NAME, RewardServicer

log = get_logger(__name__)

SCORER_THREADS = 8


def main(argv: list[str] | None = None) -> int:
    """Run the service until SIGTERM or SIGINT. Returns the exit status."""
    die_with_parent()
    arguments = _parse(argv)
    pool = ScoringPool(SCORER_THREADS)
    try:
        config = load_config(arguments.config, arguments.overrides)
        setup_logging("reward", config.telemetry)
        asyncio.run(_serve(config, arguments, pool))
    except ShoalError as error:
        log.error("service_failed", service_id=arguments.service_id, error=str(error))
        # 2: this configuration would be refused again, so a restart is of no use.
        return 2 if isinstance(error, ConfigError | NotFoundError) else 1
    finally:
        pool.shutdown()
    _leave_stuck_threads(pool)
    return 0


async def _serve(config: RunConfig, arguments: argparse.Namespace, pool: ScoringPool) -> None:
    load_modules(config.reward.modules)
    service = RewardService(service_id=arguments.service_id, registry=REGISTRY, pool=pool)
    scorers = [service.find(name, version) for name, version in config.reward.scorers.items()]
    server = RpcServer(arguments.host, arguments.port, config.security)
    server.add(lambda target: add_RewardServiceServicer_to_server(RewardServicer(service), target), SERVICE_NAME)
    port = await server.start()
    metrics_port = start_metrics_server(config.telemetry.metrics_port, host=arguments.host)
    server.set_serving(True)
    names = ", ".join(f"{scorer.name} {scorer.version}" for scorer in scorers)
    log.info("reward_ready", scorers=names, port=port, metrics_port=metrics_port)
    async with LeaseKeeper(arguments.coordinator, _service_info(config, arguments, port), config.security):
        await serve_until_signal(server)


def _service_info(config: RunConfig, arguments: argparse.Namespace, port: int) -> ServiceInfo:
    return this_process(
        run_id=config.run.id,
        service_id=arguments.service_id,
        kind=ServiceKind.REWARD,
        address=join_address(arguments.advertise or arguments.host, port),
    )


def _leave_stuck_threads(pool: ScoringPool) -> None:
    # The interpreter would wait at exit for a scorer in an endless loop.
    if pool.num_running:
        log.warning("scorers_left_running", num_threads=pool.num_running)
        logging.shutdown()
        os._exit(0)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal_reward", description="Serve scorers to a run.")
    add_service_arguments(parser, example="reward-0")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
