"""Runs a command on every rank of a gang and puts the answers together.

Rank 0 (`Gang`) publishes a command, runs its own part in the one computing thread and collects the others' answers in a second thread,
so that its event loop goes on answering health checks. Followers (`follow`) run commands one after another in their main thread.

One command runs at a time. A caller whose deadline passes leaves a running command to finish: the same call later gets its answer.
A ShoalError leaves every rank in a known state and the gang goes on. Any other exception, or a rank that gives no answer, breaks the gang:
its ranks may be at different collectives. The caller gets INTERNAL, then the process ends with a status other than 0.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from shoal.errors import DeadlineError, InternalError, InvalidRequestError
from shoal.telemetry.logs import get_logger
from shoal.telemetry.metrics import histogram
from shoal_trainer.command_store import CommandStore
from shoal_trainer.outcomes import Failure, decode_outcome, encode_outcome, failure_of, merge_outcomes

log = get_logger(__name__)

_seconds = histogram("trainer", "command", "seconds", "Time of a command on all ranks, by command.", ("command",))

Handler: TypeAlias = Callable[[bytes], bytes]
Outcomes: TypeAlias = list[bytes | Failure | None]

FAILURE_GRACE_S = 5.0
"""After one rank has failed, the others get this long to fail too; a rank in a collective would wait much longer."""


class Gang:
    """Rank 0's view of the gang; every public method belongs to the event loop.

    Args:
        handlers: command name to this rank's part.
        store: None for a gang of one.
        world_size: ranks.
        compute: one thread; the models were made in it.
        answer_timeout_s: how long followers may take longer than rank 0.
        independent: commands without a collective: a failure on one rank says nothing about the others.
        on_broken: called when the gang can take no more commands.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        store: CommandStore | None,
        world_size: int,
        compute: ThreadPoolExecutor,
        answer_timeout_s: float,
        independent: frozenset[str] = frozenset(),
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        self._handlers = handlers
        self._store = store
        self._world_size = world_size
        self._compute = compute
        self._answer_timeout_s = answer_timeout_s
        self._independent = independent
        self._collect = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answers")
        self._lock = asyncio.Lock()
        self._number = 0
        self._running: asyncio.Task[list[bytes]] | None = None
        self._on_broken = on_broken
        self.is_broken = False

    async def run(self, command: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Run a command on every rank.

        Args:
            command: name of a handler.
            payload: its request.
            timeout_s: the caller's deadline, waiting for the command before it included.
        Returns: one answer per rank.
        Raises: DeadlineError: the deadline passed; a command that has started goes on. InternalError: a rank failed. Or what
            the handler raised.
        """
        deadline = time.monotonic() + timeout_s
        await self._take_turn(command, timeout_s)
        if self.is_broken:
            self._lock.release()
            raise InternalError("this gang is broken by an earlier failure and is ending; start it again")
        task = asyncio.create_task(self._run_alone(command, payload))
        self._running = task
        task.add_done_callback(_retrieve)
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise DeadlineError(f"{command} did not finish in {timeout_s:g} s; it goes on, call again for its answer") from error

    async def drain(self) -> None:
        """Wait for the running command."""
        if self._running is not None:
            await asyncio.wait({self._running})

    async def _take_turn(self, command: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError as error:
            raise DeadlineError(f"{command} waited {timeout_s:g} s for the command before it; allow more time") from error

    async def _run_alone(self, command: str, payload: bytes) -> list[bytes]:
        try:
            with _seconds.labels(command).time():
                outcomes = await self._outcomes(command, payload)
        finally:
            self._lock.release()
        if any(outcome is None or (isinstance(outcome, Failure) and not outcome.expected) for outcome in outcomes):
            self.is_broken = True
            log.error("gang_broken", command=command)
            self._on_broken()
        return merge_outcomes(outcomes)

    async def _outcomes(self, command: str, payload: bytes) -> Outcomes:
        """Every rank's outcome, indexed by rank; None where there is none."""
        loop = asyncio.get_running_loop()
        self._number += 1
        if self._store is None:
            return [await loop.run_in_executor(self._compute, run_handler, self._handlers, command, payload)]
        grace_s = self._answer_timeout_s if command in self._independent else FAILURE_GRACE_S
        self._store.publish(self._number, command, payload)
        own = self._compute.submit(run_handler, self._handlers, command, payload)
        answers = await loop.run_in_executor(self._collect, self._collect_answers, self._number, own, grace_s)
        others = [answers.get(rank) for rank in range(1, self._world_size)]
        # With all answers in, this rank's own part ends by itself; else it may be waiting in a collective for a rank that gave up.
        healthy = all(isinstance(answer, bytes) for answer in others)
        done, _ = await asyncio.wait({asyncio.wrap_future(own)}, timeout=None if healthy else grace_s)
        return [own.result() if done else None, *others]

    def _collect_answers(self, number: int, own: Future[bytes | Failure], grace_s: float) -> dict[int, bytes | Failure]:
        """Collect until all followers have answered, or none can be expected to any more."""
        assert self._store is not None, "a gang of one collects nothing"  # noqa: S101
        found: dict[int, bytes | Failure] = {}
        deadline = math.inf
        for answers in self._store.answers(number):
            found = {rank: decode_outcome(data) for rank, data in answers.items()}
            outcomes = [*found.values(), *([own.result()] if own.done() else [])]
            if any(isinstance(outcome, Failure) for outcome in outcomes):
                deadline = min(deadline, time.monotonic() + grace_s)
            elif own.done():
                deadline = min(deadline, time.monotonic() + self._answer_timeout_s)
            if time.monotonic() > deadline:
                return found
        self._store.forget(number)
        return found


def run_handler(handlers: Mapping[str, Handler], command: str, payload: bytes) -> bytes | Failure:
    """Run this rank's part of a command; exceptions become failures."""
    try:
        if command not in handlers:
            raise InvalidRequestError(f"this gang has no command {command!r}; it knows {', '.join(sorted(handlers))}")
        return handlers[command](payload)
    except Exception as error:
        # The edge of a rank: every failure must reach rank 0.
        failure = failure_of(error)
        if not failure.expected:
            log.exception("command_fault", command=command)
        return failure


def follow(handlers: Mapping[str, Handler], store: CommandStore, rank: int) -> None:
    """Run commands until rank 0 is gone or this rank cannot go on.

    Raises: UnavailableError: rank 0 is gone. InternalError: a command failed in a way that leaves this rank in an unknown state.
    """
    number = 0
    while True:
        number += 1
        command, payload = store.next_command(number)
        outcome = run_handler(handlers, command, payload)
        store.answer(number, rank, encode_outcome(outcome))
        if isinstance(outcome, Failure) and not outcome.expected:
            raise InternalError(f"{command} failed on rank {rank}: {outcome.error_class}: {outcome.message}")


def _retrieve(task: asyncio.Task[list[bytes]]) -> None:
    """Mark the error of an abandoned command as seen; its caller was told by DeadlineError."""
    if not task.cancelled():
        task.exception()
