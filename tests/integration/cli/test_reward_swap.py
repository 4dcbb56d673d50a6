"""Every command about reward routes against a real coordinator that trains, with a reward service of the user's own beside the run's;
and a run that pauses with an alert."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shoal.cli.main import app
from shoal.errors import StateError
from shoal.types import ScoreResult, ScoreStatus
from tests.helpers.coordinator_process import VOCABULARY, CoordinatorProcess, running_coordinator, write_config
from tests.helpers.fake_services import FakeCluster
from tests.helpers.valkey import running_valkey

pytestmark = pytest.mark.timeout(180)

TIMEOUT_S = 60.0
SCORER = """
from shoal.reward import reward


@reward(name="digits", version="3")
def digits(prompt, response, row):
    "Share of digits."
    return sum(char.isdigit() for char in response) / max(1, len(response))
"""


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with running_valkey(tmp_path / "redis") as server:
        yield server.url


class Shoal:
    """The command, for one run; in a thread of this process, since starting it costs more than the call."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def __call__(self, *arguments: str) -> Result:
        """Run it."""
        return await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--address", self._address])

    async def document(self, *arguments: str) -> dict[str, Any]:
        """Run it, and read its JSON."""
        result = await self(*arguments, "--json")
        assert result.exit_code == 0, result.exception
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    async def until(self, condition: Callable[[dict[str, Any]], bool], *arguments: str) -> dict[str, Any]:
        """Ask again until the answer is as wanted."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                answer = await self.document(*arguments)
                if condition(answer):
                    return answer
                await asyncio.sleep(0.1)


@asynccontextmanager
async def own_service(folder: Path, rest_address: str) -> AsyncIterator[None]:
    """`shoal reward serve` with the user's scorer, registered with the run."""
    (folder / "digits.py").write_text(SCORER)
    argv = [sys.executable, "-m", "shoal.cli.main", "reward", "serve", "--module", "digits.py", "--service-id", "reward-own"]
    with (folder / "own.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(*argv, "--run", rest_address, cwd=folder, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0, (folder / "own.log").read_text()


async def stages(shoal: Shoal) -> dict[int, str]:
    return {route["number"]: route["stage"] for route in (await shoal.document("reward", "list"))["revisions"]}


async def test_a_reward_is_added_compared_swapped_rolled_back_and_retired_while_a_run_trains(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url, run={"steps": 100_000}, data={"held_out": None}, coordinator={"lease_s": 10.0})
    async with running_coordinator(config) as coordinator, FakeCluster(coordinator.grpc_address, "test", vocab_size=len(VOCABULARY)):
        shoal = Shoal(coordinator.rest_address)
        await coordinator.until(lambda status: status["step"] >= 1)
        async with own_service(tmp_path, coordinator.rest_address):
            await _add_and_shadow(shoal, tmp_path)
            await _swap_and_roll_back(shoal, coordinator)
        stopped = await shoal("stop")
        assert "it ends after the current step" in stopped.stdout
        await coordinator.until_state("stopped")


async def test_a_run_that_paused_by_itself_says_why_and_goes_on_after_resume(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url, run={"steps": 100_000}, data={"held_out": None}, coordinator={"lease_s": 10.0})
    async with running_coordinator(config) as coordinator:
        cluster = FakeCluster(coordinator.grpc_address, "test", vocab_size=len(VOCABULARY))
        right = cluster.reward.score
        cluster.reward.score = lambda sample: ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message="no GPU")
        async with cluster:
            shoal = Shoal(coordinator.rest_address)
            await coordinator.until_state("paused")
            (alert,) = (line for line in (await shoal("status")).stdout.splitlines() if line.startswith("ALERT"))
            assert "reward-0" in alert
            assert "no GPU" in alert
            assert "shoal resume" in alert
            cluster.reward.score = right
            assert (await shoal("resume")).exit_code == 0
            await coordinator.until(lambda status: status["step"] >= 2)
            assert "ALERT" not in (await shoal("status")).stdout
            await shoal("stop")
            await coordinator.until_state("stopped")


async def _add_and_shadow(shoal: Shoal, folder: Path) -> None:
    added = await shoal.document("reward", "add", "digits*0.5", "--label", "own", "--who", "ada", "--why", "try it", "--wait")
    assert (added["number"], added["stage"], added["components"][0]["version"]) == (2, "ready", "3")
    assert (await shoal.document("reward", "shadow", "2"))["stage"] == "shadow"
    found = await shoal.until(lambda found: found["num_samples"] >= 16, "reward", "compare", "2", "--plot", str(folder / "compared.png"))
    assert (found["number"], found["active"]) == (2, 1)
    assert (folder / "compared.png").read_bytes().startswith(b"\x89PNG")
    assert "standard deviation" in (await shoal("reward", "compare", "2")).stdout


async def _swap_and_roll_back(shoal: Shoal, coordinator: CoordinatorProcess) -> None:
    refused = await shoal("reward", "activate", "2", "--min-samples", "1000000")
    assert isinstance(refused.exception, StateError)
    assert "min_samples" in str(refused.exception)
    assert (await shoal.document("reward", "activate", "2", "--min-samples", "16", "--max-error-share", "0"))["stage"] == "active"
    assert "revision 2 of the route" in (await shoal("status")).stdout
    await shoal.until(lambda found: found["revisions"][0]["stage"] == "drained", "reward", "list")
    steps = (await coordinator.get("/v1/status"))["step"]
    await coordinator.until(lambda status: status["step"] >= steps + 2)
    assert (await shoal.document("reward", "rollback", "--why", "enough"))["number"] == 1
    await shoal.until(lambda found: found["revisions"][1]["stage"] == "drained", "reward", "list")
    assert (await shoal.document("reward", "retire", "2"))["stage"] == "retired"
    assert await stages(shoal) == {1: "active", 2: "retired"}
    entries = (await shoal.document("reward", "log", "--limit", "100"))["entries"]
    assert [(entry["who"], entry["why"]) for entry in entries if entry["action"] == "add" and entry["revision"] == 2] == [("ada", "try it")]
    assert [entry["why"] for entry in entries if entry["action"] == "rollback"] == ["enough"]
    assert (await shoal("reward", "slow")).exit_code == 0
    revisions = [step["reward_revision"] for step in (await coordinator.get("/v1/steps?limit=10000"))["steps"]]
    assert sorted(set(revisions)) == [1, 2]
