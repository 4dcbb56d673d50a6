"""Runs scorers in this process over batches of samples until a deadline: those with isolation THREAD or LOOP.

Concurrency: plain scorers run in a bounded pool of threads. A batch starts as one call in one thread, which costs nothing for
quick scorers; if that has not finished soon, more threads join and take samples from the same batch. A sample that outlives
the deadline keeps its thread until it returns (threads cannot be killed), its late result is dropped, and samples that find no
free thread before their deadline become errors. Async scorers run on the event loop, a bounded number at a time. `prepare` runs
once, in one of the threads; samples wait for it until their deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from shoal.reward import Scorer
from shoal.types import ScoreResult, ScoreSample
from shoal_reward.calling import BatchCall, arguments_of, ms_since, score_alone, score_one, score_together
from shoal_reward.outcome import DEADLINE_MESSAGE, failure, outcome, raised
from shoal_reward.preparing import Preparation

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
        self._preparation = Preparation(self._submit)

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
        if (problem := await self._preparation.problem(scorer, batch.remaining_s())) is not None:
            return batch.close(problem)
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
            return [batch.score_together_async]
        calls = min(MAX_ASYNC_SAMPLES, len(batch.samples))
        return [batch.score_next_async] * calls

    async def _run_threads(self, batch: _Batch) -> None:
        work = batch.score_together if batch.scorer.is_batch else batch.score_next
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

    def close(self, problem: str = DEADLINE_MESSAGE) -> list[ScoreResult]:
        """Return the results as they are now; empty slots are errors. Later ones are dropped."""
        waited_ms = (time.monotonic() - self._started) * 1e3
        return [
            failure(sample.sample_id, problem, waited_ms) if result is None else result
            for sample, result in zip(self.samples, list(self._results), strict=True)
        ]

    def score_next(self) -> None:
        """Score samples until none is left or the deadline has passed."""
        while (index := self._take()) is not None:
            self._results[index] = score_one(self.scorer, self.samples[index])

    async def score_next_async(self) -> None:
        """As `score_next`, for a scorer that is a coroutine function."""
        while (index := self._take()) is not None:
            sample, started = self.samples[index], time.perf_counter()
            try:
                returned = await _awaited(self.scorer.function(*arguments_of(self.scorer, sample)))
                self._results[index] = outcome(sample, returned, ms_since(started))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a scorer raises is an error of this sample only
                self._results[index] = raised(sample, error, ms_since(started))

    def score_together(self) -> None:
        """Score the whole batch by one call of a batch scorer; if that raises, by a call for each sample."""
        results = score_together(self.scorer, self.samples)
        if results is not None:
            self._results[:] = results
            return
        while (index := self._take()) is not None:
            self._results[index] = score_alone(self.scorer, self.samples[index])

    async def score_together_async(self) -> None:
        """As `score_together`, for a scorer that is a coroutine function."""
        call = BatchCall(self.scorer, self.samples)
        try:
            self._results[:] = call.results(await _awaited(self.scorer.function(*call.columns)))
        except (Exception, SystemExit):  # noqa: BLE001 - whatever a scorer raises is told of the samples that raise again
            while (index := self._take()) is not None:
                self._results[index] = await _score_alone_async(self.scorer, self.samples[index])

    def _take(self) -> int | None:
        index = next(self._indices)
        return index if index < len(self.samples) and time.monotonic() < self._deadline else None


async def _score_alone_async(scorer: Scorer, sample: ScoreSample) -> ScoreResult:
    call = BatchCall(scorer, [sample])
    try:
        return call.results(await _awaited(scorer.function(*call.columns)))[0]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a scorer raises is an error of this sample only
        return call.failed(error)[0]


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
