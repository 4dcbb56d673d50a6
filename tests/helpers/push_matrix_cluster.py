"""The failure matrix's cluster as a test sees it: starts, stops, mends and questions its processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.clients.rollout import RolloutClient
from shoal.config.models import SecuritySection
from tests.helpers import push_matrix_config
from tests.helpers.processes import alive, wait_gone
from tests.helpers.push_matrix_model import fingerprints_at

SERVERS = ("rollout-0", "rollout-1")
RANKS = ("rank-0", "rank-1")
START_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 5.0
POLL_S = 0.03


class Zygote:
    """The process that forks the others."""

    def __init__(self, folder: Path, roles: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None) -> None:
        """roles: other ones than those of the matrix, as modules. environment: variables to add."""
        variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(environment or {})
        self._log = (folder / "zygote.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.push_matrix_zygote", *(f"{role}={module}" for role, module in (roles or {}).items())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | variables,
        )
        self._receive()

    def start(self, role: str, log: Path, **arguments: Any) -> int:  # noqa: ANN401 - what the role takes
        """Fork a process; answers its pid."""
        return int(self._ask({"role": role, "log": str(log), "arguments": arguments})["pid"])

    def ended(self) -> dict[int, int]:
        """Exit codes of those that have ended, by pid."""
        return {int(pid): code for pid, code in self._ask({"ended": True})["ended"].items()}

    def close(self) -> None:
        """End it and everything that it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._log.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, Path(self._log.name).read_text()[-3000:]
        answer: dict[str, Any] = json.loads(line)
        return answer


