"""The local cluster leaves nothing behind, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.cli.local.cluster import LocalCluster
from shoal.cli.local.embedded_redis import embedded_redis
from shoal.cli.local.protocol import Event, RestartPolicy, ServiceSpec
from shoal.errors import UnavailableError
from tests.helpers.cluster_process import nested_spec, written_pid
from tests.helpers.processes import alive, wait_gone


@dataclass(frozen=True, kw_only=True)
class Command:
    process: subprocess.Popen[str]
    services: list[int]
    supervisor: int


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    argv = [sys.executable, "-m", "tests.helpers.cluster_process", str(tmp_path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield Command(process=process, **json.loads(process.stdout.readline()))
    process.kill()
    process.wait()


def _events_until(cluster: LocalCluster, kind: str, service: str, count: int = 1) -> list[Event]:
    found: list[Event] = []
    deadline = time.monotonic() + 20
    while sum(event.kind == kind and event.service == service for event in found) < count:
        found += cluster.events()
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_cluster_stop_ends_orphans_and_other_sessions(tmp_path: Path) -> None:
    with LocalCluster([]) as cluster:
        cluster.start(nested_spec(tmp_path))
        pids = [written_pid(tmp_path / "grandchild"), written_pid(tmp_path / "detached")]
        assert alive(pids) == pids
    assert alive(pids) == []


def test_cluster_ends_everything_when_command_is_killed(command: Command, tmp_path: Path) -> None:
    command.process.kill()
    assert wait_gone([*command.services, command.supervisor]) == []
    assert not (tmp_path / "staging-1").exists()


def test_cluster_ends_everything_when_command_is_interrupted(command: Command, tmp_path: Path) -> None:
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(20) != 0
    assert alive(command.services) == []
    assert not (tmp_path / "staging-1").exists()


def test_cluster_services_die_with_a_killed_supervisor(command: Command, tmp_path: Path) -> None:
    os.kill(command.supervisor, signal.SIGKILL)
    assert command.process.wait(20) != 0
    assert wait_gone(command.services[-1:]) == []  # direct children; those below call die_with_parent themselves
    assert not (tmp_path / "staging-1").exists()
    for pid in alive(command.services):
        os.kill(pid, signal.SIGKILL)


def test_cluster_restarts_a_failing_service_a_bounded_number_of_times(tmp_path: Path) -> None:
    argv = ["bash", "-c", f"echo run >> {tmp_path}/runs; exit 3"]
    spec = ServiceSpec(name="flaky", argv=argv, log_path=str(tmp_path / "log"), restart=RestartPolicy.ON_FAILURE, max_restarts=1)
    with LocalCluster([]) as cluster:
        cluster.start(spec)
        events = _events_until(cluster, "exited", "flaky")
    assert [event.kind for event in events] == ["started", "restarting", "started", "exited"]
    assert events[-1].exit_code == 3
    assert (tmp_path / "runs").read_text() == "run\nrun\n"


def test_cluster_wait_names_the_service_that_ended(tmp_path: Path) -> None:
    spec = ServiceSpec(name="broken", argv=["false"], log_path=str(tmp_path / "log"))
    with LocalCluster([]) as cluster:
        cluster.start(spec)
        with pytest.raises(UnavailableError, match="while waiting for the moon, broken ended with code 1"):
            cluster.wait_until(lambda: False, "the moon", 20)


def test_cluster_reports_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with LocalCluster([]) as cluster:
        cluster.start(ServiceSpec(name="ghost", argv=["/no/such/program"], log_path=str(tmp_path / "log")))
        events = _events_until(cluster, "exited", "ghost")
    assert "/no/such/program" in events[-1].message


def test_embedded_redis_answers_and_persists(tmp_path: Path) -> None:
    import redis as client

    for expected in (None, b"kept"):
        server = embedded_redis(tmp_path, tmp_path / "data", tmp_path / "redis.log")
        with LocalCluster([]) as cluster:
            cluster.start(server.spec)
            cluster.wait_until(server.is_ready, "redis", 20)
            connection = client.Redis.from_url(server.url)
            assert connection.get("key") == expected
            connection.set("key", "kept")
            connection.close()
    assert not server.is_ready()
