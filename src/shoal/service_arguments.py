"""The command-line arguments that the services have in common."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_config_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add `config`, a path, and `overrides`, a list of section.field=value."""
    parser.add_argument("--config", type=Path, required=required, help="the run's YAML file")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="override one setting; may be repeated",
    )


def add_service_arguments(parser: argparse.ArgumentParser, *, example: str, coordinator_required: bool = True) -> None:
    """Add what a service of one run needs that registers with the coordinator.

    Args:
        example: an id such as reward-0, for the help.
        coordinator_required: whether the service is of no use without a registry; else `coordinator` may be None.
    """
    add_config_arguments(parser)
    parser.add_argument("--service-id", required=True, help=f"name in the registry, unique in the run, such as {example}")
    parser.add_argument("--coordinator", required=coordinator_required, metavar="HOST:PORT", help="where the registry listens")
    add_address_arguments(parser)


def add_address_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `host`, `port` and `advertise`."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=port_number, default=0, help="port to listen on; 0 picks a free one")
    parser.add_argument("--advertise", metavar="HOST", help="host name that others reach this service by; default: --host")


def add_security_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `ca_file`, `cert_file`, `key_file` and `insecure`, for a process without a run's configuration."""
    parser.add_argument("--ca-file", metavar="PEM", help="mTLS: the CA that signs every service")
    parser.add_argument("--cert-file", metavar="PEM", help="mTLS: certificate of this service")
    parser.add_argument("--key-file", metavar="PEM", help="mTLS: key of this service")
    parser.add_argument("--insecure", action="store_true", help="plaintext beyond this machine too")


def port_number(text: str) -> int:
    """Read a port; 0 is a free one.

    Raises: argparse.ArgumentTypeError: it is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 65536):
        # gRPC would take the number without its upper bits.
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give a number from 0 to 65535")
    return int(text)
