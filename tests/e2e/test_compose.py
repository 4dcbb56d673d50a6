"""`docker compose up` from the checkout trains, without root, and killed services come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.compose import Compose, training_project

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400)]

SERVICES = {"redis", "coordinator", "rollout", "reward", "actor", "critic"}
USERS = dict.fromkeys(SERVICES, 10001) | {"reward": 10002}
MAX_LOGPROB_DIFFERENCE = 1e-3
"""Between engine and trainer; an engine with other weights than the trainer's is off by far more."""


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    with training_project("shoal-test") as project:
        yield project


def test_compose_trains_and_pushes(compose: Compose) -> None:
    assert set(compose.run("ps", "--services", "--status", "running").split()) == SERVICES
    steps = compose.get("/v1/steps")["steps"]
    assert [step["step"] for step in steps[:3]] == [1, 2, 3]
    assert all(step["logprob_max_difference"] < MAX_LOGPROB_DIFFERENCE for step in steps)
    pushes = compose.get("/v1/pushes")["pushes"]
    assert {1, 2, 3} <= {push["policy_version"] for push in pushes if push["state"] == "committed" and push["servers"] == ["rollout-0"]}


def test_compose_services_run_without_root_and_cannot_change_their_images(compose: Compose) -> None:
    for service in sorted(SERVICES):
        assert f"\nUid:\t{USERS[service]}\t{USERS[service]}" in compose.run("exec", "-T", service, "cat", "/proc/1/status"), service
        mounts = compose.run("exec", "-T", service, "cat", "/proc/mounts")
        root_options = next(line.split()[3] for line in mounts.splitlines() if line.split()[1] == "/")
        assert "ro" in root_options.split(","), service


def test_compose_reward_service_comes_back_and_training_goes_on(compose: Compose) -> None:
    killed = compose.kill("reward")
    compose.wait_restarted("reward", killed, 60)
    step = compose.step()
    compose.wait(lambda: compose.step() >= step + 3, "three more steps", 180)


def test_compose_rollout_service_comes_back_and_is_caught_up_before_it_takes_traffic(compose: Compose) -> None:
    def catch_ups() -> list[dict[str, object]]:
        pushes = compose.get("/v1/pushes?limit=1000").get("pushes", [])
        return [push for push in pushes if push["reason"] == "catch_up" and push["state"] == "committed"]

    before = len(catch_ups())
    killed = compose.kill("rollout")
    compose.wait_restarted("rollout", killed, 60)
    compose.wait(lambda: len(catch_ups()) > before, "push to the restarted server", 240)
    push = catch_ups()[-1]
    assert push["servers"] == ["rollout-0"]
    compose.wait(lambda: compose.step() >= int(str(push["policy_version"])) + 3, "three more steps", 180)
    newer = compose.get(f"/v1/steps?after={push['policy_version']}")["steps"]
    assert all(step["logprob_max_difference"] < MAX_LOGPROB_DIFFERENCE for step in newer)
