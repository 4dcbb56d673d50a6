"""`shoal reward serve`: this process becomes a reward service."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from shoal.cli.api import CoordinatorApi
from shoal.errors import ConfigError, UnavailableError
from shoal.rpc.channel import join_address, split_address

_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What was asked for. run: REST address of a coordinator; coordinator: its gRPC address; neither: the service registers nowhere."""

    file: Path | None
    modules: Sequence[str]
    run: str | None
    coordinator: str | None
    service_id: str
    more: Sequence[str]


def serve(options: ServeOptions) -> NoReturn:
    """Replace this process by the service, so that signals and the exit code are the service's own.

    Raises: ConfigError: the options do not fit. UnavailableError: the run does not answer, or tells no gRPC address.
    """
    argv = serve_argv(options)
    sys.stdout.flush()
    os.execv(argv[0], argv)  # noqa: S606 - this interpreter, with arguments of its own


def serve_argv(options: ServeOptions) -> list[str]:
    """The service's command line. Raises: as `serve`."""
    if options.file is not None and not options.file.is_file():
        raise ConfigError(f"{options.file} does not exist or is no file; give the YAML file of a reward service, or --module alone")
    argv = [sys.executable, "-m", "shoal_reward", "--service-id", options.service_id]
    argv += [] if options.file is None else ["--serve", str(options.file)]
    argv += [argument for module in options.modules for argument in ("--module", module)]
    coordinator = _coordinator(options)
    argv += [] if coordinator is None else ["--coordinator", coordinator]
    return [*argv, *options.more]


def _coordinator(options: ServeOptions) -> str | None:
    if options.run is None:
        return options.coordinator
    if options.coordinator is not None:
        raise ConfigError("--run and --coordinator name the same thing; give one of them")
    with CoordinatorApi(options.run) as api:
        address, rest_host = api.status().get("grpc_address"), urlsplit(api.base_url).hostname
    if not address:
        raise UnavailableError(f"the coordinator at {options.run} tells no gRPC address; give it with --coordinator HOST:PORT")
    host, port = split_address(address)
    # A coordinator that listens everywhere is reached where its REST API was.
    return join_address(rest_host, port) if host in _ANY_HOST and rest_host else address
