"""Runs scorers over batches of samples until a deadline.

Concurrency: plain scorers run in a bounded pool of threads. A batch starts as one call in one thread, which costs nothing for
quick scorers; if that has not finished soon, more threads join and take samples from the same batch. A sample that outlives
the deadline keeps its thread until it returns (threads cannot be killed), its late result is dropped, and samples that find no
free thread before their deadline become errors. Async scorers run on the event loop, a bounded number at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shoal.reward import Scorer
from shoal.types import ScoreResult, ScoreSample
from shoal_reward.outcome import DEADLINE_MESSAGE, failure, outcome, raised

HELP_AFTER_S = 0.01
"""A batch that takes longer than this gets more threads."""
MAX_ASYNC_SAMPLES = 64
"""Samples of one batch that an async scorer works on at once."""
_CANCEL_GRACE_S = 0.05


class ScoringPool:
    """Threads that run plain scorers, and the rules that turn their answers into results."""

    def __init__(self, num_threads: int) -> None:
        """Make the pool; threads start when needed.

        Args:
            num_threads: most samples that plain scorers work on at once.
        """
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="scorer")
        self._running = 0
        self._running_lock = threading.Lock()

    @property
    def num_running(self) -> int:
        """Threads that are inside a scorer, those past their deadline included."""
        return self._running

    async def score(self, scorer: Scorer, samples: Sequence[ScoreSample], budget_s: float) -> list[ScoreResult]:
        """Score a batch; one result per sample, in order.

        Args:
            scorer: what to run.
            samples: any number, none included.
            budget_s: seconds from now; samples that are not done by then become errors.
        """
        if not samples:
            return []
        batch = _Batch(scorer, samples, time.monotonic() + budget_s)
        if scorer.is_async:
            await _run_async(batch, self._async_calls(batch))
        else:
            await self._run_threads(batch)
        return batch.close()

    def shutdown(self) -> None:
        """Start nothing more; threads inside a scorer are left to themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _async_calls(self, batch: _Batch) -> list[Callable[[], Awaitable[None]]]:
        if batch.scorer.is_batch:
            return [batch.score_all_async]
        calls = min(MAX_ASYNC_SAMPLES, len(batch.samples))
        return [batch.score_next_async] * calls

    async def _run_threads(self, batch: _Batch) -> None:
        work = batch.score_all if batch.scorer.is_batch else batch.score_next
        helpers = 0 if batch.scorer.is_batch else min(self._num_threads, len(batch.samples)) - 1
        futures = [self._submit(work)]
        try:
            await asyncio.wait(futures, timeout=min(HELP_AFTER_S, batch.remaining_s()))
            if not futures[0].done():
                futures += [self._submit(work) for _ in range(helpers)]
                await asyncio.wait(futures, timeout=batch.remaining_s())
        finally:
            for future in futures:
                future.cancel()

    def _submit(self, work: Callable[[], None]) -> asyncio.Future[None]:
        def run() -> None:
            with self._running_lock:
                self._running += 1
            try:
                work()
            finally:
                with self._running_lock:
                    self._running -= 1

        return asyncio.get_running_loop().run_in_executor(self._executor, run)


class _Batch:
    """One batch in progress. Threads share it: each takes the next index (`next` on a count is atomic) and fills its own slot."""

    def __init__(self, scorer: Scorer, samples: Sequence[ScoreSample], deadline: float) -> None:
        self.scorer = scorer
        self.samples = samples
        self._deadline = deadline
        self._indices = itertools.count()
        self._results: list[ScoreResult | None] = [None] * len(samples)
        self._started = time.monotonic()

    def remaining_s(self) -> float:
        """Seconds to the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def close(self) -> list[ScoreResult]:
        """Return the results as they are now; empty slots are errors. Later ones are dropped."""
        waited_ms = (time.monotonic() - self._started) * 1e3
        return [
            failure(sample.sample_id, DEADLINE_MESSAGE, waited_ms) if result is None else result
            for sample, result in zip(self.samples, list(self._results), strict=True)
        ]

    def score_next(self) -> None:
        """Score samples until none is left or the deadline has passed."""
        function = self.scorer.function
        while (index := self._take()) is not None:
            sample, started = self.samples[index], time.perf_counter()
            try:
                returned = function(sample.prompt, sample.response, sample.row)
                self._results[index] = outcome(sample, returned, _ms_since(started))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a scorer raises is an error of this sample only
                self._results[index] = raised(sample, error, _ms_since(started))

    async def score_next_async(self) -> None:
        """As `score_next`, for a scorer that is a coroutine function."""
        function = self.scorer.function
        while (index := self._take()) is not None:
            sample, started = self.samples[index], time.perf_counter()
            try:
                returned = await _awaited(function(sample.prompt, sample.response, sample.row))
                self._results[index] = outcome(sample, returned, _ms_since(started))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a scorer raises is an error of this sample only
                self._results[index] = raised(sample, error, _ms_since(started))

    def score_all(self) -> None:
        """Score the whole batch by one call of a batch scorer; an exception is an error of every sample."""
        started = time.perf_counter()
        try:
            self._fill(self.scorer.function(*self._columns()), started)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a scorer raises is an error of this batch only
            self._fail(error, started)

    async def score_all_async(self) -> None:
        """As `score_all`, for a scorer that is a coroutine function."""
        started = time.perf_counter()
        try:
            self._fill(await _awaited(self.scorer.function(*self._columns())), started)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a scorer raises is an error of this batch only
            self._fail(error, started)

    def _take(self) -> int | None:
        index = next(self._indices)
        return index if index < len(self.samples) and time.monotonic() < self._deadline else None

    def _columns(self) -> tuple[list[str], list[str], list[dict[str, object]]]:
        return (
            [sample.prompt for sample in self.samples],
            [sample.response for sample in self.samples],
            [sample.row for sample in self.samples],
        )

    def _fill(self, returned: Any, started: float) -> None:  # noqa: ANN401 - user code returns anything
        scores, latency_ms = list(returned), _ms_since(started)
        if len(scores) != len(self.samples):
            raise ValueError(f"the batch scorer returned {len(scores)} scores for {len(self.samples)} samples: return one per sample")
        self._results[:] = [outcome(sample, score, latency_ms) for sample, score in zip(self.samples, scores, strict=True)]

    def _fail(self, error: BaseException, started: float) -> None:
        self._results[:] = [raised(sample, error, _ms_since(started)) for sample in self.samples]


async def _run_async(batch: _Batch, calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
    tasks = [asyncio.ensure_future(call()) for call in calls]
    try:
        await asyncio.wait(tasks, timeout=batch.remaining_s())
    finally:
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            # Lets cancelled scorers close what they hold; one that refuses to end is not waited for.
            await asyncio.wait(pending, timeout=_CANCEL_GRACE_S)


async def _awaited(value: object) -> object:
    return await value if isinstance(value, Awaitable) else value


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