class Cluster:
    """Two ranks, two rollout servers with a worker each, and a coordinator."""

    heal_timeout_s = 30.0
    checkpoint = ""
    """Folder of the model that the gang holds; the matrix's own tensors if there is none."""

    def __init__(self, zygote: Zygote, folder: Path, **sections: dict[str, Any]) -> None:
        self._zygote = zygote
        self.folder = folder
        self.pids: dict[str, int] = {}
        self._all_pids: set[int] = set()
        self._left: dict[str, str] = {}
        """Incarnations of services that have ended; the coordinator may still list them."""
        self._gang_starts = 0
        self._port = free_port()
        push_matrix_config.write(folder, **sections)
        (folder / "logs").mkdir()

    async def start(self) -> None:
        """Start everything at policy version 1 and wait until it serves."""
        self.start_coordinator()
        for name in SERVERS:
            self.start_server(name)
        self.start_gang(1)
        await self.until_up("coordinator")
        await self.adopt()
        await self.heal()

    def start_coordinator(self) -> None:
        """Start a coordinator; it knows nothing of the one before."""
        self._start("coordinator", "coordinator", port=self._port)

    def start_server(self, name: str) -> None:
        """Start a rollout server with the checkpoint's weights."""
        self._start(name, "rollout", name=name, coordinator=self._coordinator)

    def start_gang(self, policy_version: int) -> None:
        """Start both ranks, as from a checkpoint of this version."""
        self._gang_starts += 1
        for rank, name in enumerate(RANKS):
            place = {"rank": rank, "start": self._gang_starts, "policy_version": policy_version}
            self._start(name, "rank", **place, coordinator=self._coordinator, checkpoint=self.checkpoint)

    def worker_pid(self, server: str) -> int:
        """The engine worker of a server."""
        return int((self.folder / f"{server}.worker").read_text())

    def pid_of(self, name: str) -> int:
        """The pid of any process, workers included."""
        return self.worker_pid(name.replace("worker", "rollout")) if name.startswith("worker") else self.pids[name]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal a process of this cluster that may have ended."""
        pid = self.pid_of(name)
        if alive([pid]):
            os.kill(pid, number)

    async def adopt(self) -> dict[str, Any]:
        """Let the coordinator take the gang's version over."""
        answer = await self.ask("adopt", self.heal_timeout_s)
        assert "policy_version" in answer, f"{answer}\n{self.logs()}"
        return answer

    async def status(self) -> dict[str, Any]:
        """The coordinator's view."""
        return await self.ask("status", CALL_TIMEOUT_S)

    async def ask(self, what: str, timeout_s: float) -> dict[str, Any]:
        """Ask the coordinator; an empty answer if it ended meanwhile."""
        return await self._request(self.folder / f"coordinator-{self.pids['coordinator']}.sock", {"do": what}, timeout_s)

    async def serves(self, server: str) -> dict[str, Any]:
        """What a server says of itself, and its worker's live tensors."""
        answer = await self._request(self.folder / f"{server}-{self.pids[server]}.sock", {}, CALL_TIMEOUT_S)
        async with RolloutClient(answer["address"], SecuritySection()) as client:
            answer["described"] = (await client.describe(timeout_s=CALL_TIMEOUT_S)).policy_version
        return answer

    async def check_complete(self, server: str, *versions: int) -> int:
        """A server's live tensors are exactly those of one version, and it reports that one; answers which."""
        answer = await self.serves(server)
        version = int(answer["served"])
        assert version in versions, (server, answer, versions)
        assert (answer["reported"], answer["described"]) == (version, version), (server, answer)
        assert answer["live"] == fingerprints_at(version), f"{server} serves no complete version {version}"
        return version

    def note_workers(self) -> None:
        """Remember the engine workers, so that those of ended servers are missed."""
        self._all_pids |= {self.worker_pid(name) for name in SERVERS}

    async def until_up(self, name: str) -> None:
        """Wait until a process takes questions."""
        path = self.folder / f"{name}-{self.pids[name]}.sock"
        await self._until(lambda: is_listening(path), f"{name} starts", START_TIMEOUT_S)

    async def heal(self) -> int:
        """Start again what has ended, until all servers take traffic at the current version; answers it."""
        deadline_s = time.monotonic() + self.heal_timeout_s
        while True:
            await self._restart_ended()
            status = await self.status()
            if status.get("traffic") == list(SERVERS) and self._all_registered(status["services"]) and not self.ended():
                self.note_workers()
                return int(status["policy_version"])
            assert time.monotonic() < deadline_s, f"{status}\n{self.logs()}"
            await asyncio.sleep(POLL_S)

    async def until_stopped(self, name: str) -> None:
        """Wait until a process has stopped."""
        status = Path(f"/proc/{self.pid_of(name)}/status")
        await self._until(lambda: "State:\tT" in status.read_text(), f"{name} stops", START_TIMEOUT_S)

    async def until_dropped(self, server: str, timeout_s: float) -> None:
        """Wait until a server has given its push up by itself, unless it has committed it."""
        deadline_s = time.monotonic() + timeout_s
        while (state := (await self.serves(server))["state"]) not in ("idle", "committed"):
            assert time.monotonic() < deadline_s, f"{server} is {state} after {timeout_s:g} s\n{self.logs()}"
            await asyncio.sleep(POLL_S)

    async def until_ended(self, name: str) -> None:
        """Wait until a killed process is gone for good: one of several threads can look dead before it is."""
        pid = self.pid_of(name)
        if name.startswith("worker"):
            assert wait_gone([pid], START_TIMEOUT_S) == []
        else:
            await self._until(lambda: name in self.ended(), f"{name} ends", START_TIMEOUT_S)

    def _all_registered(self, services: dict[str, str]) -> bool:
        return all(name in services and services[name] != self._left.get(name) for name in ("actor", *SERVERS))

    async def _restart_ended(self) -> None:
        ended = self.ended()
        if "coordinator" in ended:
            self.start_coordinator()
            await self.until_up("coordinator")
            await self.adopt()
        services = (await self.status()).get("services", {})
        for name in ended & set(SERVERS):
            self._left[name] = services.get(name, "")
            self.start_server(name)
        if ended & set(RANKS):
            for name in set(RANKS) - ended:
                self.signal(name, signal.SIGKILL)
            wait_gone([self.pids[name] for name in RANKS])
            self._left["actor"] = services.get("actor", "")
            self.start_gang(int((await self.status())["policy_version"]))

    def ended(self) -> set[str]:
        """Names of the processes that have ended and were not started again."""
        ended = self._zygote.ended()
        return {name for name, pid in self.pids.items() if pid in ended}

    def staging_files(self) -> list[str]:
        """What lies in the staging folder."""
        return sorted(path.name for path in (self.folder / "shm").iterdir())

    def former_pids(self) -> list[int]:
        """Processes that were replaced, workers included."""
        return sorted(self._all_pids - set(self.pids.values()) - {self.worker_pid(name) for name in SERVERS})

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2500:]}" for path in sorted((self.folder / "logs").iterdir()))

    def kill(self) -> None:
        """Kill everything."""
        for name in self.pids:
            self.signal(name, signal.SIGKILL)
        wait_gone(self._all_pids, 5)

    def close(self) -> None:
        """Stop everything in order: SIGTERM where that drains, SIGKILL for what was not told to end."""
        workers = [self.worker_pid(name) for name in SERVERS]
        for name in self.pids:
            self.signal(name, signal.SIGCONT)
            self.signal(name, signal.SIGKILL if name == "coordinator" else signal.SIGTERM)
        everyone = [*self.pids.values(), *workers]
        left = wait_gone(everyone, 15)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"{left} did not end\n{self.logs()}"

    @property
    def _coordinator(self) -> str:
        return f"127.0.0.1:{self._port}"

    def _start(self, process: str, role: str, **arguments: Any) -> None:  # noqa: ANN401 - what the role takes
        self.pids[process] = self._zygote.start(role, self.folder / "logs" / f"{process}.log", folder=str(self.folder), **arguments)
        self._all_pids.add(self.pids[process])

    async def _request(self, path: Path, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            try:
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(json.dumps(request).encode() + b"\n")
                line = await reader.readline()
                writer.close()
            except ConnectionError:
                line = b""
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer

    async def _until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:g} s\n{self.logs()}"
            await asyncio.sleep(POLL_S)


def is_listening(path: Path) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that the coordinator can come back to after it was killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
