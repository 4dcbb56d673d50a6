"""A second reward container takes over from the first one while a training runs, and hostile answers do not leave their container."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from tests.helpers import hostile_answers
from tests.helpers.compose import ROOT, Compose, training_project

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400)]

EXAMPLE = ROOT / "examples" / "reward_service"
FILES = ("docker-compose.yml", "examples/reward_service/compose.yaml")
MIN_SAMPLES = 200
SANDBOX = """
from shoal_reward.code.sandbox import SandboxedProcess
from shoal_reward.code.scorer import score_code
from shoal_reward.code.settings import CodeSettings
with SandboxedProcess("answer", CodeSettings(), num_tests=1) as process:
    print(bool(process.holds["landlock"]), process.holds["seccomp"])
answer = "```python\\nimport os\\ndef f(): return len(os.listdir('/etc')) > 0\\n```"
print(score_code(answer, {"tests": ["assert f()"]}, CodeSettings())["correct"] == 1)
"""
"""Tells whether Landlock and a system call filter confine an answer, and whether it can read what is not its own."""
LEFT_OVER = """
from pathlib import Path
print(list(Path("/tmp").glob("shoal-code-*")), [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"boot.py" in p.read_bytes()])
"""
"""Tells the folders and processes of answers."""


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    """A training, three steps in, to which no second reward service was added."""
    with training_project("shoal-rewards-test") as project:
        yield project


@pytest.fixture(scope="module")
def with_brief(compose: Compose) -> Compose:
    """The same project with the example's service beside it, started as its README says."""
    before = compose.running()
    wheels = EXAMPLE / "wheels"
    if "BASE_IMAGE" in compose.env:
        wheels.mkdir()
        for wheel in (ROOT / "deploy" / "wheelhouse").glob("regex-*.whl"):
            shutil.copy(wheel, wheels)
    beside = replace(compose, files=FILES)
    try:
        beside.run("up", "--detach", "--build", "--no-deps", "brief", timeout_s=600)
    finally:
        if "BASE_IMAGE" in compose.env:
            shutil.rmtree(wheels)
    assert {service: started for service, started in beside.running().items() if service != "brief"} == before
    return beside


def shoal(compose: Compose, *arguments: str, text: str = "", timeout_s: float = 300.0) -> str:
    """Output of the command line in the coordinator's container, as the README runs it."""
    return compose.run("exec", "-T", "coordinator", "shoal", *arguments, text=text, timeout_s=timeout_s)


def revision_of_newest_step(compose: Compose) -> int:
    """Of the route that scored the last completed step."""
    steps = compose.get(f"/v1/steps?after={compose.step() - 1}").get("steps", [])
    return int(steps[-1]["reward_revision"]) if steps else 0


def wait_for_steps(compose: Compose, count: int) -> None:
    """Until the training has made so many more."""
    step = compose.step()
    compose.wait(lambda: compose.step() >= step + count, f"{count} more steps", 240)


def route(compose: Compose, number: int) -> dict[str, Any]:
    """A revision as REST shows it."""
    found: dict[str, Any] = next(each for each in compose.get("/v1/rewards")["revisions"] if each["number"] == number)
    return found


def test_compose_second_reward_service_takes_over_and_nothing_else_restarts(with_brief: Compose) -> None:
    compose = with_brief
    before = compose.running()
    assert "ready" in shoal(compose, "reward", "add", "brief", "--label", "brief answers", "--why", "shorter is better", "--wait")
    shoal(compose, "reward", "shadow", "2", "--why", "compare first")
    compose.wait(lambda: compose.get("/v1/rewards/routes/2/comparison").get("num_samples", 0) >= MIN_SAMPLES, "shadow scores", 240)
    assert "rank correlation" in shoal(compose, "reward", "compare", "2")
    assert revision_of_newest_step(compose) == 1
    gates = ["--min-samples", str(MIN_SAMPLES), "--max-error-share", "0"]
    assert "brief@1" in shoal(compose, "reward", "activate", "2", *gates, "--why", "it costs less to read")
    compose.wait(lambda: revision_of_newest_step(compose) == 2, "step scored by the new service", 240)
    compose.wait(lambda: route(compose, 1)["stage"] == "drained", "drained old revision", 60)
    newest = compose.get(f"/v1/steps?after={compose.step() - 1}")["steps"][-1]
    assert newest["reward_brief_brevity"] < 0
    assert "arithmetic@1" in shoal(compose, "reward", "rollback", "--why", "once more")
    compose.wait(lambda: revision_of_newest_step(compose) == 1, "step scored by the old service", 240)
    assert compose.running() == before


