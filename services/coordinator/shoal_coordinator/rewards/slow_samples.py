"""Samples that took longer to score than nearly all others of their scorer, by their ids."""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass

MIN_LATENCIES = 100
"""Before that a 99th percentile says nothing."""
MAX_LATENCIES = 2048
MAX_SLOW_SAMPLES = 50
MAX_SCORERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSample:
    """A sample (uid/sample_index/attempt) whose scoring took longer than p99_ms, the 99th percentile of its scorer until then."""

    sample_id: str
    scorer: str
    version: str
    service: str
    latency_ms: float
    p99_ms: float


class _Latencies:
    """The last latencies, in order of coming and in order of size."""

    def __init__(self) -> None:
        self._came: deque[float] = deque()
        self._sorted: list[float] = []

    def p99_ms(self) -> float | None:
        """The 99th percentile (nearest rank); None while there are too few."""
        if len(self._sorted) < MIN_LATENCIES:
            return None
        return self._sorted[math.ceil(0.99 * len(self._sorted)) - 1]

    def add(self, latency_ms: float) -> None:
        """Take one more; the oldest goes."""
        self._came.append(latency_ms)
        bisect.insort(self._sorted, latency_ms)
        if len(self._came) > MAX_LATENCIES:
            del self._sorted[bisect.bisect_left(self._sorted, self._came.popleft())]


class SlowSamples:
    """Keeps the last MAX_SLOW_SAMPLES; used from the event loop alone."""

    def __init__(self) -> None:
        self._latencies: dict[tuple[str, str], _Latencies] = {}
        self._slow: deque[SlowSample] = deque(maxlen=MAX_SLOW_SAMPLES)

    def note(self, scorer: str, version: str, service: str, sample_id: str, latency_ms: float) -> None:
        """Take a sample that was answered."""
        latencies = self._latencies.setdefault((scorer, version), _Latencies())
        p99_ms = latencies.p99_ms()
        if p99_ms is not None and latency_ms > p99_ms:
            self._slow.append(
                SlowSample(sample_id=sample_id, scorer=scorer, version=version, service=service, latency_ms=latency_ms, p99_ms=p99_ms)
            )
        latencies.add(latency_ms)
        while len(self._latencies) > MAX_SCORERS:
            del self._latencies[next(iter(self._latencies))]

    def samples(self) -> tuple[SlowSample, ...]:
        """The slow ones, newest first."""
        return tuple(reversed(self._slow))
