"""Grades samples in processes that can be killed.

Callers' samples wait in one queue; each grader has a small window of them, so that it never waits for the next, and the queue is served
by whoever is free. See `crew` for limits and `worker` for the process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from shoal.config.reward_service import RewardServiceSettings
from shoal.reward import Isolation, Scorer
from shoal.rpc.v1 import reward_pb2
from shoal.telemetry.logs import get_logger
from shoal_reward import metrics
from shoal_reward.grading.crew import GraderCrew
from shoal_reward.grading.order import Order
from shoal_reward.grading.work import Batch, Pace, Task, WorkQueue
from shoal_reward.room import Room

log = get_logger(__name__)

MAX_LOSSES = 3
"""A task that so many graders ended with, for whatever reason, is an error."""
_MAX_DEFAULT_WORKERS = 4


def default_workers() -> int:
    """One grader for each core that this process may use, 4 at most."""
    return min(_MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)))


class GraderPool:
    """Graders, and the samples that wait for them. Make and use it on one event loop."""

    def __init__(self, settings: RewardServiceSettings, scorers: Sequence[Scorer]) -> None:
        """Prepare; nothing runs yet.

        Args:
            settings: what graders load, how many there are, and their limits.
            scorers: all of the service; the graders run those with isolation PROCESS.
        """
        graded = [scorer for scorer in scorers if scorer.isolation is Isolation.PROCESS]
        self._graded = {(scorer.name, scorer.version): scorer for scorer in graded}
        self._changed: dict[tuple[str, str], str] = {}
        self._num_workers = default_workers() if settings.workers is None else settings.workers
        self._crew = GraderCrew(Order.for_scorers(settings, graded), self._num_workers, self)
        self._queue = WorkQueue()
        self._pace = Pace()
        self._room = Room()

    @property
    def process_ids(self) -> list[int]:
        """The graders' processes, those that are starting included."""
        return [grader.process.pid for grader in self._crew.graders]

    async def start(self) -> None:
        """Start the graders, if any scorer needs them, and return when one is ready.

        Raises: ConfigError: a grader cannot load its scorers, or not in time.
        """
        if self._graded:
            await self._crew.start()

    async def stop(self) -> None:
        """Kill the graders and return when they are gone; samples that are left are errors."""
        await self._crew.stop()
        self._queue.fail_all("the reward service is ending")

    async def score(self, scorer: Scorer, samples: Sequence[reward_pb2.ScoreSample], budget_s: float) -> list[reward_pb2.ScoreResult]:
        """Score samples; one result per sample, in order.

        Args:
            scorer: one of those that the graders run.
            samples: as they came; any number, none included.
            budget_s: seconds from now; samples that are not done by then become errors.
        Raises: CapacityError: too many samples, or bytes of them, wait already.
        """
        if not samples:
            return []
        batch = Batch(scorer, samples)
        if (problem := self._changed.get((scorer.name, scorer.version))) is not None:
            return batch.close(problem)
        tasks = batch.tasks(self._num_workers)
        with self._room.taken(len(samples), sum(task.num_bytes for task in tasks)):
            await self._finish(batch, tasks, budget_s)
        return batch.close()

    async def _finish(self, batch: Batch, tasks: Sequence[Task], budget_s: float) -> None:
        try:
            self._queue.add(tasks)
            self.more()
            async with asyncio.timeout(max(0.0, budget_s)):
                await batch.finished.wait()
        except TimeoutError:
            pass
        finally:
            batch.is_open = False
            if not batch.finished.is_set():
                self._queue.drop_closed()

    def welcome(self, offered: reward_pb2.DescribeRewardResponse) -> None:
        """See `Workplace`."""
        loaded = {(scorer.name, scorer.version): scorer.fingerprint for scorer in offered.scorers}
        for key, scorer in self._graded.items():
            if loaded.get(key) != scorer.fingerprint and key not in self._changed:
                # Two codes under one version would give rewards that nobody can compare.
                self._changed[key] = (
                    f"what stands behind {scorer.name}@{scorer.version} has changed since the service started: "
                    "give it a new version and restart the service"
                )
                log.error("scorer_changed", scorer=scorer.name, version=scorer.version)
                self._queue.fail_those_of(scorer, self._changed[key])

    def answer(self, task: Task, response: reward_pb2.ScoreResponse) -> None:
        """See `Workplace`."""
        if response.results:
            task.settle(response.results)
            self._pace.note(task.batch.scorer, response.results[0].latency_ms / len(task.indices))
        elif task.batch.is_open:
            self._queue.give_back(task.singles())
        self.more()

    def lost(self, blamed: Task | None, others: list[Task], reason: str) -> None:
        """See `Workplace`."""
        back = []
        if blamed is not None and len(blamed.indices) > 1:
            back += blamed.singles()
        elif blamed is not None:
            blamed.fail(f"the grader {reason} while it worked on this sample")
        for task in others:
            # Where one is to blame, the others merely stood behind it.
            task.num_lost += bool(reason) and blamed is None
            if task.num_lost < MAX_LOSSES:
                back.append(task)
            else:
                task.fail(f"{MAX_LOSSES} graders ended while this sample waited in them; the last one {reason}")
        self._queue.give_back(back)
        self.more()

    def more(self) -> None:
        """Give tasks to graders that have room."""
        graders = sorted((grader for grader in self._crew.graders if grader.has_room), key=lambda grader: grader.load_ms)
        for index, grader in enumerate(graders):
            share = -(-len(self._queue) // (len(graders) - index))
            tasks: list[Task] = []
            while len(tasks) < share and (task := self._queue.head()) is not None:
                task.expected_ms = self._pace.expected_ms(task)
                if not grader.plan(task):
                    break
                tasks.append(self._queue.take())
            if tasks:
                grader.give(tasks)
                self._crew.watch()
        if len(self._queue) and (problem := self._crew.lasting_problem):
            self._queue.fail_all(f"no grader runs: {problem}")
        metrics.queued_tasks.set(len(self._queue))
