"""The command-line arguments that the services have in common."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `config`, a path, and `overrides`, a list of section.field=value."""
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML file")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="override one setting; may be repeated",
    )


def add_service_arguments(parser: argparse.ArgumentParser, *, example: str, coordinator_required: bool = True) -> None:
    """Add what a service needs that registers with the coordinator.

    Args:
        example: an id such as reward-0, for the help.
        coordinator_required: whether the service is of no use without a registry; else `coordinator` may be None.
    """
    add_config_arguments(parser)
    parser.add_argument("--service-id", required=True, help=f"name in the registry, unique in the run, such as {example}")
    parser.add_argument("--coordinator", required=coordinator_required, metavar="HOST:PORT", help="where the registry listens")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 picks a free one")
    parser.add_argument("--advertise", metavar="HOST", help="host name that others reach this service by; default: --host")
