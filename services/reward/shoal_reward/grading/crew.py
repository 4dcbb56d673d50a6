"""Keeps a number of graders alive and inside their limits.

A grader is starting -> ready -> ended, and another takes its place. A tick, while there is work, looks at each:

    longer than prepare_timeout_s without a greeting, or in `prepare`          killed
    longer than sample_timeout_s in one call, or with tasks and none begun     killed
    longer than HELP_AFTER_S in one call                                       its other tasks are taken back for other graders
    ended by itself                                                            replaced

The call that it was at is the one to blame; what else it had is taken back. Graders that end before they have answered anything are
replaced later and later.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from typing import Protocol

from google.protobuf.message import DecodeError

from shoal.errors import ConfigError, UnavailableError
from shoal.rpc.v1 import reward_pb2
from shoal.telemetry.logs import get_logger
from shoal_reward import metrics
from shoal_reward.grading.frames import GREETING, REFUSAL
from shoal_reward.grading.grader_process import GraderProcess, ending
from shoal_reward.grading.limits import excess
from shoal_reward.grading.order import Order
from shoal_reward.grading.work import Task
from shoal_reward.grading.worker import RETIRED
from shoal_reward.metrics import Cause

log = get_logger(__name__)

TICK_S = 0.02
HELP_AFTER_S = 0.02
_FIRST_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 30.0
_LASTING_FAILURES = 3
_REAP_TIMEOUT_S = 10.0
_LAST_BREATH_S = 1.0


class Workplace(Protocol):
    """Where graders get their tasks from and leave their answers."""

    def welcome(self, offered: reward_pb2.DescribeRewardResponse) -> None:
        """Look at what a new grader has loaded."""

    def answer(self, task: Task, response: reward_pb2.ScoreResponse) -> None:
        """Take an answer."""

    def lost(self, blamed: Task | None, others: list[Task], reason: str) -> None:
        """Take the tasks of a grader that has ended; reason says how."""

    def more(self) -> None:
        """A grader has room, or tasks have come back."""


class GraderCrew:
    """The graders of one service. All of it runs on the event loop."""

    def __init__(self, order: Order, size: int, workplace: Workplace) -> None:
        self._settings = order.settings
        self._order = order.to_bytes()
        self._size = size
        self._workplace = workplace
        self._graders: list[GraderProcess] = []
        self._ended: list[GraderProcess] = []
        self._first_ready: asyncio.Future[None] | None = None
        self._num_failed_starts = 0
        self._timer: asyncio.TimerHandle | None = None
        self._restarts: set[asyncio.TimerHandle] = set()
        self._is_open = False
        self._start_problem = ""

    @property
    def graders(self) -> list[GraderProcess]:
        """Those that are starting or ready."""
        return self._graders

    @property
    def num_ready(self) -> int:
        """Graders that take tasks."""
        return sum(grader.is_ready for grader in self._graders)

    @property
    def lasting_problem(self) -> str:
        """Why no grader runs and none is likely to soon; empty if one does or may."""
        return self._start_problem if self._num_failed_starts >= _LASTING_FAILURES and not self.num_ready else ""

    async def start(self) -> None:
        """Start all graders and return when one is ready.

        Raises: ConfigError: a grader cannot load its scorers, or not in time.
        """
        self._is_open = True
        self._first_ready = asyncio.get_running_loop().create_future()
        for _ in range(self._size):
            self._start_one()
        try:
            await self._first_ready
        except BaseException:  # a cancelled start included: no grader may be left
            await self.stop()
            raise

    async def stop(self) -> None:
        """Kill all graders and return when they are gone.

        Raises: UnavailableError: the kernel did not end one of them.
        """
        self._is_open = False
        for timer in [*self._restarts, *([] if self._timer is None else [self._timer])]:
            timer.cancel()
        self._restarts.clear()
        for grader in list(self._graders):
            self._end(grader, None, "was stopped with the service")
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        while not self._reap():
            if time.monotonic() > deadline:
                raise UnavailableError(f"graders {[grader.process.pid for grader in self._ended]} did not end within {_REAP_TIMEOUT_S:g} s")
            await asyncio.sleep(TICK_S)

    def watch(self) -> None:
        """Look at the graders until there is nothing to watch; call it when tasks have been given."""
        if self._timer is None and self._is_open:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._reap() or any(grader.tasks or not grader.is_ready for grader in self._graders):
            self.watch()
        for grader in list(self._graders):
            self._look_at(grader)

    def _look_at(self, grader: GraderProcess) -> None:
        if grader not in self._graders:
            return
        if grader.has_ended():
            # Its last words may still be in the pipe.
            grader.drain()
            self._on_end(grader)
            return
        progress = grader.progress
        problem = excess(grader, progress, self._settings)
        if problem is not None:
            self._end(grader, *problem)
        elif progress is not None and progress.elapsed_s > HELP_AFTER_S and len(grader.tasks) > 1:
            self._workplace.lost(None, grader.take_back(but=progress.sequence), "")

    def _start_one(self) -> None:
        try:
            grader = GraderProcess(self._order, self._on_frame, self._on_end)
        except OSError as error:
            self._start_failed(f"a grader cannot be started: {error}")
            return
        self._graders.append(grader)
        self.watch()

    def _on_frame(self, grader: GraderProcess, sequence: int, payload: bytes) -> None:
        try:
            self._take_frame(grader, sequence, payload)
        except (DecodeError, ValueError) as error:
            # Only code of a scorer that writes into the pipe can cause this.
            self._end(grader, Cause.DIED, f"sent what is no answer ({error})")

    def _take_frame(self, grader: GraderProcess, sequence: int, payload: bytes) -> None:
        if sequence in (REFUSAL, GREETING) and grader not in self._graders:
            return
        if sequence == REFUSAL:
            self._refused(grader, payload.decode())
        elif sequence == GREETING:
            self._greeted(grader, payload)
        else:
            self._answered(grader, sequence, reward_pb2.ScoreResponse.FromString(payload))

    def _answered(self, grader: GraderProcess, sequence: int, response: reward_pb2.ScoreResponse) -> None:
        task = grader.tasks.get(sequence)
        if task is not None and len(response.results) not in (0, len(task.indices)):
            raise ValueError(f"{len(response.results)} results for {len(task.indices)} samples")
        self._num_failed_starts = 0
        if (task := grader.answered(sequence)) is not None:
            self._workplace.answer(task, response)

    def _greeted(self, grader: GraderProcess, payload: bytes) -> None:
        self._workplace.welcome(reward_pb2.DescribeRewardResponse.FromString(payload))
        grader.is_ready = True
        self._start_problem = ""
        metrics.running_workers.set(self.num_ready)
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_result(None)
        self._workplace.more()

    def _refused(self, grader: GraderProcess, problem: str) -> None:
        self._remove(grader)
        self._start_failed(problem)

    def _on_end(self, grader: GraderProcess) -> None:
        """The process has ended by itself, or closed its pipe."""
        self._end(grader, Cause.DIED, "")

    def _end(self, grader: GraderProcess, cause: Cause | None, reason: str) -> None:
        if grader not in self._graders:
            return
        was_ready, progress = grader.is_ready, grader.progress
        self._remove(grader)
        reason = reason or _how_it_ended(grader)
        is_retired = grader.process.returncode == RETIRED
        blamed = None if progress is None else grader.tasks.pop(progress.sequence, None)
        others = list(grader.tasks.values())
        grader.tasks.clear()
        if cause is not None and not is_retired:
            metrics.killed_workers.labels(cause).inc()
            log.warning("grader_ended", reason=reason, cause=str(cause), was_scoring=blamed is not None)
        self._replace(was_ready and (blamed is not None or grader.has_answered), reason)
        # One that made room for a fresh one is no reason to suspect what waited behind.
        self._workplace.lost(blamed, others, "" if is_retired else reason)

    def _remove(self, grader: GraderProcess) -> None:
        self._graders.remove(grader)
        # Answers that were on their way still count.
        grader.end()
        self._ended.append(grader)
        metrics.running_workers.set(self.num_ready)
        self.watch()

    def _replace(self, has_worked: bool, reason: str) -> None:
        if not self._is_open:
            return
        if has_worked:
            self._start_one()
        else:
            self._start_failed(f"a grader {reason} before it had scored anything")

    def _start_failed(self, problem: str) -> None:
        if not self._is_open:
            return
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(ConfigError(problem))
        delay_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(self._num_failed_starts, 10))
        self._num_failed_starts += 1
        self._start_problem = problem
        log.error("grader_start_failed", error=problem, retry_in_s=delay_s)
        self._restart_after(delay_s)
        self._workplace.more()

    def _restart_after(self, delay_s: float) -> None:
        def start() -> None:
            self._restarts.discard(timer)
            self._start_one()

        timer = asyncio.get_running_loop().call_later(delay_s, start)
        self._restarts.add(timer)

    def _reap(self) -> bool:
        """Collect ended processes; returns whether none is left."""
        self._ended = [grader for grader in self._ended if grader.process.poll() is None]
        return not self._ended


def _how_it_ended(grader: GraderProcess) -> str:
    try:
        # It was killed a moment ago at the latest, so this does not wait for long.
        return ending(grader.process.wait(_LAST_BREATH_S))
    except subprocess.TimeoutExpired:
        return "closed its pipe and cannot be killed"
