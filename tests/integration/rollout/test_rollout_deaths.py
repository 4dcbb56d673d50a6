"""What is left when a part of a rollout server is killed: nothing."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shoal.clients.rollout import RolloutClient
from shoal.errors import UnavailableError
from shoal.types import SamplingParams
from tests.helpers.rollout_process import SECURITY, start_rollout, until_running
from tests.helpers.tiny_models import save_tiny_model


async def test_a_dead_engine_fails_its_requests_and_ends_the_server(tmp_path: Path) -> None:
    server = await start_rollout(tmp_path / "server", save_tiny_model(tmp_path / "model"))
    try:
        async with RolloutClient(server.address, SECURITY) as client:
            sampling = SamplingParams(max_new_tokens=150, ignore_eos=True)
            stream = client.generate("r", [1, 2], sampling, 64, timeout_s=60)
            waiting = asyncio.ensure_future(anext(stream))
            await until_running(client, 64)
            for process in server.engine_processes():
                process.kill()
            with pytest.raises(UnavailableError):
                await waiting
        assert await asyncio.to_thread(server.process.wait, 30) == 70
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("num_workers", [1, 2])
async def test_a_killed_server_leaves_no_engine(tmp_path: Path, num_workers: int) -> None:
    overrides = [f"rollout.tensor_parallel_size={num_workers}"]
    server = await start_rollout(tmp_path / "server", save_tiny_model(tmp_path / "model"), service_id="rollout-1", overrides=overrides)
    try:
        engine = server.engine_processes()
        assert engine
        server.process.send_signal(signal.SIGKILL)
        await _until(lambda: not any(_is_alive(process) for process in engine))
    finally:
        server.kill()


async def _until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not true within {timeout_s} s"
        await asyncio.sleep(0.05)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
