"""Owns the services of one run: starts, watches, restarts and stops them.

    python -m shoal.cli.local.supervisor --cleanup GLOB ...

Reads `ServiceSpec` lines from stdin and starts each; writes `Event` lines to stdout. The end of stdin, SIGTERM or SIGINT stops
everything: SIGTERM by stop_order, then SIGKILL for every descendant, then the cleanup globs (staging files, sockets) are removed.

Exit code 2 means that the service refuses its configuration: it is not restarted, since it would refuse it again. A second
signal while stopping ends the grace.

State of a service: RUNNING -> ENDED | RESTARTING -> RUNNING, all -> STOPPING -> ENDED.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shoal.cli.local.process_tree import become_subreaper, kill_descendants, reap
from shoal.cli.local.protocol import Event, RestartPolicy, ServiceSpec
from shoal.process import set_parent_death_signal

_POLL_S = 0.1
_STOP_GRACE_S = 15.0
_RESTART_PAUSE_S = 1.0
_EXIT_REFUSED = 2


@dataclass(slots=True)
class _Service:
    spec: ServiceSpec
    pid: int
    num_restarts: int = 0
    restart_at: float | None = None


class Supervisor:
    """Single-threaded on purpose: PR_SET_PDEATHSIG follows the thread that forked."""

    def __init__(self, cleanup: list[str]) -> None:
        self._cleanup = cleanup
        self._services: dict[str, _Service] = {}
        self._stopping = False
        self._hurry = False
        self._buffer = b""

    def run(self) -> int:
        """Serve until told to stop; returns the exit code."""
        become_subreaper()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            while not self._stopping:
                self._read_specs()
                self._collect()
                self._restart_due()
        finally:
            left = self._stop_all()
            self._remove_files()
        self._emit(Event(kind="stopped", message=f"{len(left)} processes left" if left else ""))
        return 1 if left else 0

    def _on_signal(self, number: int, frame: object) -> None:
        self._hurry = self._stopping
        self._stopping = True

    def _read_specs(self) -> None:
        ready, _, _ = select.select([0], [], [], _POLL_S)
        if not ready:
            return
        chunk = os.read(0, 1 << 16)
        if not chunk:
            self._stopping = True
            return
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            self._start_from(line)

    def _start_from(self, line: bytes) -> None:
        try:
            spec = ServiceSpec.model_validate_json(line)
        except ValidationError as error:
            self._emit(Event(kind="exited", message=f"not a service specification: {error}"))
            return
        if spec.name in self._services:
            self._emit(Event(kind="exited", service=spec.name, message=f"service {spec.name!r} was started before; give it another name"))
            return
        self._start(spec, num_restarts=0)

    def _start(self, spec: ServiceSpec, num_restarts: int) -> None:
        Path(spec.log_path).parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **spec.env, "SHOAL_SUPERVISED": "1"}
        try:
            with open(spec.log_path, "ab") as log:
                child = subprocess.Popen(  # noqa: S603 - the argv comes from this program's own command
                    spec.argv,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=set_parent_death_signal,
                )
        except OSError as error:
            self._emit(Event(kind="exited", service=spec.name, exit_code=127, message=f"cannot start {spec.argv[0]}: {error}"))
            return
        child.returncode = 0  # this process reaps by itself; Popen must not wait
        self._services[spec.name] = _Service(spec=spec, pid=child.pid, num_restarts=num_restarts)
        self._emit(Event(kind="started", service=spec.name, pid=child.pid))

    def _collect(self) -> None:
        ended = dict(reap())
        for service in self._services.values():
            if service.pid in ended:
                self._on_exit(service, ended[service.pid])

    def _on_exit(self, service: _Service, exit_code: int) -> None:
        spec, pid = service.spec, service.pid
        service.pid = 0
        failed = exit_code not in (0, _EXIT_REFUSED)
        restart = spec.restart is RestartPolicy.ON_FAILURE and failed and service.num_restarts < spec.max_restarts
        if restart:
            service.restart_at = time.monotonic() + _RESTART_PAUSE_S
        self._emit(Event(kind="restarting" if restart else "exited", service=spec.name, pid=pid, exit_code=exit_code))

    def _restart_due(self) -> None:
        now = time.monotonic()
        for service in list(self._services.values()):
            if service.restart_at is not None and now >= service.restart_at:
                self._start(service.spec, service.num_restarts + 1)

    def _stop_all(self) -> list[int]:
        orders = sorted({service.spec.stop_order for service in self._services.values()})
        for order in orders:
            self._terminate([s for s in self._services.values() if s.spec.stop_order == order and s.pid])
        return kill_descendants(os.getpid())

    def _terminate(self, services: list[_Service]) -> None:
        for service in services:
            try:
                os.kill(service.pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + _STOP_GRACE_S
        while (waiting := [s for s in services if s.pid]) and time.monotonic() < deadline and not self._hurry:
            ended = dict(reap())
            for service in waiting:
                if service.pid in ended:
                    self._emit(Event(kind="exited", service=service.spec.name, pid=service.pid, exit_code=ended[service.pid]))
                    service.pid = 0
            time.sleep(0.02)

    def _remove_files(self) -> None:
        remove_matching(self._cleanup)

    @staticmethod
    def _emit(event: Event) -> None:
        # A broken pipe means that the command is gone: its end of stdin says so too, and stopping goes on.
        with contextlib.suppress(BrokenPipeError):
            os.write(1, event.model_dump_json().encode() + b"\n")


def remove_matching(patterns: list[str]) -> None:
    """Remove the files and folders that match the globs."""
    for pattern in patterns:
        for path in glob.glob(pattern):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                Path(path).unlink(missing_ok=True)


def main() -> int:
    """Entry point of the supervisor process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleanup", action="append", default=[], metavar="GLOB", help="removed after everything has stopped")
    return Supervisor(parser.parse_args().cleanup).run()


if __name__ == "__main__":
    sys.exit(main())
