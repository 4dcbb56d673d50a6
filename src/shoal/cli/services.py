"""The command line of every service of a run on one machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shoal.cli.local.protocol import RestartPolicy, ServiceSpec
from shoal.config.gang import GangSection
from shoal.config.models import RunConfig


def coordinator_spec(config_path: Path, ready_file: Path, logs: Path) -> ServiceSpec:
    """The coordinator; started first, since the others register with it."""
    argv = [sys.executable, "-m", "shoal_coordinator", "--config", str(config_path), "--ready-file", str(ready_file)]
    return ServiceSpec(name="coordinator", argv=argv, env=_common_env(), log_path=str(logs / "coordinator.log"), stop_order=0)


def worker_specs(config: RunConfig, config_path: Path, coordinator: str, logs: Path) -> list[ServiceSpec]:
    """Rollout servers, the reward server and the gangs."""
    specs = [_rollout_spec(f"rollout-{i}", config, config_path, coordinator, logs) for i in range(config.rollout.servers)]
    specs.append(_spec("reward-0", _module("shoal_reward", "reward-0", config_path, coordinator), logs, restart=RestartPolicy.ON_FAILURE))
    specs.append(_gang_spec("actor", config.actor, config_path, coordinator, logs))
    if config.algorithm.has_critic:
        specs.append(_gang_spec("critic", config.critic, config_path, coordinator, logs))
    return specs


def _module(module: str, service_id: str, config_path: Path, coordinator: str) -> list[str]:
    return [sys.executable, "-m", module, "--config", str(config_path), "--service-id", service_id, "--coordinator", coordinator]


def _rollout_spec(name: str, config: RunConfig, config_path: Path, coordinator: str, logs: Path) -> ServiceSpec:
    env = {"OMP_NUM_THREADS": str(config.rollout.threads)}
    return _spec(name, _module("shoal_rollout", name, config_path, coordinator), logs, env=env, restart=RestartPolicy.ON_FAILURE)


def _gang_spec(role: str, gang: GangSection, config_path: Path, coordinator: str, logs: Path) -> ServiceSpec:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gang.ranks), "--max-restarts", "0"]
    argv += ["-m", "shoal_trainer", "--role", role, *_module("", role, config_path, coordinator)[3:]]
    # A gang holds the only copy of its optimizer state: a restart could not go on where it was, so its end fails the run.
    return _spec(role, argv, logs, env={"OMP_NUM_THREADS": str(gang.threads)})


def _spec(
    name: str,
    argv: list[str],
    logs: Path,
    *,
    env: dict[str, str] | None = None,
    restart: RestartPolicy = RestartPolicy.NEVER,
) -> ServiceSpec:
    merged = {**_common_env(), **(env or {})}
    return ServiceSpec(name=name, argv=argv, env=merged, log_path=str(logs / f"{name}.log"), restart=restart, stop_order=1)


def _common_env() -> dict[str, str]:
    # Offline: a mistyped model path is refused at once instead of after several attempts to reach the hub.
    return {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "TOKENIZERS_PARALLELISM": "false"}
