"""`python -m shoal_reward` without a run: its own file and modules, killed graders, poisoned input, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from shoal_coordinator.registry import Registry
from shoal_coordinator.registry_servicer import SERVICE_NAME, RegistryServicer

from shoal.clients.reward import RewardClient
from shoal.config.models import SecuritySection
from shoal.errors import DeadlineError
from shoal.rpc.channel import open_channel
from shoal.rpc.server import RpcServer
from shoal.rpc.v1 import reward_pb2, reward_pb2_grpc
from shoal.rpc.v1.common_pb2 import FINISH_REASON_STOP, SCORE_STATUS_ERROR, SCORE_STATUS_SCORED
from shoal.rpc.v1.registry_pb2_grpc import add_RegistryServiceServicer_to_server
from shoal.types import ServiceKind
from tests.helpers.grading import SCORERS_FILE, children_of, wait_until_gone
from tests.helpers.scoring import make_samples

SECURITY = SecuritySection()
TIMEOUT_S = 60.0
SERVICE_FILE = f"""
modules: [{SCORERS_FILE}]
scorers:
  boxed: {{kind: exact, version: "7"}}
workers: 1
sample_timeout_s: 1.0
"""


@contextlib.asynccontextmanager
async def service(folder: Path, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A running service and its address."""
    ready = folder / "ready.json"
    process = await start("--ready-file", str(ready), *arguments)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not ready.exists():
                if process.returncode is not None and process.stdout is not None:
                    pytest.fail((await process.stdout.read()).decode())
                await asyncio.sleep(0.01)
        announced = json.loads(ready.read_text())
        assert announced["pid"] == process.pid
        yield process, announced["address"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "shoal_reward",
        "--metrics-port=-1",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "SHOAL_SUPERVISED": "1"},
    )


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    file = tmp_path / "service.yaml"
    file.write_text(SERVICE_FILE)
    async with service(tmp_path, "--serve", str(file), "--module", "shoal_reward.builtin") as running:
        yield running


async def test_service_offers_its_file_and_its_modules_with_fingerprints(served: tuple[asyncio.subprocess.Process, str]) -> None:
    async with RewardClient(served[1], SECURITY) as client:
        scorers = {scorer.name: scorer for scorer in await client.describe(timeout_s=TIMEOUT_S)}
        assert {"boxed", "deeds", "ids", "arithmetic"} <= set(scorers)
        assert scorers["boxed"].version == "7"
        assert [name for name, scorer in scorers.items() if scorer.needs_token_ids] == ["ids"]
        assert all(len(scorer.fingerprint) == 16 for scorer in scorers.values())
        for name, value in (("boxed", 1.0), ("arithmetic", 1.0), ("deeds", 2.0)):
            _, (result,) = await client.score(name, "", make_samples(["46"]), timeout_s=TIMEOUT_S)
            assert (name, result.value) == (name, value)


async def test_bad_samples_cost_only_themselves_over_grpc(served: tuple[asyncio.subprocess.Process, str]) -> None:
    async with RewardClient(served[1], SECURITY) as client:
        responses = ["four", "endless", "segfault", "print", "exit 1", "backtrack", "fifth"]
        _, results = await client.score("deeds", "", make_samples(responses), timeout_s=TIMEOUT_S)
    assert [str(result.status) for result in results] == ["scored", "error", "error", "scored", "error", "error", "scored"]
    assert "time limit of 1 s" in results[1].message
    assert "SIGSEGV" in results[2].message


async def test_killed_grader_is_replaced_while_the_service_serves(served: tuple[asyncio.subprocess.Process, str]) -> None:
    process, address = served
    async with RewardClient(address, SECURITY) as client:
        for _ in range(3):
            _, (result,) = await client.score("deeds", "", make_samples(["pid"]), timeout_s=TIMEOUT_S)
            assert [int(result.value)] == children_of(process.pid)
            os.kill(int(result.value), signal.SIGKILL)
            _, results = await client.score("deeds", "", make_samples(["four"] * 100), timeout_s=TIMEOUT_S)
            assert [result.value for result in results] == [4.0] * 100


async def test_poisoned_input_over_grpc(served: tuple[asyncio.subprocess.Process, str]) -> None:
    def poison(response: str, row_json: str) -> reward_pb2.ScoreSample:
        return reward_pb2.ScoreSample(sample_id="s", response=response, row_json=row_json, finish_reason=FINISH_REASON_STOP)

    nested = '{"a":' * 100_000 + "1" + "}" * 100_000
    samples = [poison("x" * 10_000_000, "{}"), poison("\0\0", '{"a": "\\udc80\\u0000"}'), poison("deep", nested), poison("fine", "{}")]
    async with open_channel(served[1], SECURITY) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        answer = await stub.Score(reward_pb2.ScoreRequest(scorer="row", samples=samples), timeout=TIMEOUT_S)
    assert [result.status for result in answer.results] == [
        SCORE_STATUS_SCORED,
        SCORE_STATUS_SCORED,
        SCORE_STATUS_ERROR,
        SCORE_STATUS_SCORED,
    ]
    assert answer.results[0].components["response"] == 1e7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_service_leaves_no_process_however_it_ends(served: tuple[asyncio.subprocess.Process, str], number: int) -> None:
    process, address = served
    async with RewardClient(address, SECURITY) as client:
        with contextlib.suppress(DeadlineError):
            await client.score("deeds", "", make_samples(["endless"]), timeout_s=0.3)
        graders = children_of(process.pid)
        assert len(graders) == 1
    process.send_signal(number)
    assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == (-number if number == signal.SIGKILL else 0)
    await wait_until_gone(graders)


async def test_service_refuses_a_module_that_it_cannot_load() -> None:
    process = await start("--module", "no.such.module")
    output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode == 2
    assert "cannot load 'no.such.module'" in output.decode()


async def test_service_that_cannot_say_it_is_ready_ends_with_one_line(tmp_path: Path) -> None:
    process = await start("--module", SCORERS_FILE, "--ready-file", str(tmp_path / "nowhere" / "ready.json"))
    output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode == 2
    assert "cannot write the ready file" in output.decode().splitlines()[-1]
    assert "Traceback" not in output.decode()


async def test_service_without_a_run_registers_with_a_coordinator(tmp_path: Path) -> None:
    registry = Registry(run_id="some-run", lease_s=10.0)
    server = RpcServer("127.0.0.1", 0, SECURITY)
    server.add(lambda target: add_RegistryServiceServicer_to_server(RegistryServicer(registry), target), SERVICE_NAME)
    coordinator = f"127.0.0.1:{await server.start()}"
    try:
        async with service(tmp_path, "--module", SCORERS_FILE, "--coordinator", coordinator, "--service-id", "extra") as (process, address):
            (registered,) = registry.services()
            assert (registered.service_id, registered.kind, registered.address) == ("extra", ServiceKind.REWARD, address)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0
        assert registry.services() == ()
    finally:
        await server.stop(0.0)
