"""The compose project under test, on the machine's container engine or on a private one."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.valkey import free_port

ROOT = Path(__file__).parents[2]
_ENGINE_CANNOT_RUN = 3
_ENGINE_STOP_S = 60
_RUNNING = '{{index .Config.Labels "com.docker.compose.service"}} {{.Id}} {{.State.StartedAt}} {{.State.Pid}}'
_KILL = "import os, sys; os.kill(int(sys.argv[1]), 9)"


@dataclass(frozen=True, kw_only=True)
class Compose:
    """docker compose with a project name of its own. files: from the repository's root; none are compose's own choice."""

    project: str
    env: dict[str, str]
    files: tuple[str, ...] = ()

    def run(self, *arguments: str, timeout_s: float = 600.0, text: str = "") -> str:
        """Output of a compose command, which gets text as its input; a failing one raises with its error output."""
        files = [argument for file in self.files for argument in ("-f", file)]
        return self._docker("compose", "--ansi", "never", "-p", self.project, *files, *arguments, timeout_s=timeout_s, text=text)

    def running(self) -> dict[str, tuple[str, str, int]]:
        """Service -> container, start and first process of those that run; another value for a service says that it was started again."""
        found = {}
        for container in self.run("ps", "--quiet").split():
            service, *rest = self._docker("inspect", "--format", _RUNNING, container).split()
            found[service] = (rest[0], rest[1], int(rest[2]))
        return found

    def process_id(self, service: str) -> int:
        """Process id, on the engine's machine, of a service's first process; 0 while the container does not run."""
        container = self.run("ps", "--all", "--quiet", service).strip()
        return int(self._docker("inspect", "--format", "{{.State.Pid}}", container))

    def kill(self, service: str) -> int:
        """SIGKILL a service's first process as a crash would, and return its id; `docker kill` would count as wanted: no restart."""
        process_id = self.process_id(service)
        options = ["--rm", "--pid", "host", "--network", "none", "--user", "0", "--entrypoint", "python"]
        self._docker("run", *options, "shoal/reward", "-c", _KILL, str(process_id))
        return process_id

    def wait_restarted(self, service: str, killed: int, timeout_s: float) -> None:
        """Wait until another process than the killed one runs."""
        self.wait(lambda: self.process_id(service) not in (0, killed), f"restarted {service}", timeout_s)

    def get(self, path: str) -> dict[str, Any]:
        """An answer of the coordinator's REST API; empty while it does not answer."""
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.env['SHOAL_REST_PORT']}{path}", timeout=10, trust_env=False)
        except httpx.TransportError:
            return {}
        body: dict[str, Any] = answer.json()
        return body

    def step(self) -> int:
        """The last completed step; a failed run raises."""
        status = self.get("/v1/status")
        assert not status.get("error"), status
        return int(status.get("step", 0))

    def wait(self, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Poll once a second; on time-out the message carries the status and the newest log lines."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline:
                shown = [json.dumps(self.get("/v1/status")), self.run("ps", "--all"), self.run("logs", "--tail", "60")]
                raise AssertionError("\n".join([f"no {what} after {timeout_s:g} s", *shown]))
            time.sleep(1.0)

    def _docker(self, *arguments: str, timeout_s: float = 60.0, text: str = "") -> str:
        argv = ["docker", *arguments]
        done = subprocess.run(argv, cwd=ROOT, env=self.env, input=text, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr[-3000:]}")
        return done.stdout


@contextmanager
def training_project(project: str) -> Iterator[Compose]:
    """A project with all services started, three steps into its training."""
    settings = {"SHOAL_REST_PORT": str(free_port()), "SHOAL_STEPS": "100000", "SHOAL_SEED": "0"}
    with compose_project(project, settings) as compose:
        compose.run("build", timeout_s=1200)
        compose.run("up", "--detach", timeout_s=600)
        compose.wait(lambda: compose.step() >= 3, "third step", 420)
        yield compose


@contextmanager
def compose_project(project: str, extra: dict[str, str]) -> Iterator[Compose]:
    """A project that is taken down, with its volumes, at the end."""
    with container_engine() as env:
        if "BASE_IMAGE" in env:
            _run_script("wheelhouse.sh", timeout_s=600)
        compose = Compose(project=project, env={**env, **extra})
        try:
            yield compose
        finally:
            compose.run("down", "--volumes", "--remove-orphans", "--timeout", "10")


@contextmanager
def container_engine() -> Iterator[dict[str, str]]:
    """Environment in which `docker compose` works; skips the test, with the reason, where no engine can run.

    An engine that answers is used as it is. Otherwise a private one below SHOAL_ENGINE_DIR is started, and stopped at the end; its images
    stay for the next time.
    """
    env = dict(os.environ)
    if _answers(env, "info") and _answers(env, "compose", "version"):
        yield env
        return
    folder = Path(env.get("SHOAL_ENGINE_DIR", "/var/tmp/shoal-engine"))
    was_running = _answers({**env, "DOCKER_HOST": f"unix://{folder}/d.sock"}, "info")
    try:
        done = _run_script("container_engine.sh", str(folder), timeout_s=900)
        yield {**env, **dict(re.findall(r"(\w+)=(\S+)", done.stdout))}
    finally:
        if not was_running:
            _prune(folder)
            _stop_engine(folder)


def _run_script(name: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    argv = [str(ROOT / "scripts" / name), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode == _ENGINE_CANNOT_RUN:
        pytest.skip(f"no container engine can run here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done


def _prune(folder: Path) -> None:
    """Keep the newest images and builds only: each change of the source adds gigabytes. Does nothing if the engine does not run."""
    env = {**os.environ, "DOCKER_HOST": f"unix://{folder}/d.sock"}
    for command in (["image", "prune", "--force"], ["builder", "prune", "--force", "--keep-storage", "10GB"]):
        if shutil.which("docker"):
            subprocess.run(["docker", *command], env=env, capture_output=True, timeout=300, check=False)


def _stop_engine(folder: Path) -> None:
    """End the dockerd of this folder and wait until it is gone."""
    try:
        process = os.pidfd_open(int((folder / "pid").read_text()))
    except (FileNotFoundError, ProcessLookupError):
        return
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        ended, _, _ = select.select([process], [], [], _ENGINE_STOP_S)
        assert ended, f"the container engine of {folder} did not end within {_ENGINE_STOP_S} s of SIGTERM"
    finally:
        os.close(process)


def _answers(env: dict[str, str], *arguments: str) -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", *arguments], env=env, capture_output=True, timeout=30).returncode == 0
