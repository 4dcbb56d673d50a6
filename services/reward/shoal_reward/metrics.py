"""What the reward service counts."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence

from shoal.reward import Scorer
from shoal.telemetry.metrics import counter, gauge, histogram
from shoal.types import ScoreResult

_LABELS = ("scorer", "version")
_samples = counter("reward", "scored", "samples", "Samples by how their scoring ended", (*_LABELS, "status"))
_latency = histogram("reward", "sample_latency", "seconds", "Time inside the scorer per sample", _LABELS)
running_threads = gauge("reward", "running", "threads", "Threads inside a scorer, those past their deadline included")


def count(scorer: Scorer, results: Sequence[ScoreResult]) -> Tally[str]:
    """Count a batch; returns the number of samples by status."""
    tally = Tally(str(result.status) for result in results)
    for status, number in tally.items():
        _samples.labels(scorer.name, scorer.version, status).inc(number)
    latency = _latency.labels(scorer.name, scorer.version)
    for result in results:
        latency.observe(result.latency_ms / 1e3)
    return tally
