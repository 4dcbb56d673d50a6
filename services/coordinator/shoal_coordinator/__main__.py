"""python -m shoal_coordinator --config FILE [--set a.b=c ...] [--ready-file FILE] [--exit-when-done]

Exit code: 0 when the run finished or was stopped, 1 when it failed, 2 when it could not start.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.config.load import load_config
from shoal.config.models import RunConfig
from shoal.errors import ShoalError
from shoal.process import die_with_parent
from shoal.service_arguments import add_config_arguments
from shoal.telemetry.logs import get_logger, setup_logging
from shoal_coordinator.app import serve
from shoal_coordinator.states import RunState

log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the coordinator's process; returns its exit code."""
    die_with_parent()
    args = _parse(argv)
    try:
        config = load_config(args.config, args.overrides)
    except ShoalError as error:
        sys.stderr.write(f"shoal_coordinator: {error}\n")
        return 2
    setup_logging("coordinator", config.telemetry, run_id=config.run.id)
    try:
        state = asyncio.run(_serve(config, args.ready_file, args.exit_when_done))
    except ShoalError as error:
        log.error("coordinator_cannot_serve", error=str(error))
        return 2
    return 1 if state is RunState.FAILED else 0


async def _serve(config: RunConfig, ready_file: Path | None, exit_when_done: bool) -> RunState:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await serve(config, stop, ready_file=ready_file, exit_when_done=exit_when_done)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal_coordinator", description="Drives one training run.")
    add_config_arguments(parser)
    parser.add_argument("--ready-file", type=Path, default=None, help="written with the addresses once they are served")
    parser.add_argument("--exit-when-done", action="store_true", help="end with the run instead of serving until SIGTERM")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
