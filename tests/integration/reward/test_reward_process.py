"""`python -m shoal_reward` of a run as a process: ready, registered, scoring, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from shoal_coordinator.registry import Registry
from shoal_coordinator.registry_servicer import SERVICE_NAME, RegistryServicer

from shoal.clients.reward import RewardClient
from shoal.config.models import SecuritySection
from shoal.rpc.server import RpcServer
from shoal.rpc.v1.registry_pb2_grpc import add_RegistryServiceServicer_to_server
from shoal.types import ServiceKind
from tests.helpers.grading import children_of, wait_until_gone
from tests.helpers.scoring import make_samples

SECURITY = SecuritySection()
TIMEOUT_S = 60.0
USER_SCORER = """
import threading
from shoal.reward import reward

@reward(name="mine", version="3")
def mine(prompt, response, row):
    if response == "hang":
        threading.Event().wait()
    return float(len(response))
"""


@pytest.fixture
async def registry() -> AsyncIterator[tuple[Registry, str]]:
    registry = Registry(run_id="test-run", lease_s=10.0)
    server = RpcServer("127.0.0.1", 0, SECURITY)
    server.add(lambda target: add_RegistryServiceServicer_to_server(RegistryServicer(registry), target), SERVICE_NAME)
    yield registry, f"127.0.0.1:{await server.start()}"
    await server.stop(0.0)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    scorers = tmp_path / "scorers.py"
    scorers.write_text(USER_SCORER)
    config = {
        "run": {"id": "test-run", "folder": str(tmp_path)},
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "reward": {"scorer": "mine", "modules": [str(scorers), "shoal_reward.builtin"]},
        "telemetry": {"metrics_port": -1},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@contextlib.asynccontextmanager
async def reward_process(config: Path, coordinator: str, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = ["--config", str(config), "--service-id", "reward-0", "--coordinator", coordinator, *more]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "shoal_reward",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "SHOAL_SUPERVISED": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def wait_for_address(registry: Registry, process: asyncio.subprocess.Process) -> str:
    registered = asyncio.ensure_future(registry.wait_for({ServiceKind.REWARD: 1}, TIMEOUT_S))
    ended = asyncio.ensure_future(process.wait())
    await asyncio.wait((registered, ended), return_when=asyncio.FIRST_COMPLETED)
    if process.returncode is not None and process.stdout is not None:
        pytest.fail((await process.stdout.read()).decode())
    ended.cancel()
    await registered
    (service,) = registry.services(ServiceKind.REWARD)
    assert service.process_id == process.pid
    return service.address


async def test_process_registers_scores_and_leaves_at_sigterm(registry: tuple[Registry, str], config_file: Path) -> None:
    leases, coordinator = registry
    async with reward_process(config_file, coordinator) as process:
        client = RewardClient(await wait_for_address(leases, process), SECURITY)
        version, (result,) = await client.score("mine", "", make_samples(["four"]), timeout_s=TIMEOUT_S)
        assert (version, result.value) == ("3", 4.0)
        _, (result,) = await client.score("arithmetic", "", make_samples([" 46 "]), timeout_s=TIMEOUT_S)
        assert result.value == 1.0
        await client.close()
        graders = children_of(process.pid)
        assert graders
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0
    await wait_until_gone(graders)
    assert leases.services() == ()


async def test_process_ends_although_a_scorer_hangs(registry: tuple[Registry, str], config_file: Path) -> None:
    leases, coordinator = registry
    async with reward_process(config_file, coordinator) as process:
        client = RewardClient(await wait_for_address(leases, process), SECURITY)
        _, (result,) = await client.score("mine", "", make_samples(["hang"]), timeout_s=2.0)
        assert str(result.status) == "error"
        await client.close()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.scorer=other", "no scorer 'other'; there is: arithmetic 1, "),
        ('reward.modules=["missing.py"]', "cannot load 'missing.py'"),
    ],
)
async def test_process_refuses_to_start_without_its_scorer(
    registry: tuple[Registry, str], config_file: Path, override: str, message: str
) -> None:
    leases, coordinator = registry
    async with reward_process(config_file, coordinator, "--set", override) as process:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode == 2
    assert message in output.decode()
    assert leases.services() == ()


def score_by_source(config_file: Path, sources: dict[str, str]) -> None:
    """Rewrite the configuration."""
    config = yaml.safe_load(config_file.read_text())
    del config["reward"]["scorer"]
    config["reward"]["sources"] = sources
    config_file.write_text(yaml.safe_dump(config))


async def test_process_refuses_to_start_without_the_scorer_of_a_source(registry: tuple[Registry, str], config_file: Path) -> None:
    score_by_source(config_file, {"sums": "mine", "poems": "poet"})
    async with reward_process(config_file, registry[1]) as process:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode == 2
    assert "no scorer 'poet'; there is: arithmetic 1" in output.decode()
