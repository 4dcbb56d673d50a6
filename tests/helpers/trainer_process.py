"""A real gang under torchrun, as the supervisor starts it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from shoal.cli.local.process_tree import descendants
from shoal.clients.trainer import TrainerClient
from shoal.clients.weights import WeightSourceClient
from shoal.config.load import dump_config
from shoal.config.models import RunConfig, SecuritySection
from tests.helpers.rpc_services import FakeRegistry, register_registry, serving

START_TIMEOUT_S = 150.0


class GangProcess:
    """One torchrun process and clients of its rank 0."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, log_path: Path) -> None:
        self.process = process
        self.address = address
        self.log_path = log_path
        self.trainer = TrainerClient(address, SecuritySection(insecure=True))
        self.weights = WeightSourceClient(address, SecuritySection(insecure=True))

    @property
    def log(self) -> str:
        """What the gang has written so far."""
        return self.log_path.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Pids below torchrun."""
        return descendants(self.process.pid)

    async def wait_end(self, timeout_s: float) -> int:
        """Wait until torchrun has ended; returns its status."""
        return await asyncio.to_thread(self.process.wait, timeout_s)

    async def close(self) -> None:
        """Close the clients."""
        await self.trainer.close()
        await self.weights.close()


@contextlib.asynccontextmanager
async def running_gang(config: RunConfig, role: str, ranks: int, folder: Path) -> AsyncIterator[GangProcess]:
    """Start a gang, wait until it has registered, and end it with its ranks at the end of the block."""
    registry = FakeRegistry(lease_s=30.0)
    async with serving(register_registry(registry), "shoal.rpc.v1.RegistryService") as coordinator:
        name = f"{role}-{ranks}"
        process = _start(config, role, ranks, coordinator, folder / name)
        log_path = folder / f"{name}.log"
        try:
            gang = GangProcess(process, await _address(registry, process, log_path), log_path)
            try:
                yield gang
            finally:
                await gang.close()
        finally:
            left = [process.pid, *descendants(process.pid)]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def _start(config: RunConfig, role: str, ranks: int, coordinator: str, stem: Path) -> subprocess.Popen[bytes]:
    config_path = stem.with_suffix(".yaml")
    dump_config(config, config_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0"]
    command += ["-m", "shoal_trainer", "--role", role, "--config", str(config_path), "--service-id", role, "--coordinator", coordinator]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(stem.with_suffix(".log"), "wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


async def _address(registry: FakeRegistry, process: subprocess.Popen[bytes], log_path: Path) -> str:
    registered = asyncio.create_task(registry.registered.get())
    ended = asyncio.create_task(asyncio.to_thread(process.wait))
    done, _ = await asyncio.wait({registered, ended}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    if registered not in done:
        registered.cancel()
        process.kill()
        raise RuntimeError(f"the gang did not register; the end of its log: {await asyncio.to_thread(_tail, log_path)}")
    return str((await registered).address)


def _tail(log_path: Path) -> str:
    return log_path.read_text(errors="replace")[-3000:]
