"""`docker compose up` from the checkout trains, and a killed service comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.compose import Compose, compose_project
from tests.helpers.valkey import free_port

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

SERVICES = {"redis", "coordinator", "rollout", "reward", "actor", "critic"}


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    settings = {"SHOAL_REST_PORT": str(free_port()), "SHOAL_STEPS": "100000", "SHOAL_SEED": "0"}
    with compose_project("shoal-test", settings) as project:
        project.run("build", timeout_s=900)
        project.run("up", "--detach", timeout_s=600)
        yield project


def test_compose_trains_and_a_killed_service_comes_back(compose: Compose) -> None:
    compose.wait(lambda: compose.status().get("step", 0) >= 3, "third step", 420)
    assert compose.status()["policy_version"] >= 3
    assert set(compose.run("ps", "--services", "--status", "running").split()) == SERVICES

    before = compose.process_id("reward")
    os.kill(before, signal.SIGKILL)
    compose.wait(lambda: compose.process_id("reward") not in (0, before), "restarted reward service", 60)
    step = compose.status()["step"]
    compose.wait(lambda: compose.status().get("step", 0) >= step + 3, "three more steps", 120)
    assert compose.status()["error"] in (None, "")


def test_compose_services_run_without_root(compose: Compose) -> None:
    for service in sorted(SERVICES):
        status = Path(f"/proc/{compose.process_id(service)}/status").read_text()
        assert "\nUid:\t10001\t10001" in status, service
