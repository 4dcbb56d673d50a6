"""The command's side of the supervisor: start services, learn what becomes of them, stop everything."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from shoal.cli.local.last_words import last_words
from shoal.cli.local.protocol import Event, ServiceSpec
from shoal.cli.local.supervisor import remove_matching
from shoal.errors import UnavailableError

_STOP_TIMEOUT_S = 60.0
_MAX_EVENTS = 4096


class LocalCluster:
    """Context manager around one supervisor process; leaving it stops every service and waits until nothing is left.

    Args:
        cleanup: globs that the supervisor removes at the end, and this object too, in case the supervisor itself was killed.
    """

    def __init__(self, cleanup: list[str]) -> None:
        self._cleanup = cleanup
        self._events: queue.Queue[Event | None] = queue.Queue(maxsize=_MAX_EVENTS)
        self._process: subprocess.Popen[bytes] | None = None
        self._logs: dict[str, Path] = {}
        self.pids: dict[str, int] = {}

    def __enter__(self) -> LocalCluster:
        argv = [sys.executable, "-m", "shoal.cli.local.supervisor"]
        for pattern in self._cleanup:
            argv += ["--cleanup", pattern]
        # Its own session: Ctrl-C reaches the command alone, which then closes the pipe.
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)  # noqa: S603
        threading.Thread(target=self._read_events, name="supervisor-events", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor."""
        return self._running().pid

    def start(self, spec: ServiceSpec) -> None:
        """Hand a service to the supervisor; its fate arrives as events."""
        process = self._running()
        self._logs[spec.name] = Path(spec.log_path)
        if process.stdin is None:
            raise UnavailableError("the supervisor's pipe is closed; start the command again")
        try:
            process.stdin.write(spec.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError as broken:
            raise UnavailableError("the supervisor has ended (was it killed?); start the command again") from broken

    def events(self) -> list[Event]:
        """What has happened since the last call.

        Raises: UnavailableError: the supervisor itself has ended.
        """
        found: list[Event] = []
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return found
            if event is None:
                raise UnavailableError("the supervisor has ended (was it killed?); all services were ended with it")
            found.append(event)

    def explain(self, event: Event) -> str:
        """Which service ended, with which code, and the last meaningful line of its log."""
        log = self._logs.get(event.service)
        reason = event.message or ("" if log is None else last_words(log))
        ended = f"{event.service or 'a service'} ended with code {event.exit_code}"
        said = f"{ended}: {reason}" if reason else ended
        return said if log is None else f"{said} (log: {log})"

    def wait_until(self, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Poll until ready() or a service ends or the time is up.

        Raises: UnavailableError: naming what was waited for, or the service that ended.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            for event in self.events():
                if event.kind == "exited":
                    raise UnavailableError(f"while waiting for {what}, {self.explain(event)}")
            if time.monotonic() > deadline:
                raise UnavailableError(f"{what} was not ready after {timeout_s:.0f} s; see the logs")
            time.sleep(0.05)

    def stop(self) -> None:
        """End every service; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            self._wait(process)
        except subprocess.TimeoutExpired:
            process.kill()  # the services die with it
            process.wait()
        finally:
            remove_matching(self._cleanup)

    @staticmethod
    def _wait(process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        interrupted = False
        while True:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
                break
            except KeyboardInterrupt:
                # An impatient user: the supervisor drops the grace and kills what is left, but nothing is left behind.
                interrupted = True
                process.send_signal(signal.SIGTERM)
        if interrupted:
            raise KeyboardInterrupt

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise UnavailableError("the local cluster is not running; enter its context first")
        return self._process

    def _read_events(self) -> None:
        process = self._process
        if process is None or process.stdout is None:
            return
        for line in process.stdout:
            event = Event.model_validate_json(line)
            if event.kind == "started":
                self.pids[event.service] = event.pid
            self._events.put(event)
        self._events.put(None)
