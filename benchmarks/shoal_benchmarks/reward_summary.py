"""The arithmetic of the reward benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Samples that were scored in a time."""

    num_samples: int
    seconds: float

    @property
    def per_s(self) -> float:
        """Samples per second."""
        return self.num_samples / self.seconds


def median_rate(measured: Sequence[Measured]) -> float:
    """The median of the repeats, in samples per second."""
    return statistics.median(each.per_s for each in measured)


def spread(measured: Sequence[Measured]) -> dict[str, float]:
    """The slowest and the fastest repeat, in samples per second."""
    rates = [each.per_s for each in measured]
    return {"min": min(rates), "max": max(rates)}


def latencies(rounds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """p50 and p99 of each way, in milliseconds; rounds are seconds by way."""
    return {way: _percentiles_ms(seconds) for way, seconds in rounds.items()}


def added_ms(rounds: Mapping[str, Sequence[float]], way: str, to: str) -> dict[str, float]:
    """p50 and p99 of what one way takes longer than another for the same group in the same round, in milliseconds."""
    return _percentiles_ms([own - other for own, other in zip(rounds[way], rounds[to], strict=True)])


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.asarray(seconds) * 1e3, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}
