"""Starting `shoal demo` on a tiny random model, and finding what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from shoal_benchmarks.models import write_random_model, write_sums

from shoal.cli.local.process_tree import descendants, parent_of
from tests.helpers.plain_http import PLAIN_HTTP


@dataclass(frozen=True, kw_only=True)
class Demo:
    """A demo command, its run folder and its output so far."""

    process: subprocess.Popen[bytes]
    folder: Path
    output: Path

    def log(self) -> str:
        """Output of the command, then the ends of the services' logs."""
        logs = sorted(self.folder.glob("*/logs/*.log"))
        return self.output.read_text() + "".join(f"\n--- {path.name}\n{path.read_text()[-1500:]}" for path in logs)

    def run_folder(self) -> Path:
        """The folder of the only run."""
        return next(path for path in self.folder.iterdir() if path.is_dir())

    def rest_address(self) -> str:
        """The coordinator's REST address, once printed."""
        found = re.search(r"REST API: (http://\S+)", self.output.read_text())
        return found[1] if found else ""

    def status(self) -> dict[str, Any]:
        """The REST status; empty while nothing answers."""
        try:
            body: dict[str, Any] = httpx.get(f"{self.rest_address()}/v1/status", timeout=5, trust_env=False, verify=PLAIN_HTTP).json()
        except (httpx.TransportError, httpx.UnsupportedProtocol, json.JSONDecodeError):
            return {}
        return body

    def wait_for_step(self, step: int, timeout_s: float = 150.0) -> None:
        """Poll the status until a step is done."""
        deadline = time.monotonic() + timeout_s
        while int(self.status().get("step", 0)) < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"step {step} was not reached:\n{self.log()}")
            time.sleep(0.2)

    def find(self, text: str) -> int:
        """Pid of the first process of the demo whose command line has this text."""
        for pid in descendants(self.process.pid):
            if text in _command_line(pid):
                return pid
        lines = [_command_line(pid) for pid in descendants(self.process.pid)]
        raise AssertionError(f"no process with {text!r} among {lines}")

    def find_engine(self) -> int:
        """Pid of the engine core: the rollout server's child, whatever title it could give itself."""
        server = self.find("shoal_rollout")
        return next(pid for pid in descendants(server) if parent_of(pid) == server)

    def shared_memory(self) -> list[str]:
        """Staging files of the run."""
        run_id = self.run_folder().name
        return [name for name in os.listdir("/dev/shm") if run_id in name]


@contextmanager
def tiny_demo(folder: Path, *arguments: str) -> Iterator[Demo]:
    """`shoal demo` with a random nano model and sums, in its own session; whatever still runs at the end is killed."""
    write_random_model("nano", folder / "model")
    write_sums(folder / "rows.jsonl", 256)
    own = ["--model", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--reward", "arithmetic"]
    # A random model is never right; without any gradient an update would be skipped.
    own += ["--set", "algorithm.entropy_coef=0.01"]
    with started_demo(folder, *own, *arguments) as demo:
        yield demo


@contextmanager
def started_demo(folder: Path, *arguments: str) -> Iterator[Demo]:
    """`shoal demo` with these arguments, in its own session."""
    runs, output = folder / "runs", folder / "output.txt"
    argv = [sys.executable, "-m", "shoal.cli.main", "demo", "--runs", str(runs), *arguments]
    with output.open("wb") as sink:
        process = subprocess.Popen(argv, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield Demo(process=process, folder=runs, output=output)
    finally:
        for pid in [process.pid, *descendants(process.pid)]:
            if parent_of(pid) is not None:
                os.kill(pid, signal.SIGKILL)
        process.wait()


def port_is_open(address: str) -> bool:
    """Whether something listens at http://host:port."""
    try:
        httpx.get(address, timeout=2, trust_env=False, verify=PLAIN_HTTP)
    except httpx.TransportError:
        return False
    return True


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
