"""Processes of the reward benchmark that are spoken to in lines of JSON; they end with this one."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.errors import ShoalError
from shoal.process import SUPERVISED_VARIABLE

STOP_TIMEOUT_S = 10.0


class LineProcess:
    """Context manager: `python -m MODULE ARGUMENTS`, with a log in a folder.

    Args:
        module, arguments: what to run.
        log: file of what it says on stderr.
        timeout_s: bound of waiting for an answer.
    """

    def __init__(self, module: str, arguments: Sequence[str], log: Path, *, timeout_s: float = 300.0) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._module = module
        self._log = log
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def __enter__(self) -> LineProcess:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", SUPERVISED_VARIABLE: "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        process = self._running()
        process.terminate()
        try:
            process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def ask(self, message: dict[str, object]) -> None:
        """Send a line."""
        pipe = self._running().stdin
        assert pipe is not None
        pipe.write(json.dumps(message).encode() + b"\n")

    def answer(self) -> dict[str, Any]:
        """Read a line. Raises: ShoalError: it has ended, or says nothing in time; with the end of its log."""
        pipe = self._running().stdout
        assert pipe is not None
        deadline_s = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise ShoalError(f"{self._module} did not answer within {self._timeout_s:g} s: {self._last_words()}")
                read = os.read(pipe.fileno(), 1 << 16)
                if not read:
                    raise ShoalError(f"{self._module} ended: {self._last_words()}")
                self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ShoalError(f"{self._module} was not started")
        return self._process

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] or "it said nothing"
