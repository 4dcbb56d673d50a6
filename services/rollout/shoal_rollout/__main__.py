"""`python -m shoal_rollout`: configuration, engine, service."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from shoal.config.load import load_config
from shoal.config.models import RunConfig
from shoal.errors import CapacityError, ConfigError, ShoalError
from shoal.process import die_with_parent
from shoal.service_arguments import add_service_arguments
from shoal.telemetry.logs import get_logger, setup_logging
from shoal_rollout.engine_environment import prepare_environment

log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one engine until SIGTERM; returns the exit code."""
    die_with_parent()
    arguments = _parse(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        setup_logging(arguments.service_id, config.telemetry, run_id=config.run.id)
        # torch and vLLM read the environment when they are imported.
        prepare_environment(config.rollout, config.telemetry)
        return _serve(config, arguments)
    except ShoalError as error:
        log.error("cannot_serve", error=str(error), kind=type(error).__name__)
        # 2: this configuration, or this little room for staging, would be refused again, so a restart is of no use.
        return 2 if isinstance(error, ConfigError | CapacityError) else 1


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
    # Without a coordinator the server registers nowhere, and serves all the same.
    add_service_arguments(parser, example="rollout-0", coordinator_required=False)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
