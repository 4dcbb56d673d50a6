"""Generation that goes on while the push benchmark pushes, and how many tokens came in a stretch of time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from shoal.clients.rollout import RolloutClient
from shoal.types import SamplingParams

PROMPT_IDS = tuple(range(5, 21))
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True)
REQUEST_TIMEOUT_S = 300.0
CONCURRENCY = 8
"""Requests at once, of one sample each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One finished request on this process's monotonic clock."""

    start_s: float
    end_s: float
    num_tokens: int


class Traffic:
    """Requests of 16 tokens, a new one whenever one is done."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._numbers = itertools.count()
        self._finished = asyncio.Event()
        self.samples: list[Sample] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Traffic]:
        """Generate until the end of the block; a failed request fails the block."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._loop()) for _ in range(CONCURRENCY)]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()

    async def until(self, num_samples: int) -> None:
        """Wait for so many finished requests in all."""
        while len(self.samples) < num_samples:
            self._finished.clear()
            await self._finished.wait()

    async def settle(self) -> None:
        """Wait until everything that runs now is done, so that its tokens can be counted."""
        await self.until(len(self.samples) + 2 * CONCURRENCY)

    async def _loop(self) -> None:
        while True:
            start_s = time.monotonic()
            request = self._client.generate(f"bench-{next(self._numbers)}", PROMPT_IDS, SAMPLING, 1, timeout_s=REQUEST_TIMEOUT_S)
            async with contextlib.aclosing(request) as completions:
                async for completion in completions:
                    sample = Sample(start_s=start_s, end_s=time.monotonic(), num_tokens=len(completion.response_ids))
                    self.samples.append(sample)
                    self._finished.set()


def tokens_between(samples: Sequence[Sample], start_s: float, end_s: float) -> float:
    """Tokens that came between two times; those of a request are spread evenly over its duration."""
    total = 0.0
    for sample in samples:
        overlap_s = min(sample.end_s, end_s) - max(sample.start_s, start_s)
        if overlap_s > 0:
            total += sample.num_tokens * overlap_s / (sample.end_s - sample.start_s)
    return total
