"""One grader as the service sees it: its process, the pipe to it, and the tasks that it has."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from shoal_reward.grading.channel import GraderChannel
from shoal_reward.grading.frames import FIRST_SEQUENCE, GREETING
from shoal_reward.grading.process_tree import kill_tree
from shoal_reward.grading.progress import Progress, ProgressPage
from shoal_reward.grading.work import Task

WINDOW_MS = 5.0
"""A grader gets as many tasks as it is expected to do in this time, so that it need not wait for the next one."""
MAX_WINDOW_TASKS = 64
MAX_WINDOW_BYTES = 1 << 20
# One grader per core: the threads of numerical libraries would only fight over it, and each of them maps memory.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class GraderProcess:
    """A grader. It does its tasks in order; `tasks` holds them by number until they are answered or taken back."""

    def __init__(
        self,
        order: bytes,
        on_frame: Callable[[GraderProcess, int, bytes], None],
        on_end: Callable[[GraderProcess], None],
    ) -> None:
        """Start the process and send it the order, see `order`; the answer comes as the first frame."""
        self.tasks: dict[int, Task] = {}
        self.is_ready = False
        self.has_answered = False
        self.started_at = time.monotonic()
        self.last_sign_at = self.started_at
        """When it was last known to do something."""
        self._num_planned = 0
        self._load_ms = 0.0
        self._load_bytes = 0
        self._sequences = itertools.count(FIRST_SEQUENCE)
        self._progress = ProgressPage.create()
        ours, theirs = socket.socketpair()
        try:
            self.process = _spawn(theirs, self._progress)
        finally:
            theirs.close()
            self._progress.close()
        self._channel = GraderChannel(ours, lambda sequence, payload: on_frame(self, sequence, payload), lambda: on_end(self))
        self._channel.send([(GREETING, order)])

    @property
    def load_ms(self) -> float:
        """How long its tasks are expected to take."""
        return self._load_ms

    @property
    def progress(self) -> Progress | None:
        """What it works on."""
        return self._progress.read()

    @property
    def has_room(self) -> bool:
        """Whether it should get tasks now: it is ready and has less than half of what it may have."""
        is_low = self._load_ms <= WINDOW_MS / 2 and self._num_planned <= MAX_WINDOW_TASKS // 2
        return self.is_ready and (is_low or self._num_planned == 0)

    def plan(self, task: Task) -> bool:
        """Count a task to the load if it fits into the window, before it is given; one always fits."""
        fits = (
            self._num_planned < MAX_WINDOW_TASKS
            and self._load_ms + task.expected_ms <= WINDOW_MS
            and self._load_bytes + task.num_bytes <= MAX_WINDOW_BYTES
        )
        if not fits and self._num_planned:
            return False
        self._count(task, 1)
        return True

    def give(self, tasks: Sequence[Task]) -> None:
        """Send tasks that were planned."""
        if not self.tasks:
            self.last_sign_at = time.monotonic()
        numbered = {next(self._sequences): task for task in tasks}
        self.tasks.update(numbered)
        self._channel.send([(sequence, task.request()) for sequence, task in numbered.items()])

    def answered(self, sequence: int) -> Task | None:
        """Remove an answered task; None if it had been taken back."""
        self.last_sign_at = time.monotonic()
        self.has_answered = True
        return self._remove(sequence)

    def take_back(self, *, but: int) -> list[Task]:
        """Remove and return the tasks that have not been answered, but for the one that is worked on."""
        self._progress.take_back_below(1 + max(self.tasks, default=0))
        return [task for sequence in list(self.tasks) if sequence != but and (task := self._remove(sequence)) is not None]

    def has_ended(self) -> bool:
        """Whether the process has ended; it stays a zombie, so that its group's number is not another's."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def drain(self) -> None:
        """Take the answers that are in the pipe."""
        self._channel.drain()

    def end(self) -> None:
        """Kill whatever is left of the process and its children, and take the answers that it still sent."""
        kill_tree(self.process.pid)
        self._channel.drain()
        self._channel.close()

    def _remove(self, sequence: int) -> Task | None:
        task = self.tasks.pop(sequence, None)
        if task is not None:
            self._count(task, -1)
        return task

    def _count(self, task: Task, sign: int) -> None:
        self._num_planned += sign
        self._load_bytes += sign * task.num_bytes
        # Sums of floats leave a rest.
        self._load_ms = self._load_ms + sign * task.expected_ms if self._num_planned else 0.0


def _spawn(channel: socket.socket, progress: ProgressPage) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "shoal_reward.grading.worker", "--parent", str(os.getpid())]
    command += ["--channel", str(channel.fileno()), "--progress", str(progress.descriptor)]
    return subprocess.Popen(  # noqa: S603 - our own module
        command,
        stdin=subprocess.DEVNULL,
        env={**_ENVIRONMENT, **os.environ},
        pass_fds=(channel.fileno(), progress.descriptor),
        # A session of its own: its group can be killed, and a Ctrl-C at the service's terminal is not for it.
        start_new_session=True,
    )


def ending(return_code: int) -> str:
    """Say how a process ended."""
    if return_code >= 0:
        return f"exited with code {return_code}"
    try:
        name = signal.Signals(-return_code).name
    except ValueError:
        name = "unknown"
    cause = ", out of memory or killed from outside" if -return_code == signal.SIGKILL else ""
    return f"was killed by signal {-return_code} ({name}{cause})"
