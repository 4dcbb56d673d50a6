"""A real rollout server in a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shoal.clients.rollout import RolloutClient
from shoal.config.models import SecuritySection
from shoal.rpc.health import is_serving

START_TIMEOUT_S = 100.0
SECURITY = SecuritySection()


@dataclass(frozen=True, slots=True)
class RolloutProcess:
    """A started server. address is host:port; log is its standard error."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path
    shm_dir: Path

    def engine_processes(self) -> list[psutil.Process]:
        """The engine core and its workers."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        """End the server and its engine if they still run."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=10)


async def start_rollout(folder: Path, model: Path, *, service_id: str = "rollout-0", overrides: Sequence[str] = ()) -> RolloutProcess:
    """Start `python -m shoal_rollout` and wait until it serves."""
    process, log = _launch(folder, model, service_id, overrides)
    try:
        address = await _until_serving(process, log)
    except BaseException:
        process.kill()
        raise
    return RolloutProcess(process, address, log, folder / "shm")


def _launch(folder: Path, model: Path, service_id: str, overrides: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
    folder.mkdir(parents=True, exist_ok=True)
    config = _write_config(folder, model)
    log = folder / f"{service_id}.log"
    argv = [sys.executable, "-m", "shoal_rollout", "--config", str(config), "--service-id", service_id]
    argv += [part for override in overrides for part in ("--set", override)]
    with log.open("wb") as stream:
        return subprocess.Popen(argv, stderr=stream, stdout=stream), log


def _write_config(folder: Path, model: Path) -> Path:
    (folder / "shm").mkdir(exist_ok=True)
    (folder / "train.jsonl").touch()
    config: dict[str, Any] = {
        "run": {"id": "test-rollout", "folder": str(folder / "run"), "seed": 3},
        "model": {"path": str(model)},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 40},
        "rollout": {"max_new_tokens": 160, "kv_cache_bytes": 32 << 20},
        "push": {"shm_dir": str(folder / "shm")},
        "redis": {"url": "redis://127.0.0.1:1"},
        "telemetry": {"metrics_port": -1},
    }
    path = folder / "run.yaml"
    # JSON is YAML.
    path.write_text(json.dumps(config))
    return path


async def until_running(client: RolloutClient, count: int, *, at_most: bool = False) -> None:
    """Wait until at least, or at most, so many samples are in the engine."""
    async with asyncio.timeout(10):
        while True:
            num_running = (await client.describe(timeout_s=5)).num_running
            if (num_running <= count) if at_most else (num_running >= count):
                return
            await asyncio.sleep(0.005)


async def _until_serving(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        address = _logged_address(log)
        if address and await is_serving(address, SECURITY, timeout_s=2):
            return address
        if process.poll() is not None:
            break
        await asyncio.sleep(0.1)
    raise AssertionError(f"the rollout server did not start (exit code {process.poll()}):\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text()[-3000:]


def _logged_address(log: Path) -> str:
    for line in log.read_text().splitlines():
        if '"server_listening"' in line:
            return str(json.loads(line)["address"])
    return ""
