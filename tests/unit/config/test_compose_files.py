"""The example's compose file goes on having what the reward service of docker-compose.yml has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
LIMITS = ("read_only", "tmpfs", "pids_limit", "mem_limit", "cap_drop", "security_opt", "restart", "pull_policy", "healthcheck")


def services(file: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["services"]
    return found


def test_compose_second_reward_service_has_the_limits_of_the_first() -> None:
    first = services("docker-compose.yml")["reward"]
    second = services("examples/reward_service/compose.yaml")["brief"]
    assert {name: second[name] for name in LIMITS} == {name: first[name] for name in LIMITS}


def test_compose_reward_services_are_users_of_their_own() -> None:
    """The kernel counts an answer's threads by user, over all containers."""
    all_services = services("docker-compose.yml") | services("examples/reward_service/compose.yaml")
    users = [service["user"] for service in all_services.values()]
    assert users.count(all_services["reward"]["user"]) == users.count(all_services["brief"]["user"]) == 1
