"""`python -m shoal_rollout`: configuration, engine, service."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from shoal.config.load import load_config
from shoal.config.models import RunConfig
from shoal.errors import ShoalError
from shoal.process import die_with_parent
from shoal.telemetry.logs import get_logger, setup_logging
from shoal_rollout.engine_environment import prepare_environment

log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one engine until SIGTERM; returns the exit code."""
    die_with_parent()
    arguments = _parse(argv)
    try:
        config = load_config(arguments.config, arguments.set)
        setup_logging(arguments.service_id, config.telemetry, run_id=config.run.id)
        # torch and vLLM read the environment when they are imported.
        prepare_environment(config.rollout, config.telemetry)
        return _serve(config, arguments)
    except ShoalError as error:
        log.error("cannot_serve", error=str(error), kind=type(error).__name__)
        return 1


def _serve(config: RunConfig, arguments: argparse.Namespace) -> int:
    from shoal_rollout.engine_start import build_engine

    llm, facts = build_engine(config, arguments.service_id)
    # gRPC must not exist before the engine is forked.
    from shoal_rollout.server import RolloutServer
    from shoal_rollout.vllm_engine import VllmEngine

    engine = VllmEngine(llm)

    async def serve() -> int:
        server = RolloutServer(
            engine,
            facts,
            config,
            service_id=arguments.service_id,
            host=arguments.host,
            port=arguments.port,
            address_host=arguments.advertise,
            coordinator=arguments.coordinator,
        )
        return await server.run()

    try:
        return asyncio.run(serve())
    finally:
        engine.shutdown()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal_rollout", description="Rollout server: one vLLM engine behind gRPC.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--set", action="append", default=[], metavar="section.field=value", help="override one value of the file")
    parser.add_argument("--service-id", required=True, help="name of this server, unique in the run, such as rollout-0")
    parser.add_argument("--coordinator", help="host:port of the coordinator; without it the server registers nowhere")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 picks a free one")
    parser.add_argument("--advertise", help="host that others reach this server at; default is --host")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