def test_compose_active_reward_service_that_is_killed_comes_back_and_training_goes_on(with_brief: Compose) -> None:
    compose = with_brief
    before = compose.running()
    shoal(compose, "reward", "activate", "2")
    compose.wait(lambda: revision_of_newest_step(compose) == 2, "step scored by the new service", 240)
    killed = compose.kill("brief")
    compose.wait_restarted("brief", killed, 60)
    wait_for_steps(compose, 3)
    assert revision_of_newest_step(compose) == 2
    after = compose.running()
    assert {service for service in before if after[service] != before[service]} == {"brief"}


def test_compose_old_reward_container_is_stopped_once_its_route_is_retired(with_brief: Compose) -> None:
    compose = with_brief
    before = compose.running()
    assert compose.get("/v1/rewards")["active"] == 2
    compose.wait(lambda: route(compose, 1)["stage"] == "drained", "drained old revision", 60)
    shoal(compose, "reward", "retire", "1", "--why", "nobody wants it back")
    compose.run("stop", "reward")
    wait_for_steps(compose, 3)
    assert revision_of_newest_step(compose) == 2
    compose.run("start", "reward")
    lines = compose.run("exec", "-T", "coordinator", "cat", "/runs/arithmetic/metrics.jsonl").splitlines()
    revisions = [int(json.loads(line)["reward_revision"]) for line in lines]
    assert [revision for revision, _ in groupby(revisions)] == [1, 2, 1, 2]
    after = compose.running()
    assert {service for service in before if after[service] != before[service]} == {"reward"}


@pytest.mark.parametrize(
    ("scorer", "rows", "worth"),
    [
        ("code", hostile_answers.code_rows(), {name: value for name, (_, _, value) in hostile_answers.CODE.items()}),
        ("math", hostile_answers.text_rows(), {name: value for name, (_, value) in hostile_answers.TEXTS.items()}),
    ],
    ids=["code", "math"],
)
def test_compose_reward_container_holds_hostile_answers(compose: Compose, scorer: str, rows: str, worth: dict[str, float]) -> None:
    compose.wait(lambda: is_serving(compose), "reward service", 60)
    before = compose.running()
    compose.run("exec", "-T", "coordinator", "sh", "-c", "cat >/tmp/rows.jsonl", text=rows)
    answer = shoal(compose, "reward", "score", scorer, "--address", "reward:7001", "--data", "/tmp/rows.jsonl", "--json")
    scored = json.loads(answer)["rows"]
    assert {name: (row["status"], row["value"]) for name, row in zip(worth, scored, strict=True)} == {
        name: ("scored", value) for name, value in worth.items()
    }
    assert is_serving(compose)
    assert compose.run("exec", "-T", "reward", "python", "-", text=LEFT_OVER).split() == ["[]", "[]"]
    wait_for_steps(compose, 1)
    assert compose.running() == before


def test_compose_reward_container_has_what_its_sandbox_needs(compose: Compose) -> None:
    status = compose.run("exec", "-T", "reward", "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (fields["NoNewPrivs"], int(fields["CapBnd"], 16), int(fields["CapEff"], 16)) == ("1", 0, 0)
    has_landlock, has_filter, can_read = compose.run("exec", "-T", "reward", "python", "-", text=SANDBOX).split()
    assert has_filter == "True"
    # Whether there is Landlock is the kernel's and the engine's to say.
    assert (can_read == "True") == (has_landlock == "False")


def is_serving(compose: Compose) -> bool:
    """Whether the reward service says so."""
    command = "import sys; from shoal.rpc.probe import probe; print(probe('127.0.0.1:7001'))"
    return compose.run("exec", "-T", "reward", "python", "-c", command).strip() == "True"
