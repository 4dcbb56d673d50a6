"""The compose project under test, on the machine's container engine or on a private one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
_ENGINE_CANNOT_RUN = 3


@dataclass(frozen=True, kw_only=True)
class Compose:
    """docker compose with a project name of its own."""

    project: str
    env: dict[str, str]

    def run(self, *arguments: str, timeout_s: float = 600.0) -> str:
        """Output of a compose command; a failing one raises with its error output."""
        argv = ["docker", "compose", "-p", self.project, *arguments]
        done = subprocess.run(argv, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr[-3000:]}")
        return done.stdout

    def process_id(self, service: str) -> int:
        """Process id of a service's first process on this machine; 0 while the container does not run."""
        container = self.run("ps", "--all", "--quiet", service).strip()
        argv = ["docker", "inspect", "--format", "{{.State.Pid}}", container]
        return int(subprocess.run(argv, env=self.env, capture_output=True, text=True, check=True, timeout=30).stdout)

    def status(self) -> dict[str, Any]:
        """The coordinator's status; empty while it does not answer."""
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.env['SHOAL_REST_PORT']}/v1/status", timeout=5, trust_env=False)
        except httpx.TransportError:
            return {}
        body: dict[str, Any] = answer.json()
        return body

    def wait(self, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Poll once a second; on time-out the message carries the status and the newest log lines."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what} after {timeout_s} s: {json.dumps(self.status())}\n{self.run('logs', '--tail', '15')}")
            time.sleep(1.0)


def engine_environment() -> dict[str, str]:
    """Environment in which `docker compose` works; skips the test, with the reason, where no engine can run."""
    env = dict(os.environ)
    if shutil.which("docker") and _answers(["docker", "info"], env) and _answers(["docker", "compose", "version"], env):
        return env
    folder = os.environ.get("SHOAL_ENGINE_DIR", "/var/tmp/shoal-engine")
    done = subprocess.run([str(ROOT / "scripts/container_engine.sh"), folder], capture_output=True, text=True, timeout=600)
    if done.returncode == _ENGINE_CANNOT_RUN:
        pytest.skip(f"no container engine can run here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return {**env, **dict(re.findall(r"(\w+)=(\S+)", done.stdout))}


@contextmanager
def compose_project(project: str, extra: dict[str, str]) -> Iterator[Compose]:
    """A project that is taken down, with its volumes, at the end."""
    env = {**engine_environment(), **extra}
    if "BASE_IMAGE" in env:
        subprocess.run([str(ROOT / "scripts/wheelhouse.sh")], check=True, timeout=600, capture_output=True)
    compose = Compose(project=project, env=env)
    try:
        yield compose
    finally:
        compose.run("down", "--volumes", "--timeout", "10")


def _answers(argv: list[str], env: dict[str, str]) -> bool:
    return subprocess.run(argv, env=env, capture_output=True, timeout=30).returncode == 0
