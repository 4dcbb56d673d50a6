"""What graders are to do: batches of callers, cut into tasks, in a queue."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.codec.reward import score_result_to_proto
from shoal.reward import Scorer
from shoal.rpc.v1 import reward_pb2
from shoal_reward.outcome import DEADLINE_MESSAGE, failure

MAX_CALL_SAMPLES = 64
"""Most samples that a batch scorer gets in one call."""


class Batch:
    """The samples of one caller and what has become of them. They are forwarded as they came: a row is decoded by its grader alone."""

    def __init__(self, scorer: Scorer, samples: Sequence[reward_pb2.ScoreSample]) -> None:
        self.scorer = scorer
        self.samples = samples
        self.is_open = True
        self.finished = asyncio.Event()
        self._results: list[reward_pb2.ScoreResult | None] = [None] * len(samples)
        self._num_unsettled = len(samples)
        self._started = time.monotonic()

    def tasks(self, num_graders: int) -> list[Task]:
        """Cut the batch: one sample each, or for a batch scorer an even share of the samples."""
        if not self.scorer.is_batch:
            return [Task(batch=self, indices=(index,)) for index in range(len(self.samples))]
        size = min(MAX_CALL_SAMPLES, -(-len(self.samples) // num_graders))
        starts = range(0, len(self.samples), size)
        return [Task(batch=self, indices=tuple(range(start, min(start + size, len(self.samples))))) for start in starts]

    def settle(self, index: int, result: reward_pb2.ScoreResult) -> None:
        """Note the result of a sample; the first one counts."""
        if self._results[index] is None:
            self._results[index] = result
            self._num_unsettled -= 1
            if self._num_unsettled == 0:
                self.finished.set()

    def fail(self, index: int, message: str) -> None:
        """Note that a sample has no score, and why."""
        waited_ms = (time.monotonic() - self._started) * 1e3
        self.settle(index, score_result_to_proto(failure(self.samples[index].sample_id, message, waited_ms)))

    def close(self, problem: str = DEADLINE_MESSAGE) -> list[reward_pb2.ScoreResult]:
        """Take no more results; samples without one are errors."""
        self.is_open = False
        for index, result in enumerate(self._results):
            if result is None:
                self.fail(index, problem)
        return [result for result in self._results if result is not None]


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """What a grader gets under one number: the samples of one call. num_lost: graders that ended with it, through no fault of it."""

    batch: Batch
    indices: tuple[int, ...]
    num_lost: int = 0
    num_bytes: int = field(init=False)
    expected_ms: float = 0.0

    def __post_init__(self) -> None:
        self.num_bytes = sum(self.batch.samples[index].ByteSize() for index in self.indices)

    def request(self) -> bytes:
        """The ScoreRequest."""
        scorer, samples = self.batch.scorer, self.batch.samples
        message = reward_pb2.ScoreRequest(scorer=scorer.name, version=scorer.version, samples=[samples[index] for index in self.indices])
        return message.SerializeToString()

    def settle(self, results: Sequence[reward_pb2.ScoreResult]) -> None:
        """Note the results."""
        for index, result in zip(self.indices, results, strict=True):
            self.batch.settle(index, result)

    def fail(self, message: str) -> None:
        """Note that no sample has a score, and why."""
        for index in self.indices:
            self.batch.fail(index, message)

    def singles(self) -> list[Task]:
        """One task for each sample."""
        return [Task(batch=self.batch, indices=(index,)) for index in self.indices]


class WorkQueue:
    """Tasks that wait for a grader, first come first served. Those whose caller is gone are left out."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, tasks: Iterable[Task]) -> None:
        """Append tasks."""
        self._tasks.extend(tasks)

    def give_back(self, tasks: Sequence[Task]) -> None:
        """Put tasks at the head, in their order."""
        self._tasks.extendleft(reversed([task for task in tasks if task.batch.is_open]))

    def head(self) -> Task | None:
        """The next task; it stays."""
        return self._tasks[0] if self._tasks else None

    def take(self) -> Task:
        """Remove and return the next task."""
        return self._tasks.popleft()

    def drop_closed(self) -> None:
        """Forget the tasks of callers that are gone."""
        self._tasks = deque(task for task in self._tasks if task.batch.is_open)

    def fail_all(self, message: str) -> None:
        """Make every waiting task an error."""
        while self._tasks:
            self._tasks.popleft().fail(message)

    def fail_those_of(self, scorer: Scorer, message: str) -> None:
        """Make every waiting task of one scorer an error; its caller is then done with."""
        for task in self._tasks:
            if task.batch.scorer is scorer:
                task.fail(message)


class Pace:
    """How long each scorer takes for a sample, as measured lately."""

    UNKNOWN_MS = 1e3
    """So a grader gets one sample of an unmeasured scorer at a time."""
    _WEIGHT = 0.2

    def __init__(self) -> None:
        self._sample_ms: dict[tuple[str, str], float] = {}

    def note(self, scorer: Scorer, sample_ms: float) -> None:
        """Add a measurement."""
        key = (scorer.name, scorer.version)
        old_ms = self._sample_ms.get(key, sample_ms)
        self._sample_ms[key] = old_ms + self._WEIGHT * (sample_ms - old_ms)

    def expected_ms(self, task: Task) -> float:
        """How long a task will take."""
        scorer = task.batch.scorer
        return self._sample_ms.get((scorer.name, scorer.version), self.UNKNOWN_MS) * len(task.indices)
