"""What a reward service is started with: a run's configuration, or a file and modules of its own."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from shoal.config.load import load_config
from shoal.config.models import SecuritySection, TelemetrySection
from shoal.config.reward_service import RewardServiceSettings, load_reward_service, reward_service_of
from shoal.errors import ConfigError
from shoal.rpc.channel import split_address
from shoal.service_arguments import add_address_arguments, add_config_arguments, add_security_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Settings of one reward service. run_id: the run that it belongs to; empty for any. wanted: name -> version, that must be there."""

    run_id: str
    service_id: str
    settings: RewardServiceSettings
    security: SecuritySection
    telemetry: TelemetrySection
    wanted: Mapping[str, str]


def parser() -> argparse.ArgumentParser:
    """The service's command line."""
    parser = argparse.ArgumentParser(prog="python -m shoal_reward", description="Serve scorers to a run, or to whoever asks.")
    add_config_arguments(parser, required=False)
    parser.add_argument("--serve", type=Path, metavar="FILE", help="without --config: YAML file with modules, scorers and limits")
    parser.add_argument(
        "--module", dest="modules", action="append", default=[], help="without --config: module or .py file; may be repeated"
    )
    parser.add_argument("--service-id", help="name in the registry, unique in the run, such as reward-0; default: of host and process")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where the registry listens; without, the service does not register")
    add_address_arguments(parser)
    add_security_arguments(parser)
    parser.add_argument("--metrics-port", type=int, default=0, help="without --config: Prometheus port; 0 picks a free one, -1 is none")
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help='gets {"address", "pid"} as JSON once the service serves')
    return parser


def startup_of(arguments: argparse.Namespace) -> Startup:
    """Read what the command line names.

    Raises: ConfigError: a file cannot be used, arguments exclude each other, or plaintext would leave this machine.
    """
    service_id = arguments.service_id or f"reward-{socket.gethostname()}-{os.getpid()}"
    if arguments.config is None:
        return _standalone(arguments, service_id)
    if arguments.serve is not None or arguments.modules:
        raise ConfigError("--config names what to serve itself: set reward.service_file and reward.modules instead of --serve and --module")
    config = load_config(arguments.config, arguments.overrides)
    return Startup(
        run_id=config.run.id,
        service_id=service_id,
        settings=reward_service_of(config.reward),
        security=config.security,
        telemetry=config.telemetry,
        wanted=config.reward.scorers,
    )


def _standalone(arguments: argparse.Namespace, service_id: str) -> Startup:
    if arguments.serve is None and not arguments.modules:
        raise ConfigError("nothing to serve: give --config RUN.yaml, --serve FILE.yaml, or --module MODULE (or .py file)")
    if arguments.overrides:
        raise ConfigError("--set changes a run's configuration: give --config, or write the setting into the file of --serve")
    settings = RewardServiceSettings() if arguments.serve is None else load_reward_service(arguments.serve)
    added = tuple(dict.fromkeys(module for module in arguments.modules if module not in settings.modules))
    return Startup(
        run_id="",
        service_id=service_id,
        settings=settings.model_copy(update={"modules": (*settings.modules, *added)}),
        security=_security(arguments),
        telemetry=TelemetrySection(metrics_port=_port(arguments.metrics_port)),
        wanted=MappingProxyType({}),
    )


def _security(arguments: argparse.Namespace) -> SecuritySection:
    files = {name: getattr(arguments, name) for name in ("ca_file", "cert_file", "key_file")}
    missing = [f"--{name.replace('_', '-')}" for name, path in files.items() if path is None]
    if not missing and arguments.insecure:
        raise ConfigError("--insecure means plaintext: leave out either it or the PEM files")
    if not missing:
        return SecuritySection(insecure=False, **files)
    if len(missing) < len(files):
        raise ConfigError(f"mTLS needs three PEM files: {', '.join(missing)} is missing")
    hosts = [arguments.host, *([] if arguments.coordinator is None else [split_address(arguments.coordinator)[0]])]
    if not arguments.insecure and (far := _beyond_loopback(hosts)):
        raise ConfigError(
            f"{far} is beyond this machine: give --ca-file, --cert-file and --key-file, or --insecure for plaintext in a private network"
        )
    return SecuritySection(insecure=True)


def _beyond_loopback(hosts: Iterable[str]) -> str:
    for host in hosts:
        try:
            is_loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            is_loopback = host == "localhost"
        if not is_loopback:
            return host
    return ""


def _port(port: int) -> int:
    if not -1 <= port <= 65535:
        raise ConfigError(f"--metrics-port {port} is no port: choose one of 1 to 65535, 0 for a free one, -1 for none")
    return port
