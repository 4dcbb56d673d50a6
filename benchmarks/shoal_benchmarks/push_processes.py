"""Processes of the push benchmark: the trainer's ranks and the rollout server, tied to this one and ended with it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.cli.local.process_tree import descendants
from shoal.errors import ShoalError
from shoal.process import SUPERVISED_VARIABLE

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0
_TAIL_CHARS = 2000


class TrainerGang:
    """The trainer's ranks; rank 0 answers lines with lines.

    Args:
        config: file of the run's configuration.
        num_ranks: processes.
        change: what an update changes, see `push_rank`.
        folder: for logs.
    """

    def __init__(self, config: Path, num_ranks: int, change: str, folder: Path) -> None:
        self._config, self._num_ranks, self._change, self._folder = config, num_ranks, change, folder
        self._processes: list[subprocess.Popen[str]] = []
        self.address = ""

    async def start(self) -> None:
        """Start every rank and wait for rank 0's address. Raises: ShoalError: a rank ended."""
        port = _free_port()
        for rank in range(self._num_ranks):
            self._processes.append(self._start_rank(rank, port))
        self.address = str((await self._answer(START_TIMEOUT_S))["address"])

    async def update(self) -> int:
        """Let every rank make the next version of the weights; answers it."""
        pipe = self._processes[0].stdin
        assert pipe is not None
        pipe.write("update\n")
        pipe.flush()
        return int((await self._answer(START_TIMEOUT_S))["policy_version"])

    def stop(self) -> None:
        """End every rank."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            _end(process)

    def _start_rank(self, rank: int, port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "shoal_benchmarks.push_rank", "--config", str(self._config), "--change", self._change]
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._num_ranks, "LOCAL_WORLD_SIZE": self._num_ranks, "MASTER_PORT": port}
        environment = _environment() | {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        with (self._folder / f"rank-{rank}.log").open("wb") as log:
            return subprocess.Popen(
                command, env=environment, text=True, stdin=subprocess.PIPE, stderr=log, stdout=subprocess.PIPE if rank == 0 else log
            )

    async def _answer(self, timeout_s: float) -> dict[str, Any]:
        pipe = self._processes[0].stdout
        assert pipe is not None
        try:
            line = await asyncio.wait_for(asyncio.to_thread(pipe.readline), timeout_s)
        except TimeoutError as error:
            raise ShoalError(f"the trainer did not answer within {timeout_s:g} s: {self._tails()}") from error
        if not line:
            raise ShoalError(f"the trainer's rank 0 ended: {self._tails()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tails(self) -> str:
        return "\n".join(_tail(self._folder / f"rank-{rank}.log") for rank in range(self._num_ranks))


class RolloutProcess:
    """A rollout server in a process of its own, without a coordinator.

    Args:
        module: `shoal_rollout`, or one that takes the same arguments.
        config: file of the run's configuration.
        service_id: its name.
        folder: for its log.
    """

    def __init__(self, module: str, config: Path, service_id: str, folder: Path) -> None:
        self._command = [sys.executable, "-m", module, "--config", str(config), "--service-id", service_id]
        self._log = folder / f"{service_id}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    async def start(self) -> None:
        """Start and wait until it listens. Raises: ShoalError: it ended, or takes too long."""
        self._process = self._launch()
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (address := listening_address(self._log.read_text(errors="replace"))):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise ShoalError(f"the rollout server did not start: {_tail(self._log)}")
            await asyncio.sleep(0.1)
        self.address = address

    def _launch(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            return subprocess.Popen(self._command, env=_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self) -> None:
        """End the server and its engine."""
        if self._process is not None:
            self._process.terminate()
            _end(self._process)


class Processes:
    """Context manager over several of them; stops all, also after a failure."""

    def __init__(self, *processes: TrainerGang | RolloutProcess) -> None:
        self._processes = processes

    async def __aenter__(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for process in self._processes:
                    group.create_task(process.start())
        except BaseException as error:  # noqa: BLE001 - raised again, once nothing runs any more
            self._stop()
            raise _first(error) from None

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        for process in self._processes:
            process.stop()


def listening_address(log: str) -> str:
    """The address in a server's log, empty while there is none."""
    lines = [line for line in log.splitlines() if '"server_listening"' in line]
    return str(json.loads(lines[0])["address"]) if lines else ""


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", SUPERVISED_VARIABLE: "1"}


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Wait for a process that was told to end, then kill it with all that it started."""
    below = descendants(process.pid)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _kill_left(below)


def _kill_left(pids: Sequence[int]) -> None:
    """Engine processes of a killed server; those of a server that ended are gone."""
    for pid in pids:
        if pid in descendants(os.getpid()):
            os.kill(pid, 9)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-_TAIL_CHARS:] if path.exists() else ""
