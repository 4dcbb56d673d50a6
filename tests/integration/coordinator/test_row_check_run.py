"""Rows whose right answer is empty or unreadable are reported at the start of a run, by the real reward service's verifier."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from tests.helpers.coordinator_process import VOCABULARY, CoordinatorProcess, running_coordinator, write_config
from tests.helpers.fake_services import FakeCluster
from tests.helpers.valkey import running_valkey

pytestmark = pytest.mark.timeout(120)

TIMEOUT_S = 60.0
UNREADABLE = r"\frac{1"


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with running_valkey(tmp_path / "redis") as server:
        yield server.url


def write_answers(path: Path, answers: list[str]) -> str:
    rows = [{"prompt": f"{index}+{index}=", "answer": answer} for index, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@asynccontextmanager
async def reward_service(config: Path, coordinator: str) -> AsyncIterator[None]:
    """`python -m shoal_reward` of the run."""
    argv = ["-m", "shoal_reward", "--config", str(config), "--service-id", "reward-math", "--coordinator", coordinator]
    with (config.parent / "reward.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=log, stderr=log, env={**os.environ})
    try:
        yield
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0, (config.parent / "reward.log").read_text()


async def until_checked(coordinator: CoordinatorProcess, num_rows: int) -> dict[str, int]:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            rows: dict[str, int] | None = (await coordinator.get("/v1/rewards"))["rows"]
            if rows is not None and rows["num_checked"] == num_rows:
                return rows
            await asyncio.sleep(0.05)


def warnings(log: str, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event and line["level"] == "warning"]


async def test_rows_without_a_readable_right_answer_are_reported_while_the_run_trains(tmp_path: Path, redis_url: str) -> None:
    train = write_answers(tmp_path / "sums.jsonl", ["0", "", "4", UNREADABLE, "#### 8", r"\boxed{10}", "12", "14"])
    held_out = write_answers(tmp_path / "held.jsonl", ["1/2", r"\boxed{}", "50%"])
    config = write_config(
        tmp_path,
        redis_url,
        run={"steps": 2},
        data={"train": train, "held_out": held_out},
        reward={"scorer": "math"},
        telemetry={"metrics_port": -1},
    )
    async with running_coordinator(config) as coordinator, reward_service(config, coordinator.grpc_address):
        async with FakeCluster(coordinator.grpc_address, "test", vocab_size=len(VOCABULARY)):
            rows = await until_checked(coordinator, 11)
            await coordinator.until_state("finished")
            listed = await asyncio.to_thread(CliRunner().invoke, app, ["reward", "list", "--address", coordinator.rest_address])
        assert rows == {"num_checked": 11, "num_unscored": 3, "num_not_correct": 0}
        found = [json.loads(line) for line in (tmp_path / "run" / "unscored_rows.jsonl").read_text().splitlines()]
        assert sorted((line["data"], line["row_index"], line["status"]) for line in found) == [
            ("held_out", 1, "not_scored"),
            ("train", 1, "not_scored"),
            ("train", 3, "not_scored"),
        ]
        assert {line["scorer"].partition("@")[0] for line in found} == {"math"}
        (warning,) = warnings(coordinator.log_path.read_text(), "rows_cannot_earn_a_reward")
        assert (warning["num_checked"], warning["num_unscored"], len(warning["first"])) == (11, 3, 3)
        assert "data: 11 rows checked with their own answer, 3 without a score, 0 not correct; unscored_rows.jsonl" in listed.stdout
