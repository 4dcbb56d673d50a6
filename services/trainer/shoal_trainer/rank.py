"""The life of one rank: join the gang, build the models, then serve (rank 0) or follow."""

from __future__ import annotations

import argparse
import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

from shoal.clients.registry import LeaseKeeper, this_process
from shoal.config.load import load_config
from shoal.config.models import RunConfig
from shoal.errors import ShoalError
from shoal.rpc.channel import join_address
from shoal.rpc.server import RpcServer, serve_until_signal
from shoal.rpc.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from shoal.rpc.v1.weights_pb2_grpc import add_WeightSourceServiceServicer_to_server
from shoal.telemetry.logs import get_logger, setup_logging
from shoal.telemetry.metrics import start_metrics_server
from shoal.types import ServiceInfo, ServiceKind, TrainerRole
from shoal_trainer import weight_servicer
from shoal_trainer.building import RankParts, build_rank, gang_section
from shoal_trainer.command_store import CommandStore, open_command_store
from shoal_trainer.distributed import RankContext, join_gang, prepare_thread
from shoal_trainer.gang import Gang, follow
from shoal_trainer.servicer import SERVICE_NAME, TrainerServicer

log = get_logger(__name__)

STOP_GRACE_S = 2.0
"""How long a running command may go on after SIGTERM; its optimizer state ends with the process anyway."""


def run_rank(arguments: argparse.Namespace) -> int:
    """Run this process's rank until it is told to stop; returns the exit status."""
    role = TrainerRole(arguments.role)
    try:
        config = load_config(arguments.config, arguments.overrides)
        name = arguments.service_id if os.environ.get("RANK", "0") == "0" else f"{arguments.service_id}.{os.environ['RANK']}"
        setup_logging(name, config.telemetry, run_id=config.run.id)
        context = join_gang(gang_section(config, role))
        host = os.environ["MASTER_ADDR"]
        # Everything that computes runs in one thread, so that rank 0's event loop answers meanwhile.
        compute = ThreadPoolExecutor(1, "compute", prepare_thread, (gang_section(config, role), context.device))
        parts = compute.submit(build_rank, config, role, context).result()
        compute.submit(parts.trainer.warm_up).result()
        store = open_command_store(context, host)
        log.info("rank_ready", rank=context.rank, world_size=context.world_size, device=str(context.device))
        if context.rank == 0:
            return asyncio.run(_serve(arguments, config, context, parts, store, compute))
        return _follow(context, parts, store, compute)
    except ShoalError as error:
        log.error("rank_failed", error=str(error))
        return 1


def _follow(context: RankContext, parts: RankParts, store: CommandStore | None, compute: ThreadPoolExecutor) -> int:
    assert store is not None, "a gang of more than one has a store"  # noqa: S101
    compute.submit(follow, parts.handlers, store, context.rank).result()
    return 0


async def _serve(
    arguments: argparse.Namespace,
    config: RunConfig,
    context: RankContext,
    parts: RankParts,
    store: CommandStore | None,
    compute: ThreadPoolExecutor,
) -> int:
    role = TrainerRole(arguments.role)
    answer_timeout_s = gang_section(config, role).collective_timeout_s
    stop = asyncio.Event()
    gang = Gang(parts.handlers, store, context.world_size, compute, answer_timeout_s, parts.independent, on_broken=stop.set)
    server = RpcServer(arguments.host, arguments.port, config.security)
    servicer = TrainerServicer(gang, lambda: parts.describe(arguments.service_id, context.world_size))
    server.add(lambda s: add_TrainerServiceServicer_to_server(servicer, s), SERVICE_NAME)
    if role is TrainerRole.ACTOR:
        source = weight_servicer.WeightSourceServicer(gang)
        server.add(lambda s: add_WeightSourceServiceServicer_to_server(source, s), weight_servicer.SERVICE_NAME)
    port = await server.start()
    start_metrics_server(config.telemetry.metrics_port, host=arguments.host)
    server.set_serving(True)
    advertised = arguments.host if arguments.advertise is None else arguments.advertise
    service = _service_info(config, role, arguments.service_id, join_address(advertised, port))
    async with LeaseKeeper(arguments.coordinator, service, config.security):
        await serve_until_signal(server, drain=gang.drain, drain_timeout_s=STOP_GRACE_S, grace_s=STOP_GRACE_S, stop_event=stop)
    return 1 if gang.is_broken else 0


def _service_info(config: RunConfig, role: TrainerRole, service_id: str, address: str) -> ServiceInfo:
    return this_process(
        run_id=config.run.id,
        service_id=service_id,
        kind=ServiceKind.ACTOR if role is TrainerRole.ACTOR else ServiceKind.CRITIC,
        address=address,
    )
